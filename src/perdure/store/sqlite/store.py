"""The store in one SQLite file, which several processes of one machine may share.

Durable (3) means here: with `sync="normal"`, what `commit` returned survives the death of this process, also by
`kill -9`; a power cut or a crash of the operating system may take the last moments, but never leaves the file damaged.
With `sync="full"` it survives those as well, at the price of waiting for the disk with each commit.

Small commits are made in the event loop's own thread (tens of microseconds); large ones, and those that meet a busy
file, go to the one writer thread, which groups them. Reads have connections and threads of their own.

Dead (11) means: the operating system has freed the lock that the node held on a file of its own, in the folder
`<path>-nodes`. Where the system has no such locks, one process has the file for itself. Wake-ups (8) are datagrams to
sockets in the same folder, and polls of the file for those that are lost.
"""

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from functools import partial

from perdure._core.ids import Fence, NodeId, SessionId, StreamId
from perdure._core.retention import Cutoffs
from perdure.errors import StoreUnavailable
from perdure.store.interface import HintListener, Liveness
from perdure.store.records import SessionRecord, StreamRecord, Survey
from perdure.store.sqlite import nodes
from perdure.store.sqlite.file import OPERATOR_PATIENCE, Sync, named, open_reader, refuse_unfit
from perdure.store.sqlite.locks import locks_of
from perdure.store.sqlite.metrics import Metrics
from perdure.store.sqlite.reads import ReaderPool, SqliteReads
from perdure.store.sqlite.sweep import sweep
from perdure.store.sqlite.wakeups import SqliteHints
from perdure.store.sqlite.writer import Writer
from perdure.store.steps import Refusals, SendMail, Step, weigh


