-- The queries of the PostgreSQL store alone: a name, one line of purpose, the statement.

-- streams_by_id: those of the streams that exist, and their readers
SELECT {stream s}, CASE WHEN r.stream IS NOT NULL THEN s.id END, r.reader, r.node, r.seq
FROM perdure.stream AS s LEFT JOIN perdure.reader AS r ON r.stream = s.key WHERE s.id = ANY ($1);

-- follow_streams: those of the streams that exist, with their readers, the revision of their session and their events
-- after a number
SELECT {stream s},
       CASE WHEN r.stream IS NOT NULL THEN s.id END, r.reader, r.node, r.seq,
       (SELECT revision FROM perdure.session WHERE id = s.session AND state <> 'ended'),
       e.seqs, e.times, e.payloads, e.finals
FROM unnest($1::text[], $2::int[]) AS x (id, after) JOIN perdure.stream AS s ON s.id = x.id
LEFT JOIN perdure.reader AS r ON r.stream = s.key
LEFT JOIN LATERAL (
    SELECT array_agg(seq) AS seqs, array_agg(time) AS times, array_agg(payload) AS payloads, array_agg(final) AS finals
    FROM (
        SELECT seq, time, payload, final,
               sum(length(payload)) OVER (ORDER BY seq ROWS UNBOUNDED PRECEDING) - length(payload) AS before
        FROM (
            (SELECT seq, time, payload, false AS final FROM perdure.event
             WHERE stream = s.key AND s.last > x.after AND seq > greatest(x.after, s.trimmed) ORDER BY seq LIMIT $3::int)
            UNION ALL
            (SELECT seq, time, payload, true FROM perdure.answer
             WHERE stream = s.key AND s.last > x.after AND seq > greatest(x.after, s.forgotten)
             ORDER BY seq LIMIT $3::int)
            ORDER BY seq LIMIT $3::int) AS page) AS sized
    WHERE before < $4::int) AS e ON true;

-- unread_streams: a session's calls whose readers were lost before the end, the oldest first
SELECT {stream} FROM perdure.stream WHERE session = $1 AND unread ORDER BY key;

-- answered_streams: the calls of a caller's sessions that were answered before their end, after a time and an id, the
-- oldest first
SELECT {stream t} FROM perdure.session AS s JOIN perdure.stream AS t ON t.session = s.id AND t.answered > 0
WHERE s.caller = $1 AND s.kind = 'session' AND s.state <> 'ended' AND (t.opened, t.id) > ($2::float8, $3::text)
ORDER BY t.opened, t.id LIMIT $4;

-- streams_of_node: the streams that a node writes, the oldest first
SELECT {stream} FROM perdure.written_by_1($1);

-- streams_by_key: some streams, the oldest first
SELECT {stream} FROM perdure.stream WHERE key = ANY ($1) ORDER BY key;

-- kept_of_session: what is retained of a session's sealed streams, the oldest first
SELECT s.id, s.opened, coalesce(e.number, 0), coalesce(a.number, 0), coalesce(e.size, 0), coalesce(a.size, 0)
FROM perdure.stream AS s
LEFT JOIN LATERAL (
    SELECT count(*) AS number, sum(length(payload)) AS size FROM perdure.event
    WHERE stream = s.key AND seq > s.trimmed) AS e ON true
LEFT JOIN LATERAL (
    SELECT count(*) AS number, sum(length(payload)) AS size FROM perdure.answer
    WHERE stream = s.key AND seq > s.forgotten) AS a ON true
WHERE s.session = $1 AND s.sealed ORDER BY s.key;

-- sessions_by_id: some sessions
SELECT {session n} FROM unnest($1::text[]) AS w (id) JOIN perdure.session AS n ON n.id = w.id;

-- load_session: one session and its standalone stream
SELECT {session n}, {stream s}
FROM perdure.session AS n LEFT JOIN perdure.stream AS s ON s.id = n.standalone WHERE n.id = $1;

