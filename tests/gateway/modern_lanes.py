"""A lane to an upstream of 2026-07-28, and a receiver that remembers what the lane brings."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from perdure._core.jsonrpc import JsonObject
from perdure._core.reconnect import Patience
from perdure._core.sse import MAX_EVENT_BYTES
from perdure.gateway.children import Children
from perdure.gateway.lane import AskKey, Lost, Opened, RequestKey
from perdure.gateway.modern_lane import ModernLane
from perdure.gateway.modern_wire import HttpWire, PipeWire
from perdure.remote.endpoint import Endpoint, http_client
from perdure.remote.route import ClientLimits, Notice, Route
from perdure.runtime.base import Flow
from tests.gateway import pipe_lanes
from tests.gateway.pipe_lanes import child_program
from tests.support.clients.modern_requests import MODERN
from tests.support.processes.starting import python_path
from tests.support.servers.in_process import until

BRIEF = Patience(max_time=0.5, max_tries=3, first_delay=0.01, max_delay=0.02)
EAGER = Patience(max_time=60.0, max_tries=10_000, first_delay=0.01, max_delay=0.02)
LIMITS = ClientLimits(
    patience=EAGER,
    listening=EAGER,
    handshake=EAGER,
    handshake_seconds=10.0,
    message_bytes=MAX_EVENT_BYTES,
    counts_from_request=False,
)
CLIENT: JsonObject = {
    "protocolVersion": "2025-06-18",
    "capabilities": {"elicitation": {}, "sampling": {}, "roots": {"listChanged": True}},
    "clientInfo": {"name": "desk", "version": "1"},
}


class Heard:
    """A receiver that remembers."""

    def __init__(self) -> None:
        self.notifications: list[tuple[str, JsonObject | None, RequestKey | None]] = []
        self.asks: dict[AskKey, tuple[str, JsonObject | None, RequestKey | None]] = {}
        self.withdrawn: list[AskKey] = []
        self.answers: dict[RequestKey, Any] = {}
        """Results, and errors as they came."""
        self.bodies: dict[RequestKey, bytes] = {}
        self.failed: set[RequestKey] = set()
        self.lost: dict[RequestKey, Lost] = {}
        self.positions: dict[RequestKey, list[JsonObject]] = {}
        self.closed: list[str] = []

    def on_notification(self, method: str, params: JsonObject | None, *, key: RequestKey | None) -> Flow | None:
        self.notifications.append((method, params, key))
        return None

    def on_ask(self, ask: AskKey, method: str, params: JsonObject | None, *, key: RequestKey | None) -> Flow | None:
        self.asks[ask] = (method, params, key)
        return None

    def on_ask_withdrawn(self, ask: AskKey, reason: str) -> None:
        self.withdrawn.append(ask)

    def on_answer(self, key: RequestKey, body: bytes, *, failed: bool) -> None:
        assert key not in self.answers
        assert key not in self.lost
        self.bodies[key], self.answers[key] = body, json.loads(body)
        if failed:
            self.failed.add(key)

    def on_lost(self, key: RequestKey, lost: Lost) -> None:
        assert key not in self.answers
        assert key not in self.lost
        self.lost[key] = lost

    def on_position(self, key: RequestKey, state: JsonObject) -> None:
        self.positions.setdefault(key, []).append(state)

    def on_closed(self, why: str) -> None:
        self.closed.append(why)

    async def answer(self, key: RequestKey) -> Any:
        """The result of a request, or its error."""
        await until(lambda: key in self.answers or key in self.lost)
        assert key in self.answers, self.lost[key]
        return self.answers[key]

    async def loss(self, key: RequestKey) -> Lost:
        await until(lambda: key in self.answers or key in self.lost)
        assert key in self.lost, self.answers[key]
        return self.lost[key]

    def of(self, method: str) -> list[JsonObject | None]:
        return [params for heard, params, _ in self.notifications if heard == method]


class Front:
    """The user of a lane."""

    def __init__(self, lane: ModernLane, heard: Heard, opened: Opened) -> None:
        self.lane = lane
        self.heard = heard
        self.opened = opened
        self._keys = 0

    def start(self, method: str, **params: Any) -> RequestKey:
        self._keys += 1
        meta = {} if (found := params.pop("meta", None)) is None else {"_meta": found}
        self.lane.request(self._keys, method, {**params, **meta} or None)
        return self._keys

    def call(self, tool: str, token: int | str | None = None, /, **arguments: Any) -> RequestKey:
        meta = None if token is None else {"progressToken": token}
        return self.start("tools/call", name=tool, arguments=arguments, **({} if meta is None else {"meta": meta}))

    async def ask(self, method: str, **params: Any) -> Any:
        return await self.heard.answer(self.start(method, **params))


def text(result: Any) -> str:
    return str(result["content"][0]["text"])


@asynccontextmanager
async def http_lane(
    url: str, *, limits: ClientLimits = LIMITS, listens: bool = True, **changes: Any
) -> AsyncIterator[Front]:
    async def complain(error: Exception) -> None:
        raise error

    def report(notice: Notice, why: str = "", *, reason: str = "") -> None:
        pass

    async with http_client(url) as client:
        endpoint = Endpoint(client, url, on_401="wants a token")
        limits = replace(limits, **changes)
        prefix = secrets.token_hex(4)
        route = Route(endpoint=endpoint, limits=limits, complain=complain, report=report, prefix=prefix)
        heard = Heard()
        lane = ModernLane(HttpWire(route), heard)
        try:
            opened = await lane.open(CLIENT)
            lane.notify("notifications/initialized", None)
            lane.listen(listens)
            yield Front(lane, heard, opened)
        finally:
            await lane.aclose(ended=True)


@asynccontextmanager
async def children_of(argv: Sequence[str], **limits: Any) -> AsyncIterator[Children]:
    """The processes of one program, which end with the block."""
    program = child_program("upstream", argv=tuple(argv), env={"PYTHONPATH": python_path()}, **limits)
    async with pipe_lanes.children_of(program) as children:
        yield children


@asynccontextmanager
async def pipe_lane(children: Children) -> AsyncIterator[Front]:
    heard = Heard()
    lane = ModernLane(PipeWire(children), heard)
    try:
        opened = await lane.open(CLIENT)
        lane.notify("notifications/initialized", None)
        lane.listen(True)
        yield Front(lane, heard, opened)
    finally:
        await lane.aclose(ended=True)


def modern_only(app: ASGIApp) -> ASGIApp:
    """The SDK's application without its session era: it refuses `initialize` as TypeScript's `legacy: 'reject'`."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers") or ())
        if scope["type"] == "http" and headers.get(b"mcp-protocol-version", b"").decode() != MODERN:
            error = {"code": -32022, "message": "Unsupported protocol version", "data": {"supported": [MODERN]}}
            response = JSONResponse({"jsonrpc": "2.0", "id": None, "error": error}, status_code=400)
            await response(scope, receive, send)
            return
        await app(scope, receive, send)

    return serve
