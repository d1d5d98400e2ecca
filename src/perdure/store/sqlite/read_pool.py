"""Reading connections, in threads of their own: a long replay keeps neither the event loop nor the writer."""

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from perdure.errors import StoreUnavailable
from perdure.store.sqlite.file import NAMED, STUCK, FileIdentity, failure, open_reader, refuse_newer
from perdure.store.time_limit import TimeLimit

T = TypeVar("T")

THREADS = 2
"""One long replay does not keep a short read waiting; more would only share the same interpreter."""


class ReaderPool:
    """`check` raises once the file is not to be read any more; `identity` tells it from another one of its name."""

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
        """Wait for what is being read, then close."""
        if self._threads is not None:
            self._threads.shutdown(wait=True)
            self._threads = None
        while self._idle:
            self._idle.pop().close()

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Read in one of the threads. The time in front of them does not count: thousands may come at once."""
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
