from collections.abc import AsyncIterator

import pytest

from tests.http.only_in_process import ONLY_IN_PROCESS
from tests.support.clients.wire_client import Peer
from tests.support.servers.behind_gateway import IS_EVERYWHERE
from tests.support.servers.in_process import Site, serve
from tests.support.servers.tool_server import ToolServer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items if IS_EVERYWHERE else ():
        name = item.originalname if isinstance(item, pytest.Function) else item.name
        if (why := ONLY_IN_PROCESS.get(name)) is not None:
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture
def shop() -> ToolServer:
    return ToolServer()


@pytest.fixture
async def site(shop: ToolServer) -> AsyncIterator[Site]:
    """The tool server with every setting at its default, on a store in memory."""
    async with serve(shop.server) as site:
        yield site


@pytest.fixture
async def peer(site: Site) -> Peer:
    """A client of the newest revision with sessions."""
    return await site.join()
