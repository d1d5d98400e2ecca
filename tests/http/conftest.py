from collections.abc import AsyncIterator

import pytest

from tests.support.site import Site, serve
from tests.support.wire import Peer
from tests.support.workshop import Workshop


@pytest.fixture
def shop() -> Workshop:
    return Workshop()


@pytest.fixture
async def site(shop: Workshop) -> AsyncIterator[Site]:
    """The workshop with every setting at its default, on a store in memory."""
    async with serve(shop.server) as site:
        yield site


@pytest.fixture
async def peer(site: Site) -> Peer:
    """A client of the newest revision with sessions."""
    return await site.join()
