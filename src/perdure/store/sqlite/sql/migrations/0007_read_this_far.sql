-- How far the readers of a stream have got, and the calls whose readers were lost before the end.

ALTER TABLE stream ADD COLUMN delivered INTEGER NOT NULL DEFAULT 0 CHECK (delivered >= 0);

ALTER TABLE stream ADD COLUMN unread INTEGER NOT NULL DEFAULT 0 CHECK (unread IN (0, 1));

CREATE INDEX stream_unread ON stream (session) WHERE unread = 1;
