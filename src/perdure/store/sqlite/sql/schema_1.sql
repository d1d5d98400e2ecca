-- Version 1 of a SQLite store.
--
-- Streams have small integer keys, because every event carries one. A stream takes everything in it along when it
-- goes: the trigger at the end does that, so that no event, call, tool step, ask or reader is ever left without its stream.

CREATE TABLE session (
    id            TEXT PRIMARY KEY NOT NULL,
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
    ended         TEXT NOT NULL DEFAULT '',
    address       TEXT NOT NULL DEFAULT '',
    revision      INTEGER NOT NULL DEFAULT 0,
    kind          TEXT NOT NULL DEFAULT 'session' CHECK (kind IN ('session', 'call', 'key')),
    is_task       INTEGER NOT NULL DEFAULT 0 CHECK (is_task IN (0, 1)),
    digest        BLOB NOT NULL DEFAULT x'',
    upstream      BLOB NOT NULL DEFAULT x''
);

-- A caller is an owner or, where there is none, an address.
CREATE INDEX session_of_caller ON session (owner, address, kind, state, active) WHERE state <> 'ended';

CREATE INDEX session_ended_of_caller ON session (owner, address, active) WHERE state = 'ended';

CREATE INDEX session_ended ON session (active) WHERE state = 'ended';

CREATE INDEX session_state ON session (kind, state);

CREATE INDEX session_dormant ON session (kind, active) WHERE state = 'dormant';

CREATE TABLE stream (
    key        INTEGER PRIMARY KEY,
    id         TEXT NOT NULL UNIQUE,
    session    TEXT NOT NULL,
    kind       TEXT NOT NULL CHECK (kind IN ('c', 's')),
    node       TEXT NOT NULL,
    fence      INTEGER NOT NULL CHECK (fence >= 0),
    opened     REAL NOT NULL,
    generation INTEGER NOT NULL CHECK (generation >= 1),
    last       INTEGER NOT NULL CHECK (last >= 0),
    sealed     INTEGER NOT NULL CHECK (sealed IN (0, 1)),
    listed     INTEGER NOT NULL CHECK (listed IN (0, 1)),
    delivered  INTEGER NOT NULL DEFAULT 0 CHECK (delivered >= 0),
    unread     INTEGER NOT NULL DEFAULT 0 CHECK (unread IN (0, 1)),
    answered   INTEGER NOT NULL DEFAULT 0 CHECK (answered >= 0)
);

CREATE INDEX stream_of_session ON stream (session);

-- What a node writes is found by its calls that have not ended ("call_open"); only a stream without such calls is listed
-- here. An index of all would have each call write a page more when it begins, and one when it ends.
CREATE INDEX stream_of_node ON stream (node) WHERE listed = 1;

-- Few calls lose their reader and never get another.
CREATE INDEX stream_unread ON stream (session) WHERE unread = 1;

-- Few calls are answered before they end.
CREATE INDEX stream_answered ON stream (session) WHERE answered > 0;

CREATE TABLE event (
    stream  INTEGER NOT NULL,
    seq     INTEGER NOT NULL CHECK (seq >= 1),
    time    REAL NOT NULL,
    payload BLOB NOT NULL,
    final   INTEGER NOT NULL CHECK (final IN (0, 1)),
    PRIMARY KEY (stream, seq)
) WITHOUT ROWID;

CREATE TABLE generation (
    stream     INTEGER NOT NULL,
    generation INTEGER NOT NULL CHECK (generation >= 1),
    "end"      INTEGER NOT NULL CHECK ("end" >= 0),
    PRIMARY KEY (stream, generation)
) WITHOUT ROWID;

-- The ledger. "request_id" is JSON, because it is given back as it came; "id_key" is the form in which ids are compared:
-- 8 and "8" are one.
CREATE TABLE call (
    stream      INTEGER NOT NULL,
    incarnation INTEGER NOT NULL CHECK (incarnation >= 0),
    request_id  TEXT NOT NULL,
    session     TEXT NOT NULL,
    id_key      NOT NULL,
    place       INTEGER NOT NULL,
    method      NOT NULL,
    request     BLOB NOT NULL,
    principal   NOT NULL,
    attempt     INTEGER NOT NULL CHECK (attempt >= 1),
    progress    REAL,
    state       TEXT NOT NULL CHECK (state IN ('running', 'waiting', 'answered', 'cancelled', 'settled')),
    digest      BLOB NOT NULL DEFAULT x'',
    name        NOT NULL DEFAULT '',
    upstream    BLOB NOT NULL DEFAULT x'',
    PRIMARY KEY (stream, incarnation, request_id)
) WITHOUT ROWID;

-- Promise 12.
CREATE UNIQUE INDEX call_open ON call (session, incarnation, id_key) WHERE state IN ('running', 'waiting');

-- What a tool has done (promise 23), not to be confused with the steps of a commit. "value" is last, because it may be large.
-- (An IN of three texts would be built again for each row, which costs a fifth of a commit.)
CREATE TABLE tool_step (
    stream      INTEGER NOT NULL,
    incarnation INTEGER NOT NULL,
    request_id  TEXT NOT NULL,
    number      INTEGER NOT NULL CHECK (number >= 1),
    kind        TEXT NOT NULL CHECK (kind = 'step' OR kind = 'sleep' OR kind = 'ask'),
    name        NOT NULL,
    state       TEXT NOT NULL CHECK (state = 'open' OR state = 'ended' OR state = 'failed'),
    again       INTEGER NOT NULL CHECK (again IN (0, 1)),
    own         INTEGER NOT NULL CHECK (own IN (0, 1)),
    attempt     INTEGER NOT NULL CHECK (attempt >= 1),
    began       REAL NOT NULL,
    ended       REAL,
    value       BLOB NOT NULL,
    PRIMARY KEY (stream, incarnation, request_id, number)
) WITHOUT ROWID;

