"""Servers that are not Perdure: plain SDK servers of every kind, and those of 2026-07-28 (B2, B18)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from mcp.server.streamable_http import EventCallback, EventId, EventMessage, EventStore, StreamId
from mcp.shared.exceptions import MCPError
from mcp_types import UNSUPPORTED_PROTOCOL_VERSION, JSONRPCMessage
from mcp_types.version import LATEST_MODERN_VERSION
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

import perdure
from perdure.client.memory import decode
from tests.client.conftest import Inbox, Progress, numbers, text
from tests.support.proxies.cutting_proxy import PRIMING, CuttingProxy, cutting_proxy
from tests.support.servers.in_process import under_uvicorn, until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio

BRIEF = perdure.Patience(max_time=1.0, max_tries=5, first_delay=0.02, max_delay=0.05)


class Shelf(EventStore):
    """The SDK's own way to resume, in memory."""

    def __init__(self) -> None:
        self.events: list[tuple[StreamId, JSONRPCMessage | None]] = []

    async def store_event(self, stream_id: StreamId, message: JSONRPCMessage | None) -> EventId:
        self.events.append((stream_id, message))
        return str(len(self.events))

    async def replay_events_after(self, last_event_id: EventId, send_callback: EventCallback) -> StreamId | None:
        number = int(last_event_id)
        stream = self.events[number - 1][0]
        for later, (of, message) in enumerate(self.events[number:], start=number + 1):
            if of == stream and message is not None:
                await send_callback(EventMessage(message, str(later)))
        return stream


@asynccontextmanager
async def behind_proxy(app: ASGIApp) -> AsyncIterator[CuttingProxy]:
    async with under_uvicorn(app, complaint=".*") as port, cutting_proxy(port) as proxy:
        yield proxy


async def test_a_plain_sdk_server_with_its_own_event_store_is_resumed(shop: ToolServer, tmp_path: Path) -> None:
    """Sessions and `Last-Event-ID` are the protocol's, so what Perdure's servers get these get too."""
    progress = Progress()
    app = shop.server.streamable_http_app(event_store=Shelf(), retry_interval=20)
    async with behind_proxy(app) as proxy, perdure.connect(proxy.url, state=tmp_path / "s.json") as client:
        call = asyncio.create_task(client.call_tool("count", {"n": 6, "gate": "g", "pauses": [3]}, None, progress))
        await until(lambda: progress.seen == numbers(3))
        proxy.cut(only="POST")
        shop.open("g/3")
        assert text(await call) == "counted to 6"
    assert progress.seen == numbers(6)


async def test_a_plain_sdk_server_without_one_has_unknown_outcomes(shop: ToolServer) -> None:
    """No event has an id, so there is nothing to come back to; other calls go on."""
    progress = Progress()
    async with (
        behind_proxy(shop.server.streamable_http_app()) as proxy,
        perdure.connect(proxy.url, patience=BRIEF) as client,
    ):
        call = asyncio.create_task(client.call_tool("count", {"n": 6, "gate": "g", "pauses": [3]}, None, progress))
        await until(lambda: progress.seen == numbers(3))
        proxy.cut(only="POST")
        with pytest.raises(perdure.OutcomeUnknown) as unknown:
            await call
        assert unknown.value.tool == "count"
        assert text(await client.call_tool("count", {"n": 1})) == "counted to 1"


async def test_a_server_that_answers_in_json(shop: ToolServer) -> None:
    inbox = Inbox()
    app = shop.server.streamable_http_app(json_response=True)
    async with behind_proxy(app) as proxy, perdure.connect(proxy.url, message_handler=inbox) as client:
        await proxy.answered("GET")
        assert text(await client.call_tool("announce", {"n": 2})) == "announced 2"
        await until(lambda: inbox.notices == ["notice://1", "notice://2"])
        with pytest.raises(MCPError, match="boom"):
            await client.call_tool("boom", {"code": -32050})


async def test_a_server_without_sessions_is_used_without_one(shop: ToolServer, tmp_path: Path) -> None:
    """Nothing to remember: the next process shakes hands anew."""
    app = shop.server.streamable_http_app(stateless_http=True)
    async with behind_proxy(app) as proxy:
        for _ in range(2):
            async with perdure.connect(proxy.url, state=tmp_path / "s.json") as client:
                assert client.session_id is None
                assert text(await client.call_tool("count", {"n": 2})) == "counted to 2"
                assert client.pending() == []
        assert proxy.requests["DELETE"] == 0
    state = decode((tmp_path / "s.json").read_bytes())
    assert state.handshake is not None
    assert state.handshake.session == ""


