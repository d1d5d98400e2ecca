"""Thousands of sessions come, are used, and end or expire; then the server is where it was (S9, R7, R8).

Real HTTP on connections that are kept, against `perdure serve` in a process of its own, which tells what it holds.
`PERDURE_TEST_SESSIONS=10000` lets more come.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from tests.support.clients.raw_http import VERSION, Answer, Parser, Peer, SessionPeer, message
from tests.support.processes.cluster import GATE_FILE_TOOLS
from tests.support.processes.serving import Served, serving
from tests.support.servers.in_process import until

# The time bounds a hang: beside other work, a machine takes minutes for the sessions of `make test-all`.
pytestmark = [pytest.mark.anyio, pytest.mark.long, pytest.mark.timeout(900)]

SESSIONS = int(os.environ.get("PERDURE_TEST_SESSIONS", "700"))
AT_ONCE = 16

#: What the process may have grown by for each. A session that stayed would be 11 KiB or more, and an allocator keeps a
#: megabyte or two for itself, however many there were.
ALLOWANCE = 4_000
#: Sessions that are left alone are gone this soon.
EXPIRY = ("--session-grace", "1s", "--replay-window", "2s", "--event-ttl", "2s", "--cleanup-interval", "500ms")
ROOM = ("--max-sessions", "20000", "--max-principal-sessions", "20000", "--store-timeout", "20s")
TABLES = ("session", "stream", "event", "call", "ask", "reader", "generation", "mail")


class Line:
    """A connection that is kept, one request after the other."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self.peer.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def ask(self, peer: Peer, method: str, body: bytes | None = None) -> Answer:
        self._writer.write(peer.request(method, body))
        parser, whole = Parser(), bytearray()
        while not parser.complete:
            data = await self._reader.read(65_536)
            assert data, "the server closed the connection"
            whole += parser.feed(data)
        return Answer(status=parser.status, headers=parser.headers, body=bytes(whole))

    async def session(self) -> SessionPeer:
        client = {"name": "line", "version": "1"}
        params = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": client}
        answer = await self.ask(self.peer, "POST", message("initialize", params, id=0))
        assert answer.status == 200, answer
        session = answer.header("mcp-session-id")
        assert session is not None
        headers = {"mcp-session-id": session, "mcp-protocol-version": VERSION}
        peer = SessionPeer(port=self.peer.port, headers=headers, id=session)
        assert (await self.ask(peer, "POST", message("notifications/initialized"))).status == 202
        return peer


async def live_and_leave(line: Line, number: int) -> None:
    """One session's life: used, some with a standalone stream that is torn down, half of them deleted."""
    peer = await line.session()
    answer = await line.ask(peer, "POST", peer.call_body("count", n=2))
    assert len(answer.messages) == 3, answer
    if number % 10 == 0:
        standalone = await peer.resume("")
        assert await standalone.head() == 200
        standalone.cut()
        await standalone.aclose()
    if number % 2:
        assert (await line.ask(peer, "DELETE")).status == 200


async def come_and_go(peer: Peer, sessions: int) -> None:
    numbers = iter(range(sessions))

    async def keep_coming(numbers: Iterator[int]) -> None:
        async with Line(peer) as line:
            for number in numbers:
                await live_and_leave(line, number)

    await asyncio.gather(*(keep_coming(numbers) for _ in range(AT_ONCE)))


def rows(path: Path) -> int:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return sum(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in TABLES)


async def at_rest(path: Path) -> None:
    """Wait until everything has expired."""
    await until(lambda: rows(path) == 0)


async def census(served: Served) -> dict[str, int]:
    """What the server holds while nobody but the one who asks is there."""
    peer = await Peer(port=served.port).session()
    answer = await peer.call("census")
    assert (await peer.delete()).status == 200
    held: dict[str, int] = json.loads(answer.messages[-1]["result"]["content"][0]["text"])
    return held


async def test_thousands_of_sessions_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COVERAGE_PROCESS_START", raising=False)  # its own memory would be measured
    path = tmp_path / "log.db"
    async with serving(GATE_FILE_TOOLS, *EXPIRY, *ROOM, "--store", f"sqlite:{path}") as served:
        peer = Peer(port=served.port)
        for _ in range(2):  # what the allocator keeps of so many at once is no leak; the first round may be a slow one
            await come_and_go(peer, SESSIONS)
            await at_rest(path)
        before = await census(served)
        await come_and_go(peer, SESSIONS)
        await at_rest(path)
        after = await census(served)
    print(before, after)
    assert after["tasks"] <= before["tasks"]
    assert after["files"] <= before["files"]
    assert after["memory"] - before["memory"] < ALLOWANCE * SESSIONS
