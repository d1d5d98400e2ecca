"""A running call sees the newest token of its principal (R9): access tokens live for minutes, calls for longer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
from fastmcp import FastMCP
from fastmcp.server.dependencies import get_access_token as fastmcp_token
from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken, TokenVerifier
from mcp.server.mcpserver import MCPServer

from perdure.http.credentials import renew
from tests.support.clients.raw_http import VERSION, Exchange, SessionPeer, bearer, message, text_of
from tests.support.servers.gated_server import Live, live
from tests.support.servers.gated_tools import gate

pytestmark = pytest.mark.anyio

SOON, LATER = 2_000_000_000, 2_000_000_600


def token(text: str, *, subject: str = "ann", expires_at: int | None = LATER) -> AccessToken:
    return AccessToken(token=text, client_id="app", subject=subject, scopes=[text], expires_at=expires_at)


class Guests(TokenVerifier):
    """Knows the tokens of ann and of bob."""

    async def verify_token(self, token_text: str) -> AccessToken | None:
        known = {
            "ann-1": token("ann-1", expires_at=SOON),
            "ann-2": token("ann-2"),
            "bob-1": token("bob-1", subject="bob"),
        }
        return known.get(token_text)


def name_of(seen: AccessToken | None) -> str:
    return "none" if seen is None else seen.token


def sdk_server() -> MCPServer:
    server = MCPServer("patient", log_level="WARNING")

    @server.tool()
    async def two_looks(name: str) -> str:
        before = name_of(get_access_token())
        gate(f"{name} begun").set()
        await gate(name).wait()
        return f"{before}, then {name_of(get_access_token())}"

    return server


def fastmcp_server() -> FastMCP:
    server: FastMCP = FastMCP("patient")

    @server.tool
    async def two_looks(name: str) -> str:
        before = name_of(fastmcp_token())
        gate(f"{name} begun").set()
        await gate(name).wait()
        return f"{before}, then {name_of(fastmcp_token())}"

    return server


@pytest.fixture(params=[sdk_server, fastmcp_server], ids=["MCPServer", "FastMCP"])
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Live]:
    make: Callable[[], object] = request.param
    async with live(server=make(), auth=Guests()) as running:
        yield running


async def begin(ann: SessionPeer, name: str) -> Exchange:
    """A call that has taken its first look."""
    call = await ann.begin_call("two_looks", name=name)
    assert await call.head() == 200
    await gate(f"{name} begun").wait()
    return call


def renewed(ann: SessionPeer) -> SessionPeer:
    return SessionPeer(port=ann.port, headers={**ann.headers, **bearer("ann-2")}, id=ann.id)


async def end(call: Exchange, name: str) -> str:
    gate(name).set()
    return text_of((await call.answer()).messages[-1])


async def test_a_request_with_a_new_token_renews_running_calls(served: Live, request: pytest.FixtureRequest) -> None:
    name = request.node.name
    ann = await served.session(**bearer("ann-1"))
    async with await begin(ann, name) as call:
        assert (await renewed(ann).ask("POST", message("ping", id=9))).status == 200
        assert await end(call, name) == "ann-1, then ann-2"


async def test_a_reattach_with_a_new_token_renews_running_calls(served: Live, request: pytest.FixtureRequest) -> None:
    name = request.node.name
    ann = await served.session(**bearer("ann-1"))
    async with await begin(ann, name) as call:
        while not call.position:
            await call.read()
        assert (await renewed(ann).initialize(VERSION)).status == 200  # which ends the readers of before
        gate(name).set()
        async with await renewed(ann).resume(call.position) as again:
            assert text_of((await again.answer()).messages[-1]) == "ann-1, then ann-2"


async def test_tokens_of_others_and_late_ones_change_nothing(served: Live, request: pytest.FixtureRequest) -> None:
    """Promise 5: a stranger's request names the session and is answered 404."""
    name = request.node.name
    ann = await served.session(**bearer("ann-2"))
    async with await begin(ann, name) as call:
        for text, status in (("bob-1", 404), ("ann-1", 200)):
            stray = SessionPeer(port=ann.port, headers={**ann.headers, **bearer(text)}, id=ann.id)
            assert (await stray.ask("POST", message("ping", id=9))).status == status
        assert await end(call, name) == "ann-2, then ann-2"


@pytest.mark.parametrize(
    ("held", "shown", "kept"),
    [(SOON, LATER, LATER), (LATER, SOON, LATER), (SOON, None, None), (None, SOON, SOON), (SOON, SOON, SOON)],
)
def test_the_newest_token_stays_unless_it_expires_sooner(held: int | None, shown: int | None, kept: int | None) -> None:
    user = AuthenticatedUser(token("first", expires_at=held))
    renew(user, token("second", expires_at=shown))
    assert user.access_token.expires_at == kept
    assert user.scopes == user.access_token.scopes
