"""The standalone stream, when its server does what it should not, or is away for long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.requests import Request
from starlette.responses import Response

import perdure
from tests.client.conftest import Inbox, text
from tests.client.odd_server import Odd, event, events, flow, good, odd_client, silent
from tests.support.proxies.cutting_proxy import CuttingProxy
from tests.support.servers.in_process import until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio

BRIEF = perdure.Patience(max_time=0.3, max_tries=3, first_delay=0.02, max_delay=0.05)


def notice(number: int) -> bytes:
    uri = f'{{"jsonrpc":"2.0","method":"notifications/resources/updated","params":{{"uri":"notice://{number}"}}}}'
    return event(uri.encode(), at=f"n{number}")


async def test_a_stream_that_was_given_up_is_tried_again_when_the_server_is_heard_of(
    shop: ToolServer, proxy: CuttingProxy, caplog: pytest.LogCaptureFixture
) -> None:
    inbox = Inbox()
    async with perdure.connect(proxy.url, patience=BRIEF, message_handler=inbox) as client:
        await proxy.answered("GET")
        proxy.refuse()
        proxy.cut()
        await until(lambda: any(vars(record)["action"] == "remote.standalone_lost" for record in caplog.records))
        proxy.accept()
        await client.call_tool("announce", {"n": 2})
        await until(lambda: inbox.notices == ["notice://1", "notice://2"])


async def test_the_first_call_waits_until_a_server_listens() -> None:
    """A question that the call asks there would be lost with a server that keeps none. (In a new session as well.)"""
    odd, listens = Odd(), set[str]()

    async def get(request: Request) -> Response:
        await asyncio.sleep(0.1)
        listens.add(request.headers["mcp-session-id"])
        return silent()

    async def check(session: str, method: str) -> None:
        assert method != "tools/call" or session in listens | odd.ended

    odd.get, odd.before = get, check
    odd.calls = {"good": lambda key: events(event(good(key)))}
    async with odd_client(odd) as client:
        assert text(await client.call_tool("good")) == "fine"
        odd.ended.add("odd-1")
        assert text(await client.call_tool("good")) == "fine"
    assert listens == {"odd-1", "odd-2"}


async def test_an_answer_that_comes_there_is_reported_and_the_stream_goes_on() -> None:
    odd, inbox = Odd(), Inbox()

    def get(request: Request) -> Response:
        async def frames() -> AsyncIterator[bytes]:
            yield event(good(1), at="n0")
            yield notice(1)
            await asyncio.Event().wait()

        return flow(frames())

    odd.get = get
    async with odd_client(odd, message_handler=inbox):
        await until(lambda: inbox.notices == ["notice://1"])
    assert [str(error) for error in inbox.errors] == ["an answer that no request here waits for: 1"]


async def test_a_position_that_the_server_refuses_is_a_gap_and_the_stream_goes_on() -> None:
    """A possible loss is reported, by the client where the server does not report it."""
    odd, gaps, inbox = Odd(), list[perdure.Gap](), Inbox()

    def get(request: Request) -> Response:
        if "last-event-id" in request.headers:
            return Response(status_code=400)
        if not gaps:
            return events(b"retry: 10\n\n", notice(1))
        odd.get = lambda request: silent()
        return events(notice(2))

    odd.get = get
    async with odd_client(odd, on_gap=gaps.append, message_handler=inbox):
        await until(lambda: inbox.notices == ["notice://1", "notice://2"])
    assert [gap.reason for gap in gaps] == ["the server refused the position"]
