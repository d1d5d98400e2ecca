"""An HTTP upstream is replaced by one of the other era at the same address, and clients of both eras go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from perdure._core.envelope import SUBSCRIPTION
from perdure._core.ids import SessionId
from tests.gateway.test_http_upstreams import gateway
from tests.support.clients.modern_peer import CallPeer, message_of, result_of, said
from tests.support.clients.modern_requests import MODERN
from tests.support.clients.wire_client import text_of
from tests.support.servers.in_process import under_uvicorn, until

pytestmark = pytest.mark.anyio

SESSION = "session"
BOTH = pytest.mark.parametrize(("first", "then"), [(SESSION, MODERN), (MODERN, SESSION)])
INFO = {"name": "chameleon", "version": "1"}
CAPABILITIES: dict[str, Any] = {"tools": {}, "resources": {"subscribe": True}}
RESULTS: dict[str, Any] = {
    "initialize": {"protocolVersion": "2025-11-25", "capabilities": CAPABILITIES, "serverInfo": INFO},
    "server/discover": {"supportedVersions": [MODERN], "capabilities": CAPABILITIES},
    "tools/list": {"tools": [{"name": "plain", "inputSchema": {"type": "object"}}]},
}


class Chameleon:
    """A server that speaks one era at a time."""

    def __init__(self) -> None:
        self.era = SESSION
        self.named = "a-session"
        """Its session id; empty where it is stateless."""
        self.denied = ""
        """A method that it refuses in either era."""
        self.refusals: dict[str, tuple[int, int, str]] = {
            SESSION: (400, -32600, "Bad Request: Unsupported protocol version: 2026-07-28"),  # of the Python SDK 1
            MODERN: (400, -32022, "Unsupported protocol version"),
            "none": (400, -32022, "Unsupported protocol version"),
        }
        """How it refuses each request of the other era."""
        self.heard: list[str] = []
        self.runs = 0
        self.held = "tools/call"
        """Requests of this method wait for the gate."""
        self.gate = asyncio.Event()
        self.gate.set()
        self.cut = asyncio.Event()
        """Ends the streams that are open."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await (await self._answer(Request(scope, receive)))(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        if request.method == "GET" and self.era == SESSION:
            return self._stream({})
        if request.method == "DELETE":
            return Response()
        message: dict[str, Any] = {"method": "GET"} if request.method == "GET" else await request.json()
        method, era = message["method"], self.era
        is_modern = request.headers.get("mcp-protocol-version") == MODERN
        if method == self.denied:
            self.heard.append(f"{era} {method}")
            era = "none"
        if era == "none" or is_modern != (era == MODERN):
            status, code, why = self.refusals[era]
            error = {"code": code, "message": why}
            return JSONResponse({"jsonrpc": "2.0", "id": message.get("id"), "error": error}, status)
        self.heard.append(f"{era} {method}")
        if "id" not in message:
            return Response(status_code=202)
        result = RESULTS.get(method, {})
        if method == "subscriptions/listen":
            params = {"notifications": message["params"]["notifications"], "_meta": {SUBSCRIPTION: message["id"]}}
            return self._stream({"method": "notifications/subscriptions/acknowledged", "params": params})
        if method == "tools/call":
            self.runs += 1
        if method == self.held:
            await self.gate.wait()
        if method == "tools/call":
            result = {"content": [{"type": "text", "text": era}]}
        if is_modern:
            result = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private", **result}
        headers = {"mcp-session-id": self.named} if method == "initialize" and self.named else {}
        return JSONResponse({"jsonrpc": "2.0", "id": message["id"], "result": result}, headers=headers)

    def _stream(self, first: dict[str, Any]) -> Response:
        async def events() -> AsyncIterator[str]:
            yield f"data: {json.dumps({'jsonrpc': '2.0', **first})}\n\n" if first else ": here\n\n"
            await self.cut.wait()

        return StreamingResponse(events(), media_type="text/event-stream")


@asynccontextmanager
async def chameleon(era: str) -> AsyncIterator[tuple[Chameleon, str]]:
    server = Chameleon()
    server.era = era
    async with under_uvicorn(server, complaint=".*") as port:
        yield server, f"http://127.0.0.1:{port}/mcp"


