-- The queries that both databases run: a name, one line of purpose, the statement. "perdure." stands for the schema, which
-- SQLite has not.

-- streams_of_session: a session's streams, the oldest first
SELECT {stream} FROM perdure.stream WHERE session = $1 ORDER BY key;

-- forwarded_to: the streams for which messages wait, and which a node writes, or no node that has joined
SELECT {stream} FROM perdure.stream AS s WHERE key IN (SELECT stream FROM perdure.forward)
    AND (node = $1 OR NOT EXISTS (SELECT 1 FROM perdure.node WHERE id = s.node))
ORDER BY key;

-- read_forwarded: some of the messages that wait for a stream after a key, the oldest first
SELECT f.key, f.payload FROM perdure.stream AS s JOIN perdure.forward AS f ON f.stream = s.key
WHERE s.id = $1 AND f.key > $2 ORDER BY f.key LIMIT $3;

-- generations_of_stream: the ended generations of a stream, the oldest first
SELECT g.generation, g."end"
FROM perdure.stream AS s JOIN perdure.generation AS g ON g.stream = s.key
WHERE s.id = $1 ORDER BY g.generation;

-- session_by_id: one session
SELECT {session} FROM perdure.session WHERE id = $1;

-- newest_with_prefix: of the sessions and calls whose ids are between two, those that were active last, as `newest`
SELECT id, owner, state, is_task, active, kind,
       CASE kind WHEN 'call' THEN (
           SELECT c.state FROM perdure.stream AS s JOIN perdure.call AS c ON c.stream = s.key
           WHERE s.session = n.id ORDER BY s.key, c.place LIMIT 1) END
FROM perdure.session AS n
WHERE id >= $2 AND id < $3 AND kind <> 'key' ORDER BY active DESC, id LIMIT $1;

-- calls_of_session: a session's ledger, the oldest first
SELECT {call} FROM perdure.stream AS s JOIN perdure.call AS c ON c.stream = s.key
WHERE s.session = $1 ORDER BY s.key, c.place;

-- calls_of_stream: the ledger rows of what a stream answers, in order
SELECT {call} FROM perdure.stream AS s JOIN perdure.call AS c ON c.stream = s.key
WHERE s.id = $1 ORDER BY c.place;

-- open_calls_of_session: a session's calls that have not ended, the oldest first
SELECT {call} FROM perdure.call AS c JOIN perdure.stream AS s ON s.key = c.stream
WHERE c.session = $1 AND c.state IN ('running', 'waiting') ORDER BY s.key, c.place;

-- tool_steps: the steps of the tools of a stream's calls, by their numbers, with their values or without
SELECT s.id, t.incarnation, t.request_id, t.number, t.kind, t.name, t.state, t.again, t.own, t.attempt, t.began, t.ended,
       CASE WHEN $2 THEN t.value END
FROM perdure.stream AS s JOIN perdure.tool_step AS t ON t.stream = s.key
WHERE s.id = $1 ORDER BY t.number, t.request_id;

-- asks_of_session: a session's open asks, the oldest first
SELECT a.session, a.id, s.id, a.request, a.node, a.call, a.incarnation, a.request_id
FROM perdure.ask AS a JOIN perdure.stream AS s ON s.key = a.stream
WHERE a.session = $1 ORDER BY a.key;

-- all_nodes: the nodes that have joined and are not buried
SELECT id, beat, facts FROM perdure.node ORDER BY key;

-- read_mail: some of a node's messages after a key, the oldest first
SELECT key, message FROM perdure.mail WHERE node = $1 AND key > $2 ORDER BY key LIMIT $3;

-- notes: the notes whose names are between two
SELECT name, value FROM perdure.note WHERE name >= $1 AND name < $2;
