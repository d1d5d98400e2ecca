-- One clock for all nodes, and what is in use, which no clock may end.

-- One row: what a node adds to its monotonic clock, which all processes of a machine share, to get the store's time.
CREATE TABLE clock (
    only   INTEGER PRIMARY KEY CHECK (only = 1),
    offset REAL NOT NULL
);

-- Sessions that a node which is not buried uses: it is their home, runs a call of theirs, or reads one of their streams.
CREATE VIEW in_use AS
SELECT session FROM stream WHERE sealed = 0 AND node IN (SELECT id FROM node)
UNION ALL
SELECT s.session FROM stream AS s JOIN reader AS r ON r.stream = s.key WHERE r.node IN (SELECT id FROM node);
