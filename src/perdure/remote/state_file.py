"""Stores keep a client's state.

A store holds the state of one client at a time. `open` is called first and refuses a second holder; `save` replaces
what was there, whole or not at all; `close` lets go, and keeps what is there.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Protocol

from perdure._files import private
from perdure._files.locks import HAS_FLOCK, let_go_in_child, lock_file, release
from perdure._files.sole_holder import SoleHolder
from perdure.errors import StateInUse, StateUnusable


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
            self._take_lock()
            return private.read(self.path, limit=None, may_be_shared=True)
        except private.Untrusted as reason:
            self.close()
            raise StateUnusable(f"the state {self.path} cannot be used: {reason}") from reason
        except (OSError, sqlite3.Error) as error:
            self.close()
            raise StateUnusable(f"the state {self.path} cannot be used: {error}") from error

    def save(self, data: bytes) -> None:
        private.replace(self.path, data)

    def set_aside(self) -> str:
        aside = self._beside("unreadable")
        self.path.replace(aside)
        return str(aside)

    def close(self) -> None:
        self._sole.release()
        if self._lock is not None:
            release(self._lock)
            self._lock = None

    def let_go(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take_lock(self) -> None:
        if HAS_FLOCK:
            self._lock = lock_file(self._beside("lock"))
            is_taken = self._lock is not None
        else:
            is_taken = self._sole.take(patience=0)
        if not is_taken:
            raise StateInUse(f"another client uses the state {self.path}")
        let_go_in_child(self)


def state_store(state: str | os.PathLike[str] | StateStore | None) -> StateStore:
    """What a user gave: a path, a store of their own, or nothing."""
    if state is None:
        return NoState()
    return StateFile(state) if isinstance(state, str | os.PathLike) else state
