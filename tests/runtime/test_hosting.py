"""Every kind of server that Perdure takes, served for real: its own lifespan, auth and routes stay its own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import mcp_types as types
import pytest
from fastmcp import Context as FastContext
from fastmcp import FastMCP
from fastmcp.server.auth import RemoteAuthProvider
from fastmcp.server.auth.providers.jwt import StaticTokenVerifier
from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import AuthSettings
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel.server import Server
from mcp.server.mcpserver import Context, MCPServer
from pydantic import AnyHttpUrl
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount

import perdure
from perdure import BadTarget, Misuse
from perdure.store import MemoryStore
from tests.support.site import Site, serve, under_uvicorn
from tests.support.wire import EVENTS, JSON, Message, Peer, Web, progress_of, text_of

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


async def modern(site: Site, name: str, arguments: Message) -> Message:
    """A tool call of 2026-07-28; its answer."""
    meta = {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientInfo": {"name": "wire", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    headers = [
        ("accept", f"{JSON}, {EVENTS}"),
        ("content-type", JSON),
        ("mcp-protocol-version", "2026-07-28"),
        ("mcp-method", "tools/call"),
        ("mcp-name", name),
    ]
    params = {"name": name, "arguments": arguments, "_meta": meta}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    response = await site.request("POST", headers=headers, body=body)
    assert response.status_code == 200, response.text
    if response.headers["content-type"].startswith(JSON):
        message: Message = response.json()
        return message
    last: Message = json.loads([line[6:] for line in response.text.splitlines() if line.startswith("data: {")][-1])
    return last


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
        assert text_of(await modern(site, "count", {"n": 2})) == "2 in the lifespan"
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
    with pytest.raises(BadTarget, match=r"a builtins\.dict is no MCP server"):
        perdure.asgi({}, store=MemoryStore())


# --- Servers that bring auth and routes of their own


PEOPLE = {"ann-token": "ann", "ann-new-token": "ann", "bob-token": "bob"}


class Doorkeeper:
    """Knows two people."""

    async def verify_token(self, token: str) -> AccessToken | None:
        if token not in PEOPLE:
            return None
        return AccessToken(token=token, client_id="app", scopes=["use"], subject=PEOPLE[token])


async def hello(request: Request) -> Response:
    return PlainTextResponse("hello")


def guarded_server() -> MCPServer[Any]:
    server = MCPServer(
        "guarded",
        token_verifier=Doorkeeper(),
        auth=AuthSettings(
            issuer_url=AnyHttpUrl("https://issuer.example"),
            resource_server_url=AnyHttpUrl("http://127.0.0.1/mcp"),
            required_scopes=["use"],
            validate_token_resource=False,
        ),
    )

    @server.tool()
    async def whoami() -> str:
        token = get_access_token()
        return f"{token.subject}" if token else "nobody"

    server.custom_route("/hello", methods=["GET"])(hello)
    return server


def guarded_fast_server() -> FastMCP[Any]:
    tokens = {token: {"client_id": "app", "sub": who, "scopes": ["use"]} for token, who in PEOPLE.items()}
    verifier = StaticTokenVerifier(tokens=tokens, required_scopes=["use"])
    auth = RemoteAuthProvider(
        token_verifier=verifier,
        authorization_servers=[AnyHttpUrl("https://issuer.example")],
        base_url="http://127.0.0.1",
    )
    server: FastMCP[Any] = FastMCP("guarded", auth=auth)

    @server.tool
    async def whoami() -> str:
        token = get_access_token()
        return f"{token.subject or (token.claims and token.claims.get('sub'))}" if token else "nobody"

    return server


GUARDED: dict[str, Callable[[], object]] = {"MCPServer": guarded_server, "FastMCP": guarded_fast_server}


@pytest.mark.parametrize("kind", GUARDED)
async def test_a_servers_own_auth_stays_in_force(kind: str) -> None:
    """A29: every request is checked, in every method; the token's owner reaches the tool."""
    async with serve(GUARDED[kind]()) as site:
        ann = await site.join(token="ann-token")
        assert await ann.result("whoami") == "ann"
        for token in (None, "wrong"):
            stranger = Peer(site, token=token)
            stranger.session = ann.session
            for response in (
                await stranger.send(stranger.request("ping")),
                await stranger.try_get(),
                await stranger.delete(),
            ):
                assert response.status_code == 401
                assert "resource_metadata" in response.headers["www-authenticate"]


@pytest.mark.parametrize("kind", GUARDED)
async def test_a_session_belongs_to_who_opened_it_under_the_servers_own_auth(kind: str) -> None:
    """A30, promise 5, R9: another person finds nothing; another token of the same person is that person."""
    async with serve(GUARDED[kind]()) as site:
        ann = await site.join(token="ann-token")
        wire = await ann.call("whoami")
        await wire.rest()
        bob = Peer(site, token="bob-token")
        bob.session = ann.session
        responses = [await bob.send(bob.request("ping")), await bob.try_get(wire.seen[0].id), await bob.delete()]
        assert [response.status_code for response in responses] == [404] * 3
        ann.token = "ann-new-token"
        assert await ann.result("whoami") == "ann"
        assert (await (await ann.get(wire.seen[0].id)).rest())[-1]["result"]


async def test_a_servers_own_routes_are_served_beside_the_endpoint() -> None:
    """Custom routes, and those that its auth needs."""
    async with serve(guarded_server()) as site:
        base = f"http://127.0.0.1:{site.port}"
        assert (await site.http.get(f"{base}/hello")).text == "hello"
        metadata = await site.http.get(f"{base}/.well-known/oauth-protected-resource/mcp")
        assert metadata.json()["authorization_servers"] == ["https://issuer.example/"]
        assert (await site.http.get(f"{base}/healthz")).json() == {"status": "ok"}


async def test_custom_routes_of_a_server_without_auth() -> None:
    server = MCPServer("routes")

    server.custom_route("/hello", methods=["GET"])(hello)
    async with serve(server) as site:
        assert (await site.http.get(f"http://127.0.0.1:{site.port}/hello")).text == "hello"


async def test_custom_routes_of_a_fastmcp_server() -> None:
    server: FastMCP[Any] = FastMCP("routes")

    server.custom_route("/hello", methods=["GET"])(hello)
    async with serve(server) as site:
        assert (await site.http.get(f"http://127.0.0.1:{site.port}/hello")).text == "hello"


async def test_auth_of_ours_and_auth_of_the_servers_exclude_each_other() -> None:
    with pytest.raises(Misuse, match="its own authentication"):
        perdure.asgi(guarded_server(), store=MemoryStore(), auth=Doorkeeper())


@pytest.mark.parametrize("kind", KINDS)
async def test_auth_of_ours_guards_a_server_of_each_kind(kind: str) -> None:
    async with serve(KINDS[kind]([]), auth=Doorkeeper()) as site:
        ann = await site.join(token="ann-token")
        assert await ann.result("count", n=1) == "1 in the lifespan"
        stranger = Peer(site)
        response = await site.request("POST", headers=stranger.headers(), body=stranger.handshake())
        assert response.status_code == 401
        info = site.app.session_info(ann.session)
        assert info is not None
        assert "ann" in info.owner


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
        assert text_of(await modern(site, "count", {"n": 1})) == "1 in the lifespan"
