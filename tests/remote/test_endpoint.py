"""Requests that go past the HTTP library: what is sent, what is decoded, and which connections are used."""

from __future__ import annotations

import asyncio
import gzip
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import pytest

from perdure.remote.endpoint import Endpoint, Handshake, RequestFailed, client_and_transport
from perdure.remote.http11 import Direct, Times, origin_of
from tests.remote.test_http11 import OK, Wire

pytestmark = pytest.mark.anyio

TIMES = Times(connect=20.0, write=20.0, read=None)
SESSION = Handshake(session="s1", request={}, result={"protocolVersion": "2025-11-25"}, initialized=True)


@asynccontextmanager
async def endpoint_at(wire: Wire, headers: dict[str, str] | None = None) -> AsyncIterator[Endpoint]:
    server = await asyncio.start_server(wire.serve, "127.0.0.1", 0)
    wire.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp?a=b"
    client, direct = client_and_transport(wire.url, headers=headers, times=TIMES)
    async with server, client:
        yield Endpoint(client, wire.url, on_401="", direct=direct, times=TIMES)


async def test_the_same_is_sent_past_the_library_and_through_it() -> None:
    """But for the encodings, which only the library can read."""
    wire = Wire(*([OK] * 6))
    async with endpoint_at(wire, {"x-team": "blue"}) as past, httpx2.AsyncClient(headers={"x-team": "blue"}) as client:
        for endpoint in (past, Endpoint(client, wire.url, on_401="")):
            async with endpoint.post(b"{}", SESSION, {"mcp-method": "x"}) as response:
                assert await response.whole(100) == b"ok"
            async with endpoint.get("p-é", SESSION) as response:
                assert await response.whole(100) == b"ok"
            await endpoint.delete(SESSION)

    def parts(request: bytes) -> tuple[bytes, set[bytes], bytes]:
        head, _, body = request.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        return first, {line.lower() for line in lines if not line.lower().startswith(b"accept-encoding")}, body

    sent = [parts(request) for request in wire.requests]
    assert sent[:3] == sent[3:]
    assert sent[0][0] == b"POST /mcp?a=b HTTP/1.1"
    assert {b"mcp-session-id: s1", b"mcp-protocol-version: 2025-11-25", b"x-team: blue"} <= sent[0][1]
    assert b"last-event-id: p-\xc3\xa9" in sent[1][1]


async def test_a_body_that_is_encoded_all_the_same_is_decoded() -> None:
    body = gzip.compress(b"hello")
    wire = Wire(b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    async with endpoint_at(wire) as endpoint, endpoint.post(b"{}", None) as response:
        assert await response.whole(100) == b"hello"


async def test_a_header_cannot_bring_another() -> None:
    forged = Handshake(session="s", request={}, result={"protocolVersion": "1\r\nx-admin: yes"})
    wire = Wire(OK)
    async with endpoint_at(wire) as endpoint:
        with pytest.raises(RequestFailed, match="line end"):
            async with endpoint.post(b"{}", forged):
                raise AssertionError
    assert wire.requests == []


async def test_a_connection_that_has_ended_is_not_used_even_if_the_loop_has_not_noticed() -> None:
    """A request on it would be lost, and might have run."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = httpx2.URL(f"http://127.0.0.1:{listener.getsockname()[1]}/")
    request = b"GET / HTTP/1.1\r\n\r\n"

    def accept() -> socket.socket:
        connection, _ = listener.accept()
        connection.recv(1_000)
        connection.sendall(OK)
        return connection

    direct = Direct(tls=None, max_idle=2, idle_seconds=60.0)
    with listener:
        for _ in range(2):
            served = asyncio.create_task(asyncio.to_thread(accept))
            exchange = await direct.exchange(origin_of(url), request, TIMES)
            assert await exchange.receive() == b"ok"
            connection = await served
            await exchange.aclose()
            connection.close()  # the loop has no turn until the next request is sent
        await direct.aclose()
