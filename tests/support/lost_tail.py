"""Stores that come back without what was written last: a promoted replica that lagged, a file put back from a copy."""

from __future__ import annotations

import contextlib
import copy
import sqlite3
from collections.abc import Callable
from pathlib import Path

from perdure.store import MemoryStore, SqliteStore
from perdure.store.base import Store

LOST = "the store (has lost|fails)"
"""The errors that a loss logs, and the outage around it; any other one fails the test."""


class Losing:
    """A real store, and the way to put it back to an earlier state while it is in use."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.path = folder / "log.db"
        self.store: Store = MemoryStore() if kind == "memory" else SqliteStore(str(self.path))

    def remember(self) -> Callable[[], None]:
        """Gives what loses all that is written from now on."""
        if isinstance(self.store, MemoryStore):
            return _remember_tables(self.store)
        return remember_file(self.path)


def remember_file(path: Path) -> Callable[[], None]:
    """The file is written over in place, as by another process: all nodes see that it has changed, and no more."""
    kept = sqlite3.connect(":memory:")
    with contextlib.closing(sqlite3.connect(path)) as live:
        live.backup(kept)

    def lose() -> None:
        with contextlib.closing(sqlite3.connect(path, timeout=30)) as live, contextlib.closing(kept):
            kept.backup(live)

    return lose


def _remember_tables(store: MemoryStore) -> Callable[[], None]:
    not_stored = ("_payloads", "_subscriptions", "_offset", "_writes")
    kept = copy.deepcopy({name: table for name, table in vars(store).items() if name not in not_stored})

    def lose() -> None:
        vars(store).update(kept)
        store._writes += 1_000_000  # its stamp was never seen

    return lose
