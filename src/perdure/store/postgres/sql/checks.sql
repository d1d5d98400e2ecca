-- The rules of `store.maintenance`: a name, one line of purpose, a query that returns a sentence for each broken place.
-- Rows of events and answers that are hidden ("trimmed", "forgotten"), or whose stream was deleted, do not count: they
-- wait for their slot to be emptied.

-- counts: how much the store holds
SELECT (SELECT count(*) FROM perdure.session), (SELECT count(*) FROM perdure.stream), (SELECT count(*) FROM perdure.call),
       (SELECT count(*) FROM perdure.event AS e JOIN perdure.stream AS s ON s.key = e.stream AND e.seq > s.trimmed),
       (SELECT count(*) FROM perdure.answer AS e JOIN perdure.stream AS s ON s.key = e.stream AND e.seq > s.forgotten);

-- orphaned: rows of streams that do not exist
SELECT what || ' of a stream that does not exist (key ' || stream || ')' FROM (
    SELECT DISTINCT 'ends of generations' AS what, stream FROM perdure.generation
    UNION ALL SELECT 'call ' || left(request_id, 20) || ' of session ' || left(session, 8), stream FROM perdure.call
    UNION ALL SELECT DISTINCT 'tool steps', stream FROM perdure.tool_step
    UNION ALL SELECT 'an ask of session ' || left(session, 8), stream FROM perdure.ask
    UNION ALL SELECT 'a reader', stream FROM perdure.reader
    UNION ALL SELECT 'message ' || key, stream FROM perdure.forward
    UNION ALL SELECT 'a sender', stream FROM perdure.sender) AS o
WHERE NOT EXISTS (SELECT 1 FROM perdure.stream WHERE key = o.stream);

-- ownerless: streams of sessions that do not exist, or have ended
SELECT 'stream ' || left(s.id, 8) || ' belongs to session ' || left(s.session, 8) || ', which '
    || CASE WHEN n.id IS NULL THEN 'does not exist' ELSE 'has ended' END
FROM perdure.stream AS s LEFT JOIN perdure.session AS n ON n.id = s.session WHERE n.id IS NULL OR n.state = 'ended';

-- standalone: sessions without their standalone stream, and standalone streams that are not their session's
SELECT 'session ' || left(n.id, 8) || ' has no standalone stream'
FROM perdure.session AS n LEFT JOIN perdure.stream AS s ON s.id = n.standalone AND s.session = n.id AND s.kind = 's'
WHERE n.kind = 'session' AND n.state <> 'ended' AND s.id IS NULL
UNION ALL
SELECT 'stream ' || left(s.id, 8) || ' is a second standalone stream of session ' || left(n.id, 8)
FROM perdure.stream AS s JOIN perdure.session AS n ON n.id = s.session
WHERE s.kind = 's' AND n.kind = 'session' AND n.state <> 'ended' AND n.standalone <> s.id;

-- beyond: events after the end of their stream
SELECT 'stream ' || left(s.id, 8) || ' ends with event ' || s.last || ', and event ' || e.newest || ' exists'
FROM perdure.stream AS s, LATERAL (
    SELECT greatest((SELECT max(seq) FROM perdure.event WHERE stream = s.key),
                    (SELECT max(seq) FROM perdure.answer WHERE stream = s.key)) AS newest) AS e
WHERE e.newest > s.last;

-- gaps: events that are missing after the oldest retained one; answers that have expired are not counted
SELECT 'stream ' || left(s.id, 8) || ' lacks ' || x.missing || ' of the events ' || o.oldest || ' to ' || s.last
FROM perdure.stream AS s, LATERAL (
    SELECT min(seq) AS oldest FROM perdure.event WHERE stream = s.key AND seq > s.trimmed) AS o, LATERAL (
    SELECT s.last - o.oldest + 1 - (SELECT count(DISTINCT seq) FROM perdure.event WHERE stream = s.key AND seq >= o.oldest)
        - (SELECT count(DISTINCT seq) FROM perdure.answer WHERE stream = s.key AND seq >= greatest(o.oldest, s.forgotten + 1))
        - greatest(0, (SELECT count(*) FROM perdure.call WHERE stream = s.key AND state NOT IN ('running', 'waiting'))
            - (SELECT count(*) FROM perdure.answer WHERE stream = s.key AND seq > s.forgotten)) AS missing) AS x
