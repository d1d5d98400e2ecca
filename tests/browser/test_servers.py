"""Servers of other kinds, in real Chromium: without Perdure, with JSON, with gaps, behind gateways, with odd manners.

A tab is closed before its server is, because the SDK's own waits for the streams that are open.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
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
from tests.support.clients.chromium import Browser, Tab
from tests.support.proxies.cutting_proxy import CuttingProxy, cutting_proxy
from tests.support.servers.in_process import serve, under_uvicorn, until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio


def for_pages(app: ASGIApp) -> ASGIApp:
    """Pages of other origins may talk to it."""
    return CORSMiddleware(
        app,
        allow_origins=["*"],
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["Mcp-Session-Id", "Retry-After"],
    )


@asynccontextmanager
async def plain(shop: ToolServer, *, json_response: bool = False) -> AsyncIterator[int]:
    """The official SDK's own server; gives the port."""
    anybody = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    app = shop.server.streamable_http_app(json_response=json_response, transport_security=anybody)
    async with under_uvicorn(for_pages(app)) as port:
        yield port


async def test_a_server_without_perdure(browser: Browser) -> None:
    """No event ids, no way back to a stream: what is cut off has an unknown outcome; a session that is gone is told."""
    async with AsyncExitStack() as stack, cutting_proxy(0) as proxy, plain(ToolServer()) as second:
        proxy.upstreams = (await stack.enter_async_context(plain(ToolServer())),)
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
        assert len(await tab.answers("c")) == 1  # the page that went has left it to the next one
        await tab.reload()
        again = await tab.connected()
        assert (again == session, await tab.record("lost")) == (False, [["lost"]])
        # A server that answers 404 to the first GET of a page may have no such stream; later it means that the session
        # is gone. (This server gives no positions, which would tell it too.)
        await tab.until("lab.listens()")
        proxy.upstreams = (second,)
        proxy.cut()
        await tab.until(f"lab.session() && lab.session() !== {again!r}")
        assert await tab.record("lost") == [["lost"], ["lost"]]
        assert await tab.eval("lab.ask('whoami', {header: 'mcp-session-id'})") == f"{await tab.connected()} "
        await tab.close()


