"""A server that answers as a test says: for all that no proper server does."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

import perdure
from tests.support.servers.in_process import under_uvicorn

BRIEF = perdure.Patience(max_time=0.5, max_tries=3, first_delay=0.01, max_delay=0.02)
WELCOME = {
    "protocolVersion": "2025-11-25",
    "capabilities": {"tools": {}},
    "serverInfo": {"name": "odd", "version": "1"},
}


def result(key: object, **content: object) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": key, "result": content}).encode()


def good(key: object) -> bytes:
    return result(key, content=[{"type": "text", "text": "fine"}])


def json_of(data: bytes, **options: Any) -> Response:
    return Response(data, media_type="application/json", **options)


def event(data: bytes, *, at: str = "") -> bytes:
    name = f"id: {at}\n".encode() if at else b""
    return name + b"data: " + data.replace(b"\n", b"\ndata: ") + b"\n\n"


def events(*frames: bytes) -> Response:
    return Response(b"".join(frames), media_type="text/event-stream")


def flow(frames: AsyncIterator[bytes]) -> Response:
    return StreamingResponse(frames, media_type="text/event-stream")


class Odd:
    """`calls` maps a tool to the answer to its POST; GETs are answered by `get`, and with 405 without a position."""

    def __init__(self, **calls: Callable[[object], Response]) -> None:
        self.calls: dict[str, Callable[[object], Response]] = calls
        self.resumed: list[bytes] = []
        self.asked: list[object] = []
        #: Sessions begun, and what came in each: methods of JSON-RPC, "answer", or GET and DELETE.
        self.sessions = 0
        self.heard: list[tuple[str | None, str]] = []
        self.replies: list[dict[str, Any]] = []
        self.ended: set[str] = set()
        self.get: Callable[[Request], Response | Awaitable[Response]] = self._resume
        self.initialize: Callable[[object], Response] = self._welcome
        #: Told of each message before it is answered; it may wait.
        self.before: Callable[[str, str], Awaitable[None]] | None = None

    @property
    def app(self) -> Starlette:
        return Starlette(routes=[Route("/mcp", self.answer, methods=["GET", "POST", "DELETE"])])

    async def answer(self, request: Request) -> Response:
        session = request.headers.get("mcp-session-id")
        if request.method != "POST":
            self.heard.append((session, request.method))
            if session in self.ended:
                return Response(status_code=404)
            found = Response() if request.method == "DELETE" else self.get(request)
            return await found if inspect.isawaitable(found) else found
        body = json.loads(await request.body())
        method = body.get("method", "answer")
        self.heard.append((session, method))
        if self.before is not None:
            await self.before(session or "", method)
        if session in self.ended:
            return Response(status_code=404)
        match method:
            case "initialize":
                return self.initialize(body["id"])
            case "tools/list":
                return json_of(result(body["id"], tools=[]))
            case "tools/call":
                self.asked.append(body["id"])
                return self.calls[body["params"]["name"]](body["id"])
            case "answer":
                self.replies.append(body)
        return Response(status_code=202)

    def _welcome(self, key: object) -> Response:
        self.sessions += 1
        return json_of(result(key, **WELCOME), headers={"mcp-session-id": f"odd-{self.sessions}"})

    def _resume(self, request: Request) -> Response:
        if "last-event-id" not in request.headers:
            return Response(status_code=405)
        return events(self.resumed.pop(0) if self.resumed else b"")


@asynccontextmanager
async def odd_client(odd: Odd, **options: Any) -> AsyncIterator[perdure.Client]:
    options = {"patience": BRIEF, **options}
    async with (
        under_uvicorn(odd.app, complaint=".*") as port,
        asyncio.timeout(30),
        perdure.connect(f"http://127.0.0.1:{port}/mcp", **options) as client,
    ):
        yield client


def silent() -> Response:
    """A stream that stays open and says nothing."""

    async def frames() -> AsyncIterator[bytes]:
        yield b": here\n\n"
        await asyncio.Event().wait()

    return flow(frames())
