"""Locks files for as long as a process lives (`flock`). Where Python has no `fcntl` (Windows), see `sole_holder`."""

import contextlib
import os
import weakref
from typing import Protocol

try:
    import fcntl
except ImportError:
    HAS_FLOCK = False
else:
    HAS_FLOCK = True

NO_FLOCK = "this system has no locks that tell which processes live (Python's fcntl)"
"""The reason for what does not work here, to be said wherever it is refused."""

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
    """A child that is forked shares its parent's locks. It lets go, or they would stay held when the parent dies."""
    _holders.add(holder)


def _let_go() -> None:
    for holder in list(_holders):
        holder.let_go()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_let_go)
