"""What the endpoint says to requests that it does not serve, and to messages that want no answer (A1–A8, A23)."""

from __future__ import annotations

import itertools
from typing import Any

import httpx2
import pytest

from tests.support.clients import raw_http
from tests.support.clients.wire_client import EVENTS, JSON, Peer
from tests.support.servers.in_process import Site, serve
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio

PING = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
NOTE = {"jsonrpc": "2.0", "method": "notifications/roots/list_changed"}


def refused(response: httpx2.Response, status: int, code: int) -> dict[str, Any]:
    """A refusal says the same thing in HTTP and in JSON-RPC, and never opens a session."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == JSON
    assert "mcp-session-id" not in response.headers
    body: dict[str, Any] = response.json()
    assert body["jsonrpc"] == "2.0"
    assert body["error"]["code"] == code
    assert body["error"]["message"]
    return body


async def test_one_path_serves_post_and_get(peer: Peer) -> None:
    """A1, A5, A6. The path may end with a slash."""
    assert (await (await peer.post(PING)).message())["result"] == {}
    assert (await (await peer.get()).event()).data == ""
    response = await peer.site.http.post(f"{peer.site.url}/", headers=peer.headers(), json=PING)
    assert response.status_code == 200


async def test_what_wants_no_answer_is_accepted_without_a_body(peer: Peer) -> None:
    """A4: also a response to nothing, because whether an ask is still open is a race that the client cannot know."""
    answers: list[dict[str, Any]] = [{"result": {}}, {"error": {"code": 1, "message": "no"}}]
    for message in (NOTE, *({"jsonrpc": "2.0", "id": "ask-1", **answer} for answer in answers)):
        response = await peer.send(message)
        assert (response.status_code, response.content) == (202, b"")
    assert await peer.result("count", n=1) == "counted to 1"


async def test_other_methods_are_told_which_ones_are_served(site: Site) -> None:
    """405 with Allow (RFC 9110)."""
    for method in ("HEAD", "PUT", "PATCH", "TRACE", "OPTIONS"):
        response = await site.request(method)
        assert response.status_code == (204 if method == "OPTIONS" else 405)
        assert {name.strip() for name in response.headers["allow"].split(",")} >= {"GET", "POST", "DELETE"}
        assert "access-control-allow-origin" not in response.headers
        if method == "HEAD":
            assert response.content == b""


async def test_a_page_of_an_allowed_origin_may_read_the_session_id(shop: ToolServer) -> None:
    """The browser client needs the header `Mcp-Session-Id` of the answer, and may send its own."""
    async with serve(shop.server, cors_origins=("https://page.example",)) as site:
        asks = [
            ("origin", "https://page.example"),
            ("access-control-request-method", "POST"),
            ("access-control-request-headers", "content-type, mcp-session-id, last-event-id, mcp-protocol-version"),
        ]
        preflight = await site.request("OPTIONS", headers=asks)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://page.example"
        allowed = preflight.headers["access-control-allow-headers"].lower()
        assert all(name in allowed for name in ("mcp-session-id", "last-event-id", "mcp-protocol-version"))
        assert "DELETE" in preflight.headers["access-control-allow-methods"]

        peer = await site.join()
        answer = await peer.send(PING, origin="https://page.example")
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        assert "mcp-session-id" in answer.headers["access-control-expose-headers"].lower()


async def test_a_foreign_origin_is_refused_everywhere(peer: Peer) -> None:
    """A2: DNS rebinding."""
    for origin in ("https://evil.example", "null", "http://127.0.0.1.evil.example"):
        refused(await peer.send(PING, origin=origin), 403, -32600)
        refused(await peer.site.request("GET", headers=peer.headers(origin=origin)), 403, -32600)
        refused(await peer.site.request("DELETE", headers=peer.headers(origin=origin)), 403, -32600)
        refused(await peer.site.request("OPTIONS", headers=peer.headers(origin=origin)), 403, -32600)
    assert (await peer.send(PING, origin="http://localhost:3000")).status_code == 200


async def test_a_foreign_host_is_refused(peer: Peer) -> None:
    """421: the other half of DNS rebinding. A test client is told how to make itself known."""
    foreign = ("evil.example", "localhost.evil", "127.0.0.1.evil.example", "evil.localhost", "localhost:1.evil")
    hints = dict.fromkeys((*foreign, "[::1].evil", "testserver.evil"), "--allowed-host")
    for host, hint in {**hints, "testserver": "base_url", "testserver:80": "base_url"}.items():
        answer = refused(await peer.send(PING, host=host), 421, -32600)
        assert f"Host {host} is" in answer["error"]["message"]
        assert hint in answer["error"]["message"]
    for host in ("localhost:1", "LOCALHOST", "127.0.0.1", "[::1]:8000"):
        assert (await peer.send(PING, host=host)).status_code == 200


async def test_two_hosts_or_origins_are_refused_whichever_comes_first(site: Site) -> None:
    """RFC 9112, 3.2: a proxy in front may have judged the other one."""
    plain = raw_http.Peer(port=site.port)
    for name, first, second in [
        (name, *hosts) for name in ("host", "origin") for hosts in itertools.permutations(["evil.example", "localhost"])
    ]:
        lines = f"{name}: {first}\r\n{name}: {second}\r\n".encode()
        request = plain.request("POST", raw_http.message("ping", id=1), headers={name: ""})  # without a line of its own
        async with await plain.open(request.replace(b"\r\n", b"\r\n" + lines, 1)) as exchange:
            answer = await exchange.answer()
        assert (answer.status, answer.error["code"]) == (400, -32600)
        assert answer.error["message"] == f"This request has 2 {name.capitalize()} headers; it may have one"


async def test_media_types_are_negotiated(peer: Peer) -> None:
    """A6."""
    for method, header, values, status in (
        ("POST", "content-type", ["text/plain"], 415),
        ("POST", "content-type", [""], 415),
        ("POST", "content-type", ["application/json; charset=utf-8"], 200),
        ("POST", "accept", [JSON], 406),
        ("POST", "accept", [EVENTS], 406),
        ("POST", "accept", ["text/html"], 406),
        ("POST", "accept", [""], 406),
        ("POST", "accept", ["*/*"], 200),
        ("POST", "accept", ["application/*, text/*"], 200),
        ("POST", "accept", [f"{EVENTS};q=0.9,{JSON};q=0.8"], 200),
        ("POST", "accept", [JSON, EVENTS], 200),  # RFC 9110, 5.3: lines of one list field are one list
        ("GET", "accept", [JSON], 406),
    ):
        headers = [(name, value) for name, value in peer.headers() if name != header]
        headers += [(header, value) for value in values]
        response = await peer.site.request(method, headers=headers, body=PING if method == "POST" else None)
        if status == 200:
            assert response.status_code == 200
        else:
            refused(response, status, -32600)


async def test_what_is_no_message_is_refused(peer: Peer) -> None:
    """A7: by the request's name where it has one; and the session goes on."""
    for body, code in (
        (b"", -32700),
        (b"{", -32700),
        (b'"\xff"', -32700),
        (b"1", -32600),
        (b"{}", -32600),
        (b'{"jsonrpc":"1.0","id":1,"method":"ping"}', -32600),
        (b'{"jsonrpc":"2.0","id":null,"method":"ping"}', -32600),
        (b'{"jsonrpc":"2.0","id":1.5,"method":"ping"}', -32600),
        (b'{"jsonrpc":"2.0","id":true,"method":"ping"}', -32600),
        (b'{"jsonrpc":"2.0","id":"mine","method":"ping","params":[1]}', -32600),
    ):
        assert (refused(await peer.send(body), 400, code)["id"] == "mine") == (b"mine" in body)
        assert (await peer.send(PING)).status_code == 200


