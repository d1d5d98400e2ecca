"""Locks a path for one process, also where Python has no `fcntl` (Windows).

With `flock` (`locks`) a file for each node says which processes live, so several may share a log. Without it SQLite's
own locks are there. The system frees them as well when a process dies, but no process can ask them which others live:
one process has a file for itself, or nothing.
"""

import sqlite3


class SoleHolder:
    """Holds the lock of a path by an SQLite file of that name, in which nothing is ever written."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None

    def take(self, *, patience: float) -> bool:
        """Whether this object has it now. Waits so many seconds for the holder before it. Raises `sqlite3.Error`."""
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
