"""Stock clients hear that a chain of resume tokens was revoked, and take no harm: they do not know the word (T10)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

import pytest

from tests.clients.node_clients import node_client
from tests.clients.python_clients import python_client
from tests.clients.stock_client import StockClient
from tests.support.clients.token_holder import Holder
from tests.support.servers.in_process import serve, until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio

Connect = Callable[[str], AbstractAsyncContextManager[StockClient]]

CLIENTS: dict[str, Connect] = {
    "python": python_client,
    "typescript-1": partial(node_client, "ts1.mjs"),
    "typescript-2": partial(node_client, "ts2.mjs"),
}


@pytest.mark.parametrize("name", CLIENTS)
async def test_a_stock_client_takes_no_harm_from_a_revocation(name: str, packages: None) -> None:
    async with serve(ToolServer().server) as site, CLIENTS[name](site.url) as client:
        await until(lambda: site.app.counters.standalone_readers)
        [session] = site.app.session_ids()
        holder = Holder(site)
        first = await holder.open(session)
        await holder.rotate(first)
        assert await holder.is_rejected("resume", first)
        assert await client.result("announce", n=1) == "announced 1"
        await client.until(lambda: len(client.notices) == 1)  # it came behind the other one, on the same stream
        assert client.errors == []
