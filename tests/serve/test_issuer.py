"""`perdure serve --issuer` with the stock client's login: the server's own code knows nothing of OAuth."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest
from mcp import Client
from mcp.client.auth import AuthorizationCodeResult, OAuthClientProvider
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.auth import OAuthClientInformationFull, OAuthClientMetadata, OAuthToken
from mcp_types import TextContent
from pydantic import AnyUrl

from perdure._core.issuers import LEEWAY
from tests.support.clients.raw_http import Peer, SessionPeer, bearer, message, text_of
from tests.support.processes.serving import Served, serving
from tests.support.proxies.cutting_proxy import cutting_proxy
from tests.support.servers import scripted_stdio
from tests.support.servers.authorization_server import AuthorizationServer, authorization_server
from tests.support.servers.in_process import until
from tests.support.stores.postgres import free_port

pytestmark = pytest.mark.anyio

COUNTED = "counted to 2"
REDIRECT = "http://127.0.0.1:1/callback"
"""Nobody listens there: the client reads the code from the redirect itself."""


@pytest.fixture
async def issuer() -> AsyncIterator[AuthorizationServer]:
    async with authorization_server("/realms/bakery") as server:
        yield server


@asynccontextmanager
async def started(
    issuer: AuthorizationServer,
    folder: Path,
    *options: str,
    port: int | None = None,
    audience: str | None = None,
    target: str = "tests.support.servers.basic_tools:server",
) -> AsyncIterator[Served]:
    port = port or free_port()
    audience = audience or f"http://127.0.0.1:{port}/mcp"
    store = f"sqlite:{folder / 'log.db'}"
    named = ("--store", store, "--issuer", issuer.issuer, "--audience", audience)
    async with serving(target, *named, *options, port=port) as served:
        yield served


class Browser:
    """What a client has beside the connection: a user's browser, and a place to keep what the login gave."""

    def __init__(self, before_login: Callable[[], Awaitable[None]] | None = None) -> None:
        self.logins = 0
        self.provider: OAuthClientProvider | None = None
        self.tokens: OAuthToken | None = None
        self._client: OAuthClientInformationFull | None = None
        self._result: AuthorizationCodeResult | None = None
        self._before_login = before_login

    def auth(self, url: str) -> OAuthClientProvider:
        metadata = OAuthClientMetadata(client_name="stock", redirect_uris=[AnyUrl(REDIRECT)])
        self.provider = OAuthClientProvider(url, metadata, self, self.visit, self.come_back)
        return self.provider

    async def visit(self, url: str) -> None:
        if self._before_login is not None:
            await self._before_login()
        self.logins += 1
        async with httpx2.AsyncClient() as http:
            answer = await http.get(url)
        assert answer.status_code == 307
        query = parse_qs(urlsplit(answer.headers["location"]).query)
        self._result = AuthorizationCodeResult(code=query["code"][0], state=query["state"][0])

    async def come_back(self) -> AuthorizationCodeResult:
        assert self._result is not None
        return self._result

    async def get_tokens(self) -> OAuthToken | None:
        return self.tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self.tokens = tokens

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self._client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self._client = client_info


@asynccontextmanager
async def logged_in(url: str, browser: Browser, *, mode: str = "legacy") -> AsyncIterator[Client]:
    async with (
        httpx2.AsyncClient(auth=browser.auth(url), timeout=30) as http,
        Client(streamable_http_client(url, http_client=http), mode=mode) as client,
    ):
        yield client


async def count(client: Client) -> str:
    result = await client.call_tool("count", {"n": 2})
    assert isinstance(result.content[0], TextContent)
    return result.content[0].text


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_a_stock_client_finds_its_way_to_a_token_and_calls(
    mode: str, issuer: AuthorizationServer, tmp_path: Path
) -> None:
    browser = Browser()
    async with started(issuer, tmp_path, "--scopes", "tools:call") as served:
        for _ in range(2):  # the second time with the token of the first
            async with logged_in(served.url, browser, mode=mode) as client:
                assert await count(client) == COUNTED
    assert browser.logins == len(issuer.clients) == 1
    assert browser.tokens is not None
    assert browser.tokens.scope == "tools:call"


