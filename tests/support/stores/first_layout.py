"""A file as the first release left it (version 1 of the layout), with a call that is over and one that is not."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perdure._core.ids import Kind, Position, StreamId
from perdure.store.sqlite import sql_files as _sql
from perdure.store.sqlite.file import APPLICATION_ID
from tests.support.clients.raw_http import VERSION

SESSION = "S" * 43
NODE = "n" * 22
STANDALONE, OVER, RUNNING = "s" * 22, "o" * 22, "r" * 22


@dataclass(frozen=True, kw_only=True)
class Old:
    """What a client of that release has."""

    session: str
    headers: dict[str, str]
    #: Positions, and what comes behind each: methods, or `answer`.
    resumes: dict[str, list[str]]
    #: The one of the call that never ended.
    running: str


def layout(path: Path) -> int:
    """The version of a file's layout."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def write_first_layout(path: Path, diary: Path) -> Old:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for statement in _sql.migrations()[0].statements:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute("PRAGMA user_version = 1")
        _fill(connection, diary)
        connection.commit()
        assert connection.execute("PRAGMA journal_mode = WAL").fetchone() == ("wal",)
    over, running = _position(Kind.CALL, OVER, 1), _position(Kind.CALL, RUNNING, 1)
    progress = "notifications/progress"
    return Old(
        session=SESSION,
        headers={"mcp-session-id": SESSION, "mcp-protocol-version": VERSION},
        resumes={over: [progress, "answer"], running: [progress, "answer"]},
        running=running,
    )


def _position(kind: Kind, stream: str, seq: int) -> str:
    return str(Position(kind=kind, stream=StreamId(stream), generation=1, seq=seq))


def _fill(connection: sqlite3.Connection, diary: Path) -> None:
    now = time.time()
    client = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": {"name": "old", "version": "1"}}
    result = {"protocolVersion": VERSION, "capabilities": {}, "serverInfo": {"name": "gate_file_tools", "version": "1"}}
    session = (SESSION, 1, "", NODE, "active", VERSION, _json(client), _json(result), 1, "[]", 1, STANDALONE, now, now)
    _insert(connection, "session", session)
    streams = [(STANDALONE, "s", 0, 0), (OVER, "c", 3, 1), (RUNNING, "c", 2, 0)]
    for key, (stream, kind, last, sealed) in enumerate(streams, start=1):
        _insert(connection, "stream", (key, stream, 1, SESSION, kind, 1, now, 1, last, sealed))
    for key, request_id, state in ((2, 1, "answered"), (3, 2, "running")):
        for seq in (1, 2):
            progress = {"progressToken": request_id, "progress": seq}
            payload = _json({"jsonrpc": "2.0", "method": "notifications/progress", "params": progress})
            _insert(connection, "event", (key, seq, now, payload, 0))
        arguments = {"n": 6, "log": str(diary), "key": "old"}
        params = {"name": "pay", "arguments": arguments, "_meta": {"progressToken": request_id}}
        request = _json({"jsonrpc": "2.0", "id": request_id, "method": "tools/call", "params": params})
        call = (key, 1, json.dumps(request_id), 0, 1, "tools/call", request, "", NODE, 1, None, state)
        _insert(connection, "call", call)
    content = {"content": [{"type": "text", "text": "counted to 2"}]}
    _insert(connection, "event", (2, 3, now, _json({"jsonrpc": "2.0", "id": 1, "result": content}), 1))
    connection.execute("UPDATE fence SET last = 1")


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _insert(connection: sqlite3.Connection, table: str, row: tuple[Any, ...]) -> None:
    connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
