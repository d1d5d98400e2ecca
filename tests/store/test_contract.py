"""Both stores keep the promises of `perdure.store.interface`: the public suite, as anyone would run it on their own."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from perdure.store.interface import Store
from perdure.store.memory import MemoryStore
from perdure.store.sqlite import SqliteStore
from perdure.store.sqlite.file import Sync
from perdure.testing import check_store

pytestmark = pytest.mark.anyio


async def test_the_store_in_memory_keeps_the_promises() -> None:
    await check_store(lambda name: MemoryStore(), durable=False)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another program writes to the file, and does not come to an end."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield


@pytest.mark.parametrize("sync", ["normal", pytest.param("full", marks=pytest.mark.long)])
async def test_the_sqlite_store_keeps_the_promises(tmp_path: Path, sync: Sync) -> None:
    def make(name: str) -> Store:
        return SqliteStore(str(tmp_path / name), sync=sync)

    await check_store(make, hang=lambda name: locked(tmp_path / name), patience=60.0)
