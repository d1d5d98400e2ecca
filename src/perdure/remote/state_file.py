"""Where a client's state is kept.

A store holds the state of one client at a time. `open` is called first and refuses a second holder; `save` replaces
what was there, whole or not at all; `close` lets go, and keeps what is there.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from pathlib import Path
from typing import Protocol

from perdure._files.locks import HAS_FLOCK, SoleHolder, flock, unlock
from perdure.errors import StateInUse, StateUnusable

# Windows has none of these, and would change line ends without its own.
_NOFOLLOW: int = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_NONBLOCK: int = getattr(os, "O_NONBLOCK", 0)


class StateStore(Protocol):
    """Keeps one client's state.

    1. `open` returns what was saved last, or None; it raises `StateInUse` while another client has it open.
    2. `save` is atomic: who opens later finds this value or the one before, never a part.
    3. `set_aside` keeps a value that could not be read out of the way, for people to look at.
    """

    def open(self) -> bytes | None: ...

    def save(self, data: bytes) -> None: ...

    def set_aside(self) -> str: ...

    def close(self) -> None: ...


class NoState:
    """Remembers nothing: the session ends with the process."""

    def open(self) -> bytes | None:
        return None

    def save(self, data: bytes) -> None:
        return None

    def set_aside(self) -> str:
        return ""

    def close(self) -> None:
        return None


class StateFile:
    """One file, readable by its owner alone, and beside it `PATH.lock`, held while a client uses it.

    The lock is the operating system's (`flock`), so that it is free as soon as its holder is dead. It stands on a file
    of its own because the state is replaced by renaming. What `save` has written survives the death of this process;
    a power cut may take the last moments with it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock: int | None = None
        self._sole = SoleHolder(os.fspath(self._beside("lock")))
        """In place of the lock, where the system has no `flock`."""

    def _beside(self, suffix: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{suffix}")

    def open(self) -> bytes | None:
        try:
            self._lock = self._take_lock()
            return self._read()
        except StateInUse:
            raise
        except (OSError, sqlite3.Error) as error:
            self.close()
            raise StateUnusable(f"the state {self.path} cannot be used: {error}") from error
        except StateUnusable:
            self.close()
            raise

    def save(self, data: bytes) -> None:
        made = self._beside("new")
        file = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _NOFOLLOW, 0o600)
        try:
            if hasattr(os, "fchmod"):  # not on Windows, whose folders say who may read
                os.fchmod(file, 0o600)
            left = memoryview(data)
            while left:
                left = left[os.write(file, left) :]
        finally:
            os.close(file)
        made.replace(self.path)

    def set_aside(self) -> str:
        aside = self._beside("unreadable")
        self.path.replace(aside)
        return str(aside)

    def close(self) -> None:
        self._sole.release()
        if self._lock is not None:
            unlock(self._lock)  # a fork of this process may hold the file open
            os.close(self._lock)
            self._lock = None

    def _take_lock(self) -> int | None:
        in_use = StateInUse(f"another client uses the state {self.path}")
        if not HAS_FLOCK:
            if not self._sole.take(patience=0):
                raise in_use
            return None
        lock = os.open(self._beside("lock"), os.O_RDWR | os.O_CREAT | _NOFOLLOW, 0o600)
        try:
            if flock(lock):
                return lock
        except OSError:
            os.close(lock)
            raise
        os.close(lock)
        raise in_use

    def _read(self) -> bytes | None:
        """What is there, if it is ours alone: it names a session, and who may write it could make us use another."""
        try:
            file = os.open(self.path, os.O_RDONLY | _NOFOLLOW | _NONBLOCK)
        except FileNotFoundError:
            return None
        with os.fdopen(file, "rb") as opened:
            about = os.fstat(opened.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise StateUnusable(f"the state {self.path} is not a plain file")
            if hasattr(os, "geteuid"):  # not on Windows, where the numbers mean nothing
                if about.st_uid != os.geteuid():
                    raise StateUnusable(f"the state {self.path} belongs to another user")
                if about.st_mode & 0o022:
                    raise StateUnusable(f"others may write the state {self.path}")
            return opened.read()


def state_store(state: str | os.PathLike[str] | StateStore | None) -> StateStore:
    """What a user gave: a path, a store of their own, or nothing."""
    if state is None:
        return NoState()
    return StateFile(state) if isinstance(state, str | os.PathLike) else state
