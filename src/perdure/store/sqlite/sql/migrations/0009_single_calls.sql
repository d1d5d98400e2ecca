-- Single calls, which are sessions of one call: counted apart from sessions. What a call asked for, as a digest, so that
-- it can be told from another one under the same key. Secrets that all processes share.

ALTER TABLE session ADD COLUMN kind TEXT NOT NULL DEFAULT 'session' CHECK (kind IN ('session', 'call', 'key', 'mark'));

ALTER TABLE call ADD COLUMN digest BLOB NOT NULL DEFAULT x'';

CREATE TABLE secret (
    name  TEXT PRIMARY KEY NOT NULL,
    value BLOB NOT NULL
);

DROP INDEX session_dormant;

CREATE INDEX session_dormant ON session (kind, active) WHERE state = 'dormant';

DROP TRIGGER session_new;

DROP TRIGGER session_gone;

CREATE TRIGGER session_new AFTER INSERT ON session
BEGIN
    UPDATE tally SET
        open = open + (NEW.kind = 'session' AND NEW.state <> 'ended'),
        ended = ended + (NEW.kind = 'session' AND NEW.state = 'ended');
END;

CREATE TRIGGER session_gone AFTER DELETE ON session
BEGIN
    DELETE FROM chain WHERE session = OLD.id;
    UPDATE tally SET
        open = open - (OLD.kind = 'session' AND OLD.state <> 'ended'),
        ended = ended - (OLD.kind = 'session' AND OLD.state = 'ended');
END;
