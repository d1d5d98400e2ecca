"""The HTTP lane against real servers: the SDK's own, of every kind that it serves, and Perdure's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.client.test_elsewhere import Shelf
from tests.gateway.web_lanes import CLIENT, Lane, lane_to, upstream_at
from tests.support.proxies.cutting_proxy import CuttingProxy, cutting_proxy
from tests.support.servers.in_process import serve, under_uvicorn, until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio

SESSIONS = ["sessions", "event store", "perdure"]
KINDS = [*SESSIONS, "json", "stateless", "stateless json"]


@asynccontextmanager
async def served(kind: str, shop: ToolServer) -> AsyncIterator[CuttingProxy]:
    kinds: dict[str, dict[str, Any]] = {
        "event store": {"event_store": Shelf(), "retry_interval": 20},
        "json": {"json_response": True},
        "stateless": {"stateless_http": True},
        "stateless json": {"stateless_http": True, "json_response": True},
    }
    if kind == "perdure":
        async with serve(shop.server, retry=0.02) as site, cutting_proxy(site.port) as proxy:
            yield proxy
        return
    app = shop.server.streamable_http_app(**kinds.get(kind, {}))
    async with under_uvicorn(app, complaint=".*") as port, cutting_proxy(port) as proxy:
        yield proxy


def call(lane: Lane, key: str, tool: str, **arguments: Any) -> None:
    lane.request(key, "tools/call", {"name": tool, "arguments": arguments, "_meta": {"progressToken": key}})


@pytest.mark.parametrize("kind", KINDS)
async def test_calls_errors_and_lists(kind: str) -> None:
    async with served(kind, ToolServer()) as proxy, lane_to(proxy.url, listens=True) as lane:
        call(lane, "a", "count", n=3)
        call(lane, "b", "boom", code=-32050)
        lane.request("c", "tools/list", {})
        assert await lane.heard.text("a") == "counted to 3"
        failed, listed = await lane.heard.end("b"), await lane.heard.end("c")
        assert isinstance(failed, dict)
        assert isinstance(listed, dict)
        assert (failed["failed"], failed["code"], failed["message"]) == (True, -32050, "boom")
        assert len(listed["tools"]) > 20
        if "json" not in kind:
            assert lane.heard.progress("a") == [1, 2, 3]


@pytest.mark.parametrize("kind", SESSIONS)
async def test_asks_and_what_belongs_to_no_call(kind: str) -> None:
    async with served(kind, ToolServer()) as proxy, lane_to(proxy.url, listens=True) as lane:
        call(lane, "a", "announce", n=2)
        assert await lane.heard.text("a") == "announced 2"
        await until(lambda: len(lane.heard.told) == 2)
        uris = [(params["uri"], key) for _, params, key in lane.heard.told]
        assert uris == [("notice://1", None), ("notice://2", None)]
        for key, alone in (("b", False), ("c", True)):
            call(lane, key, "ask", question="who?", alone=alone)
            await until(lambda: any(of == (None if alone else key) for _, _, of in lane.heard.asks.values()))  # noqa: B023
            ask, (method, _, owner) = list(lane.heard.asks.items())[-1]
            assert (method, owner) == ("elicitation/create", None if alone else key)
            lane.reply(ask, {"result": {"action": "accept", "content": {"answer": key}}})
            assert await lane.heard.text(key) == key


@pytest.mark.parametrize("kind", SESSIONS)
async def test_a_connection_that_is_cut_in_a_call(kind: str) -> None:
    """Without event ids the outcome is unknown; with them the call is followed, without a second run."""
    shop = ToolServer()
    async with served(kind, shop) as proxy, lane_to(proxy.url) as lane:
        call(lane, "a", "count", n=6, gate="g", pauses=[3])
        await until(lambda: lane.heard.progress("a") == [1, 2, 3])
        proxy.cut(only="POST")
        if kind == "sessions":
            assert (await lane.heard.loss("a")).ran
            shop.open("g/3")
        else:
            shop.open("g/3")
            assert await lane.heard.text("a") == "counted to 6"
            assert lane.heard.progress("a") == [1, 2, 3, 4, 5, 6]
        await until(lambda: shop.seen == ["counted 6"])
        call(lane, "b", "count", n=1)
        assert await lane.heard.text("b") == "counted to 1"


@pytest.mark.parametrize("kind", ["event store", "perdure"])
async def test_a_later_process_follows_a_call_and_is_asked_again(kind: str) -> None:
    shop = ToolServer()
    async with served(kind, shop) as proxy, upstream_at(proxy.url) as upstream, asyncio.timeout(30):
        before, after = Lane(upstream), Lane(upstream)
        await before.open(CLIENT)
        before.notify("notifications/initialized", None)
        call(before, "a", "quiz", question="who?", gate="g")
        await until(lambda: before.heard.progress("a"))
        shop.open("g")
        await until(lambda: before.heard.asks)
        position = before.heard.positions["a"][-1]
        await before.aclose(ended=False)
        assert not (await after.open(CLIENT, before.state)).is_new
        after.follow("z", "tools/call", None, position)
        await until(lambda: after.heard.asks)
        ask, (method, _, key) = next(iter(after.heard.asks.items()))
        assert (method, key) == ("elicitation/create", "z")
        after.reply(ask, {"result": {"action": "accept", "content": {"answer": "me"}}})
        assert await after.heard.text("z") == "me"
        await after.aclose(ended=True)


@pytest.mark.parametrize("kind", ["sessions", "json", "event store"])
async def test_a_server_that_was_restarted_gets_a_new_session(kind: str) -> None:
    first, second = ToolServer(), ToolServer()
    async with served(kind, first) as old, served(kind, second) as new, cutting_proxy(old.port) as proxy:
        async with lane_to(proxy.url, listens=True) as lane:
            call(lane, "a", "count", n=1)
            assert await lane.heard.text("a") == "counted to 1"
            session = lane.state["session"]
            proxy.upstreams = (new.port,)
            proxy.cut()
            for key in "bcd":
                call(lane, key, "count", n=2)
            for key in "bcd":
                assert await lane.heard.text(key) == "counted to 2"
            assert (len(lane.heard.renewed), lane.state["session"] != session) == (1, True)
        assert second.seen == ["counted 2"] * 3


@pytest.mark.parametrize("kind", SESSIONS)
async def test_a_cancelled_call_is_cancelled_in_the_tool(kind: str) -> None:
    shop = ToolServer()
    async with served(kind, shop) as proxy, lane_to(proxy.url) as lane:
        call(lane, "a", "wait", gate="g")
        await until(lambda: shop.seen == ["waiting at g"])
        lane.cancel("a", {"reason": "enough"})
        await until(lambda: shop.seen == ["waiting at g", "cancelled at g"])
        assert lane.heard.ended == set()
