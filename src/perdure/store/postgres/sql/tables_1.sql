-- The tables of a PostgreSQL store, version 1. "perdure." stands for the schema of the store's address.
--
-- Texts that a peer may have made are bytea: PostgreSQL takes no NUL and no half surrogate pair in a text.
-- Ids are compared as bytes (COLLATE "C"), as in the other stores.
-- No index mentions a column that appends change (stream.last, stream.sealed, stream.trimmed), so that appending
-- updates a row in place (HOT).
-- Tables whose rows come and go with each call are vacuumed when a fiftieth of their rows is dead, not a fifth, so that
-- room is used again soon.
-- The tables into which every call writes (stream, event, answer, call) have no CHECK: the server parses the text of each
-- one again in every statement, which was a seventh of its CPU time for a call. States and kinds are domains there, whose
-- conditions it keeps parsed.
-- The columns named "record" hold the version of the record's layout.

-- One row: the version of these tables, and the oldest version whose releases can still use them. "swept": when a process
-- began to sweep, which others leave to it.
CREATE TABLE perdure.version (
    one     bool PRIMARY KEY DEFAULT true CHECK (one),
    version int NOT NULL,
    oldest  int NOT NULL,
    swept   timestamptz NOT NULL DEFAULT '-infinity'
);

CREATE DOMAIN perdure.stream_kind AS text CHECK (VALUE IN ('c', 's'));
CREATE DOMAIN perdure.call_state AS text CHECK (VALUE IN ('running', 'waiting', 'answered', 'cancelled', 'settled'));

-- "caller" is a hash of owner and address, which may be long. "revision" rises with every change but that of "active".
CREATE TABLE perdure.session (
    id            text COLLATE "C" PRIMARY KEY,
    record        int NOT NULL,
    revision      bigint NOT NULL,
    owner         bytea NOT NULL,
    state         text NOT NULL CHECK (state IN ('opening', 'active', 'dormant', 'ended')),
    version       text NOT NULL,
    client_params bytea NOT NULL,
    result        bytea NOT NULL,
    initialized   bool NOT NULL,
    sticky        bytea[] NOT NULL,
    incarnation   int NOT NULL CHECK (incarnation >= 0),
    standalone    text COLLATE "C" NOT NULL,
    created       float8 NOT NULL,
    active        float8 NOT NULL,
    ended         text NOT NULL DEFAULT '',
    address       bytea NOT NULL DEFAULT '',
    caller        bytea NOT NULL,
    kind          text NOT NULL DEFAULT 'session' CHECK (kind IN ('session', 'call', 'key', 'mark'))
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);

CREATE INDEX session_of_caller ON perdure.session (caller, kind) WHERE state <> 'ended';
CREATE INDEX session_ended_of_caller ON perdure.session (caller, active) WHERE state = 'ended';
CREATE INDEX session_ended ON perdure.session (active) WHERE state = 'ended';
CREATE INDEX session_active ON perdure.session (kind, active) WHERE state <> 'ended';

-- Events up to "trimmed" are forgotten, and final answers up to "forgotten"; their rows go with their slot.
-- "listed": no call of it is open. What a node writes is found by its open calls, and by this.
-- "forwarded": the key of the last message that was forwarded to it.
CREATE TABLE perdure.stream (
    key        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id         text COLLATE "C" NOT NULL UNIQUE,
    record     int NOT NULL,
    session    text COLLATE "C" NOT NULL,
    kind       perdure.stream_kind NOT NULL,
    node       text COLLATE "C" NOT NULL,
    fence      bigint NOT NULL,
    opened     float8 NOT NULL,
    generation int NOT NULL,
    last       int NOT NULL,
    trimmed    int NOT NULL DEFAULT 0,
    forgotten  int NOT NULL DEFAULT 0,
    sealed     bool NOT NULL,
    listed     bool NOT NULL,
    delivered  int NOT NULL DEFAULT 0,
    unread     bool NOT NULL DEFAULT false,
    forwarded  bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);

CREATE INDEX stream_of_session ON perdure.stream (session);
CREATE INDEX stream_of_node ON perdure.stream (node) WHERE listed;
CREATE INDEX stream_unread ON perdure.stream (session) WHERE unread;
CREATE INDEX stream_opened ON perdure.stream (opened, key);

