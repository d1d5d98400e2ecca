-- The first layout: sessions, streams and their events, the ledger, asks, readers, mail, fences.

CREATE TABLE session (
    id            TEXT PRIMARY KEY NOT NULL,
    record        INTEGER NOT NULL,
    owner         NOT NULL,
    node          TEXT NOT NULL,
    state         TEXT NOT NULL CHECK (state IN ('opening', 'active', 'dormant', 'ended')),
    version       TEXT NOT NULL,
    client_params BLOB NOT NULL,
    result        BLOB NOT NULL,
    initialized   INTEGER NOT NULL CHECK (initialized IN (0, 1)),
    sticky        TEXT NOT NULL,
    incarnation   INTEGER NOT NULL CHECK (incarnation >= 0),
    standalone    TEXT NOT NULL,
    created       REAL NOT NULL,
    active        REAL NOT NULL
);

CREATE TABLE stream (
    key        INTEGER PRIMARY KEY,
    id         TEXT NOT NULL UNIQUE,
    record     INTEGER NOT NULL,
    session    TEXT NOT NULL,
    kind       TEXT NOT NULL CHECK (kind IN ('c', 's')),
    fence      INTEGER NOT NULL CHECK (fence >= 0),
    opened     REAL NOT NULL,
    generation INTEGER NOT NULL CHECK (generation >= 1),
    last       INTEGER NOT NULL CHECK (last >= 0),
    sealed     INTEGER NOT NULL CHECK (sealed IN (0, 1))
);

CREATE INDEX stream_of_session ON stream (session);

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

-- The ledger. "request_id" is JSON, because 8 and "8" are two ids.
CREATE TABLE call (
    stream      INTEGER NOT NULL,
    incarnation INTEGER NOT NULL CHECK (incarnation >= 0),
    request_id  TEXT NOT NULL,
    place       INTEGER NOT NULL,
    record      INTEGER NOT NULL,
    method      NOT NULL,
    request     BLOB NOT NULL,
    principal   NOT NULL,
    node        TEXT NOT NULL,
    attempt     INTEGER NOT NULL CHECK (attempt >= 1),
    progress    REAL,
    state       TEXT NOT NULL CHECK (state IN ('running', 'answered', 'cancelled', 'settled')),
    PRIMARY KEY (stream, incarnation, request_id)
) WITHOUT ROWID;

CREATE TABLE ask (
    key     INTEGER PRIMARY KEY,
    session TEXT NOT NULL,
    id      TEXT NOT NULL,
    record  INTEGER NOT NULL,
    stream  INTEGER NOT NULL,
    request BLOB NOT NULL,
    node    TEXT NOT NULL,
    UNIQUE (session, id)
);

CREATE INDEX ask_of_stream ON ask (stream);

CREATE TABLE reader (
    stream INTEGER PRIMARY KEY,
    record INTEGER NOT NULL,
    reader TEXT NOT NULL,
    node   TEXT NOT NULL,
    seq    INTEGER NOT NULL CHECK (seq >= 0)
);

CREATE TABLE mail (
    key     INTEGER PRIMARY KEY,
    node    TEXT NOT NULL,
    message BLOB NOT NULL
);

CREATE INDEX mail_of_node ON mail (node);

-- One row: the highest fence ever given out.
CREATE TABLE fence (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    last INTEGER NOT NULL CHECK (last >= 0)
);

INSERT INTO fence (only, last) VALUES (1, 0);

CREATE TRIGGER stream_gone AFTER DELETE ON stream
BEGIN
    DELETE FROM event WHERE stream = OLD.key;
    DELETE FROM generation WHERE stream = OLD.key;
    DELETE FROM call WHERE stream = OLD.key;
    DELETE FROM ask WHERE stream = OLD.key;
    DELETE FROM reader WHERE stream = OLD.key;
END;
