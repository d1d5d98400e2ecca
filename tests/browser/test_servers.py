"""Servers of other kinds, in real Chromium: without Perdure, with JSON, with gaps, behind gateways, with odd manners.

A tab is closed before its server is, because the SDK's own waits for the streams that are open.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from mcp.server.transport_security import TransportSecuritySettings
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import perdure
from perdure import Settings
from perdure.store import MemoryStore
from tests.browser.test_reload import whole
from tests.support.chromium import Browser
from tests.support.cutting_proxy import cutting_proxy
from tests.support.site import serve, under_uvicorn, until
from tests.support.workshop import Workshop

pytestmark = pytest.mark.anyio


def for_pages(app: ASGIApp) -> ASGIApp:
    """Pages of other origins may talk to it."""
    return CORSMiddleware(
        app, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"], expose_headers=["Mcp-Session-Id"]
    )


@asynccontextmanager
async def plain(shop: Workshop, *, json_response: bool = False) -> AsyncIterator[int]:
    """The official SDK's own server; gives the port."""
    anybody = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    app = shop.server.streamable_http_app(json_response=json_response, transport_security=anybody)
    async with under_uvicorn(for_pages(app)) as port:
        yield port


async def test_a_server_without_perdure(browser: Browser) -> None:
    """No event ids, no way back to a stream: what is cut off has an unknown outcome; a session that is gone is told."""
    async with AsyncExitStack() as stack, cutting_proxy(0) as proxy, plain(Workshop()) as second:
        proxy.upstreams = (await stack.enter_async_context(plain(Workshop())),)
        tab = await browser.open(proxy.url)
        session = await tab.connected()
        await tab.call("count", key="a", n=3)
        await whole(tab, "a", 3)
        await tab.call("count", key="b", n=3, gate="b", pauses=[1])
        await tab.saw("progress", "b", 1)
        proxy.cut()
        await tab.saw("error", "b", -31001)
        await tab.connected()
        await tab.call("count", key="c", n=3, gate="c", pauses=[1])
        await tab.saw("progress", "c", 1)
        await tab.reload()
        await tab.saw("error", "c", -31001)
        assert await tab.connected() == session
        await tab.reload()
        again = await tab.connected()
        assert (again == session, await tab.record("lost")) == (False, [["lost"]])
        proxy.upstreams = (second,)
        proxy.cut()
        await tab.until(f"lab.session() && lab.session() !== {again!r}")
        assert await tab.record("lost") == [["lost"], ["lost"]]
        assert await tab.eval("lab.ask('whoami', {header: 'mcp-session-id'})") == f"{await tab.connected()} "
        await tab.close()


@pytest.mark.parametrize("kind", ["the SDK's own", "Perdure's"])
async def test_a_server_that_answers_with_json(browser: Browser, kind: str) -> None:
    """Answers as they are. One that had not come when the page went cannot be had any more."""
    shop = Workshop()
    async with AsyncExitStack() as stack:
        if kind == "Perdure's":
            site = serve(shop.server, json_response=True, cors_origins=(browser.origin,))
            url = (await stack.enter_async_context(site)).url
        else:
            url = f"http://127.0.0.1:{await stack.enter_async_context(plain(shop, json_response=True))}/mcp"
        tab = await browser.open(url)
        session = await tab.connected()
        assert await tab.eval("lab.ask('remember')") == "page speaks 2025-11-25"
        await tab.call("wait", key="a", gate="a")
        await tab.until("lab.positions().calls.length === 1")
        await tab.reload()
        await tab.saw("error", "a", -31001)
        assert await tab.connected() == session
        shop.open("a")
        await tab.close()


async def test_events_that_are_gone(browser: Browser) -> None:
    """Promise 4: which, whose and why is told to the page, and what is left arrives."""
    shop = Workshop()
    async with serve(shop.server, max_stream_events=10, cors_origins=(browser.origin,), retry=0.1) as site:
        tab = await browser.open(site.url)
        await tab.connected()
        await tab.call("count", key="a", n=60, gate="g", pauses=[1])
        await tab.saw("progress", "a", 1)
        page = await tab.eval("location.href")
        await tab.goto(browser.origin + "/blank")
        shop.open("g/1")
        await until(lambda: "counted 60" in shop.seen)
        await tab.goto(page)
        await tab.saw("result", "a", "counted to 60")
        ((_, key, first, last, reason),) = await tab.record("gap")
        assert (key, first, reason) == ("a", 2, "trimmed")
        assert await tab.progress("a") == [1, *range(last + 1, 61)]


