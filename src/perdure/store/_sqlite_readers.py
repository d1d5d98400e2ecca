"""Reading connections, in threads of their own: a long replay keeps neither the event loop nor the writer."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from perdure.errors import StoreUnavailable
from perdure.store._sqlite_file import named, open_reader

T = TypeVar("T")

THREADS = 2
"""One long replay does not keep a short read waiting; more would only share the same interpreter."""


class ReaderPool:
    def __init__(self, path: str, *, busy_timeout: float) -> None:
        self._path = path
        self._busy_timeout = busy_timeout
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
        if self._threads is None:
            raise StoreUnavailable(f"the SQLite file {self._path} is closed")
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, work)

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with named(self._path, "read"):
            connection = self._idle.pop() if self._idle else open_reader(self._path, busy_timeout=self._busy_timeout)
            try:
                return work(connection)
            finally:
                self._idle.append(connection)
