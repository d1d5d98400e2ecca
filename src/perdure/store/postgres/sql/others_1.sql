-- What changes the store and is not a step, version 1.

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
    PERFORM perdure.lock_session_1(session_);
    RETURN QUERY UPDATE perdure.session SET incarnation = incarnation + 1, revision = revision + 1
    WHERE id = session_ AND state <> 'ended' RETURNING *;
END $$;

-- Give a session its chain, in place of the one that it may have; false if it has ended.
CREATE FUNCTION perdure.put_chain_1(
    session_ text, name_ text, record_ int, holder_ bytea, current_ text, next_ text
) RETURNS bool LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM perdure.lock_session_1(session_);
    IF NOT EXISTS (SELECT 1 FROM perdure.session WHERE id = session_ AND state <> 'ended') THEN
        RETURN false;
    END IF;
    INSERT INTO perdure.chain (session, name, record, holder, current, next)
    VALUES (session_, name_, record_, holder_, current_, next_)
    ON CONFLICT (session) DO UPDATE SET
        name = excluded.name, record = excluded.record, holder = excluded.holder, current = excluded.current,
        next = excluded.next;
    RETURN true;
END $$;

-- Whether a process holds an advisory lock; NULL for none.
CREATE FUNCTION perdure.is_held_1(lock_ bigint) RETURNS bool LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN lock_ IS NOT NULL THEN EXISTS (
        SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1
            AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
            AND classid = (lock_ >> 32 & 4294967295)::oid AND objid = (lock_ & 4294967295)::oid) END;
$$;

-- Enter a node. Gives the store's time: that of a node that lives, which told it a moment ago, or else what the caller
-- says (NULL: the server's clock).
CREATE FUNCTION perdure.join_1(
    node_ text, record_ int, lock_ bigint, writer_ bigint, facts_ bytea, wall float8, process_ text)
RETURNS float8 LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    told float8;
BEGIN
    SELECT clock + extract(epoch FROM clock_timestamp() - seen) INTO told FROM perdure.node
    WHERE id <> node_ AND NOT gone AND seen > clock_timestamp() - interval '1 minute'
        AND perdure.is_held_1(lock) IS NOT FALSE
    ORDER BY seen DESC LIMIT 1;
    told := coalesce(told, wall, extract(epoch FROM clock_timestamp()));
    INSERT INTO perdure.node (id, record, lock, writer, facts, clock, seen, process)
    VALUES (node_, record_, lock_, writer_, facts_, told, clock_timestamp(), process_)
    ON CONFLICT (id) DO UPDATE SET record = excluded.record, lock = excluded.lock, writer = excluded.writer,
        gone = false, process = excluded.process;
    INSERT INTO perdure.mailbox (node) VALUES (node_) ON CONFLICT (node) DO NOTHING;
    DELETE FROM perdure.buried WHERE node = node_;
    RETURN told;
END $$;

-- Note that a node is not there any more because it was buried, or has left. The last thousand are remembered: a node
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

-- A node stops: gone at once if it leaves nothing behind, else when another one has buried it.
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

-- Forget a dead node, unless it has another beat than the one that was seen (NULL: whichever it has): then "mail" is
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
        -- A commit of it that runs comes to its end; the next one finds that the node is not there.
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
    IF part_ = 'event' THEN
        UPDATE perdure.stream AS s SET trimmed = x.seq FROM unnest(keys, seqs) AS x (key, seq)
        WHERE s.key = x.key AND s.trimmed < x.seq;
    ELSE
        UPDATE perdure.stream AS s SET forgotten = x.seq FROM unnest(keys, seqs) AS x (key, seq)
        WHERE s.key = x.key AND s.forgotten < x.seq;
    END IF;
END $$;

-- Forget some streams that are over and hold nothing any more; gives how many.
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

-- Forget a session that was not used for long, if it is still so; gives how many went.
CREATE FUNCTION perdure.expire_session_1(session_ text, before float8) RETURNS int LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    keys bigint[];
BEGIN
    PERFORM perdure.lock_session_1(session_);
    SELECT array_agg(key) INTO keys FROM (
        SELECT key FROM perdure.stream WHERE session = session_ ORDER BY key FOR UPDATE) AS locked;
    DELETE FROM perdure.session AS s WHERE id = session_ AND active < before
        AND NOT EXISTS (SELECT 1 FROM perdure.in_use AS u WHERE u.session = s.id);
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    IF keys IS NOT NULL THEN
        PERFORM perdure.drop_streams_1(keys);
    END IF;
    RETURN 1;
END $$;

-- Empty a slot in which everything has expired. A reader in the way is waited for so long that short reads get done, and
-- not longer, because other readers wait behind this meanwhile. Commits do not: they lock only the slot that is written.
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