class ModernOnly:
    """Refuses all that does not name a revision without sessions, as a server does that knows no other."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode(): value.decode() for name, value in scope.get("headers", [])}
        if scope["type"] == "http" and headers.get("mcp-protocol-version") != LATEST_MODERN_VERSION:
            error = {
                "code": UNSUPPORTED_PROTOCOL_VERSION,
                "message": "Unsupported protocol version",
                "data": {"supported": [LATEST_MODERN_VERSION], "requested": "2025-11-25"},
            }
            response = JSONResponse({"jsonrpc": "2.0", "id": None, "error": error}, status_code=400)
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)


async def test_a_server_of_2026_07_28_alone_is_spoken_to_without_a_session(shop: ToolServer, tmp_path: Path) -> None:
    """B18: no session; the client finds that out by itself."""
    progress = Progress()
    async with (
        behind_proxy(ModernOnly(shop.server.streamable_http_app())) as proxy,
        perdure.connect(proxy.url, state=tmp_path / "s.json") as client,
    ):
        assert (client.protocol_version, client.session_id) == (LATEST_MODERN_VERSION, None)
        assert text(await client.call_tool("count", {"n": 3}, None, progress)) == "counted to 3"
        assert client.pending() == []
    assert progress.seen == numbers(3)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 500])
async def test_what_is_no_mcp_server_is_told_at_once(status: int) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await JSONResponse({"error": "no"}, status_code=status)(scope, receive, send)

    async with under_uvicorn(_with_lifespan(app)) as port, asyncio.timeout(20):
        with pytest.raises(MCPError):
            async with perdure.connect(f"http://127.0.0.1:{port}/mcp"):
                raise AssertionError("no server")


class Redirecting:
    """Redirects from some paths, and notes who comes to any other."""

    def __init__(self, inner: ASGIApp, places: dict[str, str]) -> None:
        self._inner = inner
        self._places = places
        self.visits: list[str] = []
        """The credentials that were shown here."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in self._places:
            place = {"location": self._places[scope["path"]]}
            await JSONResponse({}, status_code=307, headers=place)(scope, receive, send)
            return
        if scope["type"] == "http":
            self.visits.append(dict(scope["headers"]).get(b"authorization", b"").decode())
        await self._inner(scope, receive, send)


async def test_a_redirect_within_the_origin_is_followed_and_another_one_is_not(shop: ToolServer) -> None:
    """A server would answer at the other origin, and gets neither the request nor the credentials."""
    elsewhere = Redirecting(ToolServer().server.streamable_http_app(), {})
    async with under_uvicorn(elsewhere, complaint=".*") as away:
        places = {"/old": "/mcp", "/away": f"http://127.0.0.1:{away}/mcp", "/renamed": f"http://localhost:{away}/mcp"}
        here = Redirecting(shop.server.streamable_http_app(), places)
        async with under_uvicorn(here, complaint=".*") as port:
            own = {"authorization": "Bearer secret"}
            async with perdure.connect(f"http://127.0.0.1:{port}/old", headers=own) as client:
                assert text(await client.call_tool("count", {"n": 1})) == "counted to 1"
            for path in ("away", "renamed"):
                with pytest.raises(MCPError):
                    async with perdure.connect(f"http://127.0.0.1:{port}/{path}", headers=own):
                        raise AssertionError("another origin")
    assert set(here.visits) == {"Bearer secret"}
    assert elsewhere.visits == []


async def test_a_server_that_primes_and_closes_is_polled_at_its_own_pace(shop: ToolServer) -> None:
    """B7: `retry` is obeyed, not undercut. The SDK's server closes when the tool says so."""
    app = shop.server.streamable_http_app(event_store=Shelf(), retry_interval=300)
    async with behind_proxy(app) as proxy, perdure.connect(proxy.url) as client:
        mark = proxy.cut_after(PRIMING, only="POST")
        call = asyncio.create_task(client.call_tool("wait", {"gate": "g"}))
        await mark.passed()
        clock = asyncio.get_running_loop().time
        cut, gets = clock(), proxy.requests["GET"]
        await until(lambda: proxy.requests["GET"] > gets)
        assert clock() - cut >= 0.29
        shop.open("g")
        assert text(await call) == "went through g"


def _with_lifespan(app: ASGIApp) -> ASGIApp:
    async def both(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})

    return both
