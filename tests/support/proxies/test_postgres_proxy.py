"""The proxy between a store and its server does what tests rely on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import pytest

from tests.support.proxies.postgres_proxy import Direction, PostgresProxy, Role, When, postgres_proxy
from tests.support.stores.postgres import new_schema, server_url

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def table() -> AsyncIterator[tuple[asyncpg.Connection[asyncpg.Record], str]]:
    """A connection past the proxy, and a table."""
    name = f"public.{new_schema()}"
    direct = await asyncpg.connect(server_url().partition("?")[0])
    await direct.execute(f"CREATE TABLE {name} (number int)")
    try:
        yield direct, name
    finally:
        await direct.execute(f"DROP TABLE {name}")
        await direct.close()


async def through(proxy: PostgresProxy) -> asyncpg.Connection[asyncpg.Record]:
    return await asyncpg.connect(proxy.url(server_url()).partition("?")[0])


@pytest.mark.parametrize(("when", "done"), [(When.BEFORE, 1), (When.AFTER, 2)])
async def test_a_statement_is_lost_before_or_after_it_is_done(when: When, done: int) -> None:
    async with table() as (direct, name), postgres_proxy(server_url()) as proxy:
        connection = await through(proxy)
        await connection.fetch(f"INSERT INTO {name} VALUES ($1)", 1)
        cut = proxy.cut_at(Role.READER, 1, when)
        with pytest.raises((ConnectionError, asyncpg.PostgresConnectionError, asyncpg.InterfaceError)):
            await connection.fetch(f"INSERT INTO {name} VALUES ($1)", 2)
        await cut.passed()
        assert await direct.fetchval(f"SELECT count(*) FROM {name}") == done
        assert proxy.requests == [Role.NEW, Role.READER, Role.READER]


async def test_what_hangs_arrives_later_and_what_is_swallowed_never_does() -> None:
    async with table() as (direct, name), postgres_proxy(server_url()) as proxy:
        slow, lost = await through(proxy), await through(proxy)
        for connection in (slow, lost):
            assert await connection.fetchval("SELECT 1") == 1
        proxy.swallow(Direction.DOWN)
        with pytest.raises(TimeoutError):
            await lost.execute(f"INSERT INTO {name} VALUES (1)", timeout=0.2)
        proxy.heal()
        proxy.hang()
        insert = asyncio.create_task(slow.fetch(f"INSERT INTO {name} VALUES (2) RETURNING 1"))
        await asyncio.sleep(0.1)  # as far as it gets
        assert await direct.fetchval(f"SELECT number FROM {name}") == 1, "it arrived, and its answer did not"
        proxy.heal()
        assert len(await insert) == 1
        assert [row[0] for row in await direct.fetch(f"SELECT number FROM {name}")] == [1, 2]
        assert proxy.links() != []
        lost.terminate()
        await slow.close()
