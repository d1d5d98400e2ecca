"""Credentials: asked for when they are needed, asked for again when they are refused, never written (R9, R11)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from mcp.server.auth.provider import AccessToken, TokenVerifier
from mcp.shared.exceptions import MCPError

import perdure
from tests.client.conftest import Inbox, Progress, numbers, text
from tests.support.proxies.cutting_proxy import cutting_proxy
from tests.support.servers.in_process import serve, until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio


class Guests(TokenVerifier):
    """Ann, whose tokens of before are refused once she has a newer one."""

    def __init__(self) -> None:
        self.newest = 1

    async def verify_token(self, token: str) -> AccessToken | None:
        person, _, number = token.partition("-")
        if person != "ann" or int(number) < self.newest:
            return None
        return AccessToken(token=token, client_id="app", subject=person, scopes=[], expires_at=None)


async def test_a_token_that_is_renewed_in_the_middle_of_a_call(shop: ToolServer, tmp_path: Path) -> None:
    """R9: the session goes on; the position is fetched with the new token."""
    guests, given, progress = Guests(), 0, Progress()

    async def token() -> str:
        nonlocal given
        given += 1
        return f"ann-{given}"

    state = tmp_path / "agent.json"
    async with serve(shop.server, auth=guests, retry=0.02) as site, cutting_proxy(site.port) as proxy:
        async with perdure.connect(proxy.url, auth=token, state=state) as client:
            session = client.session_id
            arguments = {"n": 6, "gate": "g", "pauses": [3]}
            call = asyncio.create_task(client.call_tool("count", arguments, None, progress))
            await until(lambda: progress.seen == numbers(3))
            assert given == 1
            guests.newest = 2
            proxy.cut()
            shop.open("g/3")
            assert text(await call) == "counted to 6"
            assert text(await client.call_tool("credentials")) == "ann-2"
            assert (client.session_id, given) == (session, 2)
        assert progress.seen == numbers(6)
    assert b"ann-" not in state.read_bytes()


async def test_a_token_that_stays_refused_is_an_error_of_the_request_alone(shop: ToolServer) -> None:
    guests = Guests()
    async with (
        serve(shop.server, auth=guests, retry=0.02) as site,
        perdure.connect(f"http://127.0.0.1:{site.port}/mcp", auth=lambda: "ann-1") as client,
    ):
        assert text(await client.call_tool("credentials")) == "ann-1"
        guests.newest = 2
        with pytest.raises(MCPError):
            await client.call_tool("credentials")
        guests.newest = 1
        assert text(await client.call_tool("credentials")) == "ann-1"


async def test_many_requests_that_are_refused_at_once_ask_for_one_new_token(shop: ToolServer) -> None:
    guests, given = Guests(), 0

    async def token() -> str:
        nonlocal given
        given += 1
        await asyncio.sleep(0)
        return f"ann-{given}"

    async with (
        serve(shop.server, auth=guests, retry=0.02) as site,
        perdure.connect(f"http://127.0.0.1:{site.port}/mcp", auth=token) as client,
    ):
        guests.newest = 2
        results = await asyncio.gather(*(client.call_tool("credentials") for _ in range(10)))
        assert {text(result) for result in results} == {"ann-2"}
        assert given == 2


async def test_a_provider_that_fails_is_an_error_of_the_request_alone(shop: ToolServer, site_port: int) -> None:
    works = True

    def token() -> str:
        if works:
            return "ann-1"
        raise LookupError("no keyring")

    async with perdure.connect(f"http://127.0.0.1:{site_port}/mcp", auth=token) as client:
        works = False
        assert text(await client.call_tool("count", {"n": 1})) == "counted to 1"  # the token is still good
    with pytest.raises(MCPError, match="no keyring"):
        async with perdure.connect(f"http://127.0.0.1:{site_port}/mcp", auth=token):
            raise AssertionError("no token")


async def test_a_provider_that_fails_while_the_network_is_gone_costs_nothing_that_runs(shop: ToolServer) -> None:
    """Its tokens come over the same network: streams are resumed when it works again."""
    guests, progress, inbox = Guests(), Progress(), Inbox()
    asked, works = 0, True

    async def token() -> str:
        nonlocal asked
        asked += 1
        if not works:
            raise ConnectionError("no network")
        return f"ann-{guests.newest}"

    patience = perdure.Patience(first_delay=0.02, max_delay=0.02)
    async with (
        serve(shop.server, auth=guests, retry=0.02) as site,
        cutting_proxy(site.port) as proxy,
        perdure.connect(proxy.url, auth=token, patience=patience, message_handler=inbox) as client,
    ):
        await proxy.answered("GET")
        call = asyncio.create_task(client.call_tool("count", {"n": 6, "gate": "g", "pauses": [3]}, None, progress))
        await until(lambda: progress.seen == numbers(3))
        guests.newest, works = 2, False
        proxy.cut()
        await until(lambda: asked >= 5)
        works = True
        shop.open("g/3")
        assert text(await call) == "counted to 6"
        await client.call_tool("announce", {"n": 1})
        await until(lambda: inbox.notices == ["notice://1"])
    assert progress.seen == numbers(6)


@pytest.fixture
async def site_port(shop: ToolServer):  # type: ignore[no-untyped-def]
    async with serve(shop.server, auth=Guests(), retry=0.02) as site:
        yield site.port


async def test_headers_go_along_with_every_request(shop: ToolServer) -> None:
    async with (
        serve(shop.server, retry=0.02) as site,
        perdure.connect(f"http://127.0.0.1:{site.port}/mcp", headers={"x-team": "blue"}) as client,
    ):
        assert text(await client.call_tool("whoami", {"header": "x-team"})).startswith("blue")
