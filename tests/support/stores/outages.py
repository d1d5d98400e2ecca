"""Ways in which a store fails, and what tests of them read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from perdure.store import SqliteStore
from tests.support.clients.raw_http import Exchange, Peer, SessionPeer, progress
from tests.support.stores.faulty_store import Fault, FaultyStore

TIMEOUT = 0.2
"""`store_timeout`, short, because several outages begin with it."""

# The store with a bug is met by a beat as well, if the outage is long enough for one.
FAILS = "the store fails|a store with a bug"
"""The error that an outage logs; any other one fails the test."""


class Outage:
    """A store that can be made to fail."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = FaultyStore(SqliteStore(str(path), busy_timeout=TIMEOUT))

    def begins(self) -> AbstractAsyncContextManager[None]:
        """Fail from now on, until the block ends."""
        raise NotImplementedError


class Switched(Outage):
    def __init__(self, path: Path, fault: Fault, every: int = 1) -> None:
        super().__init__(path)
        self.store.every = every
        self._fault = fault

    @asynccontextmanager
    async def begins(self) -> AsyncIterator[None]:
        self.store.writes = self._fault
        yield
        self.store.works()


class Locked(Outage):
    """Another process holds the file."""

    HOLDER = (
        "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None);"
        "c.execute('BEGIN EXCLUSIVE'); print('held', flush=True); sys.stdin.read()"
    )

    @asynccontextmanager
    async def begins(self) -> AsyncIterator[None]:
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-c", self.HOLDER, str(self.path))
        holder = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert await holder.stdout.readline() == b"held\n"
        try:
            yield
        finally:
            holder.stdin.close()
            await holder.wait()


async def recovered(peer: Peer) -> None:
    """Wait until the outage is over for the server as well."""
    async with asyncio.timeout(60):
        while await peer.health() != "ok":  # noqa: ASYNC110 - the server may be another process
            await asyncio.sleep(0.01)


async def begin_count(peer: SessionPeer, gate: str, *, first: int, n: int) -> Exchange:
    """A call that has reported `first` of `n`, all of which are here, and waits at a gate."""
    call = await peer.begin_call("count", n=n, gate=gate, first=first)
    assert progress(await call.until_messages(first)) == list(range(1, first + 1))
    return call


def written(path: Path) -> list[list[int]]:
    """The progress numbers in the file, stream by stream, in the order of their sequence numbers."""
    streams: dict[int, list[int]] = {}
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for stream, payload in connection.execute("SELECT stream, payload FROM event ORDER BY stream, seq"):
            parsed = json.loads(payload)
            if parsed.get("method") == "notifications/progress":
                streams.setdefault(stream, []).append(parsed["params"]["progress"])
    return list(streams.values())
