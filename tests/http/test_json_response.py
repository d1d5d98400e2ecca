"""JSON in place of event streams (P1, design: JSON responses)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.support.clients.wire_client import EVENTS, JSON, Peer, progress_of, text_of
from tests.support.servers.in_process import Site, serve, until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio


@pytest.fixture
async def site(shop: ToolServer) -> AsyncIterator[Site]:
    async with serve(shop.server, json_response=True) as site:
        yield site


async def test_a_request_is_answered_with_one_json_body(peer: Peer) -> None:
    """A5."""
    response = await peer.send(peer.tool("count", n=3, id="j"))
    assert response.status_code == 200
    assert response.headers["content-type"] == JSON
    assert response.headers["mcp-session-id"] == peer.session
    assert response.json()["id"] == "j"
    assert text_of(response.json()) == "counted to 3"


async def test_errors_are_json_too(peer: Peer) -> None:
    """P4."""
    assert (await peer.send(peer.tool("boom", id=1))).json()["result"]["isError"]
    assert (await peer.send(peer.tool("boom", id=2, code=-32042))).json()["error"]["code"] == -32042
    assert (await peer.send(peer.request("no/such"))).json()["error"]["code"] == -32601


async def test_accepting_json_is_enough(peer: Peer) -> None:
    assert (await peer.send(peer.request("ping"), accept=JSON)).status_code == 200
    assert (await peer.send(peer.request("ping"), accept=EVENTS)).status_code == 406


async def test_what_belongs_to_a_call_goes_to_the_standalone_stream(peer: Peer) -> None:
    """There is no room for it in the body; tokens are the client's all the same."""
    standalone = await peer.get()
    response = await peer.send(peer.tool("count", n=3, token="t"))
    assert text_of(response.json()) == "counted to 3"
    messages = await standalone.messages(3)
    assert progress_of(messages) == [1, 2, 3]
    assert {m["params"]["progressToken"] for m in messages} == {"t"}
    await peer.send(peer.tool("log", text="hello"))
    assert (await standalone.message())["params"]["data"] == "hello"


async def test_asks_tied_to_a_call_are_refused(peer: Peer) -> None:
    """As the SDK does in this mode: the tool is told, and the call ends."""
    for tool, arguments in (("ask", {"question": "?"}), ("sample", {"prompt": "?"})):
        answer = (await peer.send(peer.tool(tool, **arguments))).json()
        assert answer.get("error") or answer["result"]["isError"]


async def test_asks_on_the_standalone_stream_work(peer: Peer) -> None:
    standalone = await peer.get()

    async def answer() -> None:
        ask = await standalone.message()
        await peer.answer(ask, {"action": "accept", "content": {"answer": "yes"}})

    answering = asyncio.create_task(answer())
    response = await peer.send(peer.tool("ask", question="?", alone=True))
    await answering
    assert text_of(response.json()) == "yes"


async def test_a_batch_is_answered_with_an_array(site: Site) -> None:
    """2025-03-26: as many answers as requests."""
    old = await site.join("2025-03-26")
    body = [old.tool("count", n=1, id=1), old.request("ping", id=2)]
    answers = {answer["id"]: answer for answer in (await old.send(body)).json()}
    assert text_of(answers[1]) == "counted to 1"
    assert answers[2]["result"] == {}


async def test_a_batch_of_one_is_still_an_array(site: Site) -> None:
    old = await site.join("2025-03-26")
    assert [answer["id"] for answer in (await old.send([old.request("ping", id=1)])).json()] == [1]


async def test_a_cancelled_request_is_answered(shop: ToolServer, peer: Peer) -> None:
    """A32."""
    waiting = asyncio.create_task(peer.send(peer.tool("wait", gate="never", id=1)))
    await until(lambda: shop.seen)
    await peer.cancel(1)
    assert (await waiting).json()["error"]["code"] == -32800


async def test_a_tool_cannot_close_what_is_no_stream(shop: ToolServer, peer: Peer) -> None:
    """P7 is for event streams; here it does nothing."""
    shop.open("g")
    response = await peer.send(peer.tool("close", before=1, after=1, gate="g"))
    assert text_of(response.json()) == "came back"


async def test_a_client_that_leaves_cancels_nothing(shop: ToolServer, site: Site, peer: Peer) -> None:
    """R3."""
    waiting = asyncio.create_task(peer.send(peer.tool("count", n=1, gate="g", pauses=[1], id=1)))
    await until(lambda: site.app.counters.calls_accepted == 2)
    waiting.cancel()
    await asyncio.wait({waiting})
    shop.open("g/1")
    await until(lambda: "counted 1" in shop.seen)
    assert text_of((await peer.send(peer.tool("count", n=2, id=1))).json()) == "counted to 2"
