"""What a user's own block raises comes out as it was raised, and leaving never hangs."""

from __future__ import annotations

import asyncio

import pytest

import perdure
from tests.client.conftest import text
from tests.support.proxies.cutting_proxy import CuttingProxy
from tests.support.servers.in_process import until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio


async def test_an_error_in_the_block_is_not_wrapped(proxy: CuttingProxy) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with perdure.connect(proxy.url):
            raise KeyError("mine")


async def test_a_group_of_the_users_own_stays_a_group(proxy: CuttingProxy) -> None:
    mine = ExceptionGroup("mine", [KeyError("one")])
    with pytest.raises(ExceptionGroup) as raised:
        async with perdure.connect(proxy.url):
            raise mine
    assert raised.value is mine


async def test_a_cancelled_block_is_left_at_once(shop: ToolServer, proxy: CuttingProxy) -> None:
    async def block() -> None:
        async with perdure.connect(proxy.url) as client:
            await client.call_tool("wait", {"gate": "g"})

    task = asyncio.create_task(block())
    await until(lambda: "waiting at g" in shop.seen)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_timeout_around_a_call_leaves_the_client_usable(shop: ToolServer, proxy: CuttingProxy) -> None:
    """B11."""
    async with perdure.connect(proxy.url) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.call_tool("wait", {"gate": "g"})
        assert text(await client.call_tool("count", {"n": 1})) == "counted to 1"


async def test_without_state_the_session_ends_with_the_block(proxy: CuttingProxy) -> None:
    """B6."""
    async with perdure.connect(proxy.url):
        assert proxy.requests["DELETE"] == 0
    assert proxy.requests["DELETE"] == 1
