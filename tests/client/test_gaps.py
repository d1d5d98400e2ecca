"""Events that the server no longer has are reported (promise 4 as a client sees it)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import perdure
from tests.client.conftest import Inbox, Progress, numbers, text
from tests.support.proxies.cutting_proxy import cutting_proxy
from tests.support.servers.in_process import serve, until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio


async def missed_events(shop: ToolServer, **options: Any) -> list[float]:
    """The progress of a call that runs on while its client is away, in a log that keeps ten events."""
    progress = Progress()
    async with (
        serve(shop.server, retry=0.02, max_stream_events=10) as site,
        cutting_proxy(site.port) as proxy,
        perdure.connect(proxy.url, **options) as client,
    ):
        call = asyncio.create_task(client.call_tool("count", {"n": 40, "gate": "g", "pauses": [2]}, None, progress))
        await until(lambda: progress.seen == numbers(2))
        proxy.refuse()
        proxy.cut()
        shop.open("g/2")
        await until(lambda: "counted 40" in shop.seen)
        proxy.accept()
        assert text(await call) == "counted to 40"
        if (inbox := options.get("message_handler")) is not None:
            await until(lambda: inbox.errors)
    return progress.seen


async def test_on_gap_is_told_what_is_missing_and_the_call_has_its_result(shop: ToolServer) -> None:
    gaps: list[perdure.Gap] = []
    assert await missed_events(shop, on_gap=gaps.append) == [*numbers(2), *range(31, 41)]
    assert [(gap.tool, gap.first, gap.last, gap.reason) for gap in gaps] == [("count", 3, 30, "trimmed")]


async def test_without_on_gap_the_message_handler_gets_the_error(shop: ToolServer) -> None:
    inbox = Inbox()
    await missed_events(shop, message_handler=inbox)
    (lost,) = inbox.errors
    assert isinstance(lost, perdure.EventsLost)
    assert (lost.gap.first, lost.gap.last) == (3, 30)


async def test_an_on_gap_that_raises_costs_nothing_but_its_own_error(shop: ToolServer) -> None:
    async def fails(gap: perdure.Gap) -> None:
        raise LookupError("mine")

    inbox = Inbox()
    await missed_events(shop, on_gap=fails, message_handler=inbox)
    assert [str(error) for error in inbox.errors] == ["mine"]
