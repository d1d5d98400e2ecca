-- Limits that hold across processes: where a session was opened from, how many there are, and small records of ended ones.

ALTER TABLE session ADD COLUMN address TEXT NOT NULL DEFAULT '';

UPDATE session SET result = x'', sticky = '[]' WHERE state = 'ended';

UPDATE session SET client_params = x''
WHERE state = 'ended' AND (ended <> 'replay window passed' OR length(client_params) > 4096);

DROP INDEX session_of_owner;

CREATE INDEX session_of_caller ON session (owner, address) WHERE state <> 'ended';

CREATE INDEX session_ended_of_caller ON session (owner, address, active) WHERE state = 'ended';

CREATE INDEX session_ended ON session (active) WHERE state = 'ended';

CREATE TABLE tally (
    only  INTEGER PRIMARY KEY CHECK (only = 1),
    open  INTEGER NOT NULL CHECK (open >= 0),
    ended INTEGER NOT NULL CHECK (ended >= 0)
);

INSERT INTO tally (only, open, ended)
SELECT 1, count(CASE WHEN state <> 'ended' THEN 1 END), count(CASE WHEN state = 'ended' THEN 1 END) FROM session;

CREATE TRIGGER session_new AFTER INSERT ON session
BEGIN
    UPDATE tally SET open = open + (NEW.state <> 'ended'), ended = ended + (NEW.state = 'ended');
END;

DROP TRIGGER session_over;

CREATE TRIGGER session_over AFTER UPDATE OF state ON session WHEN NEW.state = 'ended' AND OLD.state <> 'ended'
BEGIN
    DELETE FROM chain WHERE session = NEW.id;
    UPDATE tally SET open = open - 1, ended = ended + 1;
END;

DROP TRIGGER session_gone;

CREATE TRIGGER session_gone AFTER DELETE ON session
BEGIN
    DELETE FROM chain WHERE session = OLD.id;
    UPDATE tally SET open = open - (OLD.state <> 'ended'), ended = ended - (OLD.state = 'ended');
END;
