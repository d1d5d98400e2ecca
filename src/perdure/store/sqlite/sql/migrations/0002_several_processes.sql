-- Several processes: who writes a stream, ids that are taken wherever they run, who has joined, mail that is received
-- once.
--
-- The layout before knew one process. The calls that it left unfinished belong to a node that is dead: it gets a row
-- without a lock, and whoever opens the file settles them. Sessions have no home yet.

DROP TRIGGER stream_gone;

ALTER TABLE session RENAME TO session_1;

CREATE TABLE session (
    id            TEXT PRIMARY KEY NOT NULL,
    record        INTEGER NOT NULL,
    owner         NOT NULL,
    state         TEXT NOT NULL CHECK (state IN ('opening', 'active', 'dormant', 'ended')),
    version       TEXT NOT NULL,
    client_params BLOB NOT NULL,
    result        BLOB NOT NULL,
    initialized   INTEGER NOT NULL CHECK (initialized IN (0, 1)),
    sticky        TEXT NOT NULL,
    incarnation   INTEGER NOT NULL CHECK (incarnation >= 0),
    standalone    TEXT NOT NULL,
    created       REAL NOT NULL,
    active        REAL NOT NULL,
    ended         TEXT NOT NULL DEFAULT ''
);

INSERT INTO session (id, record, owner, state, version, client_params, result, initialized, sticky, incarnation,
                     standalone, created, active)
SELECT id, 2, owner, state, version, client_params, result, initialized, sticky, incarnation, standalone, created, active
FROM session_1;

CREATE INDEX session_of_owner ON session (owner) WHERE state <> 'ended';

CREATE INDEX session_state ON session (state);

CREATE INDEX session_dormant ON session (active) WHERE state = 'dormant';

DROP TABLE session_1;

ALTER TABLE stream RENAME TO stream_1;

CREATE TABLE stream (
    key        INTEGER PRIMARY KEY,
    id         TEXT NOT NULL UNIQUE,
    record     INTEGER NOT NULL,
    session    TEXT NOT NULL,
    kind       TEXT NOT NULL CHECK (kind IN ('c', 's')),
    node       TEXT NOT NULL,
    fence      INTEGER NOT NULL CHECK (fence >= 0),
    opened     REAL NOT NULL,
    generation INTEGER NOT NULL CHECK (generation >= 1),
    last       INTEGER NOT NULL CHECK (last >= 0),
    sealed     INTEGER NOT NULL CHECK (sealed IN (0, 1)),
    listed     INTEGER NOT NULL CHECK (listed IN (0, 1))
);

INSERT INTO stream (key, id, record, session, kind, node, fence, opened, generation, last, sealed, listed)
SELECT s.key, s.id, 2, s.session, s.kind,
       coalesce((SELECT c.node FROM call AS c WHERE c.stream = s.key LIMIT 1), ''),
       s.fence, s.opened, s.generation, s.last, s.sealed,
       s.sealed = 0 AND NOT EXISTS (SELECT 1 FROM call AS c WHERE c.stream = s.key AND c.state = 'running')
FROM stream_1 AS s ORDER BY s.key;

DROP TABLE stream_1;

CREATE INDEX stream_of_session ON stream (session);

CREATE INDEX stream_of_node ON stream (node) WHERE listed = 1;

ALTER TABLE call RENAME TO call_1;

CREATE TABLE call (
    stream      INTEGER NOT NULL,
    incarnation INTEGER NOT NULL CHECK (incarnation >= 0),
    request_id  TEXT NOT NULL,
    session     TEXT NOT NULL,
    id_key      NOT NULL,
    place       INTEGER NOT NULL,
    record      INTEGER NOT NULL,
    method      NOT NULL,
    request     BLOB NOT NULL,
    principal   NOT NULL,
    attempt     INTEGER NOT NULL CHECK (attempt >= 1),
    progress    REAL,
    state       TEXT NOT NULL CHECK (state IN ('running', 'waiting', 'answered', 'cancelled', 'settled')),
    PRIMARY KEY (stream, incarnation, request_id)
) WITHOUT ROWID;

INSERT INTO call (stream, incarnation, request_id, session, id_key, place, record, method, request, principal, attempt,
                  progress, state)
SELECT c.stream, c.incarnation, c.request_id, s.session,
       CASE WHEN c.request_id LIKE '"%' THEN CAST(json_extract(c.request_id, '$') AS TEXT) ELSE c.request_id END,
       c.place, 2, c.method, c.request, c.principal, c.attempt, c.progress, c.state
FROM call_1 AS c JOIN stream AS s ON s.key = c.stream;

DROP TABLE call_1;

-- No file should have two; if one has, it can still be opened, and both calls are settled.
UPDATE call SET id_key = id_key || ' of ' || stream
WHERE state = 'running' AND EXISTS (
    SELECT 1 FROM call AS c JOIN stream AS s ON s.key = c.stream
    WHERE s.session = call.session AND c.incarnation = call.incarnation AND c.id_key = call.id_key
      AND c.state = 'running' AND (c.stream, c.place) < (call.stream, call.place));

CREATE UNIQUE INDEX call_open ON call (session, incarnation, id_key) WHERE state IN ('running', 'waiting');

CREATE TABLE node (
    key    INTEGER PRIMARY KEY,
    id     TEXT NOT NULL UNIQUE,
    record INTEGER NOT NULL,
    beat   INTEGER NOT NULL CHECK (beat >= 0),
    facts  BLOB NOT NULL
);

INSERT INTO node (id, record, beat, facts)
SELECT DISTINCT node, 1, 0, CAST('{}' AS BLOB) FROM stream WHERE sealed = 0 AND node <> '';

-- Readers were those of that process, and there was nobody to write to.
DELETE FROM reader;

DROP TABLE mail;

CREATE TABLE mail (
    key     INTEGER PRIMARY KEY AUTOINCREMENT,
    node    TEXT NOT NULL,
    message BLOB NOT NULL
);

CREATE INDEX mail_of_node ON mail (node);

CREATE TRIGGER stream_gone AFTER DELETE ON stream
BEGIN
    DELETE FROM event WHERE stream = OLD.key;
    DELETE FROM generation WHERE stream = OLD.key;
    DELETE FROM call WHERE stream = OLD.key;
    DELETE FROM ask WHERE stream = OLD.key;
    DELETE FROM reader WHERE stream = OLD.key;
END;