-- Events that are not final answers. They are never deleted: a slot is emptied as a whole once all in it has expired,
-- and a stream that is gone, or its "trimmed", hides the rest until then.
-- A slot is written and then emptied, so to vacuum it after so many inserts would be work for nothing, and would stand
-- in the way of emptying it.
CREATE TABLE perdure.event (
    stream  bigint NOT NULL,
    time    float8 NOT NULL,
    seq     int NOT NULL,
    slot    smallint NOT NULL,
    payload bytea NOT NULL,
    PRIMARY KEY (stream, seq, slot)
) PARTITION BY LIST (slot);

-- Payloads are not compressed: they are small, or large and worth more CPU than room.
ALTER TABLE perdure.event ALTER COLUMN payload SET STORAGE EXTERNAL;

CREATE TABLE perdure.event_0 PARTITION OF perdure.event FOR VALUES IN (0)
    WITH (autovacuum_vacuum_insert_threshold = -1, toast.autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE perdure.event_1 PARTITION OF perdure.event FOR VALUES IN (1)
    WITH (autovacuum_vacuum_insert_threshold = -1, toast.autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE perdure.event_2 PARTITION OF perdure.event FOR VALUES IN (2)
    WITH (autovacuum_vacuum_insert_threshold = -1, toast.autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE perdure.event_3 PARTITION OF perdure.event FOR VALUES IN (3)
    WITH (autovacuum_vacuum_insert_threshold = -1, toast.autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE perdure.event_4 PARTITION OF perdure.event FOR VALUES IN (4)
    WITH (autovacuum_vacuum_insert_threshold = -1, toast.autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE perdure.event_5 PARTITION OF perdure.event FOR VALUES IN (5)
    WITH (autovacuum_vacuum_insert_threshold = -1, toast.autovacuum_vacuum_insert_threshold = -1);

-- Summarized by autovacuum, a megabyte at a time: it takes no more than 256 requests between two of its rounds.
CREATE INDEX event_time ON perdure.event USING brin (time) WITH (pages_per_range = 128, autosummarize = on);

-- Final answers outlive the events of their streams. They are in slots of their own, hidden by "forgotten". There are
-- fewer of them, because each slot makes each read a little slower.
CREATE TABLE perdure.answer (
    stream  bigint NOT NULL,
    time    float8 NOT NULL,
    seq     int NOT NULL,
    slot    smallint NOT NULL,
    payload bytea NOT NULL,
    PRIMARY KEY (stream, seq, slot)
) PARTITION BY LIST (slot);

ALTER TABLE perdure.answer ALTER COLUMN payload SET STORAGE EXTERNAL;

CREATE TABLE perdure.answer_0 PARTITION OF perdure.answer FOR VALUES IN (0)
    WITH (autovacuum_vacuum_insert_threshold = -1, toast.autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE perdure.answer_1 PARTITION OF perdure.answer FOR VALUES IN (1)
    WITH (autovacuum_vacuum_insert_threshold = -1, toast.autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE perdure.answer_2 PARTITION OF perdure.answer FOR VALUES IN (2)
    WITH (autovacuum_vacuum_insert_threshold = -1, toast.autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE perdure.answer_3 PARTITION OF perdure.answer FOR VALUES IN (3)
    WITH (autovacuum_vacuum_insert_threshold = -1, toast.autovacuum_vacuum_insert_threshold = -1);

CREATE INDEX answer_time ON perdure.answer USING brin (time) WITH (pages_per_range = 128, autosummarize = on);

-- Of events and of answers: the slot that is written, since when, and up to which time what has expired is hidden.
CREATE TABLE perdure.rotation (
    part  text COLLATE "C" PRIMARY KEY CHECK (part IN ('event', 'answer')),
    slot  smallint NOT NULL DEFAULT 0,
    since float8,
    swept float8 NOT NULL DEFAULT '-infinity'
);

INSERT INTO perdure.rotation (part) VALUES ('event'), ('answer');

-- From when to when each slot was written. "began" is NULL for those that are empty, and for the first one; "closed" for
-- those that are written or empty.
CREATE TABLE perdure.slot (
    part   text COLLATE "C" NOT NULL,
    slot   smallint NOT NULL,
    began  float8,
    closed float8,
    PRIMARY KEY (part, slot)
);

INSERT INTO perdure.slot (part, slot)
SELECT 'event', n FROM generate_series(0, 5) AS n UNION ALL SELECT 'answer', n FROM generate_series(0, 3) AS n;

CREATE TABLE perdure.generation (
    stream     bigint NOT NULL,
    generation int NOT NULL CHECK (generation >= 1),
    "end"      int NOT NULL CHECK ("end" >= 0),
    PRIMARY KEY (stream, generation)
);

-- The ledger. "request_id" is JSON, because it is given back as it came; "id_key" is the form in which ids are compared
-- (8 and "8" are one), or a hash of it if it is long.
CREATE TABLE perdure.call (
    stream      bigint NOT NULL,
    place       int NOT NULL,
    record      int NOT NULL,
    session     text COLLATE "C" NOT NULL,
    incarnation int NOT NULL,
    request_id  text COLLATE "C" NOT NULL,
    id_key      bytea NOT NULL,
    method      bytea NOT NULL,
    request     bytea NOT NULL,
    principal   bytea NOT NULL,
    attempt     int NOT NULL,
    progress    float8,
    state       perdure.call_state NOT NULL,
    digest      bytea NOT NULL DEFAULT '',
    name        bytea NOT NULL DEFAULT '',
    PRIMARY KEY (stream, place)
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);

-- Promise 12.
CREATE UNIQUE INDEX call_open ON perdure.call (session, incarnation, id_key) WHERE state IN ('running', 'waiting');

CREATE TABLE perdure.ask (
    key     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    session text COLLATE "C" NOT NULL,
    id      text COLLATE "C" NOT NULL,
    record  int NOT NULL,
    stream  bigint NOT NULL,
    request bytea NOT NULL,
    node    text COLLATE "C" NOT NULL,
    UNIQUE (session, id)
);

CREATE INDEX ask_of_stream ON perdure.ask (stream);

CREATE TABLE perdure.reader (
    stream bigint PRIMARY KEY,
    record int NOT NULL,
    reader text COLLATE "C" NOT NULL,
    node   text COLLATE "C" NOT NULL,
    seq    bigint NOT NULL CHECK (seq >= 0)
) WITH (fillfactor = 80);

CREATE INDEX reader_of_node ON perdure.reader (node);

-- The nodes that have joined and are not buried. "gone": it has left. "lock": the advisory lock that its ear holds, if
-- it has an ear. "writer": the row of "turn" that each of its commits locks. "asked", "answered": how often a node without an ear
-- was asked whether it holds anything, and how often it has answered that it does not. "clock": the time that it told, at
-- "seen" by the server's clock. "process": how processes on its machine find its process.
CREATE TABLE perdure.node (
    key      bigint GENERATED ALWAYS AS IDENTITY,
    id       text COLLATE "C" PRIMARY KEY,
    record   int NOT NULL,
    beat     bigint NOT NULL DEFAULT 0,
    facts    bytea NOT NULL,
    gone     bool NOT NULL DEFAULT false,
    lock     bigint,
    writer   bigint NOT NULL,
    asked    bigint NOT NULL DEFAULT 0,
    answered bigint NOT NULL DEFAULT 0,
    clock    float8 NOT NULL,
    seen     timestamptz NOT NULL,
    process  text
) WITH (fillfactor = 50);

-- A row for each writer, to be locked by its commits. Nothing of it is written to the log.
CREATE UNLOGGED TABLE perdure.turn (
    writer bigint PRIMARY KEY
);

-- The nodes that were buried, or have left, last: a node that is in neither table was lost by the server, with what came
-- after it, and joins again.
CREATE TABLE perdure.buried (
    key  bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    node text COLLATE "C" NOT NULL UNIQUE
);

-- Senders lock the row of the mailbox until they have committed, so keys become visible in their order. It is apart
-- from the node, whose beats wait for no sender. "last": the key of its last message.
CREATE TABLE perdure.mailbox (
    node    text COLLATE "C" PRIMARY KEY,
    waiting int NOT NULL DEFAULT 0,
    last    bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50);

-- Keys are never used again: a node may say twice how far it has got. They are at least the time in microseconds, so
-- that a server that has lost the last ones does not give them out again (next_key_1).
CREATE TABLE perdure.mail (
    key     bigint NOT NULL,
    node    text COLLATE "C" NOT NULL,
    message bytea NOT NULL,
    PRIMARY KEY (node, key)
);

ALTER TABLE perdure.mail ALTER COLUMN message SET STORAGE EXTERNAL;

-- What other nodes say on a stream waits here for its writer, whichever node that is.
CREATE TABLE perdure.forward (
    key     bigint NOT NULL,
    stream  bigint NOT NULL,
    payload bytea NOT NULL,
    PRIMARY KEY (stream, key)
);

ALTER TABLE perdure.forward ALTER COLUMN payload SET STORAGE EXTERNAL;

-- The sender that forwards to a stream from a node, and the number of the last message that was taken (promise 16).
CREATE TABLE perdure.sender (
    stream bigint NOT NULL,
    node   text COLLATE "C" NOT NULL,
    sender text NOT NULL,
    last   bigint NOT NULL,
    PRIMARY KEY (stream, node)
);

CREATE INDEX sender_of_node ON perdure.sender (node);

-- Resume tokens: one chain for each session at most. Hashes only.
CREATE TABLE perdure.chain (
    session text COLLATE "C" PRIMARY KEY,
    name    text NOT NULL UNIQUE,
    record  int NOT NULL,
    holder  bytea NOT NULL,
    current text NOT NULL,
    next    text NOT NULL
);

-- One row: how many sessions are open, and how many have ended. Its lock makes the limits exact (promise 14).
CREATE TABLE perdure.tally (
    one   bool PRIMARY KEY DEFAULT true CHECK (one),
    open  bigint NOT NULL DEFAULT 0 CHECK (open >= 0),
    ended bigint NOT NULL DEFAULT 0 CHECK (ended >= 0)
) WITH (fillfactor = 10);

INSERT INTO perdure.tally DEFAULT VALUES;

-- What all processes must know alike, and no client.
CREATE TABLE perdure.secret (
    name  text COLLATE "C" PRIMARY KEY,
    value bytea NOT NULL
);

CREATE FUNCTION perdure.count_sessions() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    opened int := 0;
    over int := 0;
BEGIN
    IF TG_OP <> 'INSERT' THEN
        IF OLD.state = 'ended' THEN over := over - 1; ELSE opened := opened - 1; END IF;
    END IF;
    IF TG_OP <> 'DELETE' THEN
        IF NEW.state = 'ended' THEN over := over + 1; ELSE opened := opened + 1; END IF;
    END IF;
    -- A session takes its chain along when it ends, however it does.
    IF TG_OP <> 'INSERT' THEN
        DELETE FROM perdure.chain WHERE session = OLD.id;
    END IF;
    UPDATE perdure.tally SET open = open + opened, ended = ended + over;
    RETURN NULL;
END $$;

-- Single calls are not counted: each would wait for the row of all others.
CREATE TRIGGER session_new AFTER INSERT ON perdure.session
FOR EACH ROW WHEN (NEW.kind = 'session') EXECUTE FUNCTION perdure.count_sessions();

CREATE TRIGGER session_gone AFTER DELETE ON perdure.session
FOR EACH ROW WHEN (OLD.kind = 'session') EXECUTE FUNCTION perdure.count_sessions();

CREATE TRIGGER session_over AFTER UPDATE OF state ON perdure.session
FOR EACH ROW WHEN (NEW.state = 'ended' AND OLD.state <> 'ended') EXECUTE FUNCTION perdure.count_sessions();

-- Sessions that a node which is not buried uses: it is their home, runs a call of theirs, or reads one of their streams.
CREATE VIEW perdure.in_use AS
SELECT session FROM perdure.stream WHERE NOT sealed AND node IN (SELECT id FROM perdure.node)
UNION ALL
SELECT s.session FROM perdure.stream AS s JOIN perdure.reader AS r ON r.stream = s.key
WHERE r.node IN (SELECT id FROM perdure.node);
