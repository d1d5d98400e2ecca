-- The rules of `store.maintenance`: a name, one line of purpose, a query that returns a sentence for each violation.
-- Where a query walks over a table, it does so in the table's order and keeps nothing, so memory stays small.

-- counts: how much the store holds
SELECT (SELECT count(*) FROM session), (SELECT count(*) FROM stream), (SELECT count(*) FROM call),
       count(CASE final WHEN 0 THEN 1 END), count(CASE final WHEN 1 THEN 1 END)
FROM event;

-- orphaned: rows of streams that are not there
SELECT 'events of a stream that is not there (key ' || stream || ')'
FROM (SELECT DISTINCT stream FROM event) WHERE stream NOT IN (SELECT key FROM stream)
UNION ALL
SELECT 'ends of generations of a stream that is not there (key ' || stream || ')'
FROM (SELECT DISTINCT stream FROM generation) WHERE stream NOT IN (SELECT key FROM stream)
UNION ALL
SELECT 'call ' || substr(request_id, 1, 20) || ' of session ' || substr(session, 1, 8) || ' is on a stream that is not there'
FROM call WHERE stream NOT IN (SELECT key FROM stream)
UNION ALL
SELECT 'tool steps of a stream that is not there (key ' || stream || ')'
FROM (SELECT DISTINCT stream FROM tool_step) WHERE stream NOT IN (SELECT key FROM stream)
UNION ALL
SELECT 'an ask of session ' || substr(session, 1, 8) || ' is on a stream that is not there'
FROM ask WHERE stream NOT IN (SELECT key FROM stream)
UNION ALL
SELECT 'a reader of a stream that is not there (key ' || stream || ')'
FROM reader WHERE stream NOT IN (SELECT key FROM stream)
UNION ALL
SELECT 'message ' || key || ' waits for a stream that is not there'
FROM forward WHERE stream NOT IN (SELECT key FROM stream)
UNION ALL
SELECT 'a sender forwards to a stream that is not there (key ' || stream || ')'
FROM sender WHERE stream NOT IN (SELECT key FROM stream);

-- ownerless: streams of sessions that are not there, or have ended
SELECT 'stream ' || substr(s.id, 1, 8) || ' belongs to session ' || substr(s.session, 1, 8) || ', which '
    || CASE WHEN n.id IS NULL THEN 'is not there' ELSE 'has ended' END
FROM stream AS s LEFT JOIN session AS n ON n.id = s.session WHERE n.id IS NULL OR n.state = 'ended';

-- standalone: sessions without their standalone stream, and standalone streams that are not their session's
SELECT 'session ' || substr(n.id, 1, 8) || ' has no standalone stream'
FROM session AS n LEFT JOIN stream AS s ON s.id = n.standalone AND s.session = n.id AND s.kind = 's'
WHERE n.kind = 'session' AND n.state <> 'ended' AND s.id IS NULL
UNION ALL
SELECT 'stream ' || substr(s.id, 1, 8) || ' is a second standalone stream of session ' || substr(n.id, 1, 8)
FROM stream AS s JOIN session AS n ON n.id = s.session
WHERE s.kind = 's' AND n.kind = 'session' AND n.state <> 'ended' AND n.standalone <> s.id;

-- beyond: events after the end of their stream
SELECT 'stream ' || substr(id, 1, 8) || ' ends with event ' || last || ', and event ' || newest || ' is there'
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

-- sealed: open calls on sealed streams, and standalone streams that are sealed
SELECT 'call ' || substr(c.request_id, 1, 20) || ' is ' || c.state || ' on stream ' || substr(s.id, 1, 8) || ', which is sealed'
FROM call AS c INDEXED BY call_open JOIN stream AS s ON s.key = c.stream
WHERE c.state IN ('running', 'waiting') AND s.sealed = 1
UNION ALL
SELECT 'standalone stream ' || substr(id, 1, 8) || ' is sealed' FROM stream WHERE kind = 's' AND sealed = 1;

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

-- ledger: rows that do not fit their stream or their session, and streams of calls without rows
SELECT 'call ' || substr(c.request_id, 1, 20) || ' on stream ' || substr(s.id, 1, 8) || CASE
    WHEN c.session <> s.session THEN ' belongs to another session than the stream'
    WHEN s.kind <> 'c' THEN ' is on a standalone stream'
    WHEN c.incarnation > n.incarnation THEN ' is of incarnation ' || c.incarnation || ', which has not begun'
    ELSE ' has ended, and its request is still there' END
