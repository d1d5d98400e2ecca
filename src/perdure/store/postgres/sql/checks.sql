-- The rules of `store.maintenance` that a PostgreSQL schema checks in its own way, or alone.
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

-- mail: messages for nodes that do not exist, and mailboxes whose count is wrong
SELECT 'message ' || key || ' waits for node ' || left(node, 8) || ', which does not exist'
FROM perdure.mail AS m WHERE node <> '' AND NOT EXISTS (SELECT 1 FROM perdure.node WHERE id = m.node)
UNION ALL
SELECT 'node ' || left(b.node, 8) || ' has ' || m.waiting || ' messages, and ' || b.waiting || ' are counted'
FROM perdure.mailbox AS b, LATERAL (SELECT count(*) AS waiting FROM perdure.mail WHERE node = b.node) AS m
WHERE b.waiting <> m.waiting;

-- ended: records of ended sessions that hold more than they should, or not why
SELECT 'session ' || left(id, 8) || ' has ended, and its record ' || CASE
    WHEN ended = '' THEN 'does not say why' ELSE 'holds what only an open one needs' END
FROM perdure.session WHERE state = 'ended' AND (ended = '' OR length(result) > 0 OR cardinality(sticky) > 0);