WHERE x.missing > 0;

-- doubled: numbers that name two events, in different slots or as event and answer
SELECT 'event ' || e.seq || ' of stream ' || left(s.id, 8) || ' exists ' || count(*) || ' times'
FROM (SELECT stream, seq FROM perdure.event UNION ALL SELECT stream, seq FROM perdure.answer) AS e
JOIN perdure.stream AS s ON s.key = e.stream AND e.seq > least(s.trimmed, s.forgotten)
GROUP BY e.stream, e.seq, s.id HAVING count(*) > 1;

-- sealed: open calls on sealed streams, and standalone streams that are sealed
SELECT 'call ' || left(c.request_id, 20) || ' is ' || c.state || ' on stream ' || left(s.id, 8) || ', which is sealed'
FROM perdure.call AS c JOIN perdure.stream AS s ON s.key = c.stream
WHERE c.state IN ('running', 'waiting') AND s.sealed
UNION ALL
SELECT 'standalone stream ' || left(id, 8) || ' is sealed' FROM perdure.stream WHERE kind = 's' AND sealed;

-- tail: sealed streams whose last event is not an answer
SELECT 'stream ' || left(s.id, 8) || ' is sealed, and its last event (' || s.last || ') is not an answer'
FROM perdure.stream AS s JOIN perdure.event AS e ON e.stream = s.key AND e.seq = s.last WHERE s.sealed AND s.last > s.trimmed;

-- unanswered: calls that have ended and lack their answer, although none of that time has expired
SELECT 'stream ' || left(s.id, 8) || ' has ' || x.ended || ' ended calls and ' || x.answers || ' answers'
FROM perdure.stream AS s, LATERAL (
    SELECT (SELECT count(*) FROM perdure.call WHERE stream = s.key AND state NOT IN ('running', 'waiting')) AS ended,
           (SELECT count(*) FROM perdure.answer WHERE stream = s.key AND seq > s.forgotten) AS answers) AS x
WHERE s.kind = 'c' AND x.answers < x.ended
    AND s.opened > (SELECT swept FROM perdure.rotation WHERE part = 'answer') + $1::float8;

-- answers: streams with more answers than calls that have ended
SELECT 'stream ' || left(s.id, 8) || ' has ' || x.answers || ' answers and ' || x.ended || ' ended calls'
FROM perdure.stream AS s, LATERAL (
    SELECT (SELECT count(*) FROM perdure.answer WHERE stream = s.key) AS answers,
           (SELECT count(*) FROM perdure.call WHERE stream = s.key AND state NOT IN ('running', 'waiting')) AS ended) AS x
WHERE x.answers > x.ended;

-- ledger: rows that do not fit their stream or their session, and streams of calls without rows
SELECT 'call ' || left(c.request_id, 20) || ' on stream ' || left(s.id, 8) || CASE
    WHEN c.session <> s.session THEN ' belongs to another session than the stream'
    WHEN s.kind <> 'c' THEN ' is on a standalone stream'
    WHEN c.incarnation > n.incarnation THEN ' is of incarnation ' || c.incarnation || ', which has not begun'
    ELSE ' has ended, and its request still exists' END
FROM perdure.call AS c JOIN perdure.stream AS s ON s.key = c.stream JOIN perdure.session AS n ON n.id = s.session
WHERE c.session <> s.session OR s.kind <> 'c' OR c.incarnation > n.incarnation
    OR c.state NOT IN ('running', 'waiting') AND length(c.request) > 0
