"""Stores that several nodes of a test share: a SQLite file, or with PERDURE_TEST_STORE=postgres a PostgreSQL schema."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg

from perdure.store import SqliteStore
from perdure.store.postgres.store import PostgresStore
from tests.support.stores.outages import Locked
from tests.support.stores.postgres import store_url

ON_POSTGRES = os.environ.get("PERDURE_TEST_STORE") == "postgres"

BUSY_SECONDS = 20.0
"""A busy machine is not a failing store."""

SHORT_GRACE = 0.6 if ON_POSTGRES else 0.1
"""A `session_grace` that tests wait for. A handshake has to fit into it, or it is given up (503), and on a busy machine
a server answers it in tenths of a second."""


@asynccontextmanager
async def held_up(path: Path) -> AsyncIterator[None]:
    """Lock the store against all writes, as a backup does; it can still be read."""
    if not ON_POSTGRES:
        async with Locked(path).begins():
            yield
        return
    url = shared_address(path)
    schema = url.rpartition("=")[2]
    other = await asyncpg.connect(url.partition("?")[0])
    try:
        async with other.transaction():
            tables = ", ".join(f"{schema}.{table}" for table in ("stream", "session", "mailbox", "mail", "reader"))
            await other.execute(f"LOCK TABLE {tables} IN EXCLUSIVE MODE")
            yield
    finally:
        await other.close()


def shared_address(path: Path | str) -> str:
    """The address of the store that a path stands for."""
    if not ON_POSTGRES:
        return f"sqlite:{path}"
    return store_url(f"t_{hashlib.sha256(str(path).encode()).hexdigest()[:20]}")


if TYPE_CHECKING or not ON_POSTGRES:

    class SharedStore(SqliteStore):
        """The store that a path stands for, opened once more."""

        def __init__(self, path: Path | str, *, wall: Callable[[], float] = time.time) -> None:
            super().__init__(str(path), wall=wall)

else:

    class SharedStore(PostgresStore):
        """The store that a path stands for, opened once more."""

        def __init__(self, path: Path | str, *, wall: Callable[[], float] = time.time) -> None:
            # Several stand for processes, and die, in the one process of a test.
            super().__init__(shared_address(path), timeout=BUSY_SECONDS, wall=wall, process=lambda: None)
