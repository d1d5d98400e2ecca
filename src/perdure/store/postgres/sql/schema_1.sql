-- Version 1 of a PostgreSQL store: its tables, the steps of a commit, and the other changes. "perdure." stands for the schema of the store's address.
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

-- Names without a schema are the server's own, whatever other roles have created.
SET LOCAL search_path = pg_catalog, pg_temp;

-- One row: the version of these tables, and the oldest version whose releases can still use them. "swept": when a process
-- began to sweep, which others leave to it.
CREATE TABLE perdure.version (
    one     bool PRIMARY KEY DEFAULT true CHECK (one),
    version int NOT NULL,
    oldest  int NOT NULL,
    swept   timestamptz NOT NULL DEFAULT '-infinity'
);

CREATE DOMAIN perdure.stream_kind AS text CHECK (VALUE IN ('c', 's'));
CREATE DOMAIN perdure.tool_step_kind AS text CHECK (VALUE IN ('step', 'sleep', 'ask'));
CREATE DOMAIN perdure.tool_step_state AS text CHECK (VALUE IN ('open', 'ended', 'failed'));
CREATE DOMAIN perdure.call_state AS text CHECK (VALUE IN ('running', 'waiting', 'answered', 'cancelled', 'settled'));

-- "caller" is a hash of owner and address, which may be long. "revision" rises with every change but that of "active".
CREATE TABLE perdure.session (
    id            text COLLATE "C" PRIMARY KEY,
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
    kind          text NOT NULL DEFAULT 'session' CHECK (kind IN ('session', 'call', 'key')),
    is_task       bool NOT NULL DEFAULT false,
    digest        bytea NOT NULL DEFAULT '',
    upstream      bytea NOT NULL DEFAULT ''
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);

CREATE INDEX session_of_caller ON perdure.session (caller, kind) WHERE state <> 'ended';
CREATE INDEX session_ended_of_caller ON perdure.session (caller, active) WHERE state = 'ended';
CREATE INDEX session_ended ON perdure.session (active) WHERE state = 'ended';
CREATE INDEX session_active ON perdure.session (kind, active) WHERE state <> 'ended';

-- Events up to "trimmed" are forgotten, and final answers up to "forgotten"; their rows stay until their slot is emptied.
-- "listed": no call of it is open. What a node writes is found by its open calls, and by this.
-- "forwarded": the key of the last message that was forwarded to it.
CREATE TABLE perdure.stream (
    key        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id         text COLLATE "C" NOT NULL UNIQUE,
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
    answered   int NOT NULL DEFAULT 0,
    forwarded  bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);

CREATE INDEX stream_of_session ON perdure.stream (session);
CREATE INDEX stream_of_node ON perdure.stream (node) WHERE listed;
CREATE INDEX stream_unread ON perdure.stream (session) WHERE unread;
CREATE INDEX stream_answered ON perdure.stream (session) WHERE answered > 0;
CREATE INDEX stream_opened ON perdure.stream (opened, key);

-- Events that are not final answers. They are never deleted: a slot is emptied as a whole once all in it has expired,
-- and until then "trimmed", or the absence of the stream, hides the rest.
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

-- Summarized by autovacuum, a megabyte at a time: it takes no more than 256 requests between two of its rounds.
CREATE INDEX event_time ON perdure.event USING brin (time) WITH (pages_per_range = 128, autosummarize = on);

-- Final answers outlive the events of their streams. They are in slots of their own, hidden by "forgotten". There are
-- fewer of them, because each slot makes each read a little slower.
CREATE TABLE perdure.answer (LIKE perdure.event INCLUDING ALL) PARTITION BY LIST (slot);

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

-- A slot is written and then emptied. To vacuum it after so many inserts would be useless work, and would delay emptying.
DO $$
DECLARE
    s record;
BEGIN
    FOR s IN SELECT part, slot FROM perdure.slot LOOP
        EXECUTE format(
            'CREATE TABLE perdure.%I PARTITION OF perdure.%I FOR VALUES IN (%s)'
            ' WITH (autovacuum_vacuum_insert_threshold = -1, toast.autovacuum_vacuum_insert_threshold = -1)',
            s.part || '_' || s.slot, s.part, s.slot);
    END LOOP;
END $$;

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
    upstream    bytea NOT NULL DEFAULT '',
    PRIMARY KEY (stream, place)
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);

-- Promise 12.
CREATE UNIQUE INDEX call_open ON perdure.call (session, incarnation, id_key) WHERE state IN ('running', 'waiting');

-- What a tool has done (promise 23), not to be confused with the steps of a commit.
CREATE TABLE perdure.tool_step (
    stream      bigint NOT NULL,
    incarnation int NOT NULL,
    request_id  text COLLATE "C" NOT NULL,
    number      int NOT NULL,
    kind        perdure.tool_step_kind NOT NULL,
    name        bytea NOT NULL,
    state       perdure.tool_step_state NOT NULL,
    again       bool NOT NULL,
    own         bool NOT NULL,
    attempt     int NOT NULL,
    began       float8 NOT NULL,
    ended       float8,
    value       bytea NOT NULL,
    PRIMARY KEY (stream, number, incarnation, request_id)
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);

ALTER TABLE perdure.tool_step ALTER COLUMN value SET STORAGE EXTERNAL;

CREATE TABLE perdure.ask (
    key     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    session text COLLATE "C" NOT NULL,
    id      text COLLATE "C" NOT NULL,
    stream  bigint NOT NULL,
    request bytea NOT NULL,
    node    text COLLATE "C" NOT NULL,
    call        text COLLATE "C" NOT NULL,
    incarnation int NOT NULL,
    request_id  text COLLATE "C" NOT NULL,
    UNIQUE (session, id)
);

CREATE INDEX ask_of_stream ON perdure.ask (stream);

CREATE TABLE perdure.reader (
    stream bigint PRIMARY KEY,
    reader text COLLATE "C" NOT NULL,
    node   text COLLATE "C" NOT NULL,
    seq    bigint NOT NULL CHECK (seq >= 0)
) WITH (fillfactor = 80);

CREATE INDEX reader_of_node ON perdure.reader (node);

