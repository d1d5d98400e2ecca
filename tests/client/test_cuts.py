"""Connections are lost; the client's calls are not (promise 2 as a client sees it; B7, B8, H8)."""

from __future__ import annotations

import asyncio
import os
from functools import partial

import mcp_types as types
import pytest
from mcp.client.session import ClientRequestContext

import perdure
from tests.client.conftest import Inbox, Progress, numbers, text
from tests.support.proxies.cutting_proxy import PRIMING, CuttingProxy, Loss, cutting_proxy
from tests.support.servers.in_process import Site, serve, until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio

RECONNECTS = 220 * int(os.environ.get("PERDURE_TEST_FUZZ", "1"))
"""The official client calls itself once more for each, and ends at about 960: so many are in `make test-all`."""


@pytest.mark.parametrize("loss", Loss)
async def test_a_cut_in_the_middle_of_a_call_loses_nothing_and_repeats_nothing(
    shop: ToolServer, proxy: CuttingProxy, loss: Loss
) -> None:
    progress = Progress()
    async with perdure.connect(proxy.url) as client, asyncio.TaskGroup() as group:
        call = group.create_task(client.call_tool("count", {"n": 9, "gate": "g", "pauses": [3, 6]}, None, progress))
        for pause in (3, 6):
            await until(partial(progress.has, pause))
            proxy.cut(loss=loss)
            shop.open(f"g/{pause}")
        assert text(await call) == "counted to 9"
    assert progress.seen == numbers(9)


async def test_a_cut_right_after_the_priming_event_is_resumed(shop: ToolServer, proxy: CuttingProxy) -> None:
    """B8: an event without a message is a position to come back to."""
    progress = Progress()
    async with perdure.connect(proxy.url) as client:
        mark = proxy.cut_after(PRIMING, only="POST")
        assert text(await client.call_tool("count", {"n": 3}, None, progress)) == "counted to 3"
        assert mark.happened.is_set()
    assert progress.seen == numbers(3)


async def test_one_call_survives_more_reconnects_than_the_official_client_does(shop: ToolServer) -> None:
    """Each connection carries one message and is lost."""
    progress = Progress()
    async with (
        serve(shop.server, retry=0.001, max_stream_events=RECONNECTS * 2, max_session_events=RECONNECTS * 4) as site,
        cutting_proxy(site.port) as proxy,
        perdure.connect(proxy.url) as client,
    ):
        for _ in range(RECONNECTS):
            proxy.cut_after(1)
        assert text(await client.call_tool("count", {"n": RECONNECTS + 5}, None, progress)) == (
            f"counted to {RECONNECTS + 5}"
        )
        assert site.app.counters.snapshot()["resumes"] >= RECONNECTS
    assert progress.seen == numbers(RECONNECTS + 5)


async def test_the_standalone_stream_comes_back_with_what_it_missed(shop: ToolServer, proxy: CuttingProxy) -> None:
    """R4 from the client's side."""
    inbox = Inbox()
    async with perdure.connect(proxy.url, message_handler=inbox) as client:
        await proxy.answered("GET")
        for start in (1, 4, 7):
            proxy.cut(only="GET")
            await client.call_tool("announce", {"n": 3, "start": start})
        await until(lambda: len(inbox.notices) == 9)
    assert inbox.notices == [f"notice://{number}" for number in range(1, 10)]
    assert inbox.errors == []


async def test_a_tool_that_closes_its_own_connection_is_polled(shop: ToolServer, site: Site) -> None:
    """P7, SEP-1699."""
    progress = Progress()
    url = f"http://127.0.0.1:{site.port}/mcp"
    async with perdure.connect(url) as client, asyncio.TaskGroup() as group:
        call = group.create_task(client.call_tool("close", {"before": 2, "after": 2, "gate": "g"}, None, progress))
        await until(lambda: "closed" in shop.seen)
        shop.open("g")
        assert text(await call) == "came back"
    assert progress.seen == numbers(4)


async def test_a_question_that_was_cut_off_is_answered_once(shop: ToolServer, proxy: CuttingProxy) -> None:
    """P6: the connection is lost after the question; its answer finds the call that waits."""
    asked: list[str] = []

    async def answer(context: ClientRequestContext, params: types.ElicitRequestParams) -> types.ElicitResult:
        asked.append(params.message)
        return types.ElicitResult(action="accept", content={"answer": "me"})

    async with perdure.connect(proxy.url, elicitation_callback=answer) as client:
        proxy.cut_after(1, only="POST")
        assert text(await client.call_tool("ask", {"question": "who?"})) == "me"
    assert asked == ["who?"]


async def test_a_cancelled_call_is_cancelled_on_the_server(shop: ToolServer, proxy: CuttingProxy) -> None:
    """B10: by saying so; and under the id that the server knows."""
    async with perdure.connect(proxy.url) as client:
        call = asyncio.create_task(client.call_tool("wait", {"gate": "g"}))
        await until(lambda: "waiting at g" in shop.seen)
        call.cancel()
        await until(lambda: "cancelled at g" in shop.seen)
        assert text(await client.call_tool("count", {"n": 1})) == "counted to 1"


async def test_calls_one_after_another_share_a_connection(shop: ToolServer, proxy: CuttingProxy) -> None:
    """Not each of them has to connect anew, with TLS in the end."""
    async with perdure.connect(proxy.url) as client:
        await proxy.answered("GET")
        await client.call_tool("count", {"n": 1})
        accepted = proxy.accepted
        for _ in range(20):
            await client.call_tool("count", {"n": 1})
        assert proxy.accepted - accepted < 10  # a busy machine may miss the moment now and then


async def test_a_read_whose_answer_is_lost_is_asked_again(shop: ToolServer, proxy: CuttingProxy) -> None:
    """Nothing can happen twice: the specification makes it a read. (A12: it has no position that could be resumed.)"""
    async with perdure.connect(proxy.url) as client:
        proxy.cut_after(b"HTTP/1.1 200 OK\r\n", only="POST")
        assert "count" in {tool.name for tool in (await client.list_tools()).tools}
        assert proxy.requests["POST"] == 4  # initialize, initialized, tools/list twice
