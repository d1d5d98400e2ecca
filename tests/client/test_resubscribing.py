"""`client.listen` at 2026-07-28 comes back by itself after a cut, and notifies of what may have changed meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import mcp_types as types
import pytest
from mcp.client.subscriptions import SubscriptionLost

import perdure
from tests.client.sdk_task_server import SdkTaskServer
from tests.client.test_tasks import BRIEF, EAGER, behind_proxy
from tests.support.clients.modern_requests import MODERN
from tests.support.proxies.cutting_proxy import CuttingProxy, cutting_proxy
from tests.support.servers.in_process import under_uvicorn, until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio


class Listener:
    """A program that listens to the tools and two resources, and remembers its notifications."""

    def __init__(self, client: perdure.Client) -> None:
        self.heard: list[str] = []
        self.ended: BaseException | None = None
        self.is_listening = asyncio.Event()
        self._client = client

    async def run(self) -> None:
        uris = ["note://1", "note://2"]
        try:
            async with self._client.listen(tools_list_changed=True, resource_subscriptions=uris) as subscription:
                self.is_listening.set()
                async for event in subscription:
                    self.heard.append(getattr(event, "uri", "tools"))
        except SubscriptionLost as lost:
            self.ended = lost


@asynccontextmanager
async def listening(proxy: CuttingProxy, patience: perdure.Patience) -> AsyncIterator[Listener]:
    async with perdure.connect(proxy.url, mode=MODERN, patience=patience) as client:
        listener = Listener(client)
        task = asyncio.create_task(listener.run())
        await listener.is_listening.wait()
        yield listener
        task.cancel()


async def test_after_a_cut_everything_that_is_listened_to_is_told_once() -> None:
    """The server has no memory of the subscription, so the program fetches all of it again."""
    task_server = SdkTaskServer()
    async with behind_proxy(task_server) as proxy, listening(proxy, EAGER) as listener:
        task_server.change("resource", "note://1")
        await until(lambda: listener.heard == ["note://1"])
        proxy.cut()
        task_server.change("tools")
        await until(lambda: len(listener.heard) == 4)
        assert listener.heard == ["note://1", "tools", "note://1", "note://2"]
        task_server.change("resource", "note://2")
        await until(lambda: listener.heard[4:] == ["note://2"])
    assert len(set(task_server.ids("subscriptions/listen"))) == 2


async def test_a_server_that_stops_in_good_order_is_listened_to_again() -> None:
    task_server = SdkTaskServer()
    async with behind_proxy(task_server) as proxy, listening(proxy, EAGER) as listener:
        task_server.stop_listeners()
        await until(lambda: listener.heard == ["tools", "note://1", "note://2"])
        task_server.change("tools")
        await until(lambda: listener.heard[3:] == ["tools"])
        assert listener.ended is None


async def test_a_server_that_does_not_come_back_ends_the_subscription_and_not_the_client() -> None:
    task_server = SdkTaskServer()
    async with behind_proxy(task_server) as proxy, listening(proxy, BRIEF) as listener:
        proxy.refuse()
        proxy.cut()
        await until(lambda: listener.ended is not None)
        proxy.accept()


async def test_a_plain_sdk_servers_subscriptions_come_back_too() -> None:
    """The message handler hears of it as well."""
    shop, told = ToolServer(), list[object]()

    async def handle(message: types.ServerNotification | Exception) -> None:
        told.append(message)

    async with (
        under_uvicorn(shop.server.streamable_http_app(), complaint=".*") as port,
        cutting_proxy(port) as proxy,
        perdure.connect(proxy.url, mode=MODERN, patience=EAGER, message_handler=handle) as client,
        client.listen(tools_list_changed=True) as subscription,
    ):
        proxy.cut()
        event = await anext(aiter(subscription))
        assert type(event).__name__ == "ToolsListChanged"
        await until(lambda: [type(message) for message in told] == [types.ToolListChangedNotification])