UNION ALL
SELECT 'stream ' || left(id, 8) || ' answers no call' FROM perdure.stream AS s
WHERE kind = 'c' AND NOT EXISTS (SELECT 1 FROM perdure.call WHERE stream = s.key)
UNION ALL
SELECT 'an ask of session ' || left(a.session, 8) || ' is on stream ' || left(s.id, 8) || ' of another session'
FROM perdure.ask AS a JOIN perdure.stream AS s ON s.key = a.stream WHERE a.session <> s.session;

-- abandoned: running calls that no node will settle
SELECT 'call ' || left(c.request_id, 20) || ' on stream ' || left(s.id, 8) || ' runs at node '
    || left(s.node, 8) || ', which does not exist'
FROM perdure.call AS c JOIN perdure.stream AS s ON s.key = c.stream
WHERE c.state = 'running' AND NOT s.sealed AND s.node <> '' AND NOT EXISTS (SELECT 1 FROM perdure.node WHERE id = s.node);

-- generations: ends that do not come before the present generation, or not in order
SELECT 'stream ' || left(s.id, 8) || ' is in generation ' || s.generation || ' at ' || s.last
    || ', and generation ' || g.generation || ' ended at ' || g."end"
FROM perdure.generation AS g JOIN perdure.stream AS s ON s.key = g.stream
WHERE g.generation >= s.generation OR g."end" > s.last OR EXISTS (
    SELECT 1 FROM perdure.generation AS later
    WHERE later.stream = g.stream AND later.generation > g.generation AND later."end" < g."end");

-- delivered: streams whose readers have passed their end
SELECT 'stream ' || left(id, 8) || ' ends with event ' || last || ', and readers have got to ' || delivered
FROM perdure.stream WHERE delivered > last;

-- mail: messages for nodes that do not exist, and mailboxes whose count is wrong
SELECT 'message ' || key || ' waits for node ' || left(node, 8) || ', which does not exist'
FROM perdure.mail AS m WHERE node <> '' AND NOT EXISTS (SELECT 1 FROM perdure.node WHERE id = m.node)
UNION ALL
SELECT 'node ' || left(b.node, 8) || ' has ' || m.waiting || ' messages, and ' || b.waiting || ' are counted'
FROM perdure.mailbox AS b, LATERAL (SELECT count(*) AS waiting FROM perdure.mail WHERE node = b.node) AS m
WHERE b.waiting <> m.waiting;

-- notes: notes of sessions that do not exist, or have ended
SELECT 'a note belongs to session ' || left(c.session, 8) || ', which '
    || CASE WHEN n.id IS NULL THEN 'does not exist' ELSE 'has ended' END
FROM perdure.note AS c LEFT JOIN perdure.session AS n ON n.id = c.session
WHERE c.session <> '' AND (n.id IS NULL OR n.state = 'ended');

-- tally: numbers of sessions that are not those of the records
SELECT 'counted are ' || t.open || ' open and ' || t.ended || ' ended sessions, and there are ' || n.open || ' and ' || n.ended
FROM perdure.tally AS t, (
    SELECT count(*) FILTER (WHERE state <> 'ended') AS open, count(*) FILTER (WHERE state = 'ended') AS ended
    FROM perdure.session WHERE kind = 'session') AS n
WHERE t.open <> n.open OR t.ended <> n.ended;

-- ended: records of ended sessions that hold more than they should, or not why
SELECT 'session ' || left(id, 8) || ' has ended, and its record ' || CASE
    WHEN ended = '' THEN 'does not say why' ELSE 'holds what only an open one needs' END
FROM perdure.session WHERE state = 'ended' AND (ended = '' OR length(result) > 0 OR cardinality(sticky) > 0);

-- durable_calls: records of durable calls that have ended, or have several calls
SELECT 'durable call ' || left(id, 8) || ' has ended, and its record exists'
FROM perdure.session WHERE kind <> 'session' AND state = 'ended'
UNION ALL
SELECT 'durable call ' || left(n.id, 8) || ' has ' || count(*) || ' streams'
FROM perdure.session AS n JOIN perdure.stream AS s ON s.session = n.id
WHERE n.kind = 'call' AND s.kind = 'c' GROUP BY n.id HAVING count(*) > 1;
