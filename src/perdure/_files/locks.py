"""Locks files for as long as a process lives, also where Python has no `fcntl` (Windows).

With `flock` a file for each node says which processes live, so several may share a log. Without it SQLite's own locks
are there, which the system frees as well when a process dies, but nobody can ask them who lives: one process has a file
for itself, or nothing.
"""

from __future__ import annotations

import sqlite3

try:
    import fcntl
except ImportError:
    HAS_FLOCK = False
else:
    HAS_FLOCK = True

NO_FLOCK = "this system has no locks that tell which processes live (Python's fcntl)"
"""The reason for what does not work here, to be said wherever it is refused."""


def flock(file: int, *, shared: bool = False) -> bool:
    """Lock an open file, unless another process has it locked. Several may have it locked as shared."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(file: int) -> None:
    fcntl.flock(file, fcntl.LOCK_UN)


class SoleHolder:
    """Holds the lock of a path by an SQLite file of that name, in which nothing is ever written."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None

    def take(self, *, patience: float) -> bool:
        """Whether this object has it now. Waits for so many seconds for who had it before. Raises `sqlite3.Error`."""
        if self._connection is not None:
            return True
        connection = sqlite3.connect(self._path, timeout=patience, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            connection.close()
            if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
                return False
            raise
        self._connection = connection
        return True

    def release(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
