"""Gives the free pages of a SQLite file back to the file system.

SQLite uses the pages of what was forgotten again, so a file that has grown once keeps its size and does not grow
further until they are used up. There are two ways to make it smaller:

- SQLite writes all of the file again. Servers may read meanwhile; their commits wait until it is done.
- A file that was prepared for it (`incremental`) gets smaller in short steps, between which servers commit. SQLite has
  to know for each page who points to it, which costs a little with each page that is written for the first time. So
  files are not made in this way by themselves.
"""

import contextlib
import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from functools import partial
from urllib.parse import quote

from perdure.errors import Misuse, StoreError
from perdure.store.sqlite.file import OPERATOR_PATIENCE, named, patiently, pragma
from perdure.store.upkeep import Vacuumed

SPEED = 50 << 20
"""Bytes in use that are written again in a second, on a slow machine: a busy one was measured with 75 MiB."""

SHORT = 0.5
"""Seconds for which the commits of servers may wait without being asked for: half of the default of `store_timeout`."""

STEP = 250
"""Pages given back in one transaction: half a mebibyte, a few milliseconds' worth."""

PAUSE = 0.005
"""Seconds between two such transactions, in which servers commit."""

MARGIN = 16 << 20
"""Bytes that stay free on the disk for the servers."""

TRIES = 100
"""Times that the log is tried to be moved into the file: readers in the way put it off, for a moment each."""

_STEP = f"BEGIN IMMEDIATE; PRAGMA incremental_vacuum({STEP}); COMMIT"

_INCREMENTAL = 2
"""SQLite's number for a file that can be made smaller in steps."""


def vacuum(path: str, *, living: int, incremental: bool, may_wait: bool, on_step: Callable[[int], None]) -> Vacuumed:
    """Make the file at a path smaller. `living`: servers that use it; `may_wait`: their commits may wait for long.
    `incremental`: prepare the file for steps. `on_step` is called with the bytes that are still to be given back."""
    with (
        named(path, "made smaller"),
        contextlib.closing(
            # Not `mode=ro`: that leaves the log's files behind if no other program has the file open.
            sqlite3.connect(f"file:{quote(path)}?mode=rw", uri=True, isolation_level=None, timeout=OPERATOR_PATIENCE)
        ) as file,
    ):
        page = pragma(file, "page_size")
        # What was not moved from the log yet is a part of it.
        before = max(os.path.getsize(path), pragma(file, "page_count") * page)
        free = pragma(file, "freelist_count") * page
        used = pragma(file, "page_count") * page - free
        is_prepared = pragma(file, "auto_vacuum") == _INCREMENTAL
        waited = 0.0
        if is_prepared:
            _give_back(file, on_step=lambda pages: on_step(pages * page))
        elif free or incremental:
            _refuse_long(path, used, living=living, may_wait=may_wait)
            _refuse_full(path, used)
            if incremental:
                file.execute(f"PRAGMA auto_vacuum = {_INCREMENTAL}")
            began = time.monotonic()
            patiently(partial(file.execute, "VACUUM"), patience=OPERATOR_PATIENCE)
            waited = time.monotonic() - began
        _move_log(file)
        after = os.path.getsize(path)
        return Vacuumed(before=before, after=after, free=free, waited=waited, is_prepared=is_prepared or incremental)


def _refuse_long(path: str, used: int, *, living: int, may_wait: bool) -> None:
    seconds = used / SPEED
    if living and seconds > SHORT and not may_wait:
        raise Misuse(
            f"{used:,} bytes of {path} are in use; writing them again may take {seconds:.0f} s, in which the commits of"
            f" its {living} servers wait and they go on from memory; stop them first, or say --while-serving"
        )


def _refuse_full(path: str, used: int) -> None:
    """SQLite writes what is in use twice before it gives anything back."""
    folder = os.path.dirname(path)
    room = shutil.disk_usage(folder).free
    if room < 2 * used + MARGIN:
        raise StoreError(
            f"making {path} smaller takes {2 * used:,} bytes for the time being, and the disk has {room:,} left; free"
            " some first"
        )


def _give_back(file: sqlite3.Connection, *, on_step: Callable[[int], None]) -> None:
    while left := pragma(file, "freelist_count"):
        on_step(left)
        # As a script, because Python ends any other statement that has no columns after its first step, and each step
        # is one page.
        patiently(partial(file.executescript, _STEP), patience=OPERATOR_PATIENCE)
        file.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        time.sleep(PAUSE)
    on_step(0)


def _move_log(file: sqlite3.Connection) -> None:
    """The file is cut when the log was moved into it."""
    for _ in range(TRIES):
        (is_busy, _, _) = file.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if not is_busy:
            return
        time.sleep(PAUSE)
