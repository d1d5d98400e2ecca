-- The rules of `store.maintenance` that both databases check alike: a name, one line of purpose, a query that returns a
-- sentence for each broken place. "perdure." stands for the schema, which SQLite has not. The other rules are in the files
-- of the databases.

-- ownerless: streams of sessions that do not exist, or have ended
SELECT 'stream ' || substr(s.id, 1, 8) || ' belongs to session ' || substr(s.session, 1, 8) || ', which '
    || CASE WHEN n.id IS NULL THEN 'does not exist' ELSE 'has ended' END
FROM perdure.stream AS s LEFT JOIN perdure.session AS n ON n.id = s.session WHERE n.id IS NULL OR n.state = 'ended';

-- standalone: sessions without their standalone stream, and standalone streams that are not their session's
SELECT 'session ' || substr(n.id, 1, 8) || ' has no standalone stream'
FROM perdure.session AS n LEFT JOIN perdure.stream AS s ON s.id = n.standalone AND s.session = n.id AND s.kind = 's'
WHERE n.kind = 'session' AND n.state <> 'ended' AND s.id IS NULL
UNION ALL
SELECT 'stream ' || substr(s.id, 1, 8) || ' is a second standalone stream of session ' || substr(n.id, 1, 8)
FROM perdure.stream AS s JOIN perdure.session AS n ON n.id = s.session
WHERE s.kind = 's' AND n.kind = 'session' AND n.state <> 'ended' AND n.standalone <> s.id;

-- sealed: open calls on sealed streams, and standalone streams that are sealed
SELECT 'call ' || substr(c.request_id, 1, 20) || ' is ' || c.state || ' on stream ' || substr(s.id, 1, 8) || ', which is sealed'
FROM perdure.call AS c JOIN perdure.stream AS s ON s.key = c.stream
WHERE c.state IN ('running', 'waiting') AND s.sealed
UNION ALL
SELECT 'standalone stream ' || substr(id, 1, 8) || ' is sealed' FROM perdure.stream WHERE kind = 's' AND sealed;

-- ledger: rows that do not fit their stream or their session, and streams of calls without rows
SELECT 'call ' || substr(c.request_id, 1, 20) || ' on stream ' || substr(s.id, 1, 8) || CASE
    WHEN c.session <> s.session THEN ' belongs to another session than the stream'
    WHEN s.kind <> 'c' THEN ' is on a standalone stream'
    WHEN c.incarnation > n.incarnation THEN ' is of incarnation ' || c.incarnation || ', which has not begun'
    ELSE ' has ended, and its request still exists' END
FROM perdure.call AS c JOIN perdure.stream AS s ON s.key = c.stream JOIN perdure.session AS n ON n.id = s.session
WHERE c.session <> s.session OR s.kind <> 'c' OR c.incarnation > n.incarnation
    OR c.state NOT IN ('running', 'waiting') AND length(c.request) > 0
UNION ALL
SELECT 'stream ' || substr(id, 1, 8) || ' answers no call' FROM perdure.stream AS s
WHERE kind = 'c' AND NOT EXISTS (SELECT 1 FROM perdure.call WHERE stream = s.key)
UNION ALL
SELECT 'an ask of session ' || substr(a.session, 1, 8) || ' is on stream ' || substr(s.id, 1, 8) || ' of another session'
FROM perdure.ask AS a JOIN perdure.stream AS s ON s.key = a.stream WHERE a.session <> s.session;

-- abandoned: running calls that no node will settle
SELECT 'call ' || substr(c.request_id, 1, 20) || ' on stream ' || substr(s.id, 1, 8) || ' runs at node '
    || substr(s.node, 1, 8) || ', which does not exist'
FROM perdure.call AS c JOIN perdure.stream AS s ON s.key = c.stream
WHERE c.state IN ('running', 'waiting') AND c.state = 'running' AND NOT s.sealed AND s.node <> ''
    AND NOT EXISTS (SELECT 1 FROM perdure.node WHERE id = s.node);

-- generations: ends that do not come before the present generation, or not in order
SELECT 'stream ' || substr(s.id, 1, 8) || ' is in generation ' || s.generation || ' at ' || s.last
    || ', and generation ' || g.generation || ' ended at ' || g."end"
FROM perdure.generation AS g JOIN perdure.stream AS s ON s.key = g.stream
WHERE g.generation >= s.generation OR g."end" > s.last OR EXISTS (
    SELECT 1 FROM perdure.generation AS later
    WHERE later.stream = g.stream AND later.generation > g.generation AND later."end" < g."end");

-- delivered: streams whose readers have passed their end
SELECT 'stream ' || substr(id, 1, 8) || ' ends with event ' || last || ', and readers have got to ' || delivered
FROM perdure.stream WHERE delivered > last;

-- notes: notes of sessions that do not exist, or have ended
SELECT 'a note belongs to session ' || substr(c.session, 1, 8) || ', which '
    || CASE WHEN n.id IS NULL THEN 'does not exist' ELSE 'has ended' END
FROM perdure.note AS c LEFT JOIN perdure.session AS n ON n.id = c.session
WHERE c.session <> '' AND (n.id IS NULL OR n.state = 'ended');

-- tally: numbers of sessions that are not those of the records
SELECT 'counted are ' || t.open || ' open and ' || t.ended || ' ended sessions, and there are ' || n.open || ' and ' || n.ended
FROM perdure.tally AS t, (
    SELECT count(CASE WHEN state <> 'ended' THEN 1 END) AS open, count(CASE WHEN state = 'ended' THEN 1 END) AS ended
    FROM perdure.session WHERE kind = 'session') AS n
WHERE t.open <> n.open OR t.ended <> n.ended;

-- durable_calls: records of durable calls that have ended, or have several calls
SELECT 'durable call ' || substr(id, 1, 8) || ' has ended, and its record exists'
FROM perdure.session WHERE kind <> 'session' AND state = 'ended'
UNION ALL
SELECT 'durable call ' || substr(n.id, 1, 8) || ' has ' || count(*) || ' streams'
FROM perdure.session AS n JOIN perdure.stream AS s ON s.session = n.id
WHERE n.kind = 'call' AND s.kind = 'c' GROUP BY n.id HAVING count(*) > 1;
