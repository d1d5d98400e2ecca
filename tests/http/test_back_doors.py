"""No way to the endpoint but by the entry, where callers are checked; and no answer that gets lost on its way out."""

from __future__ import annotations

import asyncio
import math

import httpx2
import pytest
from fastmcp import FastMCP
from mcp.server.auth.provider import AccessToken, TokenVerifier
from mcp.server.lowlevel.server import Server
from mcp.server.mcpserver import Context, MCPServer
from starlette.authentication import AuthCredentials, AuthenticationBackend, BaseUser, SimpleUser, UnauthenticatedUser
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse

import perdure
from perdure.errors import Misuse
from perdure.http.credentials import principal_of
from tests.support.clients.raw_http import Peer, message
from tests.support.servers.gated_server import live
from tests.support.servers.in_process import info_of, under_uvicorn, until
from tests.support.stores.faulty_store import Fault, FaultyStore
from tests.support.stores.outages import recovered

pytestmark = pytest.mark.anyio

SPELLINGS = [
    *("/mcp%0A", "/mcp%0a/", "//mcp", "/MCP", "/mcp%00", "/mcp/%0A", "/%6dcp", "/mcp;x", "/./mcp", "/mcp?x", "/mcp/")
]


class OneGuest(TokenVerifier):
    async def verify_token(self, token: str) -> AccessToken | None:
        return AccessToken(token=token, client_id="a", scopes=[]) if token == "good" else None


def servers() -> list[object]:
    return [MCPServer("m", log_level="WARNING"), Server("s"), FastMCP("f")]


