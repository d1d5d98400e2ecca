-- The queries of the SQLite store alone: a name, one line of purpose, the statement.

-- put_session: a new session; nothing if it exists
INSERT INTO session (id, owner, state, version, client_params, result, initialized, sticky, incarnation,
                     standalone, created, active, ended, address, revision, kind, is_task, digest, upstream)
VALUES (:id, :owner, :state, :version, :client_params, :result, :initialized, :sticky, :incarnation,
        :standalone, :created, :active, :ended, :address, :revision, :kind, :is_task, :digest, :upstream)
ON CONFLICT (id) DO NOTHING;

-- unput_session: a session was one too many
DELETE FROM session WHERE id = ?;

-- change_session: change what is given of a session that has not ended; more than the time of its use is a revision
UPDATE session SET
    revision = revision + (coalesce(:state, state) <> state OR coalesce(:version, version) <> version
        OR coalesce(:result, result) <> result OR coalesce(:initialized, initialized) <> initialized
        OR coalesce(:is_task, is_task) <> is_task OR coalesce(:upstream, upstream) <> upstream
        OR coalesce(:sticky, sticky) <> sticky),
    active = max(active, coalesce(:active, active)), state = coalesce(:state, state),
    version = coalesce(:version, version), result = coalesce(:result, result),
    initialized = coalesce(:initialized, initialized), is_task = coalesce(:is_task, is_task),
    upstream = coalesce(:upstream, upstream), sticky = coalesce(:sticky, sticky)
WHERE id = :session AND state <> 'ended';

-- read_sticky: what a session that has not ended repeats
SELECT sticky FROM session WHERE id = ? AND state <> 'ended';

-- next_incarnation: a client begins again in a session that has not ended
UPDATE session SET incarnation = incarnation + 1, revision = revision + 1 WHERE id = ? AND state <> 'ended';

-- params_of: how large a session's client params are, if it has not ended
SELECT length(client_params) FROM session WHERE id = ? AND state <> 'ended';

-- end_session: mark a session's record as ended, and keep little more than why; the first reason stays
UPDATE session SET
    state = 'ended', revision = revision + 1, active = :time, ended = :reason, result = x'', sticky = '[]',
    upstream = x'',
    client_params = CASE WHEN :keeps THEN client_params ELSE x'' END
WHERE id = :session AND state <> 'ended';

-- end_call_record: a record that is no session's ends, and leaves nothing; the record of a session is not touched
DELETE FROM session WHERE id = ? AND kind <> 'session';

-- forget_ended_of: of the ended sessions of one session's caller, all but the newest
DELETE FROM session WHERE id IN (
    SELECT e.id FROM session AS s JOIN session AS e ON e.owner = s.owner AND e.address = s.address
    WHERE s.id = :session AND e.state = 'ended' ORDER BY e.active DESC LIMIT -1 OFFSET :most);

-- forget_ended: the oldest of all ended sessions, where there are too many (and not many in one commit)
DELETE FROM session WHERE id IN (
    SELECT id FROM session INDEXED BY session_ended WHERE state = 'ended'
    ORDER BY active LIMIT (SELECT max(0, min(100, ended - :most)) FROM tally WHERE only = 1));

-- drop_streams: forget a session's streams, and with them all that is in them
DELETE FROM stream WHERE session = ? RETURNING id;

-- open_stream: a new stream of a session that has not ended, and has the revision that was seen; nothing if the stream exists
INSERT INTO stream (id, session, kind, node, fence, opened, generation, last, sealed, answered, listed)
SELECT ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?
WHERE EXISTS (SELECT 1 FROM session WHERE id = ? AND state <> 'ended' AND revision = coalesce(?, revision))
ON CONFLICT (id) DO NOTHING;

-- fence_of: the fence of a stream, and whether it is sealed
SELECT fence, sealed FROM stream WHERE id = ?;

-- revision_of: the revision of a session that exists and has not ended
SELECT revision FROM session WHERE id = ? AND state <> 'ended';

-- open_call: a ledger row of a new stream; nothing if the id is taken
INSERT INTO call (stream, incarnation, request_id, session, id_key, place, method, request, principal, attempt,
                  progress, state, digest, name, upstream)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO NOTHING;

-- count_calls: how many calls of a session have not ended
SELECT count(*) FROM call WHERE session = ? AND state IN ('running', 'waiting');