-- durable_call: one record and its one call, with the newest events of its stream and what it asks
SELECT {session n},
       c.session, c.incarnation, c.request_id, c.stream_id, c.method, c.request, c.principal, c.attempt,
       c.progress, c.state, c.digest, c.name, c.upstream, e.seqs, e.times, e.payloads, e.finals,
       a.sessions, a.ids, a.streams, a.requests, a.nodes, a.calls, a.incarnations, a.request_ids
FROM perdure.session AS n
LEFT JOIN LATERAL (
    SELECT c.*, s.id AS stream_id, s.last, s.trimmed, s.forgotten
    FROM perdure.stream AS s JOIN perdure.call AS c ON c.stream = s.key
    WHERE n.kind = 'call' AND s.session = n.id ORDER BY s.key, c.place LIMIT 1) AS c ON true
LEFT JOIN LATERAL (
    SELECT array_agg(seq ORDER BY seq) AS seqs, array_agg(time ORDER BY seq) AS times,
           array_agg(payload ORDER BY seq) AS payloads, array_agg(final ORDER BY seq) AS finals
    FROM (
        SELECT seq, time, payload, final,
               sum(length(payload)) OVER (ORDER BY seq DESC ROWS UNBOUNDED PRECEDING) - length(payload) AS behind
        FROM (
            (SELECT seq, time, payload, false AS final FROM perdure.event
             WHERE stream = c.stream AND c.state IN ('running', 'waiting') AND seq > greatest(c.last - $2::int, c.trimmed))
            UNION ALL
            (SELECT seq, time, payload, true FROM perdure.answer
             WHERE stream = c.stream AND seq > greatest(c.last - $2::int, c.forgotten))) AS newest) AS sized
    WHERE behind < $3::int) AS e ON true
LEFT JOIN LATERAL (
    SELECT array_agg(session ORDER BY key) AS sessions,
           array_agg(id ORDER BY key) AS ids, array_agg(c.stream_id ORDER BY key) AS streams,
           array_agg(request ORDER BY key) AS requests, array_agg(node ORDER BY key) AS nodes,
           array_agg(call ORDER BY key) AS calls, array_agg(incarnation ORDER BY key) AS incarnations,
           array_agg(request_id ORDER BY key) AS request_ids
    FROM perdure.ask WHERE session = n.id AND c.state IN ('running', 'waiting')) AS a ON true
WHERE n.id = $1;

-- newest: the sessions and calls that were active last, in short; of a call also the state of its row
SELECT id, owner, state, is_task, active, kind,
       CASE kind WHEN 'call' THEN (
           SELECT c.state FROM perdure.stream AS s JOIN perdure.call AS c ON c.stream = s.key
           WHERE s.session = n.id ORDER BY s.key, c.place LIMIT 1) END
FROM perdure.session AS n WHERE kind IN ('session', 'call') ORDER BY active DESC, id LIMIT $1;

-- count_states: how many sessions are in each state
SELECT state, count(*) FROM perdure.session WHERE kind = $1 GROUP BY state;

-- longest_dormant: the session that has been dormant for longest, of those that no node uses, of one caller or of all
SELECT {session} FROM perdure.session AS s
WHERE kind = $1 AND state = 'dormant' AND state <> 'ended'
    AND NOT EXISTS (SELECT 1 FROM perdure.in_use AS u WHERE u.session = s.id)
ORDER BY active LIMIT 1;

-- longest_dormant_of: the same of one caller's; if $3, of those whose answers their readers have seen whole
SELECT {session} FROM perdure.session AS s
WHERE caller = $1 AND kind = $2 AND state = 'dormant' AND state <> 'ended'
    AND NOT EXISTS (SELECT 1 FROM perdure.in_use AS u WHERE u.session = s.id)
    AND NOT ($3 AND EXISTS (SELECT 1 FROM perdure.stream AS t WHERE t.session = s.id AND t.unread))
ORDER BY active LIMIT 1;

-- count_states_of: how many records of a kind one caller has in each state, without those that have ended
SELECT state, count(*) FROM perdure.session WHERE caller = $1 AND kind = $2 AND state <> 'ended' GROUP BY state;

