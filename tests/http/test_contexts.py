"""What reaches a tool from the request that called it, and what a tool keeps beyond it (design: Loading a session)."""

from __future__ import annotations

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

import perdure
from perdure import Settings
from perdure.store import MemoryStore
from tests.support.clients.wire_client import Peer, Web, notices_of, text_of
from tests.support.servers.in_process import Site, info_of, serve, under_uvicorn, until
from tests.support.servers.tool_server import ToolServer, trace

pytestmark = pytest.mark.anyio


class Tracing:
    """Middleware around the application: sets a context variable from a header of each request."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            trace.set(dict(scope["headers"]).get(b"x-trace", b"").decode())
        await self.app(scope, receive, send)


async def test_headers_and_context_variables_of_each_request_reach_its_tool(shop: ToolServer) -> None:
    app = perdure.asgi(shop.server, store=MemoryStore(), settings=Settings())
    async with under_uvicorn(Tracing(app)) as port:
        web = Web(f"http://127.0.0.1:{port}/mcp")
        peer = await web.join()
        wires = [
            await peer.post(peer.tool("whoami", header="x-who"), x_who=f"who-{number}", x_trace=f"trace-{number}")
            for number in range(3)
        ]
        answers = [text_of((await wire.rest())[-1]) for wire in wires]
        assert answers == [f"who-{number} trace-{number}" for number in range(3)]
        await web.aclose()


async def test_the_runtime_is_not_stuck_in_the_context_of_the_request_that_loaded_it(shop: ToolServer) -> None:
    """The second caller's tool sees nothing of the first caller's context."""
    app = perdure.asgi(shop.server, store=MemoryStore(), settings=Settings())
    async with under_uvicorn(Tracing(app)) as port:
        web = Web(f"http://127.0.0.1:{port}/mcp")
        peer = await web.join()
        await (await peer.post(peer.tool("whoami", header="x"), x_trace="first")).rest()
        [answer] = await (await peer.post(peer.tool("whoami", header="x"))).rest()
        assert text_of(answer) == "None "
        await web.aclose()


def loaded(site: Site, peer: Peer) -> bool:
    return info_of(site.app, peer.session).loaded


async def test_a_dropped_runtime_comes_back_unnoticed(shop: ToolServer) -> None:
    """The client's params, version and capabilities are those of its handshake (A26)."""
    async with serve(shop.server, runtime_idle=0.05) as site:
        peer = await site.join("2025-06-18")
        assert await peer.result("remember") == "wire speaks 2025-06-18"
        await until(lambda: not loaded(site, peer))
        assert await peer.result("remember") == "wire speaks 2025-06-18"
        wire = await peer.call("ask", question="still?")
        ask = await wire.message()
        await peer.answer(ask, {"action": "accept", "content": {"answer": "yes"}})
        assert text_of((await wire.rest())[-1]) == "yes"


async def test_a_runtime_with_a_running_call_is_not_dropped(shop: ToolServer) -> None:
    """Nor one that waits for an answer of its client's; another session shows that the time has passed."""
    async with serve(shop.server, runtime_idle=0.05) as site:
        busy, asking, idle = [await site.join() for _ in range(3)]
        running = await busy.call("wait", gate="g")
        await running.event()
        await running.drop()
        waiting = await asking.call("ask", question="?")
        ask = await waiting.message()
        await idle.result("count", n=1)
        await until(lambda: not loaded(site, idle))
        assert loaded(site, busy)
        assert loaded(site, asking)
        shop.open("g")
        assert text_of((await (await busy.get(running.last_id)).rest())[-1]) == "went through g"
        await asking.answer(ask, {"action": "decline"})
        assert text_of((await waiting.rest())[-1]) == "decline"
        await until(lambda: not loaded(site, busy) and not loaded(site, asking))


async def test_a_session_object_that_a_tool_kept_can_notify_after_the_runtime_was_dropped(shop: ToolServer) -> None:
    """The standalone stream gets it, attached or later."""
    async with serve(shop.server, runtime_idle=0.05) as site:
        peer = await site.join()
        standalone = await peer.get()
        assert await peer.result("keep") == "kept"
        await until(lambda: not loaded(site, peer))
        assert shop.kept is not None
        await shop.kept.send_resource_updated("notice://1")
        assert notices_of([await standalone.message()]) == [1]
        await standalone.drop()
        await shop.kept.send_resource_updated("notice://2")
        assert notices_of([await (await peer.get(standalone.last_id)).message()]) == [2]


async def test_a_kept_session_object_says_nothing_after_the_session_has_ended(shop: ToolServer, site: Site) -> None:
    peer = await site.join()
    await peer.result("keep")
    await peer.delete()
    assert shop.kept is not None
    await shop.kept.send_resource_updated("notice://1")
    assert site.app.session_ids() == []


async def test_the_log_level_is_set_again_when_the_runtime_comes_back() -> None:
    """Sticky: only the last one; its answer is not sent a second time."""
    shop = ToolServer(logs=True)
    async with serve(shop.server, runtime_idle=0.4) as site:
        peer = await site.join()
        for level in ("error", "debug"):
            request = peer.request("logging/setLevel", {"level": level}, id=level)
            [answer] = await (await peer.post(request)).rest()
            assert answer == {"jsonrpc": "2.0", "id": level, "result": {}}
        assert shop.levels == ["error", "debug"]
        await until(lambda: not loaded(site, peer))
        standalone = await peer.get()
        assert await peer.result("count", n=1) == "counted to 1"
        assert shop.levels == ["error", "debug", "debug"]
        await peer.result("announce", n=1)
        assert notices_of([await standalone.message()]) == [1]


async def test_a_refused_log_level_is_not_repeated() -> None:
    shop = ToolServer(logs=True)
    async with serve(shop.server, runtime_idle=0.05) as site:
        peer = await site.join()
        [answer] = await (await peer.post(peer.request("logging/setLevel", {"level": "loud"}))).rest()
        assert answer["error"]["code"] == -32602
        await until(lambda: not loaded(site, peer))
        await peer.result("count", n=1)
        assert shop.levels == []


@pytest.mark.parametrize(
    ("how", "complaint"), [("raises", "the handler of tools/call failed"), ("cancels itself", None)]
)
async def test_a_tool_that_dies_is_answered_and_takes_no_other_call_down(
    shop: ToolServer, how: str, complaint: str | None
) -> None:
    """P4, promise 3: its call ends as unknown, and the session goes on."""
    async with serve(shop.server, runtime_idle=0.3, complaint=complaint) as site:
        peer, other = await site.join(), await site.join()
        neighbour = await other.call("wait", gate="g")
        waiting = await peer.call("wait", gate="g", id="w")
        await until(lambda: len(shop.seen) == 2)
        [answer] = await (await peer.call("die", how=how, id="d")).rest()
        assert (answer["id"], answer["error"]["code"]) == ("d", -31001)
        assert answer["error"]["data"]["outcome"] == "unknown"
        assert await peer.result("remember") == "wire speaks 2025-11-25"
        shop.open("g")
        for wire in (neighbour, waiting):
            assert text_of((await wire.rest())[-1]) == "went through g"
        await until(lambda: not loaded(site, peer))
