"""What the client's tests share: a server of the test's own, and a proxy before it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import mcp_types as types
import pytest

from tests.support.proxies.cutting_proxy import CuttingProxy, cutting_proxy
from tests.support.servers.in_process import Site, serve
from tests.support.servers.tool_server import ToolServer


@pytest.fixture
def shop() -> ToolServer:
    return ToolServer()


@pytest.fixture
async def site(shop: ToolServer) -> AsyncIterator[Site]:
    async with serve(shop.server, retry=0.02) as site:
        yield site


@pytest.fixture
async def proxy(site: Site) -> AsyncIterator[CuttingProxy]:
    async with cutting_proxy(site.port) as proxy:
        yield proxy


def text(result: types.CallToolResult) -> str:
    return "".join(part.text for part in result.content if isinstance(part, types.TextContent))


class Progress:
    """A progress callback that remembers."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    async def __call__(self, progress: float, total: float | None, message: str | None) -> None:
        self.seen.append(progress)

    def has(self, n: int) -> bool:
        return self.seen == numbers(n)


class Inbox:
    """A message handler that remembers."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.notices: list[str] = []

    async def __call__(self, message: types.ServerNotification | Exception) -> None:
        if isinstance(message, Exception):
            self.errors.append(message)
        elif isinstance(message, types.ResourceUpdatedNotification):
            self.notices.append(str(message.params.uri))


def numbers(n: int) -> list[float]:
    return [float(number) for number in range(1, n + 1)]