@BOTH
async def test_a_session_goes_on(first: str, then: str) -> None:
    async with chameleon(first) as (server, url), gateway(url) as site:
        peer = await site.join()
        assert await peer.result("plain") == first
        server.era = then
        wires = [await peer.call("plain") for _ in range(3)]
        assert [text_of((await wire.rest())[-1]) for wire in wires] == [then] * 3
        assert await peer.result("plain") == then
        assert server.runs == 5
        record = await site.store.session(SessionId(peer.session))
        assert record is not None
        kept = json.loads(record.upstream)["lane"]
        assert (kept is None) == (then == MODERN)  # the next process begins no session there either


@BOTH
@pytest.mark.parametrize("key", [None, "k"])
async def test_calls_of_2026_07_28_go_on(first: str, then: str, key: str | None) -> None:
    """Plain calls, and durable ones."""
    async with chameleon(first) as (server, url), gateway(url) as site:
        client = CallPeer(port=site.port)

        async def call(number: int) -> str:
            return said(result_of(await client.call("plain", key=None if key is None else f"{key}{number}")))

        assert await call(1) == first
        server.era = then
        assert await asyncio.gather(*map(call, (2, 3, 4))) == [then] * 3
        assert await call(5) == then
        assert server.runs == 5


async def test_a_stateless_server_is_replaced() -> None:
    async with chameleon(SESSION) as (server, url), gateway(url) as site:
        server.named = ""
        peer = await site.join()
        assert await peer.result("plain") == SESSION
        server.era = MODERN
        assert await peer.result("plain") == MODERN


async def test_a_request_of_a_session_is_sent_again_once() -> None:
    async with chameleon(SESSION) as (server, url), gateway(url) as site:
        peer = await site.join()
        server.era = "none"
        answer = (await (await peer.call("plain")).rest())[-1]
        assert (answer["error"]["code"], answer["error"]["data"]["reason"]) == (-31010, "version")
        server.era = SESSION
        assert await peer.result("plain") == SESSION


@pytest.mark.parametrize("key", [None, "k"])
async def test_a_call_of_2026_07_28_is_not_sent_for_ever(key: str | None) -> None:
    """The server discovers, and refuses calls."""
    async with chameleon(MODERN) as (server, url), gateway(url) as site:
        server.denied = "tools/call"
        error = message_of(await CallPeer(port=site.port).call("plain", key=key))["error"]
        assert (error["code"], error["data"]["reason"]) == (-31010, "version")
        assert server.heard.count(f"{MODERN} tools/call") <= 5
        assert server.runs == 0


async def test_an_error_that_only_reads_like_a_refusal_is_an_answer() -> None:
    """Of a server that still speaks the revision: it is asked once for several errors."""
    async with chameleon(MODERN) as (server, url), gateway(url) as site:
        server.denied, server.refusals["none"] = "tools/call", (400, -32000, "Your session has expired")
        client = CallPeer(port=site.port)
        for _ in range(2):
            error = message_of(await client.call("plain"))["error"]
            assert error == {"code": -32000, "message": "Your session has expired"}
        assert server.heard.count(f"{MODERN} server/discover") == 2
        assert server.heard.count(f"{MODERN} tools/call") == 2


@BOTH
async def test_a_session_that_only_listens_goes_on(first: str, then: str) -> None:
    async with chameleon(first) as (server, url), gateway(url) as site:
        peer = await site.join()
        await peer.send(peer.request("resources/subscribe", {"uri": "a:1"}))
        server.era = then
        server.cut.set()
        wanted = "session resources/subscribe" if then == SESSION else f"{MODERN} subscriptions/listen"
        await until(lambda: wanted in server.heard)


async def test_a_call_waits_until_the_new_session_is_where_the_old_one_was() -> None:
    """HTTP has no order between requests."""
    async with chameleon(MODERN) as (server, url), gateway(url) as site:
        peer = await site.join()
        await peer.send(peer.request("resources/subscribe", {"uri": "a:1"}))
        server.era, server.held = SESSION, "resources/subscribe"
        server.gate.clear()
        wires = [await peer.call("plain")]
        await until(lambda: "session resources/subscribe" in server.heard)
        wires.append(await peer.call("plain"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await until(lambda: "session tools/call" in server.heard)
        server.gate.set()
        assert [text_of((await wire.rest())[-1]) for wire in wires] == [SESSION] * 2


async def test_a_call_that_runs_at_the_earlier_server_may_end() -> None:
    """Its connection still stands."""
    async with chameleon(SESSION) as (server, url), gateway(url) as site:
        peer = await site.join()
        server.gate.clear()
        wire = await peer.call("plain")
        await until(lambda: server.runs == 1)
        server.era = MODERN
        server.gate.set()
        assert await peer.result("plain") == MODERN
        assert text_of((await wire.rest())[-1]) == SESSION
