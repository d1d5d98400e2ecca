"""Every kind of server that Perdure takes, served for real: its own lifespan, auth and routes stay its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import mcp_types as types
import pytest
from fastmcp import Context as FastContext
from fastmcp import FastMCP
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel.server import Server
from mcp.server.mcpserver import Context, MCPServer
from starlette.applications import Starlette
from starlette.routing import Mount

import perdure
from perdure import BadTarget
from perdure._core.envelope import CALLS, KEPT, TASKS
from perdure.runtime.server import is_server
from perdure.store import MemoryStore
from tests.clients.python_clients import fastmcp_client
from tests.support.clients.wire_client import JSON, Peer, Web, answer_of, progress_of, text_of
from tests.support.servers.in_process import serve, under_uvicorn

pytestmark = pytest.mark.anyio

Lives = list[str]


def lifespan_of(lives: Lives) -> Callable[[Any], Any]:
    """A lifespan that writes down when it is entered and left, and gives something to the tools."""

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[dict[str, str]]:
        lives.append("in")
        try:
            yield {"made": "in the lifespan"}
        finally:
            lives.append("out")

    return lifespan


def sdk_server(lives: Lives) -> MCPServer[Any]:
    server = MCPServer("sdk", lifespan=lifespan_of(lives))

    @server.tool()
    async def count(n: int, ctx: Context) -> str:
        for number in range(1, n + 1):
            await ctx.report_progress(number, n)
        state: Any = ctx.request_context.lifespan_context
        return f"{n} {state['made']}"

    return server


def fast_server(lives: Lives) -> FastMCP[Any]:
    server: FastMCP[Any] = FastMCP("fast", lifespan=lifespan_of(lives))

    @server.tool
    async def count(n: int, ctx: FastContext) -> str:
        for number in range(1, n + 1):
            await ctx.report_progress(number, n)
        state: Any = ctx.lifespan_context
        return f"{n} {state['made']}"

    return server


def low_level_server(lives: Lives) -> Server[Any]:
    async def list_tools(_: ServerRequestContext[Any], __: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[types.Tool(name="count", input_schema={"type": "object"})])

    async def call_tool(ctx: ServerRequestContext[Any], params: types.CallToolRequestParams) -> types.CallToolResult:
        n = int((params.arguments or {})["n"])
        token = (ctx.meta or {}).get("progress_token")
        for number in range(1, n + 1):
            if token is not None:
                note = types.ProgressNotificationParams(progress_token=token, progress=number)
                await ctx.session.send_notification(types.ProgressNotification(params=note), ctx.request_id)
        text = f"{n} {ctx.lifespan_context['made']}"
        return types.CallToolResult(content=[types.TextContent(type="text", text=text)])

    return Server("low", lifespan=lifespan_of(lives), on_list_tools=list_tools, on_call_tool=call_tool)


KINDS: dict[str, Callable[[Lives], object]] = {
    "MCPServer": sdk_server,
    "FastMCP": fast_server,
    "low-level Server": low_level_server,
}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_of_each_kind_announces_tasks_and_keys(kind: str) -> None:
    """Clients look there before they use them. The answer is a dict of some servers, and a model of others."""
    async with serve(KINDS[kind]([]), eras="both") as site:
        found = answer_of(await site.modern("server/discover", {}))["result"]
        assert found["capabilities"]["extensions"].items() >= {TASKS: {}, CALLS: {KEPT: 86_400_000}}.items()
        assert "tools" in found["capabilities"]
        async with fastmcp_client(site.url) as client:  # it refuses an answer that is not as the revision has it
            assert client.protocol == "2026-07-28"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_of_each_kind_streams_resumes_and_shares_one_lifespan(kind: str) -> None:
    """Several sessions and both eras use what one lifespan made; it is entered once and left once."""
    lives: Lives = []
    async with serve(KINDS[kind](lives)) as site:
        for peer in (await site.join(), await site.join("2025-03-26")):
            wire = await peer.call("count", n=4, token="t")
            messages = await wire.rest()
            assert progress_of(messages) == [1, 2, 3, 4]
            assert text_of(messages[-1]) == "4 in the lifespan"
            messages = await (await peer.get(wire.seen[2].id)).rest()
            assert text_of(messages[-1]) == "4 in the lifespan"
        response = await site.modern("tools/call", {"name": "count", "arguments": {"n": 2}})
        assert text_of(answer_of(response)) == "2 in the lifespan"
        assert lives == ["in"]
    assert lives == ["in", "out"]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_lifespan_that_fails_is_told(kind: str) -> None:
    """The application does not start, and the reason is the server's own."""

    @asynccontextmanager
    async def fails(_: Any) -> AsyncIterator[None]:
        raise RuntimeError("no database")
        yield

    servers: dict[str, object] = {
        "MCPServer": MCPServer("x", lifespan=fails),
        "FastMCP": FastMCP("x", lifespan=fails),
        "low-level Server": Server("x", lifespan=fails),
    }
    app = perdure.asgi(servers[kind], store=MemoryStore())
    with pytest.raises((RuntimeError, ExceptionGroup)) as caught:
        async with app.lifespan():
            pass
    assert "no database" in repr(caught.value) or "no database" in str(caught.value.__cause__)