async def test_an_unknown_protocol_version_is_refused(peer: Peer) -> None:
    """A8: within a session, in every method, with what is supported."""
    for version in ("1999-01-01", "banana", "2025-11-25x", "2025-11-2"):
        responses = [
            await peer.send(PING, mcp_protocol_version=version),
            await peer.site.request("GET", headers=peer.headers(mcp_protocol_version=version)),
            await peer.site.request("DELETE", headers=peer.headers(mcp_protocol_version=version)),
        ]
        for response in responses:
            body = refused(response, 400, -32022)
            assert "2025-11-25" in body["error"]["data"]["supported"]
    assert (await peer.send(PING)).status_code == 200


async def test_without_the_version_header_the_session_tells(peer: Peer) -> None:
    """A8, A26: the session's own version counts, not 2025-03-26: this stream is primed."""
    headers = [(name, value) for name, value in peer.headers() if name != "mcp-protocol-version"]
    response = await peer.site.request("POST", headers=headers, body=PING)
    assert response.status_code == 200
    assert response.content.startswith(b"id: ")
    assert b"retry: " in response.content


async def test_a_missing_session_id_is_refused(site: Site) -> None:
    """A23: 400, in every method, and for notifications as well."""
    stranger = Peer(site)
    refused(await stranger.send(PING), 400, -32600)
    refused(await stranger.send(NOTE), 400, -32600)
    refused(await stranger.try_get(), 400, -32600)
    refused(await stranger.delete(), 400, -32600)


async def test_an_unknown_session_is_not_found(shop: ToolServer) -> None:
    """A24, H2: 404 in every method, never 400 or 500, with what to do about it (H6)."""
    async with serve(shop.server, recover="strict") as site:
        stranger = Peer(site)
        for session in ("A" * 43, "A" * 42, "x", "a b", "%00", "1" * 5000):
            stranger.session = session
            for response in (await stranger.send(PING), await stranger.try_get(), await stranger.delete()):
                body = refused(response, 404, -31003)
                assert body["error"]["data"]["recovery"]["action"] == "initialize"


async def test_beside_the_endpoint_there_is_health_and_nothing_else(site: Site) -> None:
    base = f"http://127.0.0.1:{site.port}"
    health = await site.http.get(f"{base}/healthz")
    assert (health.status_code, health.json()) == (200, {"status": "ok"})
    assert (await site.http.get(f"{base}/elsewhere")).status_code == 404
    assert (await site.http.get(f"{base}/mcpx")).status_code == 404
