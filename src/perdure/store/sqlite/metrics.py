"""Measures a SQLite file for the metrics, a little with each scrape.

SQLite knows the size of the file at once. Its events have to be counted, which takes seconds in a large file. So each
scrape counts a bounded number of them, and shows the sums of the last whole walk.
"""

import asyncio
import os
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass

from perdure.store.records import Survey
from perdure.store.sqlite import sql_files as _sql
from perdure.store.sqlite.file import pragma
from perdure.store.sqlite.reads import ReaderPool

_SQL = _sql.queries()

WALK = 50_000
"""Events that one scrape walks over: about 20 ms of a thread that reads. A million events take twenty scrapes, five
minutes with Prometheus's usual interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Walk:
    """How far a walk over all events has come, and what it has counted."""

    stream: int = -1
    seq: int = 0
    events: int = 0
    answers: int = 0
    event_bytes: int = 0
    answer_bytes: int = 0


class Metrics:
    """Counts what one file holds, for one process."""

    def __init__(self, path: str, readers: ReaderPool, *, overhead: int) -> None:
        self._path = path
        self._readers = readers
        self._overhead = overhead
        self._walk = Walk()
        self._counted: Walk | None = None
        self._turn = asyncio.Lock()

    async def survey(self) -> Survey:
        async with self._turn:  # two scrapes at once would walk the same way twice
            files, walk, is_whole = await self._readers.run(self._look)
            self._walk = Walk() if is_whole else walk
            self._counted = walk if is_whole else self._counted
        found = self._counted
        kept = {} if found is None else {"event": found.events, "answer": found.answers}
        size = {} if found is None else {"event": found.event_bytes, "answer": found.answer_bytes}
        return Survey(files=files, kept=kept, kept_bytes=size)

    def _look(self, connection: sqlite3.Connection) -> tuple[Mapping[str, int], Walk, bool]:
        page, free = pragma(connection, "page_size"), pragma(connection, "freelist_count")
        log = f"{os.path.realpath(self._path)}-wal"
        files = {
            "used": (pragma(connection, "page_count") - free) * page,
            "free": free * page,
            "log": os.path.getsize(log) if os.path.exists(log) else 0,
        }
        begin = self._walk
        end = connection.execute(_SQL["walk_end"], (begin.stream, begin.seq, WALK - 1)).fetchone()
        values = {"stream": begin.stream, "seq": begin.seq, "overhead": self._overhead}
        last_stream, last_seq = (None, None) if end is None else end
        row = connection.execute(_SQL["walk"], values | {"last_stream": last_stream, "last_seq": last_seq}).fetchone()
        walk = Walk(
            stream=begin.stream if end is None else end[0],
            seq=begin.seq if end is None else end[1],
            events=begin.events + row[0],
            answers=begin.answers + row[1],
            event_bytes=begin.event_bytes + row[2],
            answer_bytes=begin.answer_bytes + row[3],
        )
        return files, walk, end is None