-- close_stream: delete a stream that could not be opened, with its calls
DELETE FROM stream WHERE key = ?;

-- stream_key: the small key of a stream's id
SELECT key FROM stream WHERE id = ?;

-- extend_stream: move a stream's end, if the fence is right and the new events follow the last one
UPDATE stream SET last = ? WHERE key = ? AND fence = ? AND last = ? AND sealed = 0 AND node <> '';

-- seal_stream: the same, with the last events of all
UPDATE stream SET last = ?, sealed = 1 WHERE key = ? AND fence = ? AND last = ? AND sealed = 0 AND node <> '';

-- stream_end: what decides about an append that is not plainly the next one
SELECT fence, last, sealed, node FROM stream WHERE key = ?;

-- set_stream_end: the end of a stream after an append that was partly known
UPDATE stream SET last = ?, sealed = ? WHERE key = ?;

-- answer_stream: the number of a stream's early answer, if it has none
UPDATE stream SET answered = ? WHERE key = ? AND answered = 0;

-- append_event: one event
INSERT INTO event (stream, seq, time, payload, final) VALUES (?, ?, ?, ?, ?);

-- end_call: the end of a call that has none yet; its request is not needed any more
UPDATE call SET state = ?, request = x'', upstream = x''
WHERE stream = ? AND incarnation = ? AND request_id = ? AND state IN ('running', 'waiting');

-- put_call: change the row of a call that has not ended
UPDATE call SET state = ?, attempt = ?, progress = ?, upstream = coalesce(?, upstream)
WHERE stream = ? AND incarnation = ? AND request_id = ? AND state IN ('running', 'waiting');

-- put_tool_step: a step of a tool whose call has not ended, or the end of one that has none, if the fence is the stream's and the step before is there
INSERT INTO tool_step (stream, incarnation, request_id, number, kind, name, state, again, own, attempt, began, ended, value)
SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13
WHERE EXISTS (SELECT 1 FROM call AS c JOIN stream AS s ON s.key = c.stream
    WHERE c.stream = ?1 AND c.incarnation = ?2 AND c.request_id = ?3 AND c.state IN ('running', 'waiting')
      AND s.fence = ?14 AND s.sealed = 0 AND s.node != '')
  AND (?15 = 0 OR EXISTS (SELECT 1 FROM tool_step
    WHERE stream = ?1 AND incarnation = ?2 AND request_id = ?3 AND number = ?15 AND (?16 = 0 OR state != 'open')))
ON CONFLICT (stream, incarnation, request_id, number) DO UPDATE SET
    kind = excluded.kind, name = excluded.name, state = excluded.state, again = excluded.again, own = excluded.own,
    attempt = excluded.attempt, began = excluded.began, ended = excluded.ended, value = excluded.value
WHERE tool_step.state = 'open';

-- tool_step_state: the state of one step of a tool
SELECT state FROM tool_step WHERE stream = ? AND incarnation = ? AND request_id = ? AND number = ?;

-- empty_tool_steps: the values of a call's tool steps are not needed any more
UPDATE tool_step SET value = x'' WHERE stream = ? AND incarnation = ? AND request_id = ?;

-- size_of_tool_steps: how many tool steps a stream has, and the bytes of their values
SELECT count(*), coalesce(sum(length(t.value)), 0)
FROM stream AS s JOIN tool_step AS t ON t.stream = s.key WHERE s.id = ?;

-- release_stream: no node writes a stream any more
UPDATE stream SET node = '' WHERE key = ?;

-- trim: forget events up to a number, final answers excepted
DELETE FROM event WHERE stream = (SELECT key FROM stream WHERE id = :stream) AND seq <= :through AND final = 0;

-- events_through: the numbers of some of a stream's events up to a number
SELECT e.seq FROM stream AS s JOIN event AS e ON e.stream = s.key WHERE s.id = ? AND e.seq <= ? LIMIT ?;

-- drop_stream: forget a stream, and with it all that is in it
DELETE FROM stream WHERE id = ?;

-- open_ask: an ask that waits; nothing if it exists, or its stream does not
INSERT INTO ask (session, id, stream, request, node, call, incarnation, request_id)
SELECT :session, :id, key, :request, :node, :call, :incarnation, :request_id FROM stream WHERE id = :stream
ON CONFLICT (session, id) DO NOTHING;

