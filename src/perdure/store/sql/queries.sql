-- Every query of the SQLite store: a name, one line of purpose, the statement.

-- put_session: write a session's record, over the one that is there
INSERT INTO session (id, record, owner, node, state, version, client_params, result, initialized, sticky, incarnation,
                     standalone, created, active)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET
    record = excluded.record, owner = excluded.owner, node = excluded.node, state = excluded.state,
    version = excluded.version, client_params = excluded.client_params, result = excluded.result,
    initialized = excluded.initialized, sticky = excluded.sticky, incarnation = excluded.incarnation,
    standalone = excluded.standalone, created = excluded.created, active = excluded.active;

-- end_session: mark a session's record as ended
UPDATE session SET state = 'ended', active = ? WHERE id = ?;

-- drop_streams: forget a session's streams, and with them all that is in them
DELETE FROM stream WHERE session = ?;

-- open_stream: a new stream; nothing if it is there already
INSERT INTO stream (id, record, session, kind, fence, opened, generation, last, sealed)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO NOTHING;

-- open_call: a ledger row of a new stream
INSERT INTO call (stream, incarnation, request_id, place, record, method, request, principal, node, attempt, progress,
                  state)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- stream_key: the small key behind a stream's id
SELECT key FROM stream WHERE id = ?;

-- extend_stream: move a stream's end, if the fence is right and the new events follow the last one
UPDATE stream SET last = ?, sealed = ? WHERE key = ? AND fence = ? AND last = ? AND sealed = 0;

-- stream_end: what decides about an append that is not plainly the next one
SELECT fence, last, sealed FROM stream WHERE key = ?;

-- set_stream_end: the end of a stream after an append that was partly known
UPDATE stream SET last = ?, sealed = ? WHERE key = ?;

-- append_event: one event
INSERT INTO event (stream, seq, time, payload, final) VALUES (?, ?, ?, ?, ?);

-- end_call: the end of a call that still runs; nobody will need its request again
UPDATE call SET state = ?, request = x'' WHERE stream = ? AND incarnation = ? AND request_id = ? AND state = 'running';

-- trim: forget events up to a number, final answers excepted
DELETE FROM event WHERE stream = ? AND seq <= ? AND final = 0;

-- oldest_event: where a stream's retained events begin
SELECT seq FROM event WHERE stream = ? ORDER BY seq LIMIT 1;

-- drop_stream: forget a stream, and with it all that is in it
DELETE FROM stream WHERE id = ?;

-- open_ask: an ask that waits; nothing if it is there already
INSERT INTO ask (session, id, record, stream, request, node) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (session, id) DO NOTHING;

-- close_ask: an ask that was answered or given up
DELETE FROM ask WHERE session = ? AND id = ?;

-- put_reader: who reads a stream, and how far
INSERT OR REPLACE INTO reader (stream, record, reader, node, seq) VALUES (?, ?, ?, ?, ?);

-- leave_reader: a reader left, unless another one has taken its place
DELETE FROM reader WHERE stream = ? AND reader = ?;

-- read_events: the retained events of a stream after a sequence number
SELECT e.seq, e.time, e.payload, e.final
FROM stream AS s JOIN event AS e ON e.stream = s.key
WHERE s.id = ? AND e.seq > ?
ORDER BY e.seq LIMIT ?;

-- stream_by_id: one stream
SELECT record, id, session, kind, fence, opened, generation, last, sealed FROM stream WHERE id = ?;

-- streams_of_session: a session's streams, the oldest first
SELECT record, id, session, kind, fence, opened, generation, last, sealed FROM stream WHERE session = ? ORDER BY key;

-- generations_of_stream: the ended generations of a stream, the oldest first
SELECT g.generation, g."end"
FROM stream AS s JOIN generation AS g ON g.stream = s.key
WHERE s.id = ? ORDER BY g.generation;

-- session_by_id: one session
SELECT record, id, owner, node, state, version, client_params, result, initialized, sticky, incarnation, standalone,
       created, active
FROM session WHERE id = ?;

-- sessions_after: a page of sessions, by id
SELECT record, id, owner, node, state, version, client_params, result, initialized, sticky, incarnation, standalone,
       created, active
FROM session WHERE id > ? ORDER BY id LIMIT ?;

-- calls_of_session: a session's ledger, the oldest first
SELECT c.record, s.session, c.incarnation, c.request_id, s.id, c.method, c.request, c.principal, c.node, c.attempt,
       c.progress, c.state
FROM stream AS s JOIN call AS c ON c.stream = s.key
WHERE s.session = ? ORDER BY s.key, c.place;

-- requests_of_stream: what a stream answers, in order, without the requests' bodies
SELECT c.request_id, c.method
FROM stream AS s JOIN call AS c ON c.stream = s.key
WHERE s.id = ? ORDER BY c.place;

-- asks_of_session: a session's open asks, the oldest first
SELECT a.record, a.session, a.id, s.id, a.request, a.node
FROM ask AS a JOIN stream AS s ON s.key = a.stream
WHERE a.session = ? ORDER BY a.key;

-- reader_of_stream: who reads a stream
SELECT r.record, s.id, r.reader, r.node, r.seq
FROM stream AS s JOIN reader AS r ON r.stream = s.key
WHERE s.id = ?;

-- raise_fence: the next fence, part one
UPDATE fence SET last = last + 1;

-- read_fence: the next fence, part two
SELECT last FROM fence;

-- end_generation: where the writer of a stream ended
INSERT INTO generation (stream, generation, "end") SELECT key, generation, last FROM stream WHERE id = ?;

-- next_generation: a stream's new writer
UPDATE stream SET fence = ?, generation = generation + 1 WHERE id = ?;

-- post_mail: a message for a node
INSERT INTO mail (node, message) VALUES (?, ?);

-- read_mail: a node's messages, the oldest first
SELECT message FROM mail WHERE node = ? ORDER BY key;

-- empty_mail: a node's messages are collected
DELETE FROM mail WHERE node = ?;

-- stale_streams: streams, from a key on, that hold something expired, as far as their oldest events tell
SELECT s.key FROM stream AS s
WHERE s.key > :after AND (
    (SELECT time FROM event WHERE stream = s.key AND final = 0 ORDER BY seq LIMIT 1) < :events
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

-- stale_sessions: sessions that nobody used for long
SELECT id FROM session WHERE active < ? LIMIT ?;

-- expire_session: forget a session's record, if still nobody used it
DELETE FROM session WHERE id = ? AND active < ?;

-- empty_session: forget some of the events of a session that nobody used for long
DELETE FROM event WHERE (stream, seq) IN (
    SELECT e.stream, e.seq FROM stream AS s JOIN event AS e ON e.stream = s.key
    WHERE s.session = :session AND EXISTS (SELECT 1 FROM session WHERE id = :session AND active < :answers)
    LIMIT :limit);