FROM call AS c JOIN stream AS s ON s.key = c.stream JOIN session AS n ON n.id = s.session
WHERE c.session <> s.session OR s.kind <> 'c' OR c.incarnation > n.incarnation
    OR c.state NOT IN ('running', 'waiting') AND length(c.request) > 0
UNION ALL
SELECT 'stream ' || substr(id, 1, 8) || ' answers no call' FROM stream AS s
WHERE kind = 'c' AND NOT EXISTS (SELECT 1 FROM call WHERE stream = s.key)
UNION ALL
SELECT 'an ask of session ' || substr(a.session, 1, 8) || ' is on stream ' || substr(s.id, 1, 8) || ' of another session'
FROM ask AS a JOIN stream AS s ON s.key = a.stream WHERE a.session <> s.session;

-- abandoned: running calls that no node will settle
SELECT 'call ' || substr(c.request_id, 1, 20) || ' on stream ' || substr(s.id, 1, 8) || ' runs at node '
    || substr(s.node, 1, 8) || ', which is not there'
FROM call AS c INDEXED BY call_open JOIN stream AS s ON s.key = c.stream
WHERE c.state IN ('running', 'waiting') AND c.state = 'running' AND s.sealed = 0 AND s.node <> ''
    AND s.node NOT IN (SELECT id FROM node);

-- generations: ends that do not come before the present generation, or not in order
SELECT 'stream ' || substr(s.id, 1, 8) || ' is in generation ' || s.generation || ' at ' || s.last
    || ', and generation ' || g.generation || ' ended at ' || g."end"
FROM generation AS g JOIN stream AS s ON s.key = g.stream
WHERE g.generation >= s.generation OR g."end" > s.last OR EXISTS (
    SELECT 1 FROM generation AS later
    WHERE later.stream = g.stream AND later.generation > g.generation AND later."end" < g."end");

-- delivered: streams whose readers have passed their end
SELECT 'stream ' || substr(id, 1, 8) || ' ends with event ' || last || ', and readers have got to ' || delivered
FROM stream WHERE delivered > last;

-- mail: messages for nodes that are not there
SELECT 'message ' || key || ' waits for node ' || substr(node, 1, 8) || ', which is not there'
FROM mail WHERE node NOT IN (SELECT id FROM node);

-- notes: notes of sessions that are not there, or have ended
SELECT 'a note belongs to session ' || substr(c.session, 1, 8) || ', which '
    || CASE WHEN n.id IS NULL THEN 'is not there' ELSE 'has ended' END
FROM note AS c LEFT JOIN session AS n ON n.id = c.session
WHERE c.session <> '' AND (n.id IS NULL OR n.state = 'ended');

-- tally: numbers of sessions that are not those of the records
SELECT 'counted are ' || t.open || ' open and ' || t.ended || ' ended sessions, and there are ' || n.open || ' and ' || n.ended
FROM tally AS t, (SELECT count(CASE WHEN state <> 'ended' THEN 1 END) AS open,
                         count(CASE WHEN state = 'ended' THEN 1 END) AS ended FROM session WHERE kind = 'session') AS n
WHERE t.open <> n.open OR t.ended <> n.ended;

-- ended: records of ended sessions that hold more than they should, or not why
SELECT 'session ' || substr(id, 1, 8) || ' has ended, and its record ' || CASE
    WHEN ended = '' THEN 'does not say why' ELSE 'holds what only an open one needs' END
FROM session WHERE state = 'ended' AND (ended = '' OR length(result) > 0 OR sticky <> '[]');

-- durable_calls: records of durable calls that have ended, or have several calls
SELECT 'durable call ' || substr(id, 1, 8) || ' has ended, and its record is there'
FROM session WHERE kind <> 'session' AND state = 'ended'
UNION ALL
SELECT 'durable call ' || substr(n.id, 1, 8) || ' has ' || count(*) || ' streams'
FROM session AS n JOIN stream AS s ON s.session = n.id
WHERE n.kind = 'call' AND s.kind = 'c' GROUP BY n.id HAVING count(*) > 1;
