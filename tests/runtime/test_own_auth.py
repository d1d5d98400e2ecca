"""Servers that bring auth and routes of their own keep them; for the others there is ours (A29, A30)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fastmcp import FastMCP
from fastmcp.server.auth import RemoteAuthProvider
from fastmcp.server.auth.providers.jwt import StaticTokenVerifier
from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import AuthSettings
from mcp.server.mcpserver import MCPServer
from pydantic import AnyHttpUrl
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

import perdure
from perdure import Misuse
from perdure.store import MemoryStore
from tests.runtime.test_hosting import KINDS
from tests.support.clients.wire_client import Peer
from tests.support.servers.in_process import info_of, serve

pytestmark = pytest.mark.anyio

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
        assert "ann" in info_of(site.app, ann.session).owner
