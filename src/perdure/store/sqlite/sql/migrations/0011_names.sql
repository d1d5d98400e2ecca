-- The tool or prompt that a call asks for, for people: its request is not kept when it has ended.

ALTER TABLE call ADD COLUMN name NOT NULL DEFAULT '';