-- newest_of: the records of a kind of one caller that were active last and that their client can ask for
SELECT {session} FROM perdure.session
WHERE caller = $1 AND kind = $2 AND state <> 'ended' AND (kind <> 'call' OR is_task)
ORDER BY active DESC LIMIT $3;

-- bytes_of_caller: the bytes of what is kept of one caller's durable calls that have ended
SELECT coalesce(sum(length(n.client_params)), 0) + coalesce(sum(
    (SELECT coalesce(sum(length(a.payload)), 0) FROM perdure.stream AS s JOIN perdure.answer AS a ON a.stream = s.key
     WHERE s.session = n.id AND a.seq > s.forgotten)), 0)
FROM perdure.session AS n WHERE caller = $1 AND kind = 'call' AND state = 'dormant' AND state <> 'ended';

-- sticky_of_sessions: what sessions that have not ended repeat
SELECT id, sticky FROM perdure.session WHERE id = ANY ($1) AND state <> 'ended';

-- next_incarnation: a client begins again in a session that has not ended
SELECT {session} FROM perdure.reattach_1($1);

-- open_calls: calls that have not ended, by session
SELECT c.session, s.id, c.method, c.state, c.attempt, s.node
FROM perdure.call AS c JOIN perdure.stream AS s ON s.key = c.stream
WHERE c.state IN ('running', 'waiting') ORDER BY c.session LIMIT $1;

-- oldest_retained: the time of the oldest event in some of the oldest streams
SELECT min(oldest) FROM (
    SELECT least(
        (SELECT time FROM perdure.event WHERE stream = s.key AND seq > s.trimmed ORDER BY seq LIMIT 1),
        (SELECT time FROM perdure.answer WHERE stream = s.key AND seq > s.forgotten ORDER BY seq LIMIT 1)) AS oldest
    FROM (SELECT key, trimmed, forgotten FROM perdure.stream ORDER BY opened, key LIMIT $1) AS s) AS looked;

-- count_events: how many events and answers there are, up to a number
SELECT (SELECT count(*) FROM (SELECT 1 FROM perdure.event LIMIT $1::int) AS e)
     + (SELECT count(*) FROM (SELECT 1 FROM perdure.answer LIMIT $1::int) AS a);

-- streams_of_sessions: the streams of sessions, the oldest of each first. (One session at a time: no plan scans the table)
SELECT s.* FROM unnest($1::text[]) AS w (session) CROSS JOIN LATERAL (
    SELECT {stream}
    FROM perdure.stream WHERE session = w.session ORDER BY key OFFSET 0) AS s;

-- newest_of_sessions: of sessions, when the newest stream was opened or the newest retained event was appended
SELECT w.session, max(greatest(s.opened, coalesce(
    (SELECT time FROM perdure.answer WHERE stream = s.key AND seq = s.last AND seq > s.forgotten LIMIT 1),
    (SELECT time FROM perdure.event WHERE stream = s.key AND seq = s.last AND seq > s.trimmed LIMIT 1))))
FROM unnest($1::text[]) AS w (session) CROSS JOIN LATERAL (
    SELECT key, opened, last, trimmed, forgotten FROM perdure.stream WHERE session = w.session OFFSET 0) AS s
GROUP BY w.session;

-- readers_of_sessions: the readers of the streams of sessions, each after its session
SELECT w.session, s.id, r.reader, r.node, r.seq FROM unnest($1::text[]) AS w (session)
CROSS JOIN LATERAL (SELECT key, id FROM perdure.stream WHERE session = w.session ORDER BY key OFFSET 0) AS s
CROSS JOIN LATERAL (SELECT reader, node, seq FROM perdure.reader WHERE stream = s.key OFFSET 0) AS r;

-- claim: become the writer of a stream
SELECT {stream} FROM perdure.claim_1($1, $2, $3, $4, $5, $6, $7);

-- commit: apply the steps of a commit
SELECT perdure.commit_1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17);

-- join: a node enters; returns the store's time
SELECT perdure.join_1($1, $2, $3, $4, $5, $6);