-- close_ask: an ask that was answered or given up
DELETE FROM ask WHERE session = :session AND id = :id;

-- put_reader: the reader of a stream, and how far it has got; one that does not attach must be the reader already
INSERT OR REPLACE INTO reader (stream, reader, node, seq)
SELECT key, :reader, :node, :seq FROM stream
WHERE id = :stream AND (:attaches OR EXISTS (SELECT 1 FROM reader WHERE stream = stream.key AND reader = :reader));

-- leave_reader: a reader left, unless another one has taken its place
DELETE FROM reader WHERE stream = (SELECT key FROM stream WHERE id = :stream) AND reader = :reader;

-- reach: readers of a stream have got this far, in this generation
UPDATE stream SET
    delivered = max(delivered, min(:through, CASE WHEN generation = :generation THEN last ELSE
        coalesce((SELECT g."end" FROM generation AS g WHERE g.stream = stream.key AND g.generation = :generation), 0)
    END)),
    unread = :unread
WHERE id = :stream;

-- read_events: the retained events of a stream after a sequence number
SELECT e.seq, e.time, e.payload, e.final
FROM stream AS s JOIN event AS e ON e.stream = s.key
WHERE s.id = ? AND e.seq > ?
ORDER BY e.seq LIMIT ?;

-- stream_by_id: one stream
SELECT {stream} FROM stream WHERE id = ?;

-- followed_stream: one stream, and its reader
SELECT {stream s}, CASE WHEN r.stream IS NOT NULL THEN s.id END, r.reader, r.node, r.seq
FROM stream AS s LEFT JOIN reader AS r ON r.stream = s.key WHERE s.id = ?;

-- unread_streams: a session's calls whose readers were lost before the end, the oldest first
SELECT {stream} FROM stream WHERE session = ? AND unread = 1 ORDER BY key;

-- answered_streams: the calls of a caller's sessions that were answered before their end, after a time and an id, the
-- oldest first
SELECT {stream t} FROM session AS s INDEXED BY session_of_caller
JOIN stream AS t INDEXED BY stream_answered ON t.session = s.id AND t.answered > 0
WHERE s.owner = ? AND s.address = ? AND s.kind = 'session' AND s.state <> 'ended' AND (t.opened, t.id) > (?, ?)
ORDER BY t.opened, t.id LIMIT ?;

-- streams_of_node: the streams that a node writes, the oldest first: what is listed, and what has open calls
SELECT {stream} FROM stream WHERE sealed = 0 AND key IN (
    SELECT key FROM stream WHERE node = :node AND listed = 1
    UNION SELECT s.key FROM call AS c INDEXED BY call_open JOIN stream AS s ON s.key = c.stream
    WHERE c.state IN ('running', 'waiting') AND s.node = :node)
ORDER BY key;

-- list_stream: a stream of which all calls have ended, although it has not
UPDATE stream SET listed = 1 WHERE key = :stream AND NOT EXISTS (
    SELECT 1 FROM call WHERE stream = :stream AND state IN ('running', 'waiting'));

-- kept_of_session: what is retained of a session's sealed streams, the oldest first
SELECT s.id, s.opened, count(CASE e.final WHEN 0 THEN 1 END), count(CASE e.final WHEN 1 THEN 1 END),
       coalesce(sum(CASE e.final WHEN 0 THEN length(e.payload) END), 0),
       coalesce(sum(CASE e.final WHEN 1 THEN length(e.payload) END), 0)
FROM stream AS s LEFT JOIN event AS e ON e.stream = s.key
WHERE s.session = ? AND s.sealed = 1 GROUP BY s.key ORDER BY s.key;

-- newest: the sessions and calls that were active last, in short; of a call also the state of its row. Only indexes are
-- walked through: the records themselves are large
SELECT id, owner, state, is_task, active, kind,
       CASE kind WHEN 'call' THEN (
           SELECT c.state FROM stream AS s JOIN call AS c ON c.stream = s.key
           WHERE s.session = session.id ORDER BY s.key, c.place LIMIT 1) END
FROM session
WHERE kind IN ('session', 'call') AND (
    rowid IN (
        SELECT rowid FROM session INDEXED BY session_of_caller
        WHERE state <> 'ended' AND kind IN ('session', 'call') ORDER BY active DESC LIMIT ?1)
    OR rowid IN (
        SELECT rowid FROM session INDEXED BY session_ended WHERE state = 'ended' ORDER BY active DESC LIMIT ?1))