-- The nodes that have joined and are not buried. "gone": it has left. "lock": the advisory lock that its listen
-- connection holds, if it has one. "writer": the row of "turn" that each of its commits locks. "asked", "answered": how
-- often a node without one was asked whether it holds anything, and how often it has answered that it does not. "clock": the time that it told, at
-- "seen" by the server's clock. "process": how processes on its machine find its process.
CREATE TABLE perdure.node (
    key      bigint GENERATED ALWAYS AS IDENTITY,
    id       text COLLATE "C" PRIMARY KEY,
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

-- Messages of other nodes for a stream wait here for its writer.
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

-- Small values that processes change by comparing. A note of a session is deleted with it.
CREATE TABLE perdure.note (
    name    text COLLATE "C" PRIMARY KEY,
    session text COLLATE "C" NOT NULL,
    value   bytea NOT NULL
);

CREATE INDEX note_of_session ON perdure.note (session) WHERE session <> '';

-- One row: how many sessions are open, and how many have ended. Its lock makes the limits exact (promise 14).
CREATE TABLE perdure.tally (
    one   bool PRIMARY KEY DEFAULT true CHECK (one),
    open  bigint NOT NULL DEFAULT 0 CHECK (open >= 0),
    ended bigint NOT NULL DEFAULT 0 CHECK (ended >= 0)
) WITH (fillfactor = 10);

INSERT INTO perdure.tally DEFAULT VALUES;

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
    -- A session takes its notes along when it ends, however it does.
    IF TG_OP <> 'INSERT' THEN
        DELETE FROM perdure.note WHERE session = OLD.id AND session <> '';
    END IF;
    UPDATE perdure.tally SET open = open + opened, ended = ended + over;
    RETURN NULL;
END $$;

-- Durable calls are not counted: each would wait for the row of all others.
CREATE TRIGGER session_new AFTER INSERT ON perdure.session
FOR EACH ROW WHEN (NEW.kind = 'session') EXECUTE FUNCTION perdure.count_sessions();

CREATE TRIGGER session_gone AFTER DELETE ON perdure.session
FOR EACH ROW WHEN (OLD.kind = 'session') EXECUTE FUNCTION perdure.count_sessions();

CREATE TRIGGER session_over AFTER UPDATE OF state ON perdure.session
FOR EACH ROW WHEN (NEW.state = 'ended' AND OLD.state <> 'ended') EXECUTE FUNCTION perdure.count_sessions();

-- Sessions in use: a node that is not buried is their home, runs one of their calls, or reads one of their streams.
CREATE VIEW perdure.in_use AS
SELECT session FROM perdure.stream WHERE NOT sealed AND node IN (SELECT id FROM perdure.node)
UNION ALL
SELECT s.session FROM perdure.stream AS s JOIN perdure.reader AS r ON r.stream = s.key
WHERE r.node IN (SELECT id FROM perdure.node);

-- The steps of a commit. A later release adds functions with a later number beside these, because both releases may write
-- at the same time.

-- Locks are on rows, which only roles with rights on these tables can lock. An advisory lock is shown to every role
-- that may connect to the database, and each of them may take it and keep it.

-- Wait for the turn of a writer: its earlier commits, and the burial of its node, have come to their end. A row that is
-- not there yet (or any more, because a crash of the server empties the table) is made; of two that make it, one waits.
CREATE FUNCTION perdure.take_turn_1(writer_ bigint) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF pg_is_in_recovery() THEN  -- where the table cannot even be named
        RAISE EXCEPTION 'the server is a standby' USING ERRCODE = 'read_only_sql_transaction';
    END IF;
    LOOP
        PERFORM 1 FROM perdure.turn WHERE writer = writer_ FOR UPDATE;
        EXIT WHEN FOUND;
        INSERT INTO perdure.turn (writer) VALUES (writer_) ON CONFLICT (writer) DO NOTHING;
        EXIT WHEN FOUND;
    END LOOP;
END $$;

-- Refuse whatever a process does of which a node was buried: other nodes have settled its calls, and would not settle
-- one that it accepts now. (A node may be buried by its lock, which its process has lost, before its lease ends.) A node
-- that is unknown because the server has lost it has to join again first, for the same reason.
CREATE FUNCTION perdure.refuse_buried_1(members text[]) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    missing text[];
    buried_ text[];
BEGIN
    SELECT array_agg(m), array_agg(m) FILTER (WHERE EXISTS (SELECT 1 FROM perdure.buried WHERE node = m))
    INTO missing, buried_ FROM unnest(members) AS m WHERE NOT EXISTS (SELECT 1 FROM perdure.node WHERE id = m);
    IF buried_ IS NOT NULL THEN
        RAISE EXCEPTION 'other nodes have buried this one' USING ERRCODE = 'PD001', DETAIL = array_to_string(buried_, ' ');
    ELSIF missing IS NOT NULL THEN
        RAISE EXCEPTION 'the server does not know this node' USING ERRCODE = 'PD002', DETAIL = array_to_string(missing, ' ');
    END IF;
END $$;

-- The key of a message after another one, as perdure/store/records.py has it. The lock of the addressee is held.
CREATE FUNCTION perdure.next_key_1(last_ bigint) RETURNS bigint LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT greatest(last_ + 1, floor(extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
$$;

-- Lock a session and its streams; returns the keys of the streams. With the rows locked no node claims a stream, and no
-- reader comes, between a check of the session and its end.
CREATE FUNCTION perdure.lock_session_1(session_ text) RETURNS bigint[] LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM 1 FROM perdure.session WHERE id = session_ FOR NO KEY UPDATE;
    RETURN array(SELECT key FROM perdure.stream WHERE session = session_ ORDER BY key FOR UPDATE);
END $$;

-- Delete streams with all that is in them, except their events and answers, which stay until their slots are emptied.
CREATE FUNCTION perdure.drop_streams_1(keys bigint[]) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    DELETE FROM perdure.stream WHERE key = ANY (keys);
    DELETE FROM perdure.call WHERE stream = ANY (keys);
    DELETE FROM perdure.tool_step WHERE stream = ANY (keys);
    DELETE FROM perdure.generation WHERE stream = ANY (keys);
    DELETE FROM perdure.ask WHERE stream = ANY (keys);
    DELETE FROM perdure.reader WHERE stream = ANY (keys);
    DELETE FROM perdure.forward WHERE stream = ANY (keys);
    DELETE FROM perdure.sender WHERE stream = ANY (keys);
END $$;

-- Take back a session that was put and is one too many, the caller's limit first. Returns 'caller' or 'all' with the
-- number that was there; NULL if it may stay. The row of "tally" is locked since the session was put.
CREATE FUNCTION perdure.limit_sessions_1(session_ text, has_caller bool, most_of_caller bigint, most bigint)
RETURNS text[] LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    found_ bigint;
    refusal text[];
BEGIN
    IF has_caller THEN
        SELECT count(*) INTO found_ FROM perdure.session
        WHERE (caller, kind) = (SELECT caller, kind FROM perdure.session WHERE id = session_) AND state <> 'ended';
        IF found_ > most_of_caller THEN refusal := ARRAY['caller', (found_ - 1)::text]; END IF;
    END IF;
    IF refusal IS NULL AND most IS NOT NULL THEN
        SELECT open INTO found_ FROM perdure.tally;
        IF found_ > most THEN refusal := ARRAY['all', (found_ - 1)::text]; END IF;
    END IF;
    IF refusal IS NOT NULL THEN
        DELETE FROM perdure.session WHERE id = session_;
    END IF;
    RETURN refusal;
END $$;

-- End a session: its streams go, its record keeps little more than why, and the oldest ended records go.
-- "unused_since": only if it was not used since, and is in no use. "params": bytes of client params that are kept.
CREATE FUNCTION perdure.end_session_1(
    session_ text, time_ float8, reason text, unused_since float8, params bigint, most_of_caller bigint, most bigint
) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    keys bigint[] := perdure.lock_session_1(session_);
    whose bytea;
BEGIN
    IF unused_since IS NOT NULL AND NOT EXISTS (
        SELECT 1 FROM perdure.session AS s WHERE id = session_ AND active <= unused_since
            AND NOT EXISTS (SELECT 1 FROM perdure.in_use AS u WHERE u.session = s.id)) THEN
        RETURN;
    END IF;
    PERFORM perdure.drop_streams_1(keys);
    DELETE FROM perdure.session WHERE id = session_ AND kind <> 'session';
    UPDATE perdure.session SET
        state = 'ended', active = time_, ended = reason, result = '', sticky = '{}', upstream = '', revision = revision + 1,
        client_params = CASE WHEN length(client_params) <= params THEN client_params ELSE '' END
    WHERE id = session_ AND state <> 'ended' RETURNING caller INTO whose;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    DELETE FROM perdure.session WHERE id IN (
        SELECT id FROM perdure.session WHERE caller = whose AND state = 'ended'
        ORDER BY active DESC OFFSET most_of_caller);
    -- Not many in one commit.
    DELETE FROM perdure.session WHERE id IN (
        SELECT id FROM perdure.session WHERE state = 'ended'
        ORDER BY active LIMIT (SELECT greatest(0, least(100, ended - most)) FROM perdure.tally));
END $$;

-- Put messages for the writer of a stream after those that wait. Returns 'gone', 'no_node', 'behind'
-- or 'full' with a number.
CREATE FUNCTION perdure.forward_1(
    stream_ text, node_ text, sender_ text, first bigint, payloads bytea[], most int, most_bytes bigint
) RETURNS text[] LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    s record;
    known bigint := 0;
    fresh bytea[];
    waiting int;
    size bigint;
    key_ bigint;
BEGIN
    -- The lock makes keys visible in their order.
    SELECT key, node, forwarded INTO s FROM perdure.stream WHERE id = stream_ FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN ARRAY['gone', '0'];
    END IF;
    SELECT last INTO known FROM perdure.sender WHERE stream = s.key AND node = node_ AND sender = sender_;
    known := coalesce(known, 0);
    fresh := payloads[greatest(0, known + 1 - first) + 1 :];
    IF coalesce(cardinality(fresh), 0) = 0 THEN
        RETURN NULL;
    END IF;
    IF NOT EXISTS (SELECT 1 FROM perdure.node WHERE id = s.node) THEN
        RETURN ARRAY['no_node', '0'];
    END IF;
    IF first > known + 1 THEN
        RETURN ARRAY['behind', known::text];
    END IF;
    SELECT count(*), coalesce(sum(length(payload)), 0) INTO waiting, size
    FROM perdure.forward WHERE stream = s.key;
    SELECT size + sum(length(p)) INTO size FROM unnest(fresh) AS p;
    IF waiting > 0 AND (waiting + cardinality(fresh) > most OR size > most_bytes) THEN
        RETURN ARRAY['full', waiting::text];
    END IF;
    key_ := perdure.next_key_1(s.forwarded);
    INSERT INTO perdure.forward (stream, key, payload)
    SELECT s.key, key_ - 1 + place, p FROM unnest(fresh) WITH ORDINALITY AS f (p, place);
    UPDATE perdure.stream SET forwarded = key_ - 1 + cardinality(fresh) WHERE key = s.key;
    INSERT INTO perdure.sender (stream, node, sender, last)
    VALUES (s.key, node_, sender_, first + cardinality(payloads) - 1)
    ON CONFLICT (stream, node) DO UPDATE SET sender = excluded.sender, last = excluded.last;
    RETURN NULL;
END $$;

-- Put messages into the mailboxes of nodes. "places" are those of their steps. Returns what was refused, as commit_1 does.
CREATE FUNCTION perdure.send_mail_1(places int[], nodes text[], messages bytea[], most int)
RETURNS text[] LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    box record;
    room int;
    first bigint;
    why text;
    refused text[] := '{}';
BEGIN
    -- In the order of the nodes, so that two commits never wait for each other here.
    FOR box IN
        SELECT node, array_agg(place ORDER BY place) AS places, array_agg(message ORDER BY place) AS messages
        FROM unnest(places, nodes, messages) AS m (place, node, message) GROUP BY node ORDER BY node
    LOOP
        SELECT most - waiting, perdure.next_key_1(last) INTO room, first FROM perdure.mailbox WHERE node = box.node FOR UPDATE;
        why := CASE WHEN FOUND THEN 'full' ELSE 'no_node' END;
        room := greatest(0, least(coalesce(room, 0), cardinality(box.places)));
        FOR p IN room + 1 .. cardinality(box.places) LOOP
            refused := refused || ARRAY[box.places[p]::text, why, box.node];
        END LOOP;
        INSERT INTO perdure.mail (node, key, message)
        SELECT box.node, first - 1 + i, m FROM unnest(box.messages[: room]) WITH ORDINALITY AS t (m, i);
        UPDATE perdure.mailbox SET waiting = waiting + room, last = first + room - 1
        WHERE node = box.node AND room > 0;
    END LOOP;
    RETURN refused;
END $$;

-- Apply the steps of a commit, all or none. "kinds" has a letter for each step. The values of the steps are in four pools,
-- and "begins" has four numbers for each step: where its texts, numbers, times and blobs begin. Events name the append that
-- they belong to, counted from 1.
-- "writer" is a number of the process: if it has given up on a commit that still runs here, the next one waits for it,
-- so that commits happen in their order. "members" are the nodes of the process. A burial waits for the same number, so
-- none of them is buried before this is done. Returns what was refused, as place, reason and detail of each step.
--
-- Where a call is found by its stream, that it has not ended is written as NOT IN: with IN ('running', 'waiting') the
-- index "call_open" would fit as well, and a plan that was made while the table was small reads all of it each time.
CREATE FUNCTION perdure.commit_1(
    writer bigint, members text[], kinds text, begins int[], texts text[], numbers bigint[], times float8[], blobs bytea[],
    event_of int[], event_seq int[], event_time float8[], event_final bool[], event_payload bytea[],
    mail_places int[], mail_nodes text[], mail_messages bytea[], most_mail int
) RETURNS text[] LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    refused text[] := '{}';
    why text[];
    kind_ text;
    t int;  -- the next in each pool
    n int;
    f int;
    b int;
    keys bigint[] := '{}';  -- of each append: its stream, and up to where its events are known already
    known int[] := '{}';
    k bigint;
    s record;
    end_ int;
    count_ int;
    done bool;
    session_ text;
    most_ bigint;
    calls_ int;
    more bytea[];
BEGIN
    PERFORM perdure.take_turn_1(writer);
    IF (SELECT count(*) FROM perdure.node WHERE id = ANY (members)) < cardinality(members) THEN
        PERFORM perdure.refuse_buried_1(members);
    END IF;
    -- Appending to an array unpacks it; from a packed one each element is found by walking over those in front of it.
    texts := array_append(texts, '');
    blobs := array_append(blobs, ''::bytea);
    FOR i IN 1 .. length(kinds) LOOP
        kind_ := substr(kinds, i, 1);
        t := begins[4 * i - 3];
        n := begins[4 * i - 2];
        f := begins[4 * i - 1];
        b := begins[4 * i];
        why := NULL;
        CASE kind_
        WHEN 'a' THEN  -- append: stream; fence, first, last (0: no events), lost, seal, taken, ends,
            -- answered or 0; of each end: id, state; incarnation, stepped
            k := NULL;
            end_ := numbers[n + 2];
            done := numbers[n + 4] = 1;
            IF end_ > 0 AND numbers[n + 3] = 0 THEN
                UPDATE perdure.stream SET last = end_, sealed = done
                WHERE id = texts[t] AND fence = numbers[n] AND last = numbers[n + 1] - 1 AND NOT sealed AND node <> ''
                RETURNING key INTO k;
            END IF;
            IF k IS NOT NULL THEN
                known := array_append(known, (numbers[n + 1] - 1)::int);
            ELSE
                SELECT key, fence, last, sealed, node INTO s FROM perdure.stream WHERE id = texts[t] FOR NO KEY UPDATE;
                IF NOT FOUND THEN
                    why := ARRAY['gone', ''];
                ELSIF s.fence <> numbers[n] THEN
                    why := ARRAY['fenced', s.fence::text];
                ELSIF end_ > s.last AND s.sealed THEN
                    why := ARRAY['sealed', ''];
                ELSIF end_ > s.last AND s.node = '' THEN
                    why := ARRAY['released', ''];
                ELSIF numbers[n + 1] > s.last + 1 AND numbers[n + 3] = 0 THEN
                    why := ARRAY['behind', s.last::text];
                ELSE
                    k := s.key;
                    UPDATE perdure.stream SET last = greatest(last, end_), sealed = sealed OR done
                    WHERE key = k AND (last < end_ OR done);
                END IF;
                known := array_append(known, coalesce(s.last, 0));
            END IF;
            keys := array_append(keys, coalesce(k, 0));
            IF why IS NULL AND numbers[n + 5] > 0 THEN
                DELETE FROM perdure.forward WHERE stream = k AND key <= numbers[n + 5];
            END IF;
            IF why IS NULL AND numbers[n + 7] > 0 THEN
                UPDATE perdure.stream SET answered = numbers[n + 7] WHERE key = k AND answered = 0;
            END IF;
            count_ := CASE WHEN why IS NULL THEN numbers[n + 6] ELSE 0 END;
            FOR e IN 1 .. count_ LOOP
                UPDATE perdure.call SET state = texts[t + 2 * e], request = '', upstream = ''
                WHERE stream = k AND incarnation = numbers[n + 6 + 2 * e] AND request_id = texts[t + 2 * e - 1]
                    AND state NOT IN ('answered', 'cancelled', 'settled');
                IF numbers[n + 7 + 2 * e] = 1 THEN
                    UPDATE perdure.tool_step SET value = ''
                    WHERE stream = k AND incarnation = numbers[n + 6 + 2 * e] AND request_id = texts[t + 2 * e - 1];
                END IF;
            END LOOP;
            IF count_ > 0 AND NOT done THEN
                UPDATE perdure.stream SET listed = true WHERE key = k AND NOT listed AND NOT EXISTS (
                    SELECT 1 FROM perdure.call WHERE stream = k AND state NOT IN ('answered', 'cancelled', 'settled'));
            END IF;
        WHEN 'o' THEN  -- open stream: id, session, kind, node; fence, generation, last, sealed, listed,
            -- most calls or -1, calls, seen or -1, unique, answered or 0; opened. Of each call: id, state; incarnation, attempt, has progress; progress;
            -- key, method, request, principal, digest, name, upstream
            PERFORM 1 FROM perdure.session WHERE id = texts[t + 1] FOR NO KEY UPDATE;
            INSERT INTO perdure.stream (id, session, kind, node, fence, opened, generation, last, sealed, listed, answered)
            SELECT texts[t], texts[t + 1], texts[t + 2], texts[t + 3], numbers[n], times[f],
                   numbers[n + 1], numbers[n + 2], numbers[n + 3] = 1, numbers[n + 4] = 1, numbers[n + 9]
            FROM perdure.session WHERE id = texts[t + 1] AND state <> 'ended' AND (numbers[n + 7] = -1 OR (
                -- Messages that were forwarded to this node come before those of the call.
                numbers[n + 7] = revision AND NOT EXISTS (
                    SELECT 1 FROM perdure.stream AS h JOIN perdure.forward AS w ON w.stream = h.key
                    WHERE h.id = session.standalone AND h.node = texts[t + 3])))
            ON CONFLICT (id) DO NOTHING RETURNING key INTO k;
            done := k IS NULL;
            IF done THEN
                SELECT fence, sealed INTO s FROM perdure.stream WHERE id = texts[t];
                IF NOT FOUND THEN
                    SELECT ARRAY['changed', revision::text] INTO why FROM perdure.session
                    WHERE id = texts[t + 1] AND state <> 'ended';
                    why := coalesce(why, ARRAY['ended', '']);
                ELSIF numbers[n + 8] = 1 AND s.fence <> numbers[n] THEN
                    why := ARRAY['fenced', s.fence::text];
                ELSIF numbers[n + 8] = 1 AND s.sealed THEN
                    why := ARRAY['sealed', ''];
                END IF;
            END IF;
            session_ := texts[t + 1];
            most_ := numbers[n + 5];
            calls_ := numbers[n + 6];
            FOR c IN 1 .. calls_ LOOP
                EXIT WHEN done;
                INSERT INTO perdure.call VALUES (
                    k, c, session_, numbers[n + 7 + 3 * c], texts[t + 2 + 2 * c], blobs[b], blobs[b + 1],
                    blobs[b + 2], blobs[b + 3], numbers[n + 8 + 3 * c],
                    CASE WHEN numbers[n + 9 + 3 * c] = 1 THEN times[f + c] END, texts[t + 3 + 2 * c],
                    blobs[b + 4], blobs[b + 5], blobs[b + 6])
                ON CONFLICT DO NOTHING;
                IF NOT FOUND THEN
                    why := ARRAY['taken', texts[t + 2 + 2 * c]];
                    done := true;
                END IF;
                b := b + 7;
            END LOOP;
            IF NOT done AND most_ >= 0 THEN
                SELECT count(*) INTO count_ FROM perdure.call
                WHERE session = session_ AND state IN ('running', 'waiting');
                IF count_ > most_ THEN
                    why := ARRAY['calls', (count_ - calls_)::text];
                END IF;
            END IF;
            IF why IS NOT NULL AND k IS NOT NULL THEN
                DELETE FROM perdure.call WHERE stream = k;
                DELETE FROM perdure.stream WHERE key = k;
            END IF;
        WHEN 'p', 'S', 'r' THEN  -- stream; fence. Put call: id, state; incarnation, attempt, has progress, has upstream; progress; upstream.
            -- Put tool step: id, state, kind; incarnation, attempt, number, again, own, has ended, after or 0, after ended; began,
            -- ended; name, value
            SELECT key, fence, sealed, node INTO s FROM perdure.stream WHERE id = texts[t] FOR NO KEY UPDATE;
            IF NOT FOUND THEN
                why := ARRAY['gone', ''];
            ELSIF s.fence <> numbers[n] THEN
                why := ARRAY['fenced', s.fence::text];
            ELSIF s.sealed THEN
                why := ARRAY['sealed', ''];
            ELSIF kind_ = 'r' THEN
                UPDATE perdure.stream SET node = '' WHERE key = s.key;
            ELSIF s.node = '' THEN
                why := ARRAY['released', ''];
            ELSIF kind_ = 'S' AND numbers[n + 7] > 0 AND NOT EXISTS (
                SELECT 1 FROM perdure.tool_step WHERE stream = s.key AND number = numbers[n + 7]
                    AND incarnation = numbers[n + 1] AND request_id = texts[t + 1]
                    AND (numbers[n + 8] = 0 OR state <> 'open')) THEN
                why := ARRAY['behind', ''];
            ELSIF kind_ = 'S' THEN
                INSERT INTO perdure.tool_step AS u
                SELECT s.key, numbers[n + 1], texts[t + 1], numbers[n + 3], texts[t + 3], blobs[b], texts[t + 2],
                       numbers[n + 4] = 1, numbers[n + 5] = 1, numbers[n + 2], times[f],
                       CASE WHEN numbers[n + 6] = 1 THEN times[f + 1] END, blobs[b + 1]
                WHERE EXISTS (SELECT 1 FROM perdure.call WHERE stream = s.key AND incarnation = numbers[n + 1]
                    AND request_id = texts[t + 1] AND state NOT IN ('answered', 'cancelled', 'settled'))
                ON CONFLICT (stream, number, incarnation, request_id) DO UPDATE SET
                    kind = excluded.kind, name = excluded.name, state = excluded.state, again = excluded.again,
                    own = excluded.own, attempt = excluded.attempt, began = excluded.began, ended = excluded.ended,
                    value = excluded.value
                WHERE u.state = 'open';
            ELSE
                UPDATE perdure.call SET
                    state = texts[t + 2], attempt = numbers[n + 2],
                    progress = CASE WHEN numbers[n + 3] = 1 THEN times[f] END,
                    upstream = CASE WHEN numbers[n + 4] = 1 THEN blobs[b] ELSE upstream END
                WHERE stream = s.key AND incarnation = numbers[n + 1] AND request_id = texts[t + 1]
                    AND state NOT IN ('answered', 'cancelled', 'settled');
            END IF;
        WHEN 's' THEN  -- put session: id, state, version, standalone, ended, kind; initialized, incarnation, limits,
            -- has caller, most of caller, most or -1, sticky, revision, is task; created, active; owner, address, caller, params, result, digest,
            -- upstream, sticky…
            INSERT INTO perdure.session (
                id, state, version, standalone, ended, initialized, incarnation, created, active, owner, address,
                caller, client_params, result, sticky, revision, kind, digest, is_task, upstream)
            VALUES (
                texts[t], texts[t + 1], texts[t + 2], texts[t + 3], texts[t + 4], numbers[n] = 1,
                numbers[n + 1], times[f], times[f + 1], blobs[b], blobs[b + 1], blobs[b + 2], blobs[b + 3], blobs[b + 4],
                blobs[b + 7 : b + 6 + numbers[n + 6]::int], numbers[n + 7], texts[t + 5], blobs[b + 5], numbers[n + 8] = 1,
                blobs[b + 6])
            ON CONFLICT (id) DO NOTHING;
            IF FOUND AND numbers[n + 2] = 1 THEN
                why := perdure.limit_sessions_1(texts[t], numbers[n + 3] = 1, numbers[n + 4], nullif(numbers[n + 5], -1));
            END IF;
        WHEN 'c' THEN  -- change session: id, state or '', version; has version, result, initialized or -1, sticks, seen,
            -- sticky, is task or -1, has upstream; active or -infinity; result, upstream, seen…, sticky…
            done := numbers[n + 3] = 0;
            count_ := numbers[n + 4];
            more := blobs[b + 2 + count_ : b + 1 + count_ + numbers[n + 5]::int];
            UPDATE perdure.session SET
                active = greatest(active, times[f]),
                state = coalesce(nullif(texts[t + 1], ''), state),
                version = CASE WHEN numbers[n] = 1 THEN texts[t + 2] ELSE version END,
                result = CASE WHEN numbers[n + 1] = 1 THEN blobs[b] ELSE result END,
                initialized = CASE WHEN numbers[n + 2] >= 0 THEN numbers[n + 2] = 1 ELSE initialized END,
                is_task = CASE WHEN numbers[n + 6] >= 0 THEN numbers[n + 6] = 1 ELSE is_task END,
                upstream = CASE WHEN numbers[n + 7] = 1 THEN blobs[b + 1] ELSE upstream END,
                sticky = CASE WHEN done THEN sticky ELSE more END,
                revision = revision + (texts[t + 1] NOT IN ('', state) OR (numbers[n] = 1 AND texts[t + 2] <> version)
                    OR (numbers[n + 1] = 1 AND blobs[b] <> result)
                    OR (numbers[n + 2] >= 0 AND (numbers[n + 2] = 1) <> initialized)
                    OR (numbers[n + 6] >= 0 AND (numbers[n + 6] = 1) <> is_task)
                    OR (numbers[n + 7] = 1 AND blobs[b + 1] <> upstream) OR (NOT done AND more <> sticky))::int
            WHERE id = texts[t] AND state <> 'ended'
                AND (done OR sticky = blobs[b + 2 : b + 1 + count_]);
            IF NOT FOUND AND NOT done
                AND EXISTS (SELECT 1 FROM perdure.session WHERE id = texts[t] AND state <> 'ended') THEN
                RAISE EXCEPTION 'the sticky requests have changed' USING ERRCODE = 'serialization_failure';
            END IF;
        WHEN 'e' THEN  -- end session: id, reason; has unused since, params, most of caller, most; time, unused since
            PERFORM perdure.end_session_1(
                texts[t], times[f], texts[t + 1], CASE WHEN numbers[n] = 1 THEN times[f + 1] END,
                numbers[n + 1], numbers[n + 2], numbers[n + 3]);
        WHEN 't' THEN  -- trim: stream; through
            UPDATE perdure.stream SET trimmed = least(numbers[n], last)
            WHERE id = texts[t] AND trimmed < least(numbers[n], last);
        WHEN 'd' THEN  -- drop stream: id
            SELECT key INTO k FROM perdure.stream WHERE id = texts[t] FOR UPDATE;
            IF FOUND THEN
                PERFORM perdure.drop_streams_1(ARRAY[k]);
            END IF;
        WHEN 'q' THEN  -- open ask: session, id, stream, node, call, request id; incarnation; request
            -- The lock keeps the stream from being deleted before the ask is seen, and stops no append.
            SELECT key INTO k FROM perdure.stream WHERE id = texts[t + 2] FOR KEY SHARE;
            IF FOUND THEN
                INSERT INTO perdure.ask (session, id, stream, request, node, call, incarnation, request_id)
                VALUES (texts[t], texts[t + 1], k, blobs[b], texts[t + 3], texts[t + 4], numbers[n], texts[t + 5])
                ON CONFLICT (session, id) DO NOTHING;
            END IF;
        WHEN 'Q' THEN  -- close ask: session, id
            DELETE FROM perdure.ask WHERE session = texts[t] AND id = texts[t + 1];
        WHEN 'h' THEN  -- put reader: stream, reader, node; seq, attaches
            SELECT key INTO k FROM perdure.stream WHERE id = texts[t] FOR KEY SHARE;
            IF FOUND AND (numbers[n + 1] = 1 OR EXISTS (
                SELECT 1 FROM perdure.reader WHERE stream = k AND reader = texts[t + 1] FOR UPDATE)) THEN
                INSERT INTO perdure.reader (stream, reader, node, seq)
                VALUES (k, texts[t + 1], texts[t + 2], numbers[n])
                ON CONFLICT (stream) DO UPDATE SET
                    reader = excluded.reader, node = excluded.node, seq = excluded.seq;
            END IF;
        WHEN 'l' THEN  -- leave reader: stream, reader
            DELETE FROM perdure.reader
            WHERE stream = (SELECT key FROM perdure.stream WHERE id = texts[t]) AND reader = texts[t + 1];
        WHEN 'R' THEN  -- reached: stream; generation, through, unread
            UPDATE perdure.stream AS u SET
                delivered = greatest(delivered, least(numbers[n + 1], CASE WHEN generation = numbers[n] THEN last ELSE
                    coalesce((SELECT g."end" FROM perdure.generation AS g
                              WHERE g.stream = u.key AND g.generation = numbers[n]), 0) END)),
                unread = numbers[n + 2] = 1
            WHERE id = texts[t];
        WHEN 'f' THEN  -- forward: stream, node, sender; first, payloads, most, most bytes; payloads…
            why := perdure.forward_1(
                texts[t], texts[t + 1], texts[t + 2], numbers[n], blobs[b : b + numbers[n + 1]::int - 1],
                numbers[n + 2]::int, numbers[n + 3]);
        WHEN 'T' THEN  -- mail received: node; through
            -- The mailbox first, as its senders do.
            PERFORM 1 FROM perdure.mailbox WHERE node = texts[t] FOR UPDATE;
            DELETE FROM perdure.mail WHERE node = texts[t] AND key <= numbers[n];
            GET DIAGNOSTICS count_ = ROW_COUNT;
            UPDATE perdure.mailbox SET waiting = greatest(0, waiting - count_) WHERE node = texts[t] AND count_ > 0;
        WHEN '-' THEN  -- a step that does nothing here: mail is sent at the end
            NULL;
        END CASE;
        IF why IS NOT NULL THEN
            refused := refused || ARRAY[(i - 1)::text] || why;
        END IF;
    END LOOP;
    IF false = ANY (event_final) THEN
        INSERT INTO perdure.event (stream, time, seq, slot, payload)
        SELECT keys[e.of_], e.time, e.seq, r.slot, e.payload FROM perdure.rotation AS r,
            unnest(event_of, event_seq, event_time, event_final, event_payload) AS e (of_, seq, time, final, payload)
        WHERE r.part = 'event' AND NOT e.final AND keys[e.of_] > 0 AND e.seq > known[e.of_];
    END IF;
    IF true = ANY (event_final) THEN
        INSERT INTO perdure.answer (stream, time, seq, slot, payload)
        SELECT keys[e.of_], e.time, e.seq, r.slot, e.payload FROM perdure.rotation AS r,
            unnest(event_of, event_seq, event_time, event_final, event_payload) AS e (of_, seq, time, final, payload)
        WHERE r.part = 'answer' AND e.final AND keys[e.of_] > 0 AND e.seq > known[e.of_];
    END IF;
    IF cardinality(mail_places) > 0 THEN
        refused := refused || perdure.send_mail_1(mail_places, mail_nodes, mail_messages, most_mail);
    END IF;
    RETURN refused;
END $$;

-- Changes of the store that are not steps.

-- Become the writer of a stream: a new generation, whose number is the high part of the new fence. The low part is
-- random, so that a server that lost its last moments does not give out a fence again.
-- "known": a generation that the caller has seen, which the server may have lost. "members": the nodes of the caller's
-- process, which must not be buried before this is done.
CREATE FUNCTION perdure.claim_1(
    stream_ text, node_ text, held bigint, known int, random_ bigint, kept int, members text[]
) RETURNS SETOF perdure.stream LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    s perdure.stream;
    next_ int;
BEGIN
    PERFORM 1 FROM perdure.node WHERE id = ANY (members) ORDER BY id FOR KEY SHARE;
    PERFORM perdure.refuse_buried_1(members);
    SELECT * INTO s FROM perdure.stream WHERE id = stream_ AND fence = held AND NOT sealed FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    INSERT INTO perdure.generation (stream, generation, "end") VALUES (s.key, s.generation, s.last);
    next_ := greatest(s.generation, known) + 1;
    DELETE FROM perdure.generation AS g WHERE g.stream = s.key AND g.generation < next_ - kept;
    RETURN QUERY UPDATE perdure.stream AS u SET
        node = node_, generation = next_, fence = (next_::bigint << 40) | random_
    WHERE u.key = s.key RETURNING u.*;
END $$;

-- A client begins again in a session that has not ended. The lock: no call of the incarnation before is being accepted
-- any more when this is done.
CREATE FUNCTION perdure.reattach_1(session_ text) RETURNS SETOF perdure.session LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM 1 FROM perdure.session WHERE id = session_ FOR NO KEY UPDATE;
    RETURN QUERY UPDATE perdure.session SET incarnation = incarnation + 1, revision = revision + 1
    WHERE id = session_ AND state <> 'ended' RETURNING *;
END $$;

-- Write a note, or delete it (NULL), if its value is the one that was seen (NULL: there is none), and the session that a
-- new one belongs to has not ended. Returns whether it was done.
CREATE FUNCTION perdure.change_note_1(name_ text, seen bytea, value_ bytea, session_ text)
RETURNS bool LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF session_ <> '' THEN
        PERFORM 1 FROM perdure.session WHERE id = session_ AND state <> 'ended' FOR NO KEY UPDATE;
        IF NOT FOUND THEN
            RETURN false;
        END IF;
    END IF;
    IF seen IS NULL THEN
        INSERT INTO perdure.note (name, session, value) VALUES (name_, session_, value_) ON CONFLICT (name) DO NOTHING;
    ELSIF value_ IS NULL THEN
        DELETE FROM perdure.note WHERE name = name_ AND value = seen;
    ELSE
        UPDATE perdure.note SET value = value_ WHERE name = name_ AND value = seen;
    END IF;
    RETURN FOUND;
END $$;

-- Whether a process holds an advisory lock; NULL for none.
CREATE FUNCTION perdure.is_held_1(lock_ bigint) RETURNS bool LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN lock_ IS NOT NULL THEN EXISTS (
        SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1
            AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
            AND classid = (lock_ >> 32 & 4294967295)::oid AND objid = (lock_ & 4294967295)::oid) END;
$$;

-- Enter a node. Returns the store's time: that of a node that is alive and showed it a moment ago, or else the caller's
-- (NULL: the server's clock).
CREATE FUNCTION perdure.join_1(
    node_ text, lock_ bigint, writer_ bigint, facts_ bytea, wall float8, process_ text)
RETURNS float8 LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    told float8;
BEGIN
    SELECT clock + extract(epoch FROM clock_timestamp() - seen) INTO told FROM perdure.node
    WHERE id <> node_ AND NOT gone AND seen > clock_timestamp() - interval '1 minute'
        AND perdure.is_held_1(lock) IS NOT FALSE
    ORDER BY seen DESC LIMIT 1;
    told := coalesce(told, wall, extract(epoch FROM clock_timestamp()));
    INSERT INTO perdure.node (id, lock, writer, facts, clock, seen, process)
    VALUES (node_, lock_, writer_, facts_, told, clock_timestamp(), process_)
    ON CONFLICT (id) DO UPDATE SET lock = excluded.lock, writer = excluded.writer,
        gone = false, process = excluded.process;
    INSERT INTO perdure.mailbox (node) VALUES (node_) ON CONFLICT (node) DO NOTHING;
    DELETE FROM perdure.buried WHERE node = node_;
    RETURN told;
END $$;

-- Note that a node was buried, or has left. The last thousand are remembered: a node
-- learns it with its next beat, or when it is awake again, and by then a thousand others have hardly come and gone.
CREATE FUNCTION perdure.note_buried_1(node_ text) RETURNS void LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO perdure.buried (node) VALUES (node_) ON CONFLICT (node) DO NOTHING;
    DELETE FROM perdure.buried WHERE key <= (SELECT max(key) FROM perdure.buried) - 1000;
$$;

-- The streams that a node writes, sealed ones excepted: what is listed, and what has open calls.
CREATE FUNCTION perdure.written_by_1(node_ text) RETURNS SETOF perdure.stream LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT * FROM perdure.stream WHERE NOT sealed AND key IN (
        SELECT key FROM perdure.stream WHERE node = node_ AND listed
        UNION SELECT s.key FROM perdure.call AS c JOIN perdure.stream AS s ON s.key = c.stream
        WHERE c.state IN ('running', 'waiting') AND s.node = node_)
    ORDER BY key;
$$;

-- A node stops. Its row is deleted at once if nothing of it is left to settle, else when another node buries it.
CREATE FUNCTION perdure.leave_1(node_ text) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    DELETE FROM perdure.sender WHERE node = node_;
    PERFORM 1 FROM perdure.mailbox WHERE node = node_ FOR UPDATE;
    IF EXISTS (SELECT 1 FROM perdure.written_by_1(node_)) OR EXISTS (SELECT 1 FROM perdure.mail WHERE node = node_)
        OR EXISTS (SELECT 1 FROM perdure.reader WHERE node = node_) THEN
        UPDATE perdure.node SET gone = true WHERE id = node_;
    ELSE
        DELETE FROM perdure.mailbox WHERE node = node_;
        DELETE FROM perdure.node WHERE id = node_;
        PERFORM perdure.note_buried_1(node_);
    END IF;
END $$;

-- Delete a dead node, unless it has another beat than the one that was seen (NULL: whichever it has): then "mail" is
-- NULL. Else it is the number of its messages, which the heir has now, under new keys: it may have dealt with later ones
-- already. "keys" are the streams that it read. "members" are the nodes of the caller's process: one that is buried
-- itself inherits nothing.
CREATE FUNCTION perdure.bury_1(node_ text, heir text, seen_ bigint, members text[])
RETURNS TABLE (mail int, keys bigint[]) LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    n perdure.node;
    first bigint;
BEGIN
    -- In the order of the nodes: two may bury each other.
    PERFORM 1 FROM perdure.node WHERE id = ANY (members || node_) ORDER BY id FOR UPDATE;
    PERFORM perdure.refuse_buried_1(members);
    SELECT * INTO n FROM perdure.node WHERE id = node_;
    IF FOUND THEN
        IF n.beat <> seen_ THEN
            RETURN NEXT;
            RETURN;
        END IF;
        -- A commit of it that runs comes to its end; the next one finds that the node does not exist.
        PERFORM perdure.take_turn_1(n.writer);
        PERFORM perdure.note_buried_1(node_);
    END IF;
    PERFORM 1 FROM perdure.mailbox WHERE node IN (node_, heir) ORDER BY node FOR UPDATE;
    SELECT array_agg(r.stream) INTO keys FROM perdure.reader AS r WHERE r.node = node_;
    DELETE FROM perdure.reader AS r WHERE r.node = node_;
    SELECT perdure.next_key_1(b.last) INTO first FROM perdure.mailbox AS b WHERE b.node = heir;
    INSERT INTO perdure.mail (node, key, message)
    SELECT heir, first - 1 + row_number() OVER (ORDER BY m.key), m.message FROM perdure.mail AS m
    WHERE m.node = node_ AND first IS NOT NULL;
    GET DIAGNOSTICS mail = ROW_COUNT;
    UPDATE perdure.mailbox AS b SET waiting = waiting + mail, last = first + mail - 1 WHERE b.node = heir AND mail > 0;
    DELETE FROM perdure.mail AS m WHERE m.node = node_;
    DELETE FROM perdure.mailbox AS b WHERE b.node = node_;
    DELETE FROM perdure.sender AS s WHERE s.node = node_;
    DELETE FROM perdure.node WHERE id = node_;
    -- Also those of processes that wrote and never joined.
    DELETE FROM perdure.turn WHERE writer IN (
        SELECT t.writer FROM perdure.turn AS t WHERE NOT EXISTS (SELECT 1 FROM perdure.node AS o WHERE o.writer = t.writer)
        FOR UPDATE SKIP LOCKED);
    RETURN NEXT;
END $$;

-- Hide the events, or the answers, of some streams up to a number each. The rows are locked in the order in which commits
-- lock them, so that none waits for the other in a circle.
CREATE FUNCTION perdure.hide_1(part_ text, keys bigint[], seqs int[]) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM 1 FROM perdure.stream WHERE key = ANY (keys) ORDER BY id FOR NO KEY UPDATE;
    UPDATE perdure.stream AS s SET
        trimmed = CASE part_ WHEN 'event' THEN greatest(trimmed, x.seq) ELSE trimmed END,
        forgotten = CASE part_ WHEN 'answer' THEN greatest(forgotten, x.seq) ELSE forgotten END
    FROM unnest(keys, seqs) AS x (key, seq) WHERE s.key = x.key;
END $$;

-- Delete some streams that are over and hold nothing any more; returns how many.
CREATE FUNCTION perdure.expire_streams_1(keys bigint[], answers float8) RETURNS int LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    over bigint[];
BEGIN
    PERFORM 1 FROM perdure.stream WHERE key = ANY (keys) ORDER BY id FOR UPDATE;
    SELECT array_agg(key) INTO over FROM perdure.stream AS s
    WHERE key = ANY (keys) AND opened < answers
        AND (sealed OR NOT EXISTS (SELECT 1 FROM perdure.session WHERE id = s.session))
        AND NOT EXISTS (SELECT 1 FROM perdure.answer WHERE stream = s.key AND seq > s.forgotten AND time >= answers)
        AND NOT EXISTS (SELECT 1 FROM perdure.event WHERE stream = s.key AND seq > s.trimmed);
    IF over IS NULL THEN
        RETURN 0;
    END IF;
    PERFORM perdure.drop_streams_1(over);
    RETURN cardinality(over);
END $$;

-- Delete a session that was not used for long, if it is still so; returns how many were deleted.
CREATE FUNCTION perdure.expire_session_1(session_ text, before float8) RETURNS int LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    keys bigint[] := perdure.lock_session_1(session_);
BEGIN
    DELETE FROM perdure.session AS s WHERE id = session_ AND active < before
        AND NOT EXISTS (SELECT 1 FROM perdure.in_use AS u WHERE u.session = s.id);
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    PERFORM perdure.drop_streams_1(keys);
    RETURN 1;
END $$;

-- Empty a slot in which everything has expired. A reader in the way is waited for so long that short reads get done, and
-- not longer, because other readers wait for this meanwhile. Commits do not: they lock only the slot that is written.
CREATE FUNCTION perdure.empty_slot_1(part_ text, slot_ smallint, expired float8) RETURNS bool LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM 1 FROM perdure.rotation WHERE part = part_ FOR UPDATE;
    IF NOT EXISTS (SELECT 1 FROM perdure.slot WHERE part = part_ AND slot = slot_ AND closed < expired) THEN
        RETURN false;
    END IF;
    PERFORM set_config('lock_timeout', '100ms', true);
    EXECUTE format('TRUNCATE perdure.%I', part_ || '_' || slot_);
    UPDATE perdure.slot SET began = NULL, closed = NULL WHERE part = part_ AND slot = slot_;
    RETURN true;
END $$;

-- Write into an empty slot from now on, if the present one was written for as long as a slot is, and there is one.
CREATE FUNCTION perdure.next_slot_1(part_ text, now_ float8, period float8) RETURNS bool LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    r perdure.rotation;
    next_ smallint;
BEGIN
    SELECT * INTO r FROM perdure.rotation WHERE part = part_ FOR UPDATE;
    IF r.since IS NULL THEN
        UPDATE perdure.rotation SET since = now_ WHERE part = part_;
        RETURN false;
    END IF;
    SELECT slot INTO next_ FROM perdure.slot WHERE part = part_ AND slot <> r.slot AND closed IS NULL ORDER BY slot LIMIT 1;
    IF NOT FOUND OR now_ - r.since < period THEN
        RETURN false;
    END IF;
    UPDATE perdure.slot SET closed = now_ WHERE part = part_ AND slot = r.slot;
    UPDATE perdure.slot SET began = now_ WHERE part = part_ AND slot = next_;
    UPDATE perdure.rotation SET slot = next_, since = now_ WHERE part = part_;
    RETURN true;
END $$;
