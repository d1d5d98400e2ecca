"""Stock TypeScript clients of 1.x, whose sessions a restart has lost: the store is in memory (H3, H6).

They take the session id that stands in the 404, so the next call works in the new session.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from tests.clients.node_clients import node_client
from tests.clients.stock_client import StockClient
from tests.support.processes.cluster import cluster

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("packages")]


async def where(client: StockClient) -> tuple[str, int]:
    session, pid = (await client.result("where")).split()
    return session, int(pid)


@pytest.mark.parametrize("script", [pytest.param("ts1_20.mjs", marks=pytest.mark.long), "ts1.mjs"])
async def test_clients_go_on_in_a_new_session_after_a_restart(script: str) -> None:
    """Without any setting: one call meets the 404, the next one works, each client in a session of its own."""
    async with cluster("memory:", "--eras", "session") as site, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(node_client(script, site.proxy.url)) for _ in range(3)]
        before = [await where(client) for client in clients]
        await site.crash()
        met = [await client.answer(await client.call("where")) for client in clients]
        assert all("-31003" in text or "Session not found" in text for text in met), met
        after = await asyncio.gather(*(where(client) for client in clients))
        assert len({session for session, _ in (*before, *after)}) == 6
        assert {pid for _, pid in after} == {site.server.pid}
