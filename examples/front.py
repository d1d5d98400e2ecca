"""Serves the demo's page, handles its two buttons that break things, and passes `/mcp` on to the server.

The page must be there while the server is down, so it comes from here. While the server is down, `/mcp` answers 503: no
server has taken the request, so it may be sent again. If the server dies in the middle of an answer, the connection to
the page is closed as well.

`/stock` leads to the same server as the SDK serves it, which the page uses with the SDK's own transport. A browser has
six connections for each name of a host, so the page asks for it under the machine's other name, `localhost` or
`127.0.0.1`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx2
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from perdure.serve.listener import listen

PAGE = Path(__file__).with_name("page")
SCRIPT = PAGE / "dist" / "page.js"
NOT_BUILT = "The page is not built: make page"

#: Seconds. It stops at once, unless a connection holds it up, and the demo need not wait for that.
STOP_SECONDS = 3

#: What a script under the other name of this host may send and see.
CROSSING = [
    (b"access-control-allow-methods", b"GET, POST, DELETE"),
    (b"access-control-allow-headers", b"*, content-type, last-event-id, mcp-session-id, mcp-protocol-version"),
    (b"access-control-expose-headers", b"mcp-session-id"),
]

#: Of one connection, not of the message.
HOP = {b"host", b"connection", b"transfer-encoding", b"content-length", b"keep-alive"}


def has_page() -> bool:
    """Whether the page was built, so that it can be served."""
    return SCRIPT.exists()


class Broken(Exception):
    """The connection is closed here, in the middle of the answer."""


class Front:
    """Serves the page and passes `/mcp` on, in its own thread."""

    def __init__(self, port: int, *, upstream: Callable[[], str], stock: str, restart: Callable[[], object]) -> None:
        """`upstream`: the server for the next request. `stock`: the one without Perdure."""
        self._upstream = upstream
        self._stock = stock
        self._restart = restart
        self._listener = listen("127.0.0.1", port)
        self.port: int = self._listener.getsockname()[1]
        self._cuts: set[asyncio.Event] = set()
        # A kept connection may lead to a server that was killed.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx2.AsyncClient(timeout=None, trust_env=False, verify=False, limits=limits)
        routes = [
            Route("/", lambda _: self._file(PAGE / "index.html")),
            Route("/page.css", lambda _: self._file(PAGE / "page.css")),
            Route("/page.js", lambda _: self._file(SCRIPT)),
            Route("/demo/cut", self._cut, methods=["POST"]),
            Route("/demo/restart", self._restarted, methods=["POST"]),
        ]
        self._own = Starlette(routes=routes)
        # Otherwise it would log each broken connection, and the demo breaks them on purpose.
        config = uvicorn.Config(
            self._serve, interface="asgi3", ws="none", lifespan="off", log_config=None, log_level="critical"
        )
        config.load()  # here, because an interrupted import in this thread would hold up the other one
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    @property
    def mcp(self) -> str:
        return f"{self.url}mcp"

    def start(self) -> None:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)  # uvicorn has no event for this

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS)
        self._listener.close()

    # The page

    def _file(self, path: Path) -> Response:
        if not path.exists():
            return PlainTextResponse(NOT_BUILT, status_code=503)
        return FileResponse(path, headers={"Cache-Control": "no-store"})

    async def _cut(self, request: Request) -> Response:
        if not _ours(request):
            return PlainTextResponse("not for other pages", status_code=403)
        for cut in self._cuts:
            cut.set()
        return PlainTextResponse("cut")

    async def _restarted(self, request: Request) -> Response:
        if not _ours(request):
            return PlainTextResponse("not for other pages", status_code=403)
        await asyncio.to_thread(self._restart)
        return PlainTextResponse("started again")

    # The way to the server

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        serve = {"/mcp": self._serve_mcp, "/stock": self._serve_stock}.get(scope["path"], self._own)
        await serve(scope, receive, send)

    async def _serve_stock(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        origin = headers.get(b"origin", b"")
        names = [f"http://{name}:{self.port}".encode() for name in ("127.0.0.1", "localhost")]
        allowed = [(b"access-control-allow-origin", origin), *CROSSING] if origin in names else []

        async def crossing(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *allowed]}
            await send(message)

        if scope["method"] == "OPTIONS":
            await _say(crossing, 200, b"")
        elif scope["method"] == "GET" and b"last-event-id" not in headers:
            # Nothing comes on its standalone stream here, and it would take a connection from the calls.
            await _say(crossing, 405, b"no standalone stream", (b"allow", b"POST, DELETE"))
        else:
            await self._relay(scope, receive, crossing, self._stock)

    async def _serve_mcp(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._relay(scope, receive, send, self._upstream())

    async def _relay(self, scope: Scope, receive: Receive, send: Send, url: str) -> None:
        body = await _body(receive)
        cut = asyncio.Event()
        self._cuts.add(cut)
        passing = asyncio.ensure_future(self._pass(scope, body, send, url))
        ends = [asyncio.ensure_future(cut.wait()), asyncio.ensure_future(_gone(receive))]
        try:
            await asyncio.wait([passing, *ends], return_when=asyncio.FIRST_COMPLETED)
            if cut.is_set():
                raise Broken
            if passing.done():
                passing.result()
        finally:
            self._cuts.discard(cut)
            for task in (passing, *ends):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Broken):
                    await task

    async def _pass(self, scope: Scope, body: bytes, send: Send, url: str) -> None:
        headers = [(name, value) for name, value in scope["headers"] if name not in HOP]
        try:
            request = self._http.build_request(scope["method"], url, headers=headers, content=body)
            answer = await self._http.send(request, stream=True)
        except httpx2.ConnectError:
            return await _say(send, 503, b"the server is down", (b"retry-after", b"1"))
        except httpx2.TransportError:
            return await _say(send, 502, b"the server died")
        try:
            kept = [(name.lower(), value) for name, value in answer.headers.raw if name.lower() not in HOP]
            await send({"type": "http.response.start", "status": answer.status_code, "headers": kept})
            async for chunk in answer.aiter_raw():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except httpx2.TransportError:
            raise Broken from None
        finally:
            await answer.aclose()


def _ours(request: Request) -> bool:
    """Whether the request comes from the demo's page: a page of another site cannot send this header."""
    return "x-demo" in request.headers


async def _body(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message: Message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _say(send: Send, status: int, text: bytes, *headers: tuple[bytes, bytes]) -> None:
    about = [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(text)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": about})
    await send({"type": "http.response.body", "body": text})
