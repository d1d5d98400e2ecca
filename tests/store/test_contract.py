"""Both stores keep the promises of `perdure.store.base`: the public suite, as anyone would run it on their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.store.base import Store
from perdure.store.memory import MemoryStore
from perdure.store.sqlite import SqliteStore
from perdure.testing import check_store

pytestmark = pytest.mark.anyio


async def test_the_store_in_memory_keeps_the_promises() -> None:
    await check_store(lambda name: MemoryStore(), durable=False)


async def test_the_sqlite_store_keeps_the_promises(tmp_path: Path) -> None:
    await check_store(lambda name: SqliteStore(str(tmp_path / name)))


async def test_the_sqlite_store_with_full_sync_keeps_the_promises(tmp_path: Path) -> None:
    def make(name: str) -> Store:
        return SqliteStore(str(tmp_path / name), sync="full")

    await check_store(make)
