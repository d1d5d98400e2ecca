"""A call's answer reaches the program whatever other requests do, and stays in the state until the program has it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from mcp.server.mcpserver import MCPServer
from mcp_types import CallToolResult
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import perdure
from perdure.client.memory import Memory, StateFile, decode
from perdure.remote.durable_calls import DurableCall
from tests.client.client_process import client_process
from tests.client.conftest import text
from tests.client.odd_server import BRIEF
from tests.support.clients.modern_requests import MODERN
from tests.support.processes.cluster import GATE_FILE_TOOLS
from tests.support.processes.serving import serving
from tests.support.servers.gate_file_tools import open_gate
from tests.support.servers.in_process import Site, under_uvicorn, until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio

ERAS = pytest.mark.parametrize("mode", ["legacy", MODERN])
#: Takes a regular expression of Python's about 2^40 steps.
HOSTILE: dict[str, object] = {"type": "object", "properties": {"result": {"type": "string", "pattern": "^(a+)+$"}}}
FATAL = "a" * 40 + "!"


class ToolLists:
    """Answers `tools/list` itself: with 503, or with a schema for the output of `echo`."""

    def __init__(self, app: ASGIApp, schema: dict[str, object] | None = None) -> None:
        self._app = app
        self._schema = schema
        self.asked = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        parts: list[bytes] = []
        while (message := await receive())["type"] == "http.request":
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                break
        body = b"".join(parts)
        request = json.loads(body)

        async def again() -> Message:
            return {"type": "http.request", "body": parts.pop()} if parts else await receive()

        if request.get("method") != "tools/list":
            parts[:] = [body]
            await self._app(scope, again, send)
            return
        self.asked += 1
        response: Response = Response(status_code=503)
        if self._schema is not None:
            tool = {"name": "echo", "inputSchema": {"type": "object"}, "outputSchema": self._schema}
            result = {"tools": [tool], "resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
            response = JSONResponse({"jsonrpc": "2.0", "id": request["id"], "result": result})
        await response(scope, again, send)


@asynccontextmanager
async def echoing(schema: dict[str, object] | None = None) -> AsyncIterator[tuple[str, ToolLists]]:
    server = MCPServer("echo", version="1", log_level="WARNING")

    @server.tool()
    def echo(said: str) -> str:
        return said

    lists = ToolLists(server.streamable_http_app(), schema)
    async with under_uvicorn(lists, complaint=".*") as port:
        yield f"http://127.0.0.1:{port}/mcp", lists


@ERAS
async def test_an_answered_call_returns_where_the_list_of_tools_cannot_be_read(mode: str) -> None:
    """`Unreachable` says that a call did not run; this one ran."""
    async with echoing() as (url, lists), perdure.connect(url, mode=mode, patience=BRIEF) as client:
        result = await client.call_tool("echo", {"said": "it ran"})
        assert (text(result), result.structured_content, result.is_error) == ("it ran", {"result": "it ran"}, False)
        assert lists.asked == 0
        with pytest.raises(perdure.Unreachable):
            await client.list_tools()


@ERAS
async def test_a_schema_of_the_server_cannot_stop_the_client(mode: str) -> None:
    """Promise 6: its pattern would take years to match, on the event loop."""
    async with echoing(HOSTILE) as (url, _), perdure.connect(url, mode=mode) as client:
        assert (await client.list_tools()).tools[0].output_schema == HOSTILE
        assert text(await client.call_tool("echo", {"said": FATAL})) == FATAL


@ERAS
async def test_a_tools_own_error_is_still_one(mode: str) -> None:
    async with echoing() as (url, _), perdure.connect(url, mode=mode) as client:
        assert (await client.call_tool("echo", {"wrong": 1})).is_error is True


class Moments(StateFile):
    """Notes at each write, as a kill right after it would find it: whether the call is in the state."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.has_returned = False
        self.lost: list[str] = []
        self.forgotten = asyncio.Event()
        self._had_call = False

    def save(self, data: bytes) -> None:
        super().save(data)
        state = decode(data)
        has_call = bool(state.calls or state.durable_calls)
        if self._had_call and not has_call:
            if not self.has_returned:
                self.lost.append("neither returned nor pending")
            self.forgotten.set()
        self._had_call = has_call


