-- The rules of `store.maintenance` that a SQLite file checks in its own way, or alone.
-- Where a query walks over a table, it does so in the table's order and keeps nothing, so memory stays small.

-- counts: how much the store holds
SELECT (SELECT count(*) FROM session), (SELECT count(*) FROM stream), (SELECT count(*) FROM call),
       count(CASE final WHEN 0 THEN 1 END), count(CASE final WHEN 1 THEN 1 END)
FROM event;

-- orphaned: rows of streams that do not exist
SELECT what || ' of a stream that does not exist (key ' || stream || ')' FROM (
    SELECT 'events' AS what, stream FROM (SELECT DISTINCT stream FROM event)
    UNION ALL SELECT 'ends of generations', stream FROM (SELECT DISTINCT stream FROM generation)
    UNION ALL SELECT 'call ' || substr(request_id, 1, 20) || ' of session ' || substr(session, 1, 8), stream FROM call
    UNION ALL SELECT 'tool steps', stream FROM (SELECT DISTINCT stream FROM tool_step)
    UNION ALL SELECT 'an ask of session ' || substr(session, 1, 8), stream FROM ask
    UNION ALL SELECT 'a reader', stream FROM reader
    UNION ALL SELECT 'message ' || key, stream FROM forward
    UNION ALL SELECT 'a sender', stream FROM sender) AS o
WHERE NOT EXISTS (SELECT 1 FROM stream WHERE key = o.stream);

-- beyond: events after the end of their stream
SELECT 'stream ' || substr(id, 1, 8) || ' ends with event ' || last || ', and event ' || newest || ' exists'
FROM (SELECT id, last, (SELECT seq FROM event WHERE stream = s.key ORDER BY seq DESC LIMIT 1) AS newest FROM stream AS s)
WHERE newest > last;

-- gaps: events that are missing after the oldest retained one; answers that have expired are not counted
SELECT 'stream ' || substr(id, 1, 8) || ' lacks ' || missing || ' of the events ' || oldest || ' to ' || last
FROM (
    SELECT id, last, oldest, last - oldest + 1 - (SELECT count(*) FROM event WHERE stream = key AND seq >= oldest)
        - max(0, (SELECT count(*) FROM call WHERE stream = key AND state NOT IN ('running', 'waiting'))
            - (SELECT count(*) FROM event WHERE stream = key AND final = 1)) AS missing
    FROM (SELECT key, id, last, (SELECT seq FROM event WHERE stream = s.key AND final = 0 ORDER BY seq LIMIT 1) AS oldest
          FROM stream AS s)
    WHERE oldest IS NOT NULL)
WHERE missing > 0;

-- tail: sealed streams whose last event is not an answer
SELECT 'stream ' || substr(s.id, 1, 8) || ' is sealed, and its last event (' || s.last || ') is not an answer'
FROM stream AS s JOIN event AS e ON e.stream = s.key AND e.seq = s.last WHERE s.sealed = 1 AND e.final = 0;

-- unanswered: calls that have ended and lack their answer, although an older one is retained
SELECT 'stream ' || substr(id, 1, 8) || ' has ' || ended || ' ended calls and ' || answers || ' answers'
FROM (
    SELECT id, (SELECT count(*) FROM call WHERE stream = s.key AND state NOT IN ('running', 'waiting')) AS ended,
        (SELECT count(*) FROM event WHERE stream = s.key AND final = 1) AS answers
    FROM stream AS s
    WHERE kind = 'c' AND opened > (SELECT coalesce(min(time), 1e300) FROM event WHERE final = 1) + ?)
WHERE answers < ended;

-- answers: streams with more answers than calls that have ended
SELECT 'stream ' || substr(id, 1, 8) || ' has ' || answers || ' answers and ' || ended || ' ended calls'
FROM (
    SELECT id, (SELECT count(*) FROM event WHERE stream = s.key AND final = 1) AS answers,
        (SELECT count(*) FROM call WHERE stream = s.key AND state NOT IN ('running', 'waiting')) AS ended
    FROM stream AS s)
WHERE answers > ended;

-- mail: messages for nodes that do not exist
SELECT 'message ' || key || ' waits for node ' || substr(node, 1, 8) || ', which does not exist'
FROM mail WHERE node NOT IN (SELECT id FROM node);

-- ended: records of ended sessions that hold more than they should, or not why
SELECT 'session ' || substr(id, 1, 8) || ' has ended, and its record ' || CASE
    WHEN ended = '' THEN 'does not say why' ELSE 'holds what only an open one needs' END
FROM session WHERE state = 'ended' AND (ended = '' OR length(result) > 0 OR sticky <> '[]');
