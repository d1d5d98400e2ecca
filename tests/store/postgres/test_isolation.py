"""A role whose transactions are stricter than the store's: the store chooses its own level, or refuses."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator

import asyncpg
import pytest

from perdure.errors import StoreError, StoreUnavailable
from perdure.store.postgres.address import parse_address
from perdure.store.postgres.store import PostgresStore
from perdure.store.steps import PutSession
from perdure.testing._values import NODE, a_session
from tests.support.proxies.postgres_proxy import postgres_proxy
from tests.support.servers.in_process import until
from tests.support.stores.postgres import server_url, store_url
from tests.support.stores.postgres_roles import Operator, role_with

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["serializable", pytest.param("repeatable read", marks=pytest.mark.long)])
async def strict(request: pytest.FixtureRequest, operator: Operator) -> AsyncIterator[str]:
    """The address of a store for a role with this isolation."""
    async with role_with(operator, default_transaction_isolation=request.param) as url:
        yield url


async def test_a_commit_that_waited_while_its_node_was_buried_is_refused(strict: str, operator: Operator) -> None:
    """Promise 11: it reads after it has waited, and not with its earlier view."""
    schema = parse_address(strict).schema
    waits = "SELECT 1 FROM pg_locks WHERE locktype = 'transactionid' AND NOT granted AND transactionid::text = $1"
    async with PostgresStore(strict, timeout=20.0) as store:
        await store.join(NODE)
        looker = await asyncpg.connect(server_url().partition("?")[0])
        async with operator.transaction():
            writer = await operator.fetchval(f"SELECT writer FROM {schema}.node")
            await operator.execute(f"INSERT INTO {schema}.turn (writer) VALUES ($1)", writer)
            own = await operator.fetchval("SELECT pg_current_xact_id()::text")
            commit = asyncio.create_task(store.commit([PutSession(record=a_session())]))
            await until(lambda: looker.fetchval(waits, own))
            await operator.execute(f"SELECT {schema}.note_buried_1($1)", NODE)
            await operator.execute(f"DELETE FROM {schema}.node")
        with pytest.raises(StoreUnavailable, match="have buried this one"):
            await commit
        await looker.close()
        assert list(await store.newest(limit=9)) == []


async def test_processes_that_start_at_once_make_the_store_once(strict: str) -> None:
    stores = [PostgresStore(strict, timeout=20.0) for _ in range(4)]
    await asyncio.gather(*(store.open() for store in stores))
    for store in stores:
        await store.aclose()


async def test_behind_a_pooler_it_is_refused_with_what_to_do(strict: str) -> None:
    """A pooler takes no settings, so this process cannot choose."""
    async with postgres_proxy(strict) as way:
        way.is_pooler = True
        with pytest.raises(StoreError, match=r"ALTER ROLE … SET default_transaction_isolation = 'read committed'"):
            await PostgresStore(way.url(strict), timeout=20.0).open()


async def test_behind_a_pooler_the_default_is_taken() -> None:
    url = store_url()
    async with postgres_proxy(url) as way:
        way.is_pooler = True
        async with PostgresStore(way.url(url), timeout=20.0) as store:
            assert list(await store.commit([PutSession(record=a_session(secrets.token_hex(4)))])) == [None]
