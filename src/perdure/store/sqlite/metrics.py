"""Measures a SQLite file for the metrics, a little with each scrape.

SQLite knows the size of the file at once. Its events have to be counted, which takes seconds in a large file. So each
scrape counts a bounded number of them, and shows the sums of the last whole walk.
"""

import asyncio
import os
import sqlite3
import sys
from collections.abc import Sequence

from perdure.store.records import Survey
from perdure.store.sqlite import sql_files as _sql
from perdure.store.sqlite.file import pragma
from perdure.store.sqlite.reads import ReaderPool

_SQL = _sql.queries()

WALK = 50_000
"""Events that one scrape walks over: about 20 ms of a thread that reads. A million events take twenty scrapes, five
minutes with Prometheus's usual interval."""

_START, _END = (-1, 0), (sys.maxsize, sys.maxsize)
"""A stream's key and a number: before all events, and after them."""


class Metrics:
    """Counts what one file holds, for one process."""

    def __init__(self, path: str, readers: ReaderPool) -> None:
        self._log = f"{os.path.realpath(path)}-wal"
        self._readers = readers
        self._place: tuple[int, int] = _START
        self._sums: Sequence[int] = (0, 0, 0, 0)
        """Events, answers, and the bytes of each, up to that place."""
        self._counted: Sequence[int] = ()
        """The same of the last whole walk."""
        self._turn = asyncio.Lock()

    async def survey(self) -> Survey:
        async with self._turn:  # two scrapes at once would walk the same way twice
            files, sums, place = await self._readers.run(self._look)
            if place is None:
                self._place, self._sums, self._counted = _START, (0, 0, 0, 0), sums
            else:
                self._place, self._sums = place, sums
        kinds = ("event", "answer")
        kept, size = (dict(zip(kinds, part, strict=False)) for part in (self._counted[:2], self._counted[2:]))
        return Survey(files=files, kept=kept, kept_bytes=size)

    def _look(self, connection: sqlite3.Connection) -> tuple[dict[str, int], Sequence[int], tuple[int, int] | None]:
        """Return the sizes of the file, the sums after a part of the walk, and where that part ends."""
        page, free = pragma(connection, "page_size"), pragma(connection, "freelist_count")
        files = {
            "used": (pragma(connection, "page_count") - free) * page,
            "free": free * page,
            "log": os.path.getsize(self._log) if os.path.exists(self._log) else 0,
        }
        end = connection.execute(_SQL["walk_end"], (*self._place, WALK - 1)).fetchone()
        found = connection.execute(_SQL["walk"], (*self._place, *(end or _END))).fetchone()
        return files, [before + more for before, more in zip(self._sums, found, strict=True)], end