async def test_an_application_can_be_mounted_in_another_one() -> None:
    lives: Lives = []
    app = perdure.asgi(sdk_server(lives), store=MemoryStore(), path="/tools")
    outer = Starlette(routes=[Mount("/inner", app)], lifespan=app.lifespan)
    async with under_uvicorn(outer) as port:
        web = Web(f"http://127.0.0.1:{port}/inner/tools")
        peer = await web.join()
        assert await peer.result("count", n=1) == "1 in the lifespan"
        await web.aclose()
    assert lives == ["in", "out"]


async def test_without_its_lifespan_the_application_says_so() -> None:
    app = perdure.asgi(sdk_server([]), store=MemoryStore())
    outer = Starlette(routes=[Mount("/", app)])
    async with under_uvicorn(outer, complaint="was not started") as port:
        web = Web(f"http://127.0.0.1:{port}/mcp")
        peer = Peer(web)
        response = await web.request("POST", headers=peer.headers(), body=peer.handshake())
        assert response.status_code == 500
        await web.aclose()


def test_what_is_no_server_is_refused() -> None:
    with pytest.raises(BadTarget, match=r"the object to serve is a builtins\.dict, not an MCP server"):
        perdure.asgi({}, store=MemoryStore())


@pytest.mark.parametrize("kind", KINDS)
async def test_other_paths_and_slashes(kind: str) -> None:
    async with serve(KINDS[kind]([]), path="/a/b/") as site:
        peer = await site.join()
        assert await peer.result("count", n=1) == "1 in the lifespan"
        assert (await site.http.post(f"http://127.0.0.1:{site.port}/mcp")).status_code == 404


async def test_the_same_server_object_can_be_served_twice() -> None:
    """One after the other, as in tests of a user's own."""
    lives: Lives = []
    server = sdk_server(lives)
    for _ in range(2):
        async with serve(server) as site:
            assert await (await site.join()).result("count", n=1) == "1 in the lifespan"
    assert lives == ["in", "out", "in", "out"]


async def test_settings_reach_the_handler_of_the_other_era() -> None:
    """`json_response` is one setting for both."""
    async with serve(sdk_server([]), json_response=True) as site:
        response = await site.modern("tools/call", {"name": "count", "arguments": {"n": 1}})
        assert response.headers["content-type"].startswith(JSON)
        assert text_of(answer_of(response)) == "1 in the lifespan"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (MCPServer("a"), True),
        (Server("a"), True),
        (FastMCP("a"), True),
        (FastMCP, False),
        (MCPServer, False),
        (1, False),
    ],
)
def test_servers_are_known_among_other_objects(found: object, expected: bool) -> None:
    assert is_server(found) is expected
