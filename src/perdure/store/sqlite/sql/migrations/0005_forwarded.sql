-- Messages for a stream's writer wait under the stream, and no longer in the mailbox of a node.

-- What other nodes say on a stream waits here for its writer, whoever that is. Keys are never used again: a writer may say
-- twice how far it has got.
CREATE TABLE forward (
    key     INTEGER PRIMARY KEY AUTOINCREMENT,
    stream  INTEGER NOT NULL,
    payload BLOB NOT NULL
);

CREATE INDEX forward_of_stream ON forward (stream);

-- Who forwards to a stream from a node, and the number of the last message that was taken (promise 16).
CREATE TABLE sender (
    stream INTEGER NOT NULL,
    node   TEXT NOT NULL,
    sender TEXT NOT NULL,
    last   INTEGER NOT NULL CHECK (last >= 1),
    PRIMARY KEY (stream, node)
) WITHOUT ROWID;

DROP TRIGGER stream_gone;

CREATE TRIGGER stream_gone AFTER DELETE ON stream
BEGIN
    DELETE FROM event WHERE stream = OLD.key;
    DELETE FROM generation WHERE stream = OLD.key;
    DELETE FROM call WHERE stream = OLD.key;
    DELETE FROM ask WHERE stream = OLD.key;
    DELETE FROM reader WHERE stream = OLD.key;
    DELETE FROM forward WHERE stream = OLD.key;
    DELETE FROM sender WHERE stream = OLD.key;
END;

-- What was on its way by mail moves over, in its order. Mail that is no JSON is left to its reader, who says so.
INSERT INTO forward (stream, payload)
SELECT s.key, CAST(p.value AS BLOB)
FROM (SELECT key, CASE WHEN json_valid(CAST(message AS TEXT)) THEN CAST(message AS TEXT) END AS text FROM mail) AS m
JOIN session AS o ON o.id = json_extract(m.text, '$.session')
JOIN stream AS s ON s.id = o.standalone
JOIN json_each(m.text, '$.payloads') AS p
WHERE json_extract(m.text, '$.kind') = 'forward'
ORDER BY m.key, p.key;

DELETE FROM mail
WHERE CASE WHEN json_valid(CAST(message AS TEXT))
           THEN json_extract(CAST(message AS TEXT), '$.kind') = 'forward' ELSE 0 END;
