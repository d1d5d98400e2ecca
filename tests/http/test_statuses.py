"""What the endpoint says to requests that it does not serve, and to messages that want no answer (A1–A8, A23)."""

from __future__ import annotations

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
    """A1, A5, A6."""
    assert (await (await peer.post(PING)).message())["result"] == {}
    assert (await (await peer.get()).event()).data == ""


async def test_a_notification_is_answered_202_without_a_body(peer: Peer) -> None:
    """A4."""
    response = await peer.send(NOTE)
    assert (response.status_code, response.content) == (202, b"")


async def test_a_response_to_nothing_is_accepted_and_dropped(peer: Peer) -> None:
    """A4: whether the ask is still open is a race that the client cannot know."""
    answers: list[dict[str, Any]] = [{"result": {}}, {"error": {"code": 1, "message": "no"}}]
    for answer in answers:
        response = await peer.send({"jsonrpc": "2.0", "id": "ask-1", **answer})
        assert (response.status_code, response.content) == (202, b"")
    assert await peer.result("count", n=1) == "counted to 1"


@pytest.mark.parametrize("method", ["HEAD", "PUT", "PATCH", "TRACE"])
async def test_other_methods_are_told_which_ones_are_served(site: Site, method: str) -> None:
    """405 with Allow (RFC 9110)."""
    response = await site.request(method)
    assert response.status_code == 405
    assert {name.strip() for name in response.headers["allow"].split(",")} >= {"GET", "POST", "DELETE"}
    if method == "HEAD":
        assert response.content == b""


async def test_options_without_cors_says_what_is_served(site: Site) -> None:
    response = await site.request("OPTIONS")
    assert response.status_code == 204
    assert "POST" in response.headers["allow"]
    assert "access-control-allow-origin" not in response.headers


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
    """421: the other half of DNS rebinding."""
    for host in (
        "evil.example",
        "localhost.evil",
        "127.0.0.1.evil.example",
        "evil.localhost",
        "localhost:1.evil",
        "[::1].evil",
    ):
        refused(await peer.send(PING, host=host), 421, -32600)
    for host in ("localhost:1", "LOCALHOST", "127.0.0.1", "[::1]:8000"):
        assert (await peer.send(PING, host=host)).status_code == 200


async def test_a_test_client_is_told_how_to_make_itself_known(peer: Peer) -> None:
    hints = {"testserver": "base_url", "testserver:80": "base_url", "testserver.evil": "--allowed-host"}
    for host, hint in hints.items():
        answer = refused(await peer.send(PING, host=host), 421, -32600)
        assert f"Host {host} is" in answer["error"]["message"]
        assert hint in answer["error"]["message"]


@pytest.mark.parametrize("name", ["host", "origin"])
@pytest.mark.parametrize("order", [1, -1], ids=["evil first", "evil last"])
async def test_two_hosts_or_origins_are_refused_whichever_comes_first(site: Site, name: str, order: int) -> None:
    """RFC 9112, 3.2: a proxy in front may have judged the other one."""
    lines = "".join(f"{name}: {value}\r\n" for value in ["evil.example", "localhost"][::order]).encode()
    plain = raw_http.Peer(port=site.port)
    request = plain.request("POST", raw_http.message("ping", id=1), headers={name: ""})  # without a line of its own
    async with await plain.open(request.replace(b"\r\n", b"\r\n" + lines, 1)) as exchange:
        answer = await exchange.answer()
    assert (answer.status, answer.error["code"]) == (400, -32600)
    assert answer.error["message"] == f"This request has 2 {name.capitalize()} headers; it may have one"


async def test_a_body_of_another_type_is_refused(peer: Peer) -> None:
    refused(await peer.send(PING, content_type="text/plain"), 415, -32600)
    refused(await peer.send(PING, content_type=""), 415, -32600)
    assert (await peer.send(PING, content_type="application/json; charset=utf-8")).status_code == 200


@pytest.mark.parametrize("accept", [JSON, EVENTS, "text/html", ""])
async def test_a_post_must_accept_json_and_events(peer: Peer, accept: str) -> None:
    headers = [(name, value) for name, value in peer.headers() if name != "accept"]
    response = await peer.site.request("POST", headers=[*headers, ("accept", accept)], body=PING)
    refused(response, 406, -32600)


@pytest.mark.parametrize("accept", ["*/*", "application/*, text/*", f"{EVENTS};q=0.9,{JSON};q=0.8"])
async def test_wildcards_and_weights_are_accepted(peer: Peer, accept: str) -> None:
    assert (await peer.send(PING, accept=accept)).status_code == 200


async def test_accept_may_come_in_several_lines(peer: Peer) -> None:
    """RFC 9110, 5.3: lines of one list field are one list."""
    headers = [(name, value) for name, value in peer.headers() if name != "accept"]
    headers += [("accept", JSON), ("accept", EVENTS)]
    assert (await peer.site.request("POST", headers=headers, body=PING)).status_code == 200


async def test_a_get_must_accept_events(peer: Peer) -> None:
    """A6."""
    refused(await peer.site.request("GET", headers=peer.headers(accept=JSON)), 406, -32600)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", -32700),
        (b"{", -32700),
        (b'"\xff"', -32700),
        (b"1", -32600),
        (b"{}", -32600),
        (b'{"jsonrpc":"1.0","id":1,"method":"ping"}', -32600),
        (b'{"jsonrpc":"2.0","id":null,"method":"ping"}', -32600),
        (b'{"jsonrpc":"2.0","id":1.5,"method":"ping"}', -32600),
        (b'{"jsonrpc":"2.0","id":true,"method":"ping"}', -32600),
        (b'{"jsonrpc":"2.0","id":1,"method":"ping","params":[1]}', -32600),
    ],
)
async def test_what_is_no_message_is_refused(peer: Peer, body: bytes, code: int) -> None:
    """A7; and the session goes on."""
    refused(await peer.send(body), 400, code)
    assert (await peer.send(PING)).status_code == 200


async def test_a_refusal_names_the_request_where_it_can(peer: Peer) -> None:
    body = refused(await peer.send({"jsonrpc": "2.0", "id": "mine", "method": "ping", "params": []}), 400, -32600)
    assert body["id"] == "mine"


@pytest.mark.parametrize("version", ["1999-01-01", "banana", "2025-11-25x", "2025-11-2"])
async def test_an_unknown_protocol_version_is_refused(peer: Peer, version: str) -> None:
    """A8: within a session, in every method, with what is supported."""
    responses = [
        await peer.send(PING, mcp_protocol_version=version),
        await peer.site.request("GET", headers=peer.headers(mcp_protocol_version=version)),
        await peer.site.request("DELETE", headers=peer.headers(mcp_protocol_version=version)),
    ]
    for response in responses:
        body = refused(response, 400, -32022)
        assert "2025-11-25" in body["error"]["data"]["supported"]
    assert (await peer.send(PING)).status_code == 200


async def test_an_unknown_protocol_version_without_a_session_is_refused(site: Site) -> None:
    """A8."""
    stranger = Peer(site, "1999-01-01")
    response = await site.request("POST", headers=stranger.headers(), body=PING)
    assert response.status_code == 400


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


async def test_the_path_may_end_with_a_slash(peer: Peer) -> None:
    response = await peer.site.http.post(f"{peer.site.url}/", headers=peer.headers(), json=PING)
    assert response.status_code == 200