-- leave: a node stops
SELECT perdure.leave_1($1);

-- bury: a dead node is deleted; returns how many messages the heir got (NULL: it has beaten), and the streams it read
SELECT mail, keys FROM perdure.bury_1($1, $2, $3, $4);

-- missing_nodes: those of some nodes that are not in the store, and whether each was buried, or has left
SELECT m, EXISTS (SELECT 1 FROM perdure.buried WHERE node = m) FROM unnest($1::text[]) AS m
WHERE NOT EXISTS (SELECT 1 FROM perdure.node WHERE id = m);

-- beat: a node shows that it lives
UPDATE perdure.node SET beat = beat + 1, facts = $2, clock = $3, seen = clock_timestamp()
WHERE id = $1 AND NOT gone RETURNING true;

-- show_life: nodes show that they are alive, and their lock if it is another one; returns those that exist
UPDATE perdure.node SET beat = beat + 1, lock = coalesce($2, lock) WHERE id = ANY ($1) RETURNING id;

-- begin_sweep: sweep, unless another process began to within so many seconds and has not ended
UPDATE perdure.version SET swept = clock_timestamp()
WHERE swept NOT BETWEEN clock_timestamp() - make_interval(secs => $1) AND clock_timestamp() RETURNING true;

-- end_sweep: others may sweep
UPDATE perdure.version SET swept = '-infinity';

-- overview: each node, whether it has left and holds its lock; whether mail waits for one, and anything for a stream
SELECT id, beat, facts, gone, perdure.is_held_1(lock) AS held, process,
       EXISTS (SELECT 1 FROM perdure.mail WHERE node = $1 AND key > $2) AS has_mail,
       EXISTS (SELECT 1 FROM perdure.forward) AS has_forwarded
FROM perdure.node ORDER BY key;

-- ask: ask nodes whether they hold anything; returns what each must answer
UPDATE perdure.node SET asked = asked + 1 WHERE id = ANY ($1) RETURNING id, asked;

-- questions: how often each was asked, and how often it has answered
SELECT id, asked, answered FROM perdure.node WHERE id = ANY ($1);

-- answer: nodes held nothing when they had read that they were asked so often
UPDATE perdure.node AS n SET answered = greatest(n.answered, x.number)
FROM unnest($1::text[], $2::bigint[]) AS x (id, number) WHERE n.id = x.id;

-- poll: a value that changes whenever a commit becomes visible, and whether one of these nodes is asked something
SELECT pg_current_snapshot()::text,
       EXISTS (SELECT 1 FROM perdure.node WHERE id = ANY ($1) AND answered < asked);

-- swept_before: up to which time events, or answers, that have expired are hidden already
SELECT swept FROM perdure.rotation WHERE part = $1;

-- slots_of_span: the slots that were written in a span of time, with so many seconds before and after it
SELECT s.slot FROM perdure.slot AS s JOIN perdure.rotation AS r USING (part)
WHERE s.part = $1 AND (s.closed IS NOT NULL OR s.slot = r.slot)
    AND coalesce(s.began, '-infinity') - $4::float8 < $3::float8
    AND coalesce(s.closed, 'infinity') + $4::float8 >= $2::float8;

-- expired_events: the streams with events of a span of time in some slots, the last one, and how many
SELECT s.key, x.last, x.number FROM (
    SELECT stream, max(seq) AS last, count(*) AS number FROM perdure.event
    WHERE time >= $1 AND time < $2 AND slot = ANY ($3::smallint[]) GROUP BY stream) AS x
JOIN perdure.stream AS s ON s.key = x.stream WHERE s.trimmed < x.last;

-- expired_answers: the same of answers
SELECT s.key, x.last, x.number FROM (
    SELECT stream, max(seq) AS last, count(*) AS number FROM perdure.answer
    WHERE time >= $1 AND time < $2 AND slot = ANY ($3::smallint[]) GROUP BY stream) AS x
JOIN perdure.stream AS s ON s.key = x.stream WHERE s.forgotten < x.last;

