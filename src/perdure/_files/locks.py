"""Locks files for as long as a process lives (`flock`), or, where Python has no `fcntl` (Windows), by SQLite's locks.

With `flock` a file for each node says which processes live, so several may share a log. SQLite's own locks are freed as
well when a process dies, but no process can ask them which others live: one process has a file for itself, or nothing.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import sqlite3

try:
    import fcntl
except ImportError:
    HAS_FLOCK = False
else:
    HAS_FLOCK = True

NO_FLOCK = "this system has no locks that tell which processes live (Python's fcntl)"
"""The reason in every refusal of what needs these locks."""

# Windows has none of these, and would change line ends without its own.
NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
NO_WAIT: int = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
"""A pipe of that name must not make us wait."""


def flock(file: int, *, shared: bool = False) -> bool:
    """Lock an open file, unless another process has it locked. Several may have it locked as shared."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(file: int) -> None:
    fcntl.flock(file, fcntl.LOCK_UN)


def release(file: int) -> None:
    """Free a lock and close its file. A child that was forked in this moment may have the file open as well, so closing
    it would not be enough."""
    with contextlib.suppress(OSError):
        unlock(file)
    os.close(file)


def open_file(path: str | os.PathLike[str], *, dir_fd: int | None = None) -> int:
    """Open the file of this name, made if need be."""
    return os.open(path, os.O_RDWR | os.O_CREAT | NO_FOLLOW | NO_WAIT, 0o600, dir_fd=dir_fd)


def lock_file(path: str | os.PathLike[str], *, dir_fd: int | None = None, file: int | None = None) -> int | None:
    """Lock the file of this name, which is opened if it is not (`file`). None if another process has it. Raises
    `OSError`.

    A process removes such a file only while it holds the lock, so a lock counts only if the file is still the one of
    that name.
    """
    file = open_file(path, dir_fd=dir_fd) if file is None else file
    with contextlib.ExitStack() as closing:
        closing.callback(os.close, file)
        if flock(file) and is_still(path, file, dir_fd=dir_fd):
            closing.pop_all()
            return file
    return None


def is_still(path: str | os.PathLike[str], file: int, *, dir_fd: int | None = None) -> bool:
    """Whether an open file is the one of this name."""
    try:
        return os.path.samestat(os.stat(path, dir_fd=dir_fd, follow_symlinks=False), os.fstat(file))
    except OSError:
        return False


class Holder(Protocol):
    """Keeps locked files open."""

    def let_go(self) -> None:
        """Close the files without freeing the locks, which another process has as well."""


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()


def let_go_in_child(holder: Holder) -> None:
    """Close the files in a forked child, which shares its parent's locks: they would stay held when the parent dies."""
    _holders.add(holder)


def _let_go() -> None:
    for holder in list(_holders):
        holder.let_go()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_let_go)


class SoleHolder:
    """Holds the lock of a path by an SQLite file of that name, in which nothing is ever written."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None

    def take(self, *, patience: float) -> bool:
        """Whether this object has it now. Waits so many seconds for the holder before it. Raises `sqlite3.Error`."""
        import sqlite3  # not for the bridge, which starts often and never needs it

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