class Front:
    """What stands before a server: it sees each request, and may keep or answer it itself."""

    def __init__(self, shop: Workshop, origin: str) -> None:
        settings = Settings(cors_origins=(origin,), retry=0.1)
        self.app = perdure.asgi(shop.server, store=MemoryStore(), settings=settings)
        self.is_down = self.is_keeping = False
        #: Resumed streams begin when this is set.
        self.resuming = asyncio.Event()
        self.resuming.set()
        #: Of each GET, whether it had a position.
        self.gets: list[bool] = []
        self.refused = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope.get("method")
        if method == "GET":
            self.gets.append(b"last-event-id" in dict(scope["headers"]))
            if self.gets[-1]:
                await self.resuming.wait()
        if method == "GET" and self.is_keeping:
            while (await receive())["type"] != "http.disconnect":
                pass
        elif method in {"GET", "POST"} and self.is_down:
            self.refused += 1
            await for_pages(Response("bad gateway", 502))(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        async with under_uvicorn(self) as port:
            yield f"http://127.0.0.1:{port}{self.app.path}"
            self.app.begin_stop()


async def test_a_page_that_was_reloaded_before_its_standalone_stream_had_begun(browser: Browser) -> None:
    """R5: asking for that stream without a position says that the client has lost its calls; so they come first."""
    shop = Workshop()
    front = Front(shop, browser.origin)
    async with front.serving() as url:
        front.is_keeping = True
        tab = await browser.open(url)
        await tab.connected()
        await tab.call("count", key="a", n=4, gate="g", pauses=[2])
        await tab.saw("progress", "a", 2)
        front.is_keeping = False
        front.resuming.clear()
        await tab.reload()
        await until(lambda: len(front.gets) >= 2)
        assert await tab.connected()
        await tab.eval("lab.ask('remember')")  # whatever was sent before has arrived now
        assert front.gets == [False, True]
        front.resuming.set()
        await tab.until("lab.positions().standalone")
        assert front.gets == [False, True, False]
        shop.open("g/2")
        await whole(tab, "a", 4)


async def test_a_gateway_whose_server_is_away(browser: Browser) -> None:
    """A call may have reached the server; a page that comes back waits; and who gives up asks no more."""
    shop = Workshop()
    front = Front(shop, browser.origin)
    async with front.serving() as url:
        tab = await browser.open(url)
        session = await tab.connected()
        await tab.call("count", key="a", n=4, gate="g", pauses=[2])
        await tab.saw("progress", "a", 2)
        front.is_down = True
        await tab.call("count", key="b", n=1)
        await tab.saw("error", "b", -31001)
        await tab.reload()
        await tab.saw("status", "reconnecting")
        await tab.eval("lab.close()")
        refused = front.refused
        await tab.saw("failed")
        await tab.eval("fetch(lab.url, {method: 'POST'})")
        assert front.refused == refused + 1
        front.is_down = False
        await tab.reload()
        shop.open("g/2")
        await whole(tab, "a", 4)
        assert await tab.connected() == session


INITIALIZED = {
    "protocolVersion": "2025-11-25",
    "capabilities": {"tools": {}},
    "serverInfo": {"name": "odd", "version": "1"},
}


async def odd(request: Request) -> Response:
    """Answers to `initialize` as it should, and to calls as their tool's name says."""
    if request.method != "POST":
        return Response(status_code=405)
    message = await request.json()
    if "id" not in message:
        return Response(status_code=202)
    if message["method"] == "initialize":
        return JSONResponse({"jsonrpc": "2.0", "id": message["id"], "result": INITIALIZED})
    result = {"content": [{"type": "text", "text": "counted to 0"}]}
    answer = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result})
    if message["params"]["name"] == "nothing":
        return JSONResponse({"jsonrpc": "2.0"})
    events = f"event: news\ndata: not for clients\n\ndata: no JSON\n\ndata: {answer}\n\n"
    return Response(events, media_type="text/event-stream")


async def test_a_server_with_odd_manners(browser: Browser) -> None:
    """What cannot be read is told and passed over; an answer that is none is an unknown outcome."""
    app = Starlette(routes=[Route("/mcp", odd, methods=["GET", "POST"])])
    async with under_uvicorn(for_pages(app)) as port:
        tab = await browser.open(f"http://127.0.0.1:{port}/mcp")
        await tab.saw("ready")
        await tab.call("babble", key="a")
        await whole(tab, "a", 0)
        await tab.call("nothing", key="b")
        await tab.saw("error", "b", -31001)
        assert [line[1].partition(":")[0] for line in await tab.record("trouble")] == ["SyntaxError"]
        await tab.reload()
        await tab.saw("status", "connected")
        assert await tab.record("lost", "recovered") == []