CREATE TABLE ask (
    key     INTEGER PRIMARY KEY,
    session TEXT NOT NULL,
    id      TEXT NOT NULL,
    stream  INTEGER NOT NULL,
    request BLOB NOT NULL,
    node    TEXT NOT NULL,
    call        TEXT NOT NULL,
    incarnation INTEGER NOT NULL,
    request_id  TEXT NOT NULL,
    UNIQUE (session, id)
);

CREATE INDEX ask_of_stream ON ask (stream);

CREATE TABLE reader (
    stream INTEGER PRIMARY KEY,
    reader TEXT NOT NULL,
    node   TEXT NOT NULL,
    seq    INTEGER NOT NULL CHECK (seq >= 0)
);

-- The nodes that have joined and are not buried. A lock beside the file shows whether a node lives.
CREATE TABLE node (
    key    INTEGER PRIMARY KEY,
    id     TEXT NOT NULL UNIQUE,
    beat   INTEGER NOT NULL CHECK (beat >= 0),
    facts  BLOB NOT NULL
);

-- Keys are never used again: a node may say twice how far it has got.
CREATE TABLE mail (
    key     INTEGER PRIMARY KEY AUTOINCREMENT,
    node    TEXT NOT NULL,
    message BLOB NOT NULL
);

CREATE INDEX mail_of_node ON mail (node);

-- What other nodes say on a stream waits here for its writer, whichever node that is. Keys are never used again: a writer
-- may say twice how far it has got.
CREATE TABLE forward (
    key     INTEGER PRIMARY KEY AUTOINCREMENT,
    stream  INTEGER NOT NULL,
    payload BLOB NOT NULL
);

CREATE INDEX forward_of_stream ON forward (stream);

-- The sender that forwards to a stream from a node, and the number of the last message that was taken (promise 16).
CREATE TABLE sender (
    stream INTEGER NOT NULL,
    node   TEXT NOT NULL,
    sender TEXT NOT NULL,
    last   INTEGER NOT NULL CHECK (last >= 1),
    PRIMARY KEY (stream, node)
) WITHOUT ROWID;

-- Small values that processes change by comparing. A note of a session is deleted with it.
CREATE TABLE note (
    name    TEXT PRIMARY KEY NOT NULL,
    session TEXT NOT NULL,
    value   BLOB NOT NULL
) WITHOUT ROWID;

CREATE INDEX note_of_session ON note (session) WHERE session <> '';

-- One row: how many sessions are open, and how many have ended. Counting them would take longer the more there are.
CREATE TABLE tally (
    only  INTEGER PRIMARY KEY CHECK (only = 1),
    open  INTEGER NOT NULL CHECK (open >= 0),
    ended INTEGER NOT NULL CHECK (ended >= 0)
);

INSERT INTO tally (only, open, ended) VALUES (1, 0, 0);

-- One row: what a node adds to its monotonic clock, which all processes of a machine share, to get the store's time.
CREATE TABLE clock (
    only   INTEGER PRIMARY KEY CHECK (only = 1),
    offset REAL NOT NULL
);

-- Sessions in use: a node that is not buried is their home, runs one of their calls, or reads one of their streams.
CREATE VIEW in_use AS
SELECT session FROM stream WHERE sealed = 0 AND node IN (SELECT id FROM node)
UNION ALL
SELECT s.session FROM stream AS s JOIN reader AS r ON r.stream = s.key WHERE r.node IN (SELECT id FROM node);

CREATE TRIGGER stream_gone AFTER DELETE ON stream
BEGIN
    DELETE FROM event WHERE stream = OLD.key;
    DELETE FROM generation WHERE stream = OLD.key;
    DELETE FROM call WHERE stream = OLD.key;
    DELETE FROM tool_step WHERE stream = OLD.key;
    DELETE FROM ask WHERE stream = OLD.key;
    DELETE FROM reader WHERE stream = OLD.key;
    DELETE FROM forward WHERE stream = OLD.key;
    DELETE FROM sender WHERE stream = OLD.key;
END;

CREATE TRIGGER session_new AFTER INSERT ON session
BEGIN
    UPDATE tally SET
        open = open + (NEW.kind = 'session' AND NEW.state <> 'ended'),
        ended = ended + (NEW.kind = 'session' AND NEW.state = 'ended');
END;

-- A session takes its notes along when it ends, however it does.
CREATE TRIGGER session_over AFTER UPDATE OF state ON session WHEN NEW.state = 'ended' AND OLD.state <> 'ended'
BEGIN
    DELETE FROM note WHERE session = NEW.id AND session <> '';
    UPDATE tally SET open = open - 1, ended = ended + 1;
END;

CREATE TRIGGER session_gone AFTER DELETE ON session
BEGIN
    DELETE FROM note WHERE session = OLD.id AND session <> '';
    UPDATE tally SET
        open = open - (OLD.kind = 'session' AND OLD.state <> 'ended'),
        ended = ended - (OLD.kind = 'session' AND OLD.state = 'ended');
END;
