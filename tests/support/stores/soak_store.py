"""The stores of the soak: a SQLite file, or a PostgreSQL server of its own that is killed and started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from tests.support.stores.postgres import Server

#: Seconds within which the processes of a killed server have ended, and their memory is free.
GONE = 30.0
#: Seconds of a lease: short, so that many pauses outlast it.
LEASE = 3.0


class SoakedStore(Protocol):
    """The store of a soak's nodes."""

    nodes: int
    """How many processes serve from it."""
    options: tuple[str, ...]
    """The options with which the nodes are started."""
    lease: float
    """Seconds after which a node that stands still is taken for dead; 0 if it never is."""
    holds: bool
    """Nodes show what is not written yet while the store fails."""

    @property
    def address(self) -> str: ...
    def start(self) -> None: ...
    def kill(self) -> None: ...
    def restart(self) -> None: ...
    def stop(self) -> None: ...


class SqliteFile:
    """A file, which has no server."""

    nodes: int = 2
    options: tuple[str, ...] = ()
    lease: float = 0.0
    holds: bool = True

    def __init__(self, folder: Path) -> None:
        self._path = folder / "log.db"

    @property
    def address(self) -> str:
        return f"sqlite:{self._path}"

    def start(self) -> None:
        """Servers make the file."""

    def kill(self) -> None:
        """There is nothing to kill, to restart or to stop."""

    def restart(self) -> None: ...
    def stop(self) -> None: ...


class PostgresServer:
    """A server of its own, with `synchronous_commit=on`, for three nodes with a short lease.

    What a client was shown must be in the log although server and nodes die together. So nodes refuse while the store
    fails (`refuse`). With `hold` they show what they hold in memory, which is lost if they die before they have written
    it; the soak kills no node in such a moment then.
    """

    nodes: int = 3

    def __init__(self, folder: Path, *, holds: bool = False) -> None:
        self.lease = LEASE
        self.holds = holds
        on_failure = ("hold", "--store-timeout", "20s") if holds else ("refuse",)  # a busy machine holds nothing
        self.options: tuple[str, ...] = ("--lease", f"{LEASE:g}s", "--on-store-failure", *on_failure)
        self._server = Server(folder, synchronous_commit="on")

    @property
    def address(self) -> str:
        return f"{self._server.url}?schema=soak"

    def start(self) -> None:
        self._server.make()
        self._server.start()

    def kill(self) -> None:
        """Kill all its processes (SIGKILL) and start it again: it recovers from its log."""
        pid = self._server.pid
        os.kill(pid, signal.SIGSTOP)  # it starts no more processes
        doomed = [pid, *_children(pid)]
        for each in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        deadline = time.monotonic() + GONE
        while any(_is_alive(each) for each in doomed):
            assert time.monotonic() < deadline, "the server does not die"
            time.sleep(0.01)
        # Where process 1 does not take the status of orphans, as in many containers, the dead one looks alive.
        (self._server.data / "postmaster.pid").unlink()
        self._server.start()

    def restart(self) -> None:
        """Ask it to end at once, with its clients cut off, and start it again."""
        self._server.stop("fast")
        self._server.start()

    def stop(self) -> None:
        self._server.stop()


def _children(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(stat.parent.name))
    return found


def _is_alive(pid: int) -> bool:
    """It runs: it is neither gone nor a zombie, which holds nothing."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@asynccontextmanager
async def running(store: SoakedStore) -> AsyncIterator[None]:
    await asyncio.to_thread(store.start)
    try:
        yield
    finally:
        await asyncio.to_thread(store.stop)
