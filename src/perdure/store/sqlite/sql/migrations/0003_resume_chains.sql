-- Resume tokens: one chain for each session at most, which goes when the session ends.

CREATE TABLE chain (
    session TEXT PRIMARY KEY NOT NULL,
    name    TEXT NOT NULL UNIQUE,
    record  INTEGER NOT NULL,
    holder  TEXT NOT NULL,
    current TEXT NOT NULL,
    next    TEXT NOT NULL
) WITHOUT ROWID;

CREATE TRIGGER session_over AFTER UPDATE OF state ON session WHEN NEW.state = 'ended'
BEGIN
    DELETE FROM chain WHERE session = NEW.id;
END;

CREATE TRIGGER session_gone AFTER DELETE ON session
BEGIN
    DELETE FROM chain WHERE session = OLD.id;
END;
