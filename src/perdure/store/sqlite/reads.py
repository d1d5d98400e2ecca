"""Reads records and events from a SQLite file."""

import asyncio
import contextlib
import os
import sqlite3
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from perdure._core.ids import SessionId, StreamId
from perdure._core.limits import Caller
from perdure.errors import StoreUnavailable
from perdure.store import rows
from perdure.store.records import (
    MAX_COUNTED,
    OLDEST_STREAMS,
    READ_BYTES,
    Event,
    Extent,
    Followed,
    SessionRecord,
    Usage,
)
from perdure.store.rows import RecordReads
from perdure.store.sqlite import sql_files as _sql
from perdure.store.sqlite.file import NAMED, STUCK, FileIdentity, failure, open_reader, refuse_newer
from perdure.store.time_limit import TimeLimit

Id = TypeVar("Id")
T = TypeVar("T")

_SQL = _sql.queries()

MAX_READ = 1_000
"""Events read in one go, before the interpreter lets a busy event loop cut in (5 ms). After that each row would wait
for its turn: 10,000 took 0.9 s beside a busy loop, and take 0.05 s in pages."""

THREADS = 2
"""One long replay does not keep a short read waiting; more would only share the same interpreter."""


class ReaderPool:
    """Reads in threads, each with a connection: a long replay keeps neither the event loop nor the writer. `check`
    raises once the file must not be read any more; `identity` notices another file of its name."""

    def __init__(self, path: str, *, busy_timeout: float, check: Callable[[], None], identity: FileIdentity) -> None:
        self._path = path
        self._check = check
        self._identity = identity
        self._busy_timeout = busy_timeout
        self._limit = TimeLimit(busy_timeout * STUCK)
        self._threads: ThreadPoolExecutor | None = None
        self._idle: list[sqlite3.Connection] = []

    def open(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="perdure-sqlite-reader")

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=True)
            self._threads = None
        while self._idle:
            self._idle.pop().close()

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Read in one of the threads. Time in their queue does not count: thousands may come at once."""
        if self._threads is None:
            raise StoreUnavailable(f"the SQLite file {self._path} is closed")
        self._check()
        reading = asyncio.get_running_loop().run_in_executor(self._threads, self._run, work)
        return await self._limit.wait(reading)

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            if self._idle:
                connection = self._idle.pop()
            else:
                connection = open_reader(self._path, busy_timeout=self._busy_timeout, check=self._identity.check)
            try:
                return work(connection)
            except NAMED:
                # The tables of a newer release may have other columns; then that is the failure.
                refuse_newer(connection, self._path)
                raise
            finally:
                self._idle.append(connection)
        except NAMED as error:
            raise failure(error, self._path, "read") from error


class SqliteReads(RecordReads):
    """Reads what this database keeps in its own form, and the rest as every database does."""

    _path: str
    _readers: ReaderPool
    _session_record = staticmethod(rows.session_record)

    async def read(self, stream: StreamId, *, after: int, limit: int) -> Sequence[Event]:
        events: list[Event] = []
        room = READ_BYTES

        def read_page(connection: sqlite3.Connection) -> bool:
            """Read some events. Returns whether more may follow."""
            nonlocal room
            wanted = min(len(events) + MAX_READ, limit)
            last = events[-1].seq if events else after
            query = connection.execute(_SQL["read_events"], (stream, last, wanted - len(events)))
            # Closed at its end: a query that is left in the middle would keep the file's log from being reused.
            with contextlib.closing(query) as found:
                for seq, time, payload, final in found:
                    events.append(Event(seq, time, payload, final == 1))
                    room -= len(payload)
                    if room <= 0:
                        return False
            return len(events) == wanted < limit

        while await self._readers.run(read_page):
            pass
        return events

    async def follow(self, after: Mapping[StreamId, int], *, limit: int) -> Mapping[StreamId, Followed]:
        def followed(connection: sqlite3.Connection, stream: StreamId) -> Followed | None:
            row = connection.execute(_SQL["followed_stream"], (stream,)).fetchone()
            return None if row is None else rows.followed(row)

        return await self._each(after, followed)

    def _columns_of(self, caller: Caller) -> tuple[object, ...]:
        return rows.loose(caller.owner), caller.address

    async def usage(self, sessions: Sequence[SessionId]) -> Mapping[SessionId, tuple[SessionRecord, Usage]]:
        def usage(connection: sqlite3.Connection, session: SessionId) -> tuple[SessionRecord, Usage] | None:
            if (row := connection.execute(_SQL["session_by_id"], (session,)).fetchone()) is None:
                return None
            streams = [rows.stream_record(row) for row in connection.execute(_SQL["streams_of_session"], (session,))]
            (appended,) = connection.execute(_SQL["newest_of_session"], (session,)).fetchone()
            readers = [rows.reader_record(row) for row in connection.execute(_SQL["readers_of_session"], (session,))]
            newest = max([stream.opened for stream in streams], default=0.0)
            return rows.session_record(row), Usage(streams, max(newest, appended or 0.0), readers)

        return await self._each(sessions, usage)

    async def extent(self) -> Extent:
        def read(connection: sqlite3.Connection) -> Extent:
            (counted,) = connection.execute(_SQL["count_events"], (MAX_COUNTED + 1,)).fetchone()
            (oldest,) = connection.execute(_SQL["oldest_retained"], (OLDEST_STREAMS,)).fetchone()
            size = os.stat(self._path).st_size
            with contextlib.suppress(FileNotFoundError):
                size += os.stat(f"{self._path}-wal").st_size
            return Extent(size, min(counted, MAX_COUNTED), counted <= MAX_COUNTED, oldest)

        return await self._readers.run(read)

    async def _each(self, ids: Iterable[Id], read: Callable[[sqlite3.Connection, Id], T | None]) -> dict[Id, T]:
        """Read something for each id, some ids at a time. An id for which there is nothing is left out."""
        waiting = deque(ids)
        found: dict[Id, T] = {}

        def read_some(connection: sqlite3.Connection) -> None:
            for _ in range(min(MAX_READ, len(waiting))):
                if (one := read(connection, id_ := waiting.popleft())) is not None:
                    found[id_] = one

        while waiting:
            await self._readers.run(read_some)
        return found

    async def _all(self, query: str, record: Callable[[rows.Row], T], *values: Any) -> Sequence[T]:
        def read(connection: sqlite3.Connection) -> Sequence[T]:
            return [record(row) for row in connection.execute(_SQL[query], values)]

        return await self._readers.run(read)