class SqliteStore(SqliteReads):
    """A store in the file at `path`, which is made (readable by its owner only) if it does not exist.

    `busy_timeout`: seconds that one operation may be stuck, or another program may hold the file, before it fails. Time
    in the queues of the threads does not count. `wall`: the time in seconds since 1970, read when a node joins.
    """

    shared = True
    lapses = False

    def __init__(
        self,
        path: str,
        *,
        sync: Sync = "normal",
        busy_timeout: float = 1.0,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._path = os.path.abspath(path)
        self._wall = wall
        self._offset = wall() - time.monotonic()
        self._writer = Writer(self._path, sync=sync, busy_timeout=busy_timeout)
        self._readers = ReaderPool(
            self._path, busy_timeout=busy_timeout, check=self._writer.check, identity=self._writer.identity
        )
        self._meter = Metrics(self._path, self._readers)
        self._locks = locks_of(self._path)
        self._hints = SqliteHints(self._locks, look=self._writer.look)
        self._open = False
        self._turning = asyncio.Lock()

    async def open(self) -> None:
        async with self._turning:
            await asyncio.to_thread(self._writer.open)
            self._readers.open()
            self._open = True

    async def aclose(self) -> None:
        """Write what is queued, then close. Closing twice is closing once. Nodes that have not left are dead then."""
        async with self._turning:
            if self._open:
                self._open = False
                self._hints.close()
                self._writer.stop()
                # The writer after the readers: it moves the log into the file, which they would hold up. The locks at
                # the very end: as long as anything is written, its node lives (11).
                for close in (self._readers.close, self._writer.join, self._locks.close):
                    await asyncio.to_thread(close)

    # Writing

    async def commit(self, steps: Sequence[Step]) -> Refusals:
        """By the writer thread. Cancelling ends the wait; the steps may be written nevertheless (5)."""
        _, size, _ = weigh(steps)
        refusals = await self._writer.run(lambda apply, _: apply.apply(steps), size=size)
        self._announce(steps, refusals)
        return refusals

    def commit_now(self, steps: Sequence[Step]) -> Refusals | None:
        """In this thread, if the steps are few, nothing is queued, no other process writes, and `sync` is normal."""
        refusals = self._writer.commit_now(steps)
        if refusals is not None:
            self._announce(steps, refusals)
        return refusals

    def _announce(self, steps: Sequence[Step], refusals: Refusals) -> None:
        for place, step in enumerate(steps):
            if type(step) is SendMail and refusals[place] is None:
                self._hints.hint(step.node, ())

    async def claim(self, stream: StreamId, *, node: NodeId, held: Fence, known: int = 0) -> StreamRecord | None:
        return await self._writer.run(lambda apply, _: apply.streams.claim(stream, node=node, held=held, known=known))

    async def reattach(self, session: SessionId) -> SessionRecord | None:
        return await self._writer.run(lambda apply, _: apply.reattach(session))

    async def change_note(self, name: str, *, seen: bytes | None, value: bytes | None, session: str = "") -> bool:
        return await self._writer.run(
            lambda apply, _: apply.change_note(name, seen=seen, value=value, session=session), size=len(value or b"")
        )

    async def sweep(self, cutoffs: Cutoffs) -> int:
        return await sweep(self._writer, self._readers, cutoffs)

    async def survey(self) -> Survey:
        return await self._meter.survey()

    # Wake-ups

    def subscribe(self, node: NodeId, listener: HintListener) -> Callable[[], None]:
        return self._hints.subscribe(node, listener)

    def hint(self, node: NodeId, streams: Sequence[StreamId]) -> None:
        self._hints.hint(node, streams)

    def stamp(self) -> object:
        number = self._writer.look()
        return object() if number is None else (self._writer.life, number)

    # Nodes

    async def join(self, node: NodeId) -> Fence:
        """The lock first: a row without one is that of a dead node."""
        joined = self._locks.holds(node)
        await asyncio.to_thread(self._locks.join, node)
        offset = self._wall() - time.monotonic()
        try:
            fence, self._offset = await self._writer.run(
                partial(nodes.join, node=node, locks=self._locks, offset=offset)
            )
        except BaseException:
            if not joined:
                self._locks.leave(node)
            raise
        return fence

    def clock(self) -> float:
        """By the machine's monotonic clock, which all its processes share."""
        return time.monotonic() + self._offset

    async def leave(self, node: NodeId) -> None:
        await self._writer.run(partial(nodes.leave, node=node))
        await asyncio.to_thread(self._locks.leave, node)

    def liveness(self, node: NodeId, *, lease: float, monotonic: Callable[[], float]) -> Liveness:
        return nodes.SqliteLiveness(
            node, locks=self._locks, writer=self._writer, readers=self._readers, monotonic=monotonic
        )

    async def bury(self, node: NodeId, *, heir: NodeId, beat: int | None = None) -> Sequence[StreamRecord] | None:
        buried = await self._writer.run(partial(nodes.bury, node=node, heir=heir, beat=beat))
        if buried is None:
            return None
        read, mail = buried
        await asyncio.to_thread(self._locks.bury, node)
        if mail:
            self._hints.hint(heir, ())
        return read


class ExistingSqlite(SqliteStore):
    """A store that must be there already."""

    async def open(self) -> None:
        refuse_unfit(self._path)
        await super().open()


class SqliteView(SqliteStore):
    """A store that is only read. It has no writer, so no other process waits for a lock of it."""

    _watch: sqlite3.Connection | None = None

    async def open(self) -> None:
        refuse_unfit(self._path)
        with named(self._path, "opened"):
            self._watch = open_reader(self._path, busy_timeout=OPERATOR_PATIENCE)
            self._writer.identity.opened()
        self._readers.open()

    async def aclose(self) -> None:
        self._readers.close()
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def stamp(self) -> object:
        """Return SQLite's own count of the commits of others. Raises `StoreReplaced` if the path leads to another file
        by now."""
        if self._watch is None:
            raise StoreUnavailable(f"the SQLite file {self._path} is closed")
        self._writer.identity.check()
        with named(self._path, "read"):
            return self._watch.execute("PRAGMA data_version").fetchone()[0]