async def _plain(call: Awaitable[CallToolResult], moments: Moments) -> None:
    await call
    moments.has_returned = True


async def _gathered(call: Awaitable[CallToolResult], moments: Moments) -> None:
    await asyncio.gather(call)
    moments.has_returned = True


async def _limited(call: Awaitable[CallToolResult], moments: Moments) -> None:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(asyncio.wait_for(call, 30))
    moments.has_returned = task.result() is not None


WAYS = pytest.mark.parametrize("way", [_plain, _gathered, _limited])


@ERAS
@WAYS
async def test_a_result_is_forgotten_only_when_the_program_has_it(
    site: Site, tmp_path: Path, mode: str, way: Callable[[Awaitable[CallToolResult], Moments], Awaitable[None]]
) -> None:
    """R12: a kill at any write finds the result returned or the call pending, and soon it is forgotten."""
    moments = Moments(tmp_path / "s")
    async with perdure.connect(site.url, mode=mode, state=moments) as client:
        await way(client.call_tool("count", {"n": 1}), moments)
        await asyncio.wait_for(moments.forgotten.wait(), 30)
    assert moments.lost == []
    assert client.pending() == []


@ERAS
async def test_an_earlier_calls_result_is_forgotten_only_when_the_program_has_it(
    site: Site, shop: ToolServer, tmp_path: Path, mode: str
) -> None:
    async with perdure.connect(site.url, mode=mode, state=tmp_path / "s") as client:
        call = asyncio.create_task(client.call_tool("wait", {"gate": "g"}))
        await until(lambda: shop.seen)
    with pytest.raises(Exception, match="Connection closed"):
        await call
    shop.open("g")
    moments = Moments(tmp_path / "s")
    async with perdure.connect(site.url, mode=mode, state=moments) as client:
        [pending] = client.pending()
        await _limited(pending.result(), moments)
        await asyncio.wait_for(moments.forgotten.wait(), 30)
    assert moments.lost == []


@ERAS
async def test_a_result_is_forgotten_when_the_program_leaves(site: Site, tmp_path: Path, mode: str) -> None:
    async with perdure.connect(site.url, mode=mode, state=tmp_path / "s") as client:
        await client.call_tool("count", {"n": 1})
    state = decode((tmp_path / "s").read_bytes())
    assert (state.calls, state.durable_calls) == ({}, {})


async def test_a_key_that_is_used_again_is_not_forgotten_with_its_first_call() -> None:
    """Both calls stand under one key in the state."""
    memory = Memory(None, "http://a/mcp")
    first, second = (DurableCall(id="order-1", params={}, headers={}, began=0.0) for _ in range(2))
    for call in (first, second):
        memory.state.durable_calls[call.id] = call
    memory.end_durable(first)
    assert memory.state.durable_calls == {"order-1": second}


@pytest.mark.parametrize("more", [(), ("modern",)])
async def test_killed_as_the_result_leaves_the_state_it_was_returned(tmp_path: Path, more: tuple[str, ...]) -> None:
    """R12: the process kills itself (SIGKILL) in the moment at which the call is no longer in its state."""
    gate, state = tmp_path / "gate", tmp_path / "agent.json"
    async with serving(GATE_FILE_TOOLS, "--store", "memory:") as served:
        open_gate(f"{gate}.1")
        arguments = {"n": 1, "gate": str(gate), "pauses": [1]}
        async with client_process(served.url, state, "pay", "fatal", *more, **arguments) as first:
            while await first.line() is not None:
                pass
            assert await first.process.wait() == -9
        async with client_process(served.url, state, "-", *more) as second:
            await second.rest()
    assert first.told("result") + second.told("result") == ["counted to 1"]
