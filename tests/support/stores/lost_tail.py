"""Stores that come back without what was written last: a promoted replica that lagged, a file put back from a copy."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import sqlite3
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import asyncpg

from perdure.store import MemoryStore, open_store
from perdure.store.interface import Store
from perdure.store.postgres.address import parse_address
from tests.support.stores.postgres import connection, store_url
from tests.support.stores.shared_store import ON_POSTGRES, shared_address

LOST = "the store (has lost|fails)"
"""The errors that a loss logs, and the outage around it; any other one fails the test."""


class Losing:
    """A real store that can be put back to an earlier state while it is in use."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.path = folder / "log.db"
        urls = {"memory": "memory:", "sqlite": f"sqlite:{self.path}"}
        self.url = urls[kind] if kind in urls else store_url()
        self.store: Store = open_store(self.url, busy_timeout=20.0)

    def remember(self) -> Callable[[], None]:
        """Return the function that loses all that is written from now on. For PostgreSQL call it outside the event loop
        (see `remember`)."""
        if isinstance(self.store, MemoryStore):
            return _remember_tables(self.store)
        return remember_file(self.path) if self.url.startswith("sqlite:") else remember_schema(self.url)


def remember(path: Path) -> Callable[[], Awaitable[None]]:
    """Return the function that loses all that is written from now on to the store that a path stands for.

    The event loop continues meanwhile. Between the driver's two messages for a new statement the server keeps locks on
    that statement's tables: a wait for the tables would never end if it kept the driver from its second message.
    """
    if not ON_POSTGRES:
        lose_file = remember_file(path)

        async def lose() -> None:
            lose_file()

        return lose
    return partial(asyncio.to_thread, remember_schema(shared_address(path)))


def remember_schema(url: str) -> Callable[[], None]:
    """Return the function that puts the present rows of all tables back, in one transaction: the nodes are then
    connected to a server that lagged."""
    schema = parse_address(url).schema
    kept = f"{schema}_kept"
    with connection(url) as run:
        run(f"CREATE SCHEMA {kept}")
        # Those two are in parts, which are tables too.
        names = "SELECT tablename FROM pg_tables WHERE schemaname = $1 AND tablename NOT IN ('event', 'answer')"
        tables = [row[0] for row in run(names, schema)]
        for table in tables:
            run(f"CREATE TABLE {kept}.{table} AS TABLE {schema}.{table}")

    def lose() -> None:
        with connection(url) as run:
            while not _locked(run, [f"{schema}.{table}" for table in tables]):
                pass
            run("SET LOCAL session_replication_role = replica")  # nothing is counted again
            run(f"TRUNCATE {', '.join(f'{schema}.{table}' for table in tables)}")
            for table in tables:
                run(f"INSERT INTO {schema}.{table} OVERRIDING SYSTEM VALUE SELECT * FROM {kept}.{table}")
            run("COMMIT")
            run(f"DROP SCHEMA {kept} CASCADE")

    return lose


def _locked(run: Callable[..., list[object]], tables: list[str]) -> bool:
    """Begin a transaction that locks all tables, or none. A transaction that has the first table and waits for the
    second might wait for a commit that waits for the first."""
    run("BEGIN")
    try:
        run(f"LOCK TABLE {', '.join(tables)} NOWAIT")
    except asyncpg.LockNotAvailableError:
        run("ROLLBACK")
        return False
    return True


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
    not_stored = ("_payloads", "_subscriptions", "_views", "_offset", "_writes")
    kept = copy.deepcopy({name: table for name, table in vars(store).items() if name not in not_stored})

    def lose() -> None:
        vars(store).update(kept)
        store._writes += 1_000_000  # its stamp was never seen

    return lose
