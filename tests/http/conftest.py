from collections.abc import AsyncIterator

import pytest

from tests.support.clients.wire_client import Peer
from tests.support.servers.in_process import Site, serve
from tests.support.servers.tool_server import ToolServer


@pytest.fixture
def shop() -> ToolServer:
    return ToolServer()


@pytest.fixture
async def site(shop: ToolServer) -> AsyncIterator[Site]:
    """The workshop with every setting at its default, on a store in memory."""
    async with serve(shop.server) as site:
        yield site


@pytest.fixture
async def peer(site: Site) -> Peer:
    """A client of the newest revision with sessions."""
    return await site.join()
