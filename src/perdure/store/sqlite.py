"""The store in one SQLite file.

Durable (3) means here: with `sync="normal"`, what `commit` returned survives the death of this process, also by
`kill -9`; a power cut or a crash of the operating system may take the last moments, but never leaves the file damaged.
With `sync="full"` it survives those as well, at the price of waiting for the disk with each commit.

Small commits are made in the event loop's own thread (tens of microseconds); what is large, or meets a busy file, goes
to the one writer thread, which groups. Reading has connections and threads of its own. One process writes the file:
the layout is made for several (fences, generations), the wake-ups between them are not there yet.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self, TypeVar

from perdure._core.ids import Fence, NodeId, SessionId, StreamId
from perdure._core.retention import Cutoffs
from perdure.store import _sql
from perdure.store import _sqlite_rows as rows
from perdure.store._sqlite_file import Sync
from perdure.store._sqlite_readers import ReaderPool
from perdure.store._sqlite_steps import weigh
from perdure.store._sqlite_sweep import sweep
from perdure.store._sqlite_writer import Writer
from perdure.store.base import (
    AskRecord,
    CallRecord,
    Event,
    Generation,
    ReaderRecord,
    Refusals,
    SessionRecord,
    Step,
    StreamRecord,
)

T = TypeVar("T")

_SQL = _sql.queries()

MAX_READ = 1_000
"""Events read in one go: little enough to be done before the interpreter lets a busy event loop cut in (5 ms).

Beyond that each single row would wait for its turn: 10,000 took 0.9 s beside a busy loop, and take 0.05 s in pages."""


class SqliteStore:
    """A store in the file at `path`, which is made (readable by its owner only) if it is not there.

    `busy_timeout`: seconds to wait for another program that holds the file before a commit fails.
    """

    def __init__(self, path: str, *, sync: Sync = "normal", busy_timeout: float = 1.0) -> None:
        self._path = os.path.abspath(path)
        self._writer = Writer(self._path, sync=sync, busy_timeout=busy_timeout)
        self._readers = ReaderPool(self._path, busy_timeout=busy_timeout)
        self._open = False
        self._turning = asyncio.Lock()

    async def open(self) -> None:
        async with self._turning:
            await asyncio.to_thread(self._writer.open)
            self._readers.open()
            self._open = True

    async def aclose(self) -> None:
        """Write what is queued, then close. Closing twice is closing once."""
        async with self._turning:
            if self._open:
                self._open = False
                self._writer.stop()
                await asyncio.to_thread(self._close)

    def _close(self) -> None:
        # The writer goes last: it moves the log into the file, which readers would hold up.
        self._readers.close()
        self._writer.join()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # Events

    async def commit(self, steps: Sequence[Step]) -> Refusals:
        """By the writer thread. Cancelling gives up waiting; the steps may be written all the same (5)."""
        _, size, _ = weigh(steps)
        return await self._writer.run(lambda apply, _: apply.apply(steps), size=size)

    def commit_now(self, steps: Sequence[Step]) -> Refusals | None:
        """In this thread, if the steps are few, nothing is queued, nobody else writes, and `sync` is normal."""
        return self._writer.commit_now(steps)

    async def read(self, stream: StreamId, *, after: int, limit: int) -> Sequence[Event]:
        found: list[Event] = []
        while True:
            page = min(limit - len(found), MAX_READ)
            last = found[-1].seq if found else after
            more = await self._readers.run(partial(_events, stream=stream, after=last, limit=page))
            found += more
            if len(more) < page or len(found) >= limit:
                return found

    async def stream(self, stream: StreamId) -> StreamRecord | None:
        return await self._one("stream_by_id", rows.stream_record, stream)

    async def streams(self, session: SessionId) -> Sequence[StreamRecord]:
        return await self._all("streams_of_session", rows.stream_record, session)

    async def claim(self, stream: StreamId) -> StreamRecord | None:
        return await self._writer.run(lambda apply, _: apply.claim(stream))

    async def generations(self, stream: StreamId) -> Sequence[Generation]:
        return await self._all("generations_of_stream", rows.generation, stream)

    async def sweep(self, cutoffs: Cutoffs) -> int:
        """In chunks, so that commits get in between."""
        return await sweep(self._writer, self._readers, cutoffs)

    # Sessions, ledger, asks, readers

    async def session(self, session: SessionId) -> SessionRecord | None:
        return await self._one("session_by_id", rows.session_record, session)

    async def sessions(self, *, after: SessionId | None, limit: int) -> Sequence[SessionRecord]:
        return await self._all("sessions_after", rows.session_record, after or "", limit)

    async def calls(self, session: SessionId) -> Sequence[CallRecord]:
        return await self._all("calls_of_session", rows.call_record, session)

    async def requests(self, stream: StreamId) -> Sequence[tuple[int | str, str]]:
        return await self._all("requests_of_stream", rows.request, stream)

    async def asks(self, session: SessionId) -> Sequence[AskRecord]:
        return await self._all("asks_of_session", rows.ask_record, session)

    async def reader(self, stream: StreamId) -> ReaderRecord | None:
        return await self._one("reader_of_stream", rows.reader_record, stream)

    # Wake-ups and mail

    def subscribe(self, listener: Callable[[StreamId], None]) -> Callable[[], None]:
        """Never called back: only this process writes the file, so nothing grows by another's hand."""
        return lambda: None

    async def join(self, node: NodeId) -> Fence:
        return await self._writer.run(lambda apply, _: apply.join(node))

    async def post(self, node: NodeId, message: bytes) -> None:
        await self._writer.run(lambda apply, _: apply.post(node, message), size=len(message))

    async def collect(self, node: NodeId) -> Sequence[bytes]:
        return await self._writer.run(lambda apply, _: apply.collect(node))

    async def _one(self, query: str, record: Callable[[rows.Row], T], *values: Any) -> T | None:
        found = await self._all(query, record, *values)
        return found[0] if found else None

    async def _all(self, query: str, record: Callable[[rows.Row], T], *values: Any) -> list[T]:
        return await self._readers.run(
            lambda connection: [record(row) for row in connection.execute(_SQL[query], values)]
        )


def _events(connection: sqlite3.Connection, *, stream: StreamId, after: int, limit: int) -> list[Event]:
    found = connection.execute(_SQL["read_events"], (stream, after, limit))
    return [Event(seq, time, payload, final == 1) for seq, time, payload, final in found]
