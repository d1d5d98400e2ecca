-- How often a session's record was changed, so that a request is refused that was checked against an older one.

ALTER TABLE session ADD COLUMN revision INTEGER NOT NULL DEFAULT 0;