ORDER BY active DESC, id LIMIT ?1;

-- count_sessions: how many sessions have not ended
SELECT open FROM tally WHERE only = 1;

-- count_of_caller: how many of a kind that one caller has opened have not ended
SELECT count(*) FROM session INDEXED BY session_of_caller
WHERE owner = ? AND address = ? AND kind = ? AND state <> 'ended';

-- count_states_of: how many of a kind that one caller has opened are in each state, without those that have ended
SELECT state, count(*) FROM session INDEXED BY session_of_caller
WHERE owner = ? AND address = ? AND kind = ? AND state <> 'ended' GROUP BY state;

-- count_states: how many records of a kind are in each state
SELECT state, count(*) FROM session INDEXED BY session_state WHERE kind = ? GROUP BY state;

-- longest_dormant: the session that has been dormant for longest, of those that no node uses
SELECT {session} FROM session INDEXED BY session_dormant
WHERE state = 'dormant' AND kind = ? AND NOT EXISTS (SELECT 1 FROM in_use WHERE in_use.session = session.id)
ORDER BY active LIMIT 1;

-- longest_dormant_of: the same of one caller's; if the last value is true, of those whose answers their readers have
-- seen whole (that it has not ended is said for the index)
SELECT {session} FROM session INDEXED BY session_of_caller
WHERE owner = ? AND address = ? AND kind = ? AND state <> 'ended' AND state = 'dormant'
    AND NOT EXISTS (SELECT 1 FROM in_use WHERE in_use.session = session.id)
    AND NOT (? AND EXISTS (
        SELECT 1 FROM stream INDEXED BY stream_unread WHERE stream.session = session.id AND unread = 1))
ORDER BY active LIMIT 1;

-- newest_of: the records of a kind of one caller that were active last and that their client can ask for
SELECT {session} FROM session INDEXED BY session_of_caller
WHERE owner = ? AND address = ? AND kind = ? AND state <> 'ended' AND (kind <> 'call' OR is_task = 1)
ORDER BY active DESC LIMIT ?;

-- bytes_of_caller: the bytes of what is kept of one caller's durable calls that have ended
SELECT coalesce(sum(length(n.client_params)), 0) + coalesce(sum(
    (SELECT coalesce(sum(length(e.payload)), 0) FROM stream AS s JOIN event AS e ON e.stream = s.key
     WHERE s.session = n.id)), 0)
FROM session AS n INDEXED BY session_of_caller
WHERE owner = ? AND address = ? AND kind = 'call' AND state <> 'ended' AND state = 'dormant';

-- open_calls: calls that have not ended, by session
SELECT c.session, s.id, c.method, c.state, c.attempt, s.node
FROM call AS c INDEXED BY call_open CROSS JOIN stream AS s ON s.key = c.stream
WHERE c.state IN ('running', 'waiting') ORDER BY c.session LIMIT ?;

-- count_events: how many events there are, up to a number
SELECT count(*) FROM (SELECT 1 FROM event LIMIT ?);

-- oldest_retained: the time of the oldest event in some of the oldest streams
SELECT min(oldest) FROM (
    SELECT (SELECT time FROM event WHERE stream = s.key ORDER BY seq LIMIT 1) AS oldest
    FROM stream AS s ORDER BY s.key LIMIT ?);

-- newest_of_session: when its newest retained event was appended
SELECT max(e.time) FROM stream AS s JOIN event AS e ON e.stream = s.key AND e.seq = s.last WHERE s.session = ?;

-- readers_of_session: the readers of a session's streams
SELECT s.id, r.reader, r.node, r.seq
FROM stream AS s JOIN reader AS r ON r.stream = s.key
WHERE s.session = ? ORDER BY s.key;

-- generation_of: the present generation of a stream
SELECT generation FROM stream WHERE id = ?;

-- end_generation: where the writer of a stream ended, if its fence is the one that was seen
INSERT INTO generation (stream, generation, "end")
SELECT key, generation, last FROM stream WHERE id = ? AND fence = ? AND sealed = 0;

-- end_generations: where the writers of all streams that may still grow ended
INSERT INTO generation (stream, generation, "end") SELECT key, generation, last FROM stream WHERE sealed = 0;

