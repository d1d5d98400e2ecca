"""The bridge waits for trouble on the way to the server to end, or reports it in one sentence and one answer; the pipe
stays open."""

from __future__ import annotations

import asyncio
import re
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest
from mcp.server.auth.provider import AccessToken, TokenVerifier
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from perdure._core.reconnect import Patience
from perdure.remote.endpoint import Endpoint, Heartbeat, HttpResponse
from perdure.remote.message import Message
from perdure.remote.route import Route
from perdure.remote.stream import Stream
from perdure.stdio.bridge import connection_log, limits_of
from tests.stdio.served_hosts import FIRST, RESUMED, ServedHost, sentences, serving_host
from tests.stdio.stdio_bridges import a_host, text_of
from tests.support.proxies.cutting_proxy import cutting_proxy
from tests.support.servers.in_process import serve, under_uvicorn
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio

NOT_FOUND = PlainTextResponse("nothing here", status_code=404)


@asynccontextmanager
async def answering(status: str, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """A web server with one answer to everything."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        head = f"HTTP/1.1 {status}\r\ncontent-type: text/html\r\ncontent-length: 3\r\nconnection: close\r\n\r\n"
        writer.write(f"{head}<p>".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"


@pytest.mark.parametrize(
    ("status", "reason", "sentence"),
    [
        ("404 Not Found", "not_found", "there is no MCP server at {url} (HTTP 404)"),
        ("401 Unauthorized", "unauthorized", "{url} wants a token: see --token-env and --token-file (HTTP 401)"),
        ("403 Forbidden", "forbidden", "{url} does not let us in (HTTP 403)"),
        ("200 OK", "not_mcp", "{url} is not an MCP server: it answers with text/html"),
        ("418 Teapot", "refused", "{url} refuses the request (HTTP 418)"),
    ],
)
async def test_an_address_that_is_not_an_mcp_server_is_reported(
    folder: Path, status: str, reason: str, sentence: str
) -> None:
    async with answering(status) as url, a_host(folder, url) as host:
        bridge = await host.start("--no-resume")
        told = sentence.format(url=url)
        for _ in range(2):  # it lives on, and tries again
            refused = await bridge.handshake()
            assert refused["error"] == {"code": -31021, "message": told, "data": {"reason": reason}}
        assert await bridge.end() == 0
        assert await sentences(bridge) == [told]


async def test_what_cannot_work_is_reported_to_the_host_too(folder: Path) -> None:
    async with a_host(folder, "ftp://nowhere/mcp") as host:
        (folder / "empty").touch(0o600)
        cases = [
            ((), "ftp://nowhere/mcp is not the address of an MCP server: it must begin with http:// or https://"),
            (("--token-env", "NO_SUCH"), "the variable NO_SUCH of --token-env is not set"),
            (("--token-file", str(folder / "none")), f"the file {folder / 'none'} of --token-file cannot be read"),
            (
                ("--token-file", str(folder / "empty")),
                f"the file {folder / 'empty'} of --token-file does not hold a token",
            ),
        ]
        for options, sentence in cases:
            bridge = await host.start(*options, url="http://127.0.0.1:9/mcp" if options else None)
            refused = await bridge.handshake()
            assert refused["error"]["code"] == -31021
            assert refused["error"]["message"].startswith(sentence)
            assert await bridge.end() == 2
        bridge = await host.start(url="http://me:secret@127.0.0.1:9/mcp")
        assert "credentials must not stand in the address" in (await bridge.handshake())["error"]["message"]
        await bridge.end()
        assert "secret" not in bridge.log.read_text()


@pytest.mark.parametrize(("is_tls", "why"), [(True, "self.signed certificate"), (False, "WRONG_VERSION_NUMBER")])
async def test_tls_that_does_not_fit_is_reported_at_once(folder: Path, is_tls: bool, why: str) -> None:
    async with answering("200 OK", tls=_self_signed(folder) if is_tls else None) as url, a_host(folder, "") as host:
        bridge = await host.start("--no-resume", url=url.replace("http:", "https:"))
        refused = await bridge.handshake()
        assert refused["error"]["data"] == {"reason": "tls"}
        assert re.search(f"cannot be trusted: .*{why}", refused["error"]["message"])


def _self_signed(folder: Path) -> ssl.SSLContext:
    files = ("-keyout", str(folder / "key"), "-out", str(folder / "cert"))
    about = ("-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=127.0.0.1")
    subprocess.run(("openssl", "req", *about, *files), check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert", folder / "key")
    return context


async def test_a_server_that_is_away_is_waited_for_within_limits_and_the_pipe_lives(folder: Path) -> None:
    async with serving_host(folder) as hosted, cutting_proxy(hosted.site.port) as proxy:
        hosted.host.url = proxy.url
        bridge = await hosted.host.session("--no-resume", "--patience", "700ms")
        # The way is cut in the middle of a call: the host sees nothing of it.
        call = bridge.begin_call("count", token=1, n=4, gate="g", pauses=[2])
        await bridge.until(lambda: len(bridge.progress()) == 2, "two of four")
        proxy.cut()
        hosted.tool_server.open("g/2")
        assert text_of(await bridge.answer(call)) == "counted to 4"
        assert [number for _, number in bridge.progress()] == [1, 2, 3, 4]
        # It stays away: an error for each request, and the pipe stays open.
        proxy.refuse()
        proxy.cut()
        lists = [bridge.begin("tools/list") for _ in range(3)]
        for request in lists:
            assert (await bridge.answer(request))["error"]["code"] == -31020
        # A call that may have arrived there is not sent again.
        assert (await bridge.answer(bridge.begin_call("count", n=1)))["error"]["code"] in (-31020, -31001)
        # It is back, and so is everything else.
        proxy.accept()
        assert await bridge.call("count", n=1) == "counted to 1"
        await bridge.call("announce", n=2)
        await bridge.until(lambda: bridge.notices() == [1, 2], "the notices")
        assert sum("cannot be reached" in line for line in bridge.told()) <= 3
        assert len(hosted.sessions) == 1


async def test_a_session_that_is_gone_is_replaced_with_the_hosts_own_initialize(folder: Path) -> None:
    """B5: one new handshake, subscriptions and level repeated; what ran has an unknown outcome."""
    async with serving_host(folder) as hosted:
        bridge = await hosted.host.session(elicitation={})
        await bridge.request("logging/setLevel", {"level": "debug"})
        await bridge.request("resources/subscribe", {"uri": "notice://3"})
        await bridge.request("resources/subscribe", {"uri": "notice://4"})
        await bridge.request("resources/unsubscribe", {"uri": "notice://4"})
        await _delete(hosted)
        calls = [bridge.begin("tools/list") for _ in range(5)]
        for call in calls:
            assert "tools" in (await bridge.answer(call))["result"]
        assert len(hosted.sessions) == 1
        assert hosted.tool_server.levels == ["debug", "debug"]
        assert hosted.tool_server.subscribing == ["+notice://3", "+notice://4", "-notice://4", "+notice://3"]
        await hosted.tool_server.update("notice://3")
        await bridge.until(lambda: 3 in bridge.notices(), "the subscription in the new session")
        # The server forgets everything under a call: its outcome is unknown.
        asking = bridge.begin_call("ask", question="?")
        await bridge.until(lambda: len(bridge.asked()) == 1, "a question")
        await _delete(hosted)
        answer = await bridge.answer(asking)
        assert "error" in answer
        assert await bridge.call("count", n=1) == "counted to 1"
        # The new session is the one that is resumed.
        await bridge.end()
        again = await hosted.host.session(elicitation={})
        assert await sentences(again) == [RESUMED]
        assert len(hosted.sessions) == 1


async def _delete(hosted: ServedHost) -> None:
    [session] = hosted.sessions
    await hosted.site.http.delete(hosted.site.url, headers={"mcp-session-id": session})


def _words(folder: Path, *, besides: Path) -> set[bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path != besides]
    return {word for path in files for word in path.read_bytes().split()}


class OneToken(TokenVerifier):
    """Accepts the token of the moment, always as the same principal."""

    def __init__(self, token: str) -> None:
        self.token = token

    async def verify_token(self, token: str) -> AccessToken | None:
        if token != self.token:
            return None
        return AccessToken(token=token, client_id="desk", scopes=[], subject="desk")


async def test_a_token_file_is_read_again_when_the_token_is_refused(folder: Path) -> None:
    auth = OneToken("first")
    file = folder / "bearer"
    file.touch(0o600)
    file.write_text("first\n")
    async with serve(ToolServer().server, auth=auth) as site, a_host(folder, site.url) as host:
        bridge = await host.session("--token-file", str(file))
        assert await bridge.call("count", n=1) == "counted to 1"
        auth.token = "second"
        file.write_text("second")
        assert await bridge.call("count", n=2) == "counted to 2"
        auth.token = "third"
        refused = await bridge.answer(bridge.begin_call("count", n=3))
        assert refused["error"]["data"] == {"reason": "unauthorized"}
        await bridge.end()
        # The token is never in a log, and another name for it makes another target.
        by_env = await host.start("--token-env", "BEARER", BEARER="third")
        await by_env.handshake()
        assert await sentences(by_env) == [FIRST]
        assert await by_env.call("count", n=3) == "counted to 3"
        await by_env.end()
        assert not {b"first", b"second", b"third"} & _words(folder, besides=file)


@pytest.mark.parametrize("comes_back", [True, False], ids=["it comes back", "it stays away"])
async def test_a_running_call_outlives_a_token_file_that_cannot_be_read(folder: Path, comes_back: bool) -> None:
    """Promise 3: the call runs, so an attempt to resume it that finds no token is followed by others; when patience
    ends, its outcome is unknown."""
    auth, tool_server, file = OneToken("first"), ToolServer(), folder / "bearer"
    file.touch(0o600)
    file.write_text("first")
    async with (
        serve(tool_server.server, auth=auth, retry=0.05) as site,
        cutting_proxy(site.port) as proxy,
        a_host(folder, proxy.url) as host,
    ):
        patience = "60s" if comes_back else "300ms"
        bridge = await host.session("--no-resume", "--token-file", str(file), "--patience", patience)
        call = bridge.begin_call("count", token=1, n=3, gate="g", pauses=[1])
        await bridge.until(lambda: len(bridge.progress()) == 1, "one of three")
        auth.token = "second"
        file.unlink()  # it is being rewritten
        proxy.cut()
        await bridge.logged("cannot be read")
        if comes_back:
            file.touch(0o600)
            file.write_text("second")
            tool_server.open("g/1")
            assert text_of(await bridge.answer(call)) == "counted to 3"
            assert bridge.progress() == [(1, 1), (1, 2), (1, 3)]
        else:
            ended = (await bridge.answer(call))["error"]
            assert (ended["code"], ended["data"]["outcome"]) == (-31001, "unknown")
            assert "cannot be read" in ended["data"]["reason"]
            tool_server.open("g/1")


@pytest.mark.parametrize("is_plain", [False, True], ids=["event streams", "plain JSON"])
async def test_a_server_without_a_broker_is_bridged_and_not_resumed(folder: Path, is_plain: bool) -> None:
    """The SDK's own server: everything passes; a new session each time, and the log says why once."""
    app = ToolServer().server.streamable_http_app(json_response=is_plain)
    async with under_uvicorn(app) as port, a_host(folder, "") as host:
        for _ in range(2):
            bridge = await host.start(url=f"http://127.0.0.1:{port}/mcp")
            await bridge.handshake()
            assert await bridge.call("count", n=3) == "counted to 3"
            await bridge.logged("has no resume broker")
            await bridge.end()
            assert sum("has no resume broker" in line for line in bridge.told()) == 1


async def test_a_server_without_a_standalone_stream_keeps_its_session(folder: Path) -> None:
    """404 on the first GET of a new session means that there is no such stream, not that the session is gone."""
    inner, seen = ToolServer().server.streamable_http_app(), []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope.get("method"))
        await (NOT_FOUND if scope.get("method") == "GET" else inner)(scope, receive, send)

    async with under_uvicorn(app) as port, a_host(folder, "") as host:
        bridge = await host.start(url=f"http://127.0.0.1:{port}/mcp")
        await bridge.handshake()
        for _ in range(3):
            assert await bridge.call("count", n=1) == "counted to 1"
        assert seen.count("GET") == 1
        assert not any("session is gone" in line for line in bridge.told())