@pytest.mark.parametrize("kind", ["the SDK's own", "Perdure's"])
async def test_a_server_that_answers_with_json(browser: Browser, kind: str) -> None:
    """Answers as they are. One that had not come when the page went cannot be had any more."""
    shop = ToolServer()
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
    shop = ToolServer()
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

    def __init__(self, shop: ToolServer, origin: str, *, retry: float = 0.1) -> None:
        settings = Settings(cors_origins=(origin,), retry=retry)
        self.app = perdure.asgi(shop.server, store=MemoryStore(), settings=settings)
        self.is_keeping = False
        #: What it answers itself, in place of the server, perhaps by the position of a GET.
        self.own: Response | Callable[[str], Response] | None = None
        #: Resumed streams begin when this is set.
        self.resuming = asyncio.Event()
        self.resuming.set()
        #: Of each GET, whether it had a position.
        self.gets: list[bool] = []
        #: What it did not hand on: the positions of GETs, and the methods of POSTs.
        self.refused: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope.get("method")
        if method == "GET":
            self.gets.append(b"last-event-id" in dict(scope["headers"]))
            if self.gets[-1]:
                await self.resuming.wait()
        if method == "GET" and self.is_keeping:
            while (await receive())["type"] != "http.disconnect":
                pass
        elif method in {"GET", "POST"} and self.own is not None:
            own, asked = self.own, Request(scope, receive)
            position = asked.headers.get("last-event-id", "")
            self.refused.append(position if method == "GET" else (await asked.json())["method"])
            await for_pages(own if isinstance(own, Response) else own(position))(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        async with under_uvicorn(self) as port:
            yield f"http://127.0.0.1:{port}{self.app.path}"
            self.app.begin_stop()


async def test_a_page_that_was_reloaded_before_its_standalone_stream_had_begun(browser: Browser) -> None:
    """R5: asking for that stream without a position says that the client has lost its calls; so they come first."""
    shop = ToolServer()
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
    shop = ToolServer()
    front = Front(shop, browser.origin)
    async with front.serving() as url:
        tab = await browser.open(url)
        session = await tab.connected()
        await tab.call("count", key="a", n=4, gate="g", pauses=[2])
        await tab.saw("progress", "a", 2)
        front.own = Response("bad gateway", 502)
        await tab.call("count", key="b", n=1)
        await tab.saw("error", "b", -31001)
        await tab.reload()
        await tab.saw("status", "reconnecting")
        await tab.eval("lab.close()")
        refused = len(front.refused)
        await tab.saw("failed")
        await tab.eval("fetch(lab.url, {method: 'POST', body: JSON.stringify({method: 'mine'})})")
        assert front.refused[refused:] == ["mine"]
        front.own = None
        await tab.reload()
        shop.open("g/2")
        await whole(tab, "a", 4)
        assert await tab.connected() == session


KEYS = "abcdefgh"


@asynccontextmanager
async def eight_calls(browser: Browser, front: Front) -> AsyncIterator[tuple[Tab, CuttingProxy]]:
    """More than are read at a time: each of them has had its turn, and has let go of its connection for the others."""
    async with front.serving() as url, cutting_proxy(int(url.split(":")[2].partition("/")[0])) as proxy:
        tab = await browser.open(proxy.url)
        await tab.connected()
        for key in KEYS:
            await tab.call("count", key=key, n=4, gate="g", pauses=[2])
            await tab.saw("progress", key, 2)
        begun = len(front.gets)
        await until(lambda: len(front.gets) >= begun + 2 * len(KEYS))
        yield tab, proxy


async def test_a_server_that_is_away_is_asked_with_longer_and_longer_pauses(browser: Browser) -> None:
    """Also for the streams that had let go of their connections: a failure is a failure, whoever made room before."""
    shop = ToolServer()
    front = Front(shop, browser.origin)
    async with eight_calls(browser, front) as (tab, proxy):
        front.own = Response("bad gateway", 502)
        proxy.cut()
        asked = Counter[str]()

        def each_was_asked_for_three_times() -> bool:
            asked.clear()
            asked.update(front.refused)
            return len(asked) > len(KEYS) and min(asked.values()) >= 3

        await until(each_was_asked_for_three_times)
        assert max(asked.values()) <= 12
        front.own = None
        shop.open("g/2")
        for key in KEYS:
            await whole(tab, key, 4)


async def test_the_first_stream_that_gets_through_hurries_the_others(browser: Browser) -> None:
    """Calls that come back later have their notifications on the standalone stream, perhaps after their result."""
    shop = ToolServer()
    front = Front(shop, browser.origin, retry=3600)
    async with front.serving() as url:
        tab = await browser.open(url)
        await tab.connected()
        for key in "ab":
            await tab.call("count", key=key, n=4, gate="g", pauses=[2])
            await tab.saw("progress", key, 2)
        soon, some_time = Response(status_code=503, headers={"retry-after": "1"}), Response(status_code=502)
        front.own = lambda position: soon if position.startswith("s") else some_time
        await tab.eval("dispatchEvent(new Event('online'))")  # their connections may be dead

        async def all_were_refused() -> bool:
            await tab.eval("dispatchEvent(new Event('visibilitychange'))")  # else they wait for an hour
            return len(set(front.refused)) == 3

        await until(all_were_refused)
        front.own = None
        shop.open("g/2")
        for key in "ab":
            await whole(tab, key, 4)


async def test_a_server_says_when_streams_may_come_back(browser: Browser) -> None:
    """B7: `Retry-After` counts for each of them."""
    shop = ToolServer()
    front = Front(shop, browser.origin)
    async with eight_calls(browser, front) as (tab, proxy):
        front.own = Response("come back later", 503, headers={"retry-after": "3600"})
        proxy.cut()
        await until(lambda: len(set(front.refused)) > len(KEYS))
        # Whoever does not wait comes again within a tenth of a second, which is what `retry` says here.
        await tab.eval("new Promise((resolve) => setTimeout(resolve, 1000))")
        assert max(Counter(front.refused).values()) == 1


@pytest.mark.parametrize(
    ("status", "headers", "ending"),
    [
        (503, {"retry-after": "1"}, "counted to 1"),
        (503, {"retry-after": "0"}, "counted to 1"),
        (429, {}, "counted to 1"),
        (503, {}, -31001),
        (500, {}, -31001),
        (507, {}, -31001),
        (413, {}, None),
    ],
)
async def test_a_call_that_is_answered_with_an_error_status(
    browser: Browser, status: int, headers: dict[str, str], ending: object
) -> None:
    """H8: it is sent again only if the server says that it has not taken it; if it may have run, nobody knows."""
    front = Front(ToolServer(), browser.origin)
    async with front.serving() as url:
        tab = await browser.open(url)
        await tab.connected()
        front.own = Response("no", status, headers=headers)
        await tab.call("count", key="a", n=1)
        await until(lambda: "tools/call" in front.refused)
        front.own = None
        if isinstance(ending, str):
            await tab.saw("result", "a", ending)
        else:
            await tab.saw("error", "a", ending)
        assert front.refused.count("tools/call") == 1


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
