"""Nodes that are asked whether they hold anything, and do not answer (promise 15)."""

from __future__ import annotations

import pytest

from perdure.store.postgres.address import parse_address
from perdure.store.postgres.store import PostgresStore
from perdure.testing._values import NODE, OTHER
from tests.support.proxies.postgres_proxy import PostgresProxy, postgres_proxy
from tests.support.servers.in_process import until
from tests.support.stores.postgres import connection, store_url

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("fall_silent", [PostgresProxy.hang, PostgresProxy.refuse])
async def test_a_holder_that_falls_silent_is_named_until_it_answers(fall_silent: object) -> None:
    """It holds because it cannot write, so it cannot answer either: it stands still with its lock, or has lost it."""
    assert callable(fall_silent)
    url = store_url()
    schema = parse_address(url).schema
    held = f"SELECT {schema}.is_held_1(lock) AS held FROM {schema}.node WHERE id = $1"
    async with (
        postgres_proxy(url) as proxy,
        PostgresStore(url, timeout=20.0) as here,
        PostgresStore(proxy.url(url), timeout=20.0) as there,
    ):
        await here.join(NODE)
        await there.join(OTHER)
        mine = here.liveness(NODE, lease=1_000.0, monotonic=lambda: 0.0)
        theirs = there.liveness(OTHER, lease=1_000.0, monotonic=lambda: 0.0)
        assert list(await mine.holders()) == []
        theirs.hold(True)
        assert list(await mine.holders()) == [OTHER]
        fall_silent(proxy)
        with connection(url) as run:
            await until(lambda: run(held, OTHER)[0]["held"] is (fall_silent is PostgresProxy.hang))
        assert list(await mine.holders()) == [OTHER]
        proxy.heal()
        theirs.hold(False)

        async def has_answered() -> bool:
            return list(await mine.holders()) == []

        await until(has_answered)