-- skip_generations: the next generation of all these streams, after some that another copy of the store may have begun
UPDATE stream SET generation = max(generation + 1, min(generation + :skipped, 999000)) WHERE sealed = 0;

-- next_generation: a stream's new writer
UPDATE stream SET node = ?, fence = ?, generation = ? WHERE id = ?;

-- forget_generations: of a stream, all ends but the newest
DELETE FROM generation WHERE stream = (SELECT key FROM stream WHERE id = :stream)
    AND generation < (SELECT generation FROM stream WHERE id = :stream) - :kept;

-- put_node: a node joins
INSERT INTO node (id, beat, facts) VALUES (?, 0, ?) ON CONFLICT (id) DO NOTHING;

-- read_clock: what is added to the monotonic clock
SELECT offset FROM clock WHERE only = 1;

-- set_clock: the same, from a node that finds no other one
INSERT INTO clock (only, offset) VALUES (1, ?) ON CONFLICT (only) DO UPDATE SET offset = excluded.offset;

-- beat: raise a node's counter, with its facts
UPDATE node SET beat = beat + 1, facts = ? WHERE id = ?;

-- read_beat: a node's counter
SELECT beat FROM node WHERE id = ?;

-- drop_node: a node is buried
DELETE FROM node WHERE id = ?;

-- leave_node: delete a node that leaves nothing to settle
DELETE FROM node
WHERE id = :node
  AND NOT EXISTS (SELECT 1 FROM stream WHERE node = :node AND listed = 1 AND sealed = 0)
  AND NOT EXISTS (
    SELECT 1 FROM call AS c INDEXED BY call_open JOIN stream AS s ON s.key = c.stream
    WHERE c.state IN ('running', 'waiting') AND s.node = :node AND s.sealed = 0)
  AND NOT EXISTS (SELECT 1 FROM mail WHERE node = :node)
  AND NOT EXISTS (SELECT 1 FROM reader WHERE node = :node);

-- streams_read_from: the streams that are read on a node
SELECT {stream s} FROM reader AS r CROSS JOIN stream AS s ON s.key = r.stream
WHERE r.node = ? ORDER BY r.stream;

-- drop_readers: a node has no readers any more
DELETE FROM reader WHERE node = ?;

-- post_mail: a message for a node that has joined
INSERT INTO mail (key, node, message) SELECT ?, id, ? FROM node WHERE id = ?;

-- last_key: the highest key that a table of messages has had
SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name = ?), 0);

-- stream_writer: the key of a stream's id, and whether the node that writes it has joined
SELECT key, EXISTS (SELECT 1 FROM node WHERE id = stream.node) FROM stream WHERE id = ?;

-- sender_to: the sender that forwards to a stream from a node, and the number of its last message
SELECT sender, last FROM sender WHERE stream = ? AND node = ?;

-- put_sender: the same, from now on
INSERT OR REPLACE INTO sender (stream, node, sender, last) VALUES (?, ?, ?, ?);

-- forget_sender: a node forwards nothing more
DELETE FROM sender WHERE node = ?;

-- forward: a message for the writer of a stream
INSERT INTO forward (key, stream, payload) VALUES (?, ?, ?);

-- count_forwarded: how many messages wait for a stream, and their bytes
SELECT count(*), coalesce(sum(length(payload)), 0) FROM forward WHERE stream = ?;

-- take_forwarded: the messages up to a key are among the events of their stream
DELETE FROM forward WHERE stream = ? AND key <= ?;

-- much_mail: whether more than so many messages wait for a node
SELECT 1 FROM mail WHERE node = ? ORDER BY key LIMIT 1 OFFSET ?;

-- inherit_mail: a node's messages for another one, under new keys: it may have dealt with later ones already
INSERT INTO mail (key, node, message)
SELECT key + :shift, :heir, message FROM mail WHERE node = :node ORDER BY key;

-- oldest_mail: the key of the oldest message that waits for a node
SELECT min(key) FROM mail WHERE node = ?;

-- take_mail: a node has dealt with its messages up to a key
DELETE FROM mail WHERE node = :node AND key <= :through;

-- empty_mail: forget a node's messages
DELETE FROM mail WHERE node = ?;

-- last_of_streams: the last key of so many streams, from a key on
SELECT max(key) FROM (SELECT key FROM stream WHERE key > :after ORDER BY key LIMIT :look);

