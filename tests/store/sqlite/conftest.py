"""A SQLite store that has a session, and that `NODE` has joined."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.store.sqlite import SqliteStore
from perdure.store.steps import PutSession
from perdure.testing._values import NODE, a_session, put


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqliteStore]:
    async with SqliteStore(str(path)) as store:
        await put(store, PutSession(record=a_session()))
        await store.join(NODE)
        yield store