async def test_one_login_is_good_for_all_servers_behind_one_gateway(
    issuer: AuthorizationServer, tmp_path: Path
) -> None:
    """Programs that know nothing of HTTP; tokens are for the endpoint, and good below it."""
    program = {"command": sys.executable, "args": ["-I", "-S", scripted_stdio.__file__]}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"bread": program, "cake": program}}))
    browser = Browser()
    async with started(issuer, tmp_path, target=f"--servers={tmp_path / 'mcp.json'}") as served:
        for name in ("bread", "cake"):
            async with logged_in(f"http://127.0.0.1:{served.port}/mcp/{name}", browser) as client:
                assert (await client.list_tools()).tools
        stranger = Peer(port=served.port)
        for name in ("bread", "cake"):
            answer = await stranger.ask("POST", message("initialize", id=0), path=f"/mcp/{name}")
            assert answer.status == 401
            assert '/.well-known/oauth-protected-resource/mcp"' in str(answer.header("www-authenticate"))
    assert browser.logins == 1


async def test_a_restart_in_the_middle_of_a_login_does_not_disturb_it(
    issuer: AuthorizationServer, tmp_path: Path
) -> None:
    """Nothing of a login is kept by the servers: it begins at two nodes, and ends at the one that stayed and a new
    process, where every connection is at the next of them."""
    ports = free_port(), free_port()
    half_way, go_on = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        half_way.set()
        await go_on.wait()

    async def use(url: str) -> list[str]:
        async with logged_in(url, browser) as client:
            return [await count(client) for _ in range(3)]

    browser = Browser(wait)
    async with (
        cutting_proxy(*ports) as proxy,
        started(issuer, tmp_path, audience=proxy.url, port=ports[0]) as stays,
    ):
        async with started(issuer, tmp_path, audience=proxy.url, port=ports[1]) as served:
            user = asyncio.create_task(use(proxy.url))
            await half_way.wait()
            await served.kill()
            proxy.cut()
        async with started(issuer, tmp_path, audience=proxy.url, port=ports[1]):
            go_on.set()
            assert await user == [COUNTED] * 3
        await stays.kill()  # it would wait for what the other one may have left
    assert browser.logins == 1


async def test_a_call_that_outlives_its_token_goes_on_with_the_next_one(
    issuer: AuthorizationServer, tmp_path: Path
) -> None:
    """The stream ends with the token; the stock client renews it and comes back with its position."""
    browser = Browser()
    async with (
        started(issuer, tmp_path) as served,
        logged_in(served.url, browser) as client,
        asyncio.TaskGroup() as tasks,
    ):
        issuer.life, issuer.behind = 2, LEEWAY  # its next token is good for two seconds
        assert browser.provider is not None
        browser.provider.context.token_expiry_time = 1.0  # and is asked for at once
        call = tasks.create_task(client.call_tool("count", {"n": 2, "gate": "oven", "pauses": [1]}))
        await until(lambda: issuer.asked["/realms/bakery/token"] == 2)
        issuer.life = 3600
        await until(lambda: issuer.asked["/realms/bakery/token"] == 3)
        other = await Peer(port=served.port).session(**bearer(issuer.token(served.url)))
        await other.call("open_gate", name="oven/1")
        [answer] = (await call).content
        assert isinstance(answer, TextContent)
        assert answer.text == COUNTED
    assert browser.logins == 1


async def test_a_session_goes_on_at_another_node_with_the_same_token_and_for_no_other_subject(
    issuer: AuthorizationServer, tmp_path: Path
) -> None:
    """Promise 5, across processes."""
    audience = "https://mcp.example/mcp"
    token = bearer(issuer.token(audience))
    async with (
        started(issuer, tmp_path, audience=audience) as first,
        started(issuer, tmp_path, audience=audience) as second,
    ):
        ann = await Peer(port=first.port).session(**token)
        there = SessionPeer(port=second.port, headers=ann.headers, id=ann.id)
        assert text_of((await there.call("count", n=2)).messages[-1]) == COUNTED
        bob = {**ann.headers, **bearer(issuer.token(audience, subject="bob"))}
        for node in (first, second):
            seen = [
                await Peer(port=node.port, headers={**bob, "mcp-session-id": named}).ask("POST", message("ping", id=1))
                for named in (ann.id, "A" * len(ann.id))
            ]
            assert [answer.status for answer in seen] == [404, 404]
            assert seen[0].body == seen[1].body


async def test_an_issuer_that_is_down_delays_and_does_not_refuse(issuer: AuthorizationServer, tmp_path: Path) -> None:
    """The server starts without it."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    async with started(issuer, tmp_path, "--jwks", f"{address}/jwks") as served:
        here = Peer(port=served.port)
        answer = await here.initialize(**bearer(issuer.token(served.url)))
        assert (answer.status, answer.header("retry-after")) == (503, "1")
        assert (await here.initialize()).status == 401
        assert (await here.health()) == "ok"
