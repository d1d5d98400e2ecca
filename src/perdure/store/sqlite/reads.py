"""Reads records and events from a SQLite file."""

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from perdure._core.ids import SessionId, StreamId
from perdure.errors import StoreUnavailable
from perdure.store import rows
from perdure.store.codec import Payloads
from perdure.store.records import (
    MAX_COUNTED,
    OLDEST_STREAMS,
    READ_BYTES,
    Event,
    Extent,
    StreamRecord,
    Usage,
)
from perdure.store.rows import RecordReads
from perdure.store.sqlite import sql_files as _sql
from perdure.store.sqlite.file import NAMED, STUCK, FileIdentity, failure, open_reader, refuse_newer
from perdure.store.time_limit import TimeLimit

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

    def file_size(self) -> int:
        size = os.stat(self._path).st_size
        with contextlib.suppress(FileNotFoundError):
            size += os.stat(f"{self._path}-wal").st_size
        return size

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


class Reads(RecordReads):
    """Reads what this database keeps in its own form, and the rest as every database does."""

    _readers: ReaderPool
    _session_record = staticmethod(rows.session_record)

    async def read(self, stream: StreamId, *, after: int, limit: int) -> Sequence[Event]:
        found: list[Event] = []
        room = READ_BYTES
        while True:
            page = min(limit - len(found), MAX_READ)
            last = found[-1].seq if found else after
            more, room = await self._readers.run(
                partial(_events, self._payloads, stream=stream, after=last, limit=page, room=room)
            )
            found += more
            if len(more) < page or len(found) >= limit or room <= 0:
                return found

    async def streams_by_id(self, streams: Sequence[StreamId]) -> Mapping[StreamId, StreamRecord]:
        found: dict[StreamId, StreamRecord] = {}
        for start in range(0, len(streams), MAX_READ):
            found |= await self._readers.run(partial(_streams, ids=streams[start : start + MAX_READ]))
        return found

    def _caller(self, owner: str, address: str) -> tuple[object, ...]:
        return rows.loose(owner), address

    async def usage(self, sessions: Sequence[SessionId]) -> Mapping[SessionId, Usage]:
        found: dict[SessionId, Usage] = {}
        for start in range(0, len(sessions), MAX_READ):
            found |= await self._readers.run(partial(_usage, sessions=sessions[start : start + MAX_READ]))
        return found

    async def extent(self) -> Extent:
        def read(connection: sqlite3.Connection) -> Extent:
            (counted,) = connection.execute(_SQL["count_events"], (MAX_COUNTED + 1,)).fetchone()
            (oldest,) = connection.execute(_SQL["oldest_retained"], (OLDEST_STREAMS,)).fetchone()
            return Extent(self._readers.file_size(), min(counted, MAX_COUNTED), counted <= MAX_COUNTED, oldest)

        return await self._readers.run(read)

    async def _all(self, query: str, record: Callable[[rows.Row], T], *values: Any) -> Sequence[T]:
        def read(connection: sqlite3.Connection) -> Sequence[T]:
            return self._payloads.decode_all([record(row) for row in connection.execute(_SQL[query], values)])

        return await self._readers.run(read)


def _events(
    payloads: Payloads, connection: sqlite3.Connection, *, stream: StreamId, after: int, limit: int, room: int
) -> tuple[Sequence[Event], int]:
    """Return events, and the bytes that still have room after them."""
    events: list[Event] = []
    overhead = payloads.overhead
    # Closed at its end: a query that is left in the middle would keep the file's log from being reused.
    with contextlib.closing(connection.execute(_SQL["read_events"], (stream, after, limit))) as found:
        for seq, time, payload, final in found:
            events.append(Event(seq, time, payload, final == 1))
            room -= len(payload) - overhead if payload else 0
            if room <= 0:
                break
    return payloads.decode_all(events), room


def _usage(connection: sqlite3.Connection, *, sessions: Sequence[SessionId]) -> dict[SessionId, Usage]:
    found: dict[SessionId, Usage] = {}
    for session in sessions:
        streams = [rows.stream_record(row) for row in connection.execute(_SQL["streams_of_session"], (session,))]
        if streams:
            (appended,) = connection.execute(_SQL["newest_of_session"], (session,)).fetchone()
            readers = [rows.reader_record(row) for row in connection.execute(_SQL["readers_of_session"], (session,))]
            newest = max(*(stream.opened for stream in streams), appended or 0.0)
            found[session] = Usage(streams, newest, readers)
    return found


def _streams(connection: sqlite3.Connection, *, ids: Sequence[StreamId]) -> dict[StreamId, StreamRecord]:
    found = (connection.execute(_SQL["stream_by_id"], (id_,)).fetchone() for id_ in ids)
    return {record.id: record for record in (rows.stream_record(row) for row in found if row is not None)}