-- hide_expired: hide the events or the answers of some streams up to a number each
SELECT perdure.hide_1($1, $2, $3);

-- set_swept: up to which time they are hidden from now on
UPDATE perdure.rotation SET swept = $2 WHERE part = $1 AND swept < $2;

-- old_streams: some streams, after one, that are over and hold nothing any more, the oldest first
SELECT opened, key FROM perdure.stream AS s
WHERE (opened, key) > ($1::float8, $2::bigint) AND opened < $3
    AND (sealed OR NOT EXISTS (SELECT 1 FROM perdure.session WHERE id = s.session))
    AND NOT EXISTS (SELECT 1 FROM perdure.answer WHERE stream = s.key AND seq > s.forgotten AND time >= $3)
    AND NOT EXISTS (SELECT 1 FROM perdure.event WHERE stream = s.key AND seq > s.trimmed)
ORDER BY opened, key LIMIT $4;

-- expire_streams: forget those of some streams that are over
SELECT perdure.expire_streams_1($1, $2);

-- stale_sessions: some sessions and durable calls that were not used since their times, which are given too. They are found
-- by their last activity: reading all of them would take longer the more there are
SELECT id, since FROM (
    SELECT id, $2::float8 AS since FROM perdure.session
    WHERE kind IN ('call', 'key') AND active < $2 AND state <> 'ended'
    UNION ALL
    SELECT id, $1::float8 FROM perdure.session WHERE kind = 'session' AND active < $1 AND state <> 'ended'
    UNION ALL
    SELECT id, $1::float8 FROM perdure.session WHERE state = 'ended' AND active < $1
) AS s
WHERE id > $3 AND NOT EXISTS (SELECT 1 FROM perdure.in_use AS u WHERE u.session = s.id)
ORDER BY id LIMIT $4;

-- expire_session: forget a session if it is still not used
SELECT perdure.expire_session_1($1, $2);

-- expired_slots: the slots in which everything has expired, the oldest first
SELECT slot FROM perdure.slot WHERE part = $1 AND closed < $2 ORDER BY closed;

-- empty_slot: empty one of them
SELECT perdure.empty_slot_1($1, $2, $3);

-- next_slot: begin the next slot if it is time
SELECT perdure.next_slot_1($1, $2, $3);

-- table_sizes: the bytes of each table with its indexes and large values, and about how many rows it has
SELECT relname::text, pg_total_relation_size(oid), pg_stat_get_live_tuples(oid) FROM pg_class
WHERE relnamespace = to_regnamespace($1) AND relkind = 'r' ORDER BY relname;

-- rotated: since when the present slots are written
SELECT part, since FROM perdure.rotation WHERE since IS NOT NULL;

-- standbys: how far each standby is behind in bytes and in seconds, of those whose figures this role may see
SELECT application_name, max(pg_wal_lsn_diff(pg_current_wal_lsn(), replay_lsn))::bigint,
       coalesce(extract(epoch FROM max(replay_lag)), 0)::float8
FROM pg_stat_replication WHERE replay_lsn IS NOT NULL AND NOT pg_is_in_recovery() GROUP BY application_name;

-- node_locks: each node; whether it has left, holds its lock (NULL: it has none, or this is a standby), and has beaten in so many seconds
SELECT id, gone, CASE WHEN NOT pg_is_in_recovery() THEN perdure.is_held_1(lock) END,
       seen > clock_timestamp() - make_interval(secs => $1)
FROM perdure.node ORDER BY key;

-- skip_generations: the next generation of all streams that may still grow, after some that another copy may have begun
WITH ended AS (
    INSERT INTO perdure.generation (stream, generation, "end")
    SELECT key, generation, last FROM perdure.stream WHERE NOT sealed RETURNING stream)
UPDATE perdure.stream SET generation = greatest(generation + 1, least(generation + $1::int, 999000))
WHERE key IN (SELECT stream FROM ended);

-- change_note: another value of a note, if it is as it was seen
SELECT perdure.change_note_1($1, $2, $3, $4);
