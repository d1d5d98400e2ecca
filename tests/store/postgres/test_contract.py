"""The PostgreSQL store keeps the promises of `perdure.store.interface`, on every version of the server that is here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from perdure.store.interface import Store
from perdure.store.postgres.store import PostgresStore
from perdure.testing import check_store
from tests.store.machine import store_machine
from tests.support.stores.postgres import connection, new_schema, programs, store_url

FOUND: list[int | None] = [*programs()]
*OLDER, NEWEST = FOUND or [None]
VERSIONS = [*(pytest.param(version, marks=pytest.mark.long) for version in OLDER), NEWEST]


class Stores:
    """Stores by name, each in a schema of its own."""

    def __init__(self, version: int | None) -> None:
        self._version = version
        self._schemas: dict[str, str] = {}

    def make(self, name: str) -> Store:
        schema = self._schemas.setdefault(name, new_schema())
        return PostgresStore(store_url(schema, self._version), timeout=5.0)

    @contextmanager
    def hang(self, name: str) -> Iterator[None]:
        """Another program has locked the tables, and does not come to an end."""
        schema = self._schemas[name]
        with connection(store_url(schema, self._version)) as run:
            run("BEGIN")
            run(f"LOCK TABLE {schema}.stream IN ACCESS EXCLUSIVE MODE")
            yield
            run("ROLLBACK")


@pytest.mark.anyio
@pytest.mark.timeout(300)  # a schema for each of a hundred checks takes 90 s where ten processes share a core
@pytest.mark.parametrize("version", VERSIONS)
async def test_the_postgres_store_keeps_the_promises(version: int | None) -> None:
    stores = Stores(version)
    await check_store(stores.make, hang=stores.hang, patience=60.0, at_once=4)


@pytest.mark.parametrize("version", VERSIONS)
def test_histories_on_postgres_show_what_the_model_shows(version: int | None) -> None:
    machine = store_machine(Stores(version).make)
    run_state_machine_as_test(machine, settings=settings(max_examples=5, stateful_step_count=25))