-- stale_streams: streams between two keys that hold something expired, as far as their oldest events show (what was
-- sealed with its first event, as most durable calls are, has an answer and nothing else)
SELECT s.key FROM stream AS s
WHERE s.key > :after AND s.key <= :through AND (
    (s.sealed = 0 OR s.last > 1)
        AND (SELECT time FROM event WHERE stream = s.key AND final = 0 ORDER BY seq LIMIT 1) < :events
    OR s.opened < :answers AND (
        (SELECT time FROM event WHERE stream = s.key AND final = 1 ORDER BY seq LIMIT 1) < :answers
        OR (s.sealed = 1 OR NOT EXISTS (SELECT 1 FROM session WHERE id = s.session))
            AND NOT EXISTS (SELECT 1 FROM event WHERE stream = s.key)))
ORDER BY s.key LIMIT :limit;

-- expire_events: forget some of a stream's expired events
DELETE FROM event WHERE stream = :stream AND seq IN (
    SELECT seq FROM event
    WHERE stream = :stream AND time < CASE final WHEN 1 THEN :answers ELSE :events END
    ORDER BY seq LIMIT :limit);

-- expire_stream: forget a stream that is over and holds nothing any more
DELETE FROM stream
WHERE key = :stream AND opened < :answers
  AND (sealed = 1 OR NOT EXISTS (SELECT 1 FROM session WHERE id = stream.session))
  AND NOT EXISTS (SELECT 1 FROM event WHERE stream = :stream);

-- is_unused: whether a session was not used since a time, and no node uses it now
SELECT 1 FROM session
WHERE id = ? AND active <= ? AND NOT EXISTS (SELECT 1 FROM in_use WHERE in_use.session = session.id);

-- stale_sessions: sessions and durable calls that were not used for long, and are not in use. Those that rest or have
-- ended, which are the most, are found by their time
SELECT id FROM (
    SELECT id FROM session INDEXED BY session_dormant
    WHERE state = 'dormant' AND kind IN ('call', 'key') AND active < :calls
    UNION ALL
    SELECT id FROM session INDEXED BY session_dormant WHERE state = 'dormant' AND kind = 'session' AND active < :answers
    UNION ALL
    SELECT id FROM session INDEXED BY session_ended
    WHERE state = 'ended' AND active < :answers
    UNION ALL
    SELECT id FROM session INDEXED BY session_state
    WHERE kind IN ('call', 'key', 'session') AND state IN ('opening', 'active')
      AND active < CASE kind WHEN 'session' THEN :answers ELSE :calls END
) AS over
WHERE NOT EXISTS (SELECT 1 FROM in_use WHERE in_use.session = over.id) LIMIT :limit;

-- expire_session: forget a session's record, if it is still not used
DELETE FROM session
WHERE id = :session AND active < CASE kind WHEN 'session' THEN :answers ELSE :calls END
  AND NOT EXISTS (SELECT 1 FROM in_use WHERE in_use.session = session.id);

-- empty_session: forget some of the events of a session that was not used for long, and is not in use
DELETE FROM event WHERE (stream, seq) IN (
    SELECT e.stream, e.seq FROM stream AS s JOIN event AS e ON e.stream = s.key
    WHERE s.session = :session AND EXISTS (
        SELECT 1 FROM session WHERE id = :session AND active < CASE kind WHEN 'session' THEN :answers ELSE :calls END)
      AND NOT EXISTS (SELECT 1 FROM in_use WHERE in_use.session = :session)
    LIMIT :limit);

-- walk_end: the event so many after a place in the order of all events, if there is one
SELECT stream, seq FROM event WHERE (stream, seq) > (?, ?) ORDER BY stream, seq LIMIT 1 OFFSET ?;

-- walk: how many events and answers lie between two places, and their bytes
SELECT count(CASE final WHEN 0 THEN 1 END), count(CASE final WHEN 1 THEN 1 END),
       coalesce(sum(CASE final WHEN 0 THEN length(payload) END), 0),
       coalesce(sum(CASE final WHEN 1 THEN length(payload) END), 0)
FROM event WHERE (stream, seq) > (?, ?) AND (stream, seq) <= (?, ?);

-- note: the value of one note
SELECT value FROM note WHERE name = ?;

-- put_note: a note, or another value of it; the session of an earlier one stays
INSERT INTO note (name, session, value) VALUES (?, ?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value;

-- drop_note: forget a note
DELETE FROM note WHERE name = ?;
