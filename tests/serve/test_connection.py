"""The listening socket, and headers that never end (promise 6)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send

from perdure.errors import Misuse
from perdure.serve.connection import Connection
from perdure.serve.listener import listen

pytestmark = pytest.mark.anyio

LIMIT = 2_048
OPEN = b"GET /open HTTP/1.1\r\nhost: x\r\n\r\n"


def test_a_free_port_is_picked_and_a_busy_one_refused() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(Misuse, match=rf"^port {port} on 127\.0\.0\.1 is in use; choose another with --port"):
            listen("127.0.0.1", port)
    with listen("127.0.0.1", port) as again:
        assert again.getsockname()[1] == port


def test_a_connection_that_comes_early_waits() -> None:
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()) as early:
        assert early.getpeername() == listener.getsockname()


@pytest.mark.parametrize("host", ["no such host", "999.0.0.1", "x" * 300])
def test_a_host_that_is_no_address_is_refused(host: str) -> None:
    with pytest.raises(Misuse, match=r"cannot listen on '.*': no such address"):
        listen(host, 0)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(Misuse, match=r"cannot listen on 192\.0\.2\.1 port 0: Cannot assign requested address"):
        listen("192.0.2.1", 0)


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the size of the body; `/open` begins an answer and ends when the peer has gone; `/late` begins its
    answer after the body."""
    head: Message = {"type": "http.response.start", "status": 200, "headers": []}
    if scope["path"] != "/late":
        await send(head)
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    if scope["path"] == "/late":
        await send(head)
    if scope["path"] == "/open":
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
    else:
        await send({"type": "http.response.body", "body": b"body of %d" % size})


class Impatient(Connection):
    head_seconds = 0.05


@asynccontextmanager
async def peer(http: type[Connection] = Connection) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A raw connection to a server with a small limit."""
    config = uvicorn.Config(
        app, http=http, lifespan="off", log_config=None, access_log=False, h11_max_incomplete_event_size=LIMIT
    )
    server = uvicorn.Server(config)
    listener = listen("127.0.0.1", 0)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    try:
        yield reader, writer
    finally:
        writer.close()
        server.should_exit = True
        await running


async def send(writer: asyncio.StreamWriter, *chunks: bytes) -> None:
    """Send chunks so that each is received by itself: the server lives in this loop and reads at its next turn."""
    for chunk in chunks:
        writer.write(chunk)
        for _ in range(3):
            await asyncio.sleep(0)


async def test_endless_headers_are_answered_431_and_closed() -> None:
    async with peer() as (reader, writer):
        await send(writer, b"GET / HTTP/1.1\r\n", *[b"x: " + b"y" * 400] * 7)
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert answer.endswith(b"\r\n\r\nthe request's headers are too large")


async def test_a_client_that_waits_for_100_is_told_to_continue() -> None:
    async with peer() as (reader, writer):
        await send(writer, b"POST /late HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 1\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await send(writer, b"b")
        assert (await reader.readuntil(b"body of 1")).startswith(b"HTTP/1.1 200 ")


async def test_the_head_comes_also_where_the_body_does_not_follow() -> None:
    async with peer() as (reader, writer):
        await send(writer, b"POST / HTTP/1.1\r\ncontent-length: 1\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        await send(writer, b"b")
        await reader.readuntil(b"body of 1")


async def test_a_second_request_may_begin_in_the_chunk_that_ends_a_large_body() -> None:
    body = b"b" * 20 * LIMIT
    async with peer() as (reader, writer):
        await send(writer, post(body), body + b"GET /next HTT")
        await reader.readuntil(b"body of %d" % len(body))
        await send(writer, b"P/1.1\r\n\r\n")
        assert await reader.readuntil(b"body of 0")


async def test_endless_headers_behind_an_open_answer_only_close_it() -> None:
    async with peer() as (reader, writer):
        await send(writer, OPEN)
        await reader.readuntil(b"begun")
        await send(writer, b"GET / HTTP/1.1\r\n", *[b"x: " + b"y" * 400] * 7)
        assert b"431" not in await reader.read()


@pytest.mark.parametrize("start", [b"", b"GET / HTTP/1.1\r\nx: y"], ids=["silent", "half"])
async def test_a_peer_that_does_not_finish_its_headers_is_let_go(start: bytes) -> None:
    async with peer(Impatient) as (reader, writer):
        await send(writer, start)
        assert await reader.read() == b""


@pytest.mark.parametrize("start", [b"GET /", b"\r", b"\r\n"])
async def test_a_peer_that_stops_in_the_headers_of_its_second_request_is_let_go(start: bytes) -> None:
    """Also where it sends line ends only."""
    async with peer(Impatient) as (reader, writer):
        await send(writer, b"GET / HTTP/1.1\r\n\r\n")
        await reader.readuntil(b"body of 0\r\n0\r\n\r\n")
        await send(writer, start)
        assert await reader.read() == b""


async def test_an_open_answer_outlasts_the_time_for_headers() -> None:
    async with peer(Impatient) as (reader, writer):
        await send(writer, OPEN)
        await reader.readuntil(b"begun\r\n")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 4 * Impatient.head_seconds)


UPGRADING = (
    b"POST / HTTP/1.1\r\nhost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
    b"content-length: 5\r\n\r\n"
)


async def test_a_wish_for_another_protocol_is_not_heard_wherever_its_head_is_cut() -> None:
    """Java's HTTP client asks for HTTP/2 with every request; its segments end where the system wants."""
    async with peer() as (reader, writer):
        for cut in range(1, len(UPGRADING)):
            await send(writer, UPGRADING[:cut], UPGRADING[cut:] + b"hello")
            assert await reader.readuntil(b"body of 5\r\n0\r\n\r\n")


def post(body: bytes) -> bytes:
    return b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body)


LARGE, SPEAKING = b"b" * 20 * LIMIT, b"\r\nUpgrade: h2c\r\nup"
TAKEN: dict[str, tuple[list[bytes], int]] = {
    "slow headers": ([b"GET / HTTP/1.1\r\n", *[b"x: " + b"y" * 400 + b"\r\n"] * 4, b"\r\n"], 0),
    "a large body right after its headers": ([post(LARGE) + LARGE], len(LARGE)),
    "a wish for another protocol, byte by byte": ([*(bytes([byte]) for byte in UPGRADING), b"hello"], 5),
    "the same in mixed case": ([UPGRADING.replace(b"\r\nUpgrade:", b"\r\nuPgRaDe:") + b"hello"], 5),
    "a body that speaks of an upgrade": ([post(SPEAKING), SPEAKING[:9], SPEAKING[9:]], len(SPEAKING)),
}


@pytest.mark.parametrize("request_name", TAKEN)
async def test_an_unusual_request_is_taken(request_name: str) -> None:
    chunks, length = TAKEN[request_name]
    async with peer() as (reader, writer):
        await send(writer, *chunks)
        assert (await reader.readuntil(b"body of %d\r\n" % length)).startswith(b"HTTP/1.1 200 ")


async def test_what_is_no_request_is_refused_before_its_head_is_complete() -> None:
    async with peer() as (reader, writer):
        await send(writer, b"\x16\x03\x01\x02\x00\x01")
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