async def test_a_connection_that_has_fallen_silent_is_left_and_resumed_from_its_position() -> None:
    """A laptop that slept: the server's beat has stopped, and the connection was not closed."""

    async def silent() -> AsyncIterator[bytes]:
        yield b'id: 7\ndata: {"jsonrpc":"2.0","method":"m"}\n\n'
        await asyncio.Event().wait()

    heard: list[Message] = []

    async def take(message: Message) -> None:
        heard.append(message)

    async def complain(error: Exception) -> None:
        raise error

    async with httpx2.AsyncClient() as client:
        endpoint = Endpoint(client, "http://127.0.0.1/mcp", on_401="wants a token")
        endpoint.heartbeat = _Hasty()
        limits, log = limits_of(Patience(first_delay=0)), connection_log(endpoint.url)
        route = Route(endpoint=endpoint, limits=limits, complain=complain, report=log, prefix="")
        stream = Stream(route, take=take, patience=limits.patience)
        assert await stream.read(HttpResponse(httpx2.Response(200, content=silent())), awaited=None) is None
    assert (stream.position, stream.trouble) == ("7", "the server has fallen silent for 0 s")
    assert [message.method for message in heard] == ["m"]
    assert await stream.wait()


class _Hasty(Heartbeat):
    limit = 0.05
