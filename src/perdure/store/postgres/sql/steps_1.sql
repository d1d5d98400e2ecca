-- The steps of a commit, version 1. A later release adds functions with a later number beside these: releases of both
-- may write at the same time.

-- Locks are on rows, which only roles with rights on these tables can lock. An advisory lock is shown to every role
-- that may connect to the database, and each of them may take it and keep it.

-- Wait for the turn to change a session's life: opening a stream, ending the session, its chain.
CREATE FUNCTION perdure.lock_session_1(session_ text) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM 1 FROM perdure.session WHERE id = session_ FOR NO KEY UPDATE;
END $$;

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

-- The key of a message behind another one, as perdure/store/records.py has it. The lock of the addressee is held.
CREATE FUNCTION perdure.next_key_1(last_ bigint) RETURNS bigint LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT greatest(last_ + 1, floor(extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
$$;

-- Forget streams with all that is in them; their events and answers go with their slots.
CREATE FUNCTION perdure.drop_streams_1(keys bigint[]) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    DELETE FROM perdure.stream WHERE key = ANY (keys);
    DELETE FROM perdure.call WHERE stream = ANY (keys);
    DELETE FROM perdure.generation WHERE stream = ANY (keys);
    DELETE FROM perdure.ask WHERE stream = ANY (keys);
    DELETE FROM perdure.reader WHERE stream = ANY (keys);
    DELETE FROM perdure.forward WHERE stream = ANY (keys);
    DELETE FROM perdure.sender WHERE stream = ANY (keys);
END $$;

-- Take back a session that was put and is one too many, the caller's limit first. Gives 'caller' or 'all' with the
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
    keys bigint[];
    whose bytea;
BEGIN
    PERFORM perdure.lock_session_1(session_);
    -- With the rows locked no node claims one of them, and no reader comes, between the look and the end.
    SELECT array_agg(key) INTO keys FROM (
        SELECT key FROM perdure.stream WHERE session = session_ ORDER BY key FOR UPDATE) AS locked;
    IF unused_since IS NOT NULL AND NOT EXISTS (
        SELECT 1 FROM perdure.session AS s WHERE id = session_ AND active <= unused_since
            AND NOT EXISTS (SELECT 1 FROM perdure.in_use AS u WHERE u.session = s.id)) THEN
        RETURN;
    END IF;
    IF keys IS NOT NULL THEN
        PERFORM perdure.drop_streams_1(keys);
    END IF;
    DELETE FROM perdure.session WHERE id = session_ AND kind <> 'session';
    UPDATE perdure.session SET
        state = 'ended', active = time_, ended = reason, result = '', sticky = '{}', revision = revision + 1,
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

-- Put messages for the writer of a stream behind those that wait. Gives 'gone', 'nobody', 'behind'
-- or 'full' with a number.
CREATE FUNCTION perdure.forward_1(
    stream_ text, node_ text, sender_ text, first bigint, payloads bytea[], overhead int, most int, most_bytes bigint
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
        RETURN ARRAY['nobody', '0'];
    END IF;
    IF first > known + 1 THEN
        RETURN ARRAY['behind', known::text];
    END IF;
    SELECT count(*), coalesce(sum(greatest(0, length(payload) - overhead)), 0) INTO waiting, size
    FROM perdure.forward WHERE stream = s.key;
    SELECT size + sum(greatest(0, length(p) - overhead)) INTO size FROM unnest(fresh) AS p;
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

-- Put messages into the mailboxes of nodes. "places" are those of their steps. Gives what was refused, as commit_1 does.
CREATE FUNCTION perdure.send_mail_1(places int[], nodes text[], messages bytea[], most int)
RETURNS text[] LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    box record;
    room int;
    first bigint;
    refused text[] := '{}';
BEGIN
    -- In the order of the nodes, so that two commits never wait for each other here.
    FOR box IN
        SELECT node, array_agg(place ORDER BY place) AS places, array_agg(message ORDER BY place) AS messages
        FROM unnest(places, nodes, messages) AS m (place, node, message) GROUP BY node ORDER BY node
    LOOP
        SELECT most - waiting, perdure.next_key_1(last) INTO room, first FROM perdure.mailbox WHERE node = box.node FOR UPDATE;
        IF NOT FOUND THEN
            SELECT refused || array_agg(x ORDER BY p, i) INTO refused
            FROM unnest(box.places) AS p, unnest(ARRAY[p::text, 'nobody', box.node]) WITH ORDINALITY AS t (x, i);
            CONTINUE;
        END IF;
        room := greatest(0, least(room, cardinality(box.places)));
        IF room < cardinality(box.places) THEN
            SELECT refused || array_agg(x ORDER BY p, i) INTO refused
            FROM unnest(box.places[room + 1 :]) AS p, unnest(ARRAY[p::text, 'full', box.node]) WITH ORDINALITY AS t (x, i);
        END IF;
        INSERT INTO perdure.mail (node, key, message)
        SELECT box.node, first - 1 + i, m FROM unnest(box.messages[: room]) WITH ORDINALITY AS t (m, i);
        UPDATE perdure.mailbox SET waiting = waiting + room, last = first + room - 1
        WHERE node = box.node AND room > 0;
    END LOOP;
    RETURN refused;
END $$;

-- Apply the steps of a commit, all or none. "kinds" has a letter for each step; each takes what it needs from the four
-- pools, from where the one before it ended. Events and answers name the append that they belong to, counted from 1.
-- "writer" is a number of the process: if it has given up on a commit that still runs here, the next one waits for it,
-- so that commits happen in their order. "members" are the nodes of the process. A burial waits for the same number, so
-- none of them is buried before this is done. Gives what was refused, as place, reason and detail, one behind the other.
--
-- Where a call is found by its stream, that it has not ended is written as NOT IN: with IN ('running', 'waiting') the
-- index "call_open" would fit as well, and a plan that was made while the table was small reads all of it each time.
CREATE FUNCTION perdure.commit_1(
    writer bigint, members text[], kinds text, texts text[], numbers bigint[], times float8[], blobs bytea[],
    event_of int[], event_seq int[], event_time float8[], event_payload bytea[],
    answer_of int[], answer_seq int[], answer_time float8[], answer_payload bytea[],
    mail_places int[], mail_nodes text[], mail_messages bytea[], most_mail int
) RETURNS text[] LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    refused text[] := '{}';
    t int := 1;  -- the next in each pool
    n int := 1;
    f int := 1;
    b int := 1;
    keys bigint[] := '{}';  -- of each append: its stream, and up to where its events are there already
    known int[] := '{}';
    k bigint;
    s record;
    why text[];
    end_ int;
    count_ int;
    done bool;
    session_ text;
    record_ int;
    most_ bigint;
    calls_ int;
BEGIN
    PERFORM perdure.take_turn_1(writer);
    IF (SELECT count(*) FROM perdure.node WHERE id = ANY (members)) < cardinality(members) THEN
        PERFORM perdure.refuse_buried_1(members);
    END IF;
    -- Appending to an array unpacks it; from a packed one each element is found by walking over those in front of it.
    texts := array_append(texts, '');
    blobs := array_append(blobs, ''::bytea);
    FOR i IN 1 .. length(kinds) LOOP
        CASE substr(kinds, i, 1)
        WHEN 'a' THEN  -- append: stream; fence, first, last (0: no events), lost, seal, taken, ends; of each end: id, state;
            -- incarnation
            k := NULL;
            end_ := numbers[n + 2];
            why := NULL;
            IF end_ > 0 AND numbers[n + 3] = 0 THEN
                UPDATE perdure.stream SET last = end_, sealed = numbers[n + 4] = 1
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
                    UPDATE perdure.stream SET last = greatest(last, end_), sealed = sealed OR numbers[n + 4] = 1
                    WHERE key = k AND (last < end_ OR numbers[n + 4] = 1);
                END IF;
                known := array_append(known, coalesce(s.last, 0));
            END IF;
            keys := array_append(keys, coalesce(k, 0));
            IF why IS NOT NULL THEN
                refused := refused || ARRAY[(i - 1)::text] || why;
            ELSIF numbers[n + 5] > 0 THEN
                DELETE FROM perdure.forward WHERE stream = k AND key <= numbers[n + 5];
            END IF;
            count_ := numbers[n + 6];
            done := numbers[n + 4] = 1;
            t := t + 1;
            n := n + 7;
            FOR e IN 1 .. count_ LOOP
                IF why IS NULL THEN
                    UPDATE perdure.call SET state = texts[t + 1], request = ''
                    WHERE stream = k AND incarnation = numbers[n] AND request_id = texts[t]
                        AND state NOT IN ('answered', 'cancelled', 'settled');
                END IF;
                t := t + 2;
                n := n + 1;
            END LOOP;
            IF count_ > 0 AND why IS NULL AND NOT done THEN
                UPDATE perdure.stream SET listed = true WHERE key = k AND NOT listed AND NOT EXISTS (
                    SELECT 1 FROM perdure.call WHERE stream = k AND state NOT IN ('answered', 'cancelled', 'settled'));
            END IF;
        WHEN 'o' THEN  -- open stream: id, session, kind, node; record, fence, generation, last, sealed, listed,
            -- most calls or -1, calls, seen or -1, unique; opened. Of each call: id, state; incarnation, attempt, has progress; progress;
            -- key, method, request, principal, digest, name
            -- As lock_session_1 does.
            PERFORM 1 FROM perdure.session WHERE id = texts[t + 1] FOR NO KEY UPDATE;
            INSERT INTO perdure.stream (id, record, session, kind, node, fence, opened, generation, last, sealed, listed)
            SELECT texts[t], numbers[n], texts[t + 1], texts[t + 2], texts[t + 3], numbers[n + 1], times[f],
                   numbers[n + 2], numbers[n + 3], numbers[n + 4] = 1, numbers[n + 5] = 1
            FROM perdure.session WHERE id = texts[t + 1] AND state <> 'ended' AND (numbers[n + 8] = -1 OR (
                -- What was forwarded to this node comes before what the call will say.
                numbers[n + 8] = revision AND NOT EXISTS (
                    SELECT 1 FROM perdure.stream AS h JOIN perdure.forward AS w ON w.stream = h.key
                    WHERE h.id = session.standalone AND h.node = texts[t + 3])))
            ON CONFLICT (id) DO NOTHING RETURNING key INTO k;
            why := NULL;
            done := k IS NULL;
            IF done THEN
                SELECT fence, sealed INTO s FROM perdure.stream WHERE id = texts[t];
                IF NOT FOUND THEN
                    SELECT ARRAY['changed', revision::text] INTO why FROM perdure.session
                    WHERE id = texts[t + 1] AND state <> 'ended';
                    why := coalesce(why, ARRAY['ended', '']);
                ELSIF numbers[n + 9] = 1 AND s.fence <> numbers[n + 1] THEN
                    why := ARRAY['fenced', s.fence::text];
                ELSIF numbers[n + 9] = 1 AND s.sealed THEN
                    why := ARRAY['sealed', ''];
                END IF;
            END IF;
            session_ := texts[t + 1];
            record_ := numbers[n];
            most_ := numbers[n + 6];
            calls_ := numbers[n + 7];
            t := t + 4;
            n := n + 10;
            f := f + 1;
            FOR c IN 1 .. calls_ LOOP
                IF NOT done THEN
                    INSERT INTO perdure.call VALUES (
                        k, c, record_, session_, numbers[n], texts[t], blobs[b], blobs[b + 1], blobs[b + 2],
                        blobs[b + 3], numbers[n + 1], CASE WHEN numbers[n + 2] = 1 THEN times[f] END, texts[t + 1],
                        blobs[b + 4], blobs[b + 5])
                    ON CONFLICT DO NOTHING;
                    IF NOT FOUND THEN
                        why := ARRAY['taken', texts[t]];
                        done := true;
                    END IF;
                END IF;
                t := t + 2;
                n := n + 3;
                f := f + 1;
                b := b + 6;
            END LOOP;
            IF NOT done AND most_ >= 0 THEN
                SELECT count(*) INTO count_ FROM perdure.call
                WHERE session = session_ AND state IN ('running', 'waiting');
                IF count_ > most_ THEN
                    why := ARRAY['calls', (count_ - calls_)::text];
                END IF;
            END IF;
            IF why IS NOT NULL THEN
                refused := refused || ARRAY[(i - 1)::text] || why;
                IF k IS NOT NULL THEN
                    DELETE FROM perdure.call WHERE stream = k;
                    DELETE FROM perdure.stream WHERE key = k;
                END IF;
            END IF;
        WHEN 'p', 'r' THEN  -- stream; fence. Put call: id, state; incarnation, attempt, has progress; progress
            SELECT key, fence, sealed, node INTO s FROM perdure.stream WHERE id = texts[t] FOR NO KEY UPDATE;
            IF NOT FOUND THEN
                why := ARRAY['gone', ''];
            ELSIF s.fence <> numbers[n] THEN
                why := ARRAY['fenced', s.fence::text];
            ELSIF s.sealed THEN
                why := ARRAY['sealed', ''];
            ELSIF s.node = '' AND substr(kinds, i, 1) = 'p' THEN
                why := ARRAY['released', ''];
            ELSE
                why := NULL;
            END IF;
            IF why IS NOT NULL THEN
                refused := refused || ARRAY[(i - 1)::text] || why;
            ELSIF substr(kinds, i, 1) = 'r' THEN
                UPDATE perdure.stream SET node = '' WHERE key = s.key;
            ELSE
                UPDATE perdure.call SET
                    record = numbers[n + 1], state = texts[t + 2], attempt = numbers[n + 3],
                    progress = CASE WHEN numbers[n + 4] = 1 THEN times[f] END
                WHERE stream = s.key AND incarnation = numbers[n + 2] AND request_id = texts[t + 1]
                    AND state NOT IN ('answered', 'cancelled', 'settled');
            END IF;
            IF substr(kinds, i, 1) = 'p' THEN
                t := t + 3;
                n := n + 5;
                f := f + 1;
            ELSE
                t := t + 1;
                n := n + 1;
            END IF;
        WHEN 's' THEN  -- put session: id, state, version, standalone, ended, kind; record, initialized, incarnation, limits,
            -- has caller, most of caller, most or -1, sticky, revision; created, active; owner, address, caller, params, result, sticky…
            count_ := numbers[n + 7];
            INSERT INTO perdure.session (
                id, state, version, standalone, ended, record, initialized, incarnation, created, active, owner, address,
                caller, client_params, result, sticky, revision, kind)
            VALUES (
                texts[t], texts[t + 1], texts[t + 2], texts[t + 3], texts[t + 4], numbers[n], numbers[n + 1] = 1,
                numbers[n + 2], times[f], times[f + 1], blobs[b], blobs[b + 1], blobs[b + 2], blobs[b + 3], blobs[b + 4],
                blobs[b + 5 : b + 4 + count_], numbers[n + 8], texts[t + 5])
            ON CONFLICT (id) DO NOTHING;
            IF FOUND AND numbers[n + 3] = 1 THEN
                why := perdure.limit_sessions_1(texts[t], numbers[n + 4] = 1, numbers[n + 5], nullif(numbers[n + 6], -1));
                IF why IS NOT NULL THEN
                    refused := refused || ARRAY[(i - 1)::text] || why;
                END IF;
            END IF;
            t := t + 6;
            n := n + 9;
            f := f + 2;
            b := b + 5 + count_;
        WHEN 'c' THEN  -- change session: id, state or '', version; record, has version, result, initialized or -1; active
            -- or -infinity; result
            UPDATE perdure.session SET
                record = numbers[n], active = greatest(active, times[f]),
                state = coalesce(nullif(texts[t + 1], ''), state),
                version = CASE WHEN numbers[n + 1] = 1 THEN texts[t + 2] ELSE version END,
                result = CASE WHEN numbers[n + 2] = 1 THEN blobs[b] ELSE result END,
                initialized = CASE WHEN numbers[n + 3] >= 0 THEN numbers[n + 3] = 1 ELSE initialized END,
                revision = revision + (texts[t + 1] NOT IN ('', state) OR (numbers[n + 1] = 1 AND texts[t + 2] <> version)
                    OR (numbers[n + 2] = 1 AND blobs[b] <> result)
                    OR (numbers[n + 3] >= 0 AND (numbers[n + 3] = 1) <> initialized))::int
            WHERE id = texts[t] AND state <> 'ended';
            t := t + 3;
            n := n + 4;
            f := f + 1;
            b := b + 1;
        WHEN 'k' THEN  -- stick: session; record, seen, sticky; seen…, sticky…
            count_ := numbers[n + 1];
            UPDATE perdure.session SET
                record = numbers[n], sticky = blobs[b + count_ : b + count_ + numbers[n + 2]::int - 1],
                revision = revision + (sticky <> blobs[b + count_ : b + count_ + numbers[n + 2]::int - 1])::int
            WHERE id = texts[t] AND state <> 'ended' AND sticky = blobs[b : b + count_ - 1];
            IF NOT FOUND AND EXISTS (SELECT 1 FROM perdure.session WHERE id = texts[t] AND state <> 'ended') THEN
                RAISE EXCEPTION 'the sticky requests have changed' USING ERRCODE = 'serialization_failure';
            END IF;
            t := t + 1;
            b := b + count_ + numbers[n + 2];
            n := n + 3;
        WHEN 'e' THEN  -- end session: id, reason; has unused since, params, most of caller, most; time, unused since
            PERFORM perdure.end_session_1(
                texts[t], times[f], texts[t + 1], CASE WHEN numbers[n] = 1 THEN times[f + 1] END,
                numbers[n + 1], numbers[n + 2], numbers[n + 3]);
            t := t + 2;
            n := n + 4;
            f := f + 2;
        WHEN 't' THEN  -- trim: stream; through
            UPDATE perdure.stream SET trimmed = least(numbers[n], last)
            WHERE id = texts[t] AND trimmed < least(numbers[n], last);
            t := t + 1;
            n := n + 1;
        WHEN 'd' THEN  -- drop stream: id
            SELECT key INTO k FROM perdure.stream WHERE id = texts[t] FOR UPDATE;
            IF FOUND THEN
                PERFORM perdure.drop_streams_1(ARRAY[k]);
            END IF;
            t := t + 1;
        WHEN 'q' THEN  -- open ask: session, id, stream, node; record; request
            -- The lock keeps the stream from going before the ask is seen, and stops no append.
            SELECT key INTO k FROM perdure.stream WHERE id = texts[t + 2] FOR KEY SHARE;
            IF FOUND THEN
                INSERT INTO perdure.ask (session, id, record, stream, request, node)
                VALUES (texts[t], texts[t + 1], numbers[n], k, blobs[b], texts[t + 3])
                ON CONFLICT (session, id) DO NOTHING;
            END IF;
            t := t + 4;
            n := n + 1;
            b := b + 1;
        WHEN 'Q' THEN  -- close ask: session, id
            DELETE FROM perdure.ask WHERE session = texts[t] AND id = texts[t + 1];
            t := t + 2;
        WHEN 'h' THEN  -- put reader: stream, reader, node; record, seq
            SELECT key INTO k FROM perdure.stream WHERE id = texts[t] FOR KEY SHARE;
            IF FOUND THEN
                INSERT INTO perdure.reader (stream, record, reader, node, seq)
                VALUES (k, numbers[n], texts[t + 1], texts[t + 2], numbers[n + 1])
                ON CONFLICT (stream) DO UPDATE SET
                    record = excluded.record, reader = excluded.reader, node = excluded.node, seq = excluded.seq;
            END IF;
            t := t + 3;
            n := n + 2;
        WHEN 'm' THEN  -- move reader: stream, reader; seq
            UPDATE perdure.reader SET seq = numbers[n]
            WHERE stream = (SELECT key FROM perdure.stream WHERE id = texts[t]) AND reader = texts[t + 1];
            t := t + 2;
            n := n + 1;
        WHEN 'l' THEN  -- leave reader: stream, reader
            DELETE FROM perdure.reader
            WHERE stream = (SELECT key FROM perdure.stream WHERE id = texts[t]) AND reader = texts[t + 1];
            t := t + 2;
        WHEN 'R' THEN  -- reached: stream; generation, through, unread
            UPDATE perdure.stream AS u SET
                delivered = greatest(delivered, least(numbers[n + 1], CASE WHEN generation = numbers[n] THEN last ELSE
                    coalesce((SELECT g."end" FROM perdure.generation AS g
                              WHERE g.stream = u.key AND g.generation = numbers[n]), 0) END)),
                unread = numbers[n + 2] = 1
            WHERE id = texts[t];
            t := t + 1;
            n := n + 3;
        WHEN 'f' THEN  -- forward: stream, node, sender; first, payloads, overhead, most, most bytes; payloads…
            count_ := numbers[n + 1];
            why := perdure.forward_1(
                texts[t], texts[t + 1], texts[t + 2], numbers[n], blobs[b : b + count_ - 1], numbers[n + 2]::int,
                numbers[n + 3]::int, numbers[n + 4]);
            IF why IS NOT NULL THEN
                refused := refused || ARRAY[(i - 1)::text] || why;
            END IF;
            t := t + 3;
            n := n + 5;
            b := b + count_;
        WHEN 'T' THEN  -- mail received: node; through
            -- The mailbox first, as its senders do.
            PERFORM 1 FROM perdure.mailbox WHERE node = texts[t] FOR UPDATE;
            DELETE FROM perdure.mail WHERE node = texts[t] AND key <= numbers[n];
            GET DIAGNOSTICS count_ = ROW_COUNT;
            UPDATE perdure.mailbox SET waiting = greatest(0, waiting - count_) WHERE node = texts[t] AND count_ > 0;
            t := t + 1;
            n := n + 1;
        WHEN '-' THEN  -- a step that does nothing here: mail is sent at the end
            NULL;
        END CASE;
    END LOOP;
    IF cardinality(event_of) > 0 THEN
        INSERT INTO perdure.event (stream, time, seq, slot, payload)
        SELECT keys[e.of_], e.time, e.seq, r.slot, e.payload
        FROM perdure.rotation AS r, unnest(event_of, event_seq, event_time, event_payload) AS e (of_, seq, time, payload)
        WHERE r.part = 'event' AND keys[e.of_] > 0 AND e.seq > known[e.of_];
    END IF;
    IF cardinality(answer_of) > 0 THEN
        INSERT INTO perdure.answer (stream, time, seq, slot, payload)
        SELECT keys[e.of_], e.time, e.seq, r.slot, e.payload
        FROM perdure.rotation AS r,
            unnest(answer_of, answer_seq, answer_time, answer_payload) AS e (of_, seq, time, payload)
        WHERE r.part = 'answer' AND keys[e.of_] > 0 AND e.seq > known[e.of_];
    END IF;
    IF cardinality(mail_places) > 0 THEN
        refused := refused || perdure.send_mail_1(mail_places, mail_nodes, mail_messages, most_mail);
    END IF;
    RETURN refused;
END $$;