@pytest.mark.parametrize("server", servers(), ids=["MCPServer", "Server", "FastMCP"])
async def test_no_spelling_of_the_path_leads_past_the_tokens(server: object) -> None:
    """Promise 5: Starlette's routes end in `$`, which also matches before a line end."""
    async with live(server=server, auth=OneGuest()) as served:
        for spelling in SPELLINGS:
            body = message("initialize", {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {}}, id=0)
            head = (
                f"POST {spelling} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: application/json, text/event-stream\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            async with await served.open(head.encode() + body) as exchange:
                answer = await exchange.answer()
            assert answer.status in (307, 400, 401, 404), spelling
            assert answer.header("mcp-session-id") is None
        assert served.app.session_ids() == []


async def hello(_: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


def with_a_route(server: MCPServer | FastMCP) -> MCPServer | FastMCP:
    server.custom_route("/hello", methods=["GET"])(hello)
    return server


@pytest.mark.parametrize("kind", [MCPServer, FastMCP])
async def test_the_server_s_own_routes_need_a_token_too(kind: type[MCPServer] | type[FastMCP]) -> None:
    """Who asks for tokens does not expect a way in without one."""
    async with live(server=with_a_route(kind("m")), auth=OneGuest()) as served:
        stranger = await served.ask("GET", path="/hello")
        guest = await served.ask("GET", path="/hello", headers={"authorization": "Bearer good"})
        health = await served.ask("GET", path="/healthz")
    assert (stranger.status, guest.status, guest.body, health.status) == (401, 200, b"hello", 200)


async def test_the_server_s_own_routes_are_open_where_everything_is() -> None:
    async with live(server=with_a_route(MCPServer("m", log_level="WARNING"))) as served:
        assert (await served.ask("GET", path="/hello")).body == b"hello"


async def test_an_app_may_be_started_again() -> None:
    """As users' tests do: each start is a new life."""
    app = perdure.asgi(MCPServer("m", log_level="WARNING"), store="memory:")
    for _ in range(2):
        async with app.lifespan():
            transport = httpx2.ASGITransport(app=app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                assert (await client.get("/healthz")).json() == {"status": "ok"}


def test_users_of_an_outer_application_are_told_apart() -> None:
    """Promise 5: mounted behind somebody else's authentication, its users own their sessions."""

    ann, bob, stranger = SimpleUser("ann"), SimpleUser("bob"), UnauthenticatedUser()
    names = [principal_of({"user": user}) for user in (ann, bob, stranger, None)]
    assert len(set(names)) == 3
    assert names[2] == names[3] == ""


class NamedUser(BaseUser):
    """A user who is called like others."""

    def __init__(self, identity: str) -> None:
        self._identity = identity

    is_authenticated = True
    display_name = "John Smith"

    @property
    def identity(self) -> str:
        return self._identity


async def test_two_users_of_one_name_do_not_share_sessions() -> None:
    """Promise 5: what people are called is not unique; who they are is."""

    class ByHeader(AuthenticationBackend):
        async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, BaseUser]:
            return AuthCredentials(), NamedUser(conn.headers["x-user"])

    server = MCPServer("m", log_level="WARNING")
    app = AuthenticationMiddleware(perdure.asgi(server, store="memory:"), backend=ByHeader())
    async with under_uvicorn(app) as port:
        peer = await Peer(port=port).session(**{"x-user": "1001"})
        theirs = await peer.ask("POST", message("ping", id=1), headers={"x-user": "1002"})
        own = await peer.ask("POST", message("ping", id=1), headers={"x-user": "1001"})
    assert (theirs.status, own.status) == (404, 200)


def test_a_user_without_an_identity_owns_nothing() -> None:
    """A display name in its place would let two people share a session."""

    class Nameless(BaseUser):
        is_authenticated = True
        display_name = "John Smith"

    with pytest.raises(Misuse, match="Nameless has no identity"):
        principal_of({"user": Nameless()})


def odd_server() -> MCPServer:
    server = MCPServer("odd", log_level="WARNING")

    @server.tool()
    async def half_a_pair() -> str:
        return "\ud800"

    @server.tool()
    async def not_a_number(ctx: Context) -> str:
        await ctx.report_progress(math.nan, math.inf)
        return "done"

    return server


async def test_what_cannot_be_written_as_json_harms_nobody() -> None:
    """Promise 3: a result is answered with an error, and the session goes on. JSON has no NaN: a browser could not read
    the event, nor any replay of it."""
    async with live(server=odd_server(), complaint="the handler of tools/call failed|serializ") as served:
        peer = await served.session()
        [answer] = (await peer.call("half_a_pair", id=7)).messages
        assert answer["id"] == 7
        assert "error" in answer or answer["result"]["isError"]
        assert info_of(served.app, peer.id).running_calls == ()
        reported = await peer.call("not_a_number")
        assert b"NaN" not in reported.body
        assert b"Infinity" not in reported.body
        assert reported.messages[0]["params"]["progress"] is None


async def test_a_request_that_is_cancelled_while_its_row_is_written_never_begins() -> None:
    """A32"""
    store = FaultyStore(perdure.open_store("memory:"), timeout=0.5)
    async with live(store=store, store_timeout=0.5, complaint="the store fails") as served:
        peer = await served.session()
        store.writes = Fault.HANGS
        before = store.asked
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(peer.call("count", id=5, n=3))
            await until(lambda: store.asked > before)
            await peer.ask("POST", message("notifications/cancelled", {"requestId": 5}))
        store.works()
        [answer] = call.result().messages
        assert answer["error"]["code"] == -32800
        await recovered(served)


async def test_metrics_and_custom_routes_answer_no_other_site() -> None:
    """DNS rebinding: a page reaches a server of this machine under a name of its own."""
    async with live(server=with_a_route(MCPServer("m"))) as served:
        for headers, status in (
            ({}, 200),
            ({"host": "10.1.2.3:8000"}, 200),  # as a scraper that knows servers by their addresses
            ({"host": "evil.example"}, 421),
            ({"origin": "https://evil.example"}, 403),
        ):
            for path in ("/metrics", "/hello"):
                assert (await served.ask("GET", path=path, headers=headers)).status == status


async def test_the_server_s_own_pages_may_send_forms_to_its_own_routes() -> None:
    """A login has a form, and browsers say of each form which page it is on."""
    server = with_a_route(MCPServer("m", log_level="WARNING"))
    async with live(server=server, allowed_hosts=("bakery.example",)) as served:
        for origin, status in (
            ("https://bakery.example", 200),
            ("http://bakery.example", 200),
            ("https://bakery.example.evil.example", 403),
            ("https://bakery.example:444", 403),
            ("null", 403),
        ):
            sent = {"host": "bakery.example", "origin": origin}
            assert (await served.ask("GET", path="/hello", headers=sent)).status == status
            assert (await served.ask("POST", headers=sent)).status == 403
