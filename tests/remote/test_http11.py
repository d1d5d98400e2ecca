"""HTTP as servers speak it, byte by byte: what is a response, when its connection is used again, what is an error."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest
import uvloop

from perdure.remote import endpoint
from perdure.remote.http11 import MAX_HEAD, MAX_WAITING, Direct, Times

pytestmark = pytest.mark.anyio

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Wire:
    """A server that answers the requests on its connections with what a test says, one after the other."""

    def __init__(self, *answers: bytes | list[bytes], closes: bool = False) -> None:
        self.answers = list(answers)
        self.closes = closes
        self.requests: list[bytes] = []
        self.connections = 0
        self.has_answered = asyncio.Event()
        self.has_ended = asyncio.Event()
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                self.requests.append(head + await reader.readexactly(int(length[0][15:]) if length else 0))
                answer = self.answers.pop(0)
                for part in [answer] if isinstance(answer, bytes) else answer:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0)
                if self.closes:
                    writer.close()
                    self.has_answered.set()
                    return
                self.has_answered.set()
            await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.has_ended.set()
            writer.close()


@asynccontextmanager
async def client_of(
    wire: Wire, *, timeout: float = 20.0, idle_seconds: float = 2.0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[httpx2.AsyncClient]:
    server = await asyncio.start_server(wire.serve, "127.0.0.1", 0, ssl=tls)
    wire.url = f"http{'s' if tls else ''}://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
    trusted = None
    if tls is not None:
        trusted = ssl.create_default_context()
        trusted.check_hostname = False
        trusted.verify_mode = ssl.CERT_NONE
    direct = Direct(tls=trusted, max_idle=2, idle_seconds=idle_seconds)
    async with server, httpx2.AsyncClient(mounts={"all://": direct}, timeout=timeout, verify=False) as client:
        yield client


RESPONSES: dict[str, tuple[bytes | list[bytes], bool, bytes]] = {
    "with a length": (OK, False, b"ok"),
    "in chunks": (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\no\r\n1;x=y\r\nk\r\n0\r\n\r\n",
        False,
        b"ok",
    ),
    "until the connection ends": (b"HTTP/1.1 200 OK\r\n\r\nok", True, b"ok"),
    "byte by byte": ([bytes([byte]) for byte in OK], False, b"ok"),
    "behind an early hint": (b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n" + OK, False, b"ok"),
    "without a body": (b"HTTP/1.1 204 No Content\r\n\r\n", False, b""),
    "of HTTP/1.0": (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok", False, b"ok"),
}


@pytest.mark.parametrize("form", RESPONSES)
async def test_a_body_is_read_in_whatever_form_it_comes(form: str) -> None:
    answer, closes, body = RESPONSES[form]
    wire = Wire(answer, closes=closes)
    async with client_of(wire) as client:
        assert (await client.post(wire.url, content=b"{}")).content == body


async def test_a_request_is_sent_as_it_was_built() -> None:
    wire = Wire(OK)
    async with client_of(wire) as client:
        await client.post(wire.url + "?a=b c", content=b"{}", headers={"x-team": "blue"})
    head, _, body = wire.requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /mcp?a=b%20c HTTP/1.1\r\n")
    assert b"\r\nx-team: blue" in head
    assert b"\r\nHost: 127.0.0.1:" in head
    assert body == b"{}"


async def test_a_body_of_unknown_length_is_sent_in_one_piece() -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"{"
        yield b"}"

    wire = Wire(OK)
    async with client_of(wire) as client:
        await client.post(wire.url, content=parts())
    assert wire.requests[0].endswith(b"\r\n\r\n{}")
    assert b"transfer-encoding" not in wire.requests[0].lower()


async def test_a_connection_is_used_again_when_its_response_was_read() -> None:
    wire = Wire(OK, OK, OK)
    async with client_of(wire) as client:
        for _ in range(3):
            assert (await client.get(wire.url)).content == b"ok"
    assert wire.connections == 1


@pytest.mark.parametrize(
    ("answer", "closes", "idle_seconds"),
    [
        (OK, True, 2.0),
        (OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"), False, 2.0),
        (OK + OK, False, 2.0),
        ([OK, b"HTTP/1.1 408 Request Timeout\r\n\r\n"], False, 2.0),
        (OK, False, 0.0),
    ],
    ids=["the server closes", "it says that it will", "it says more", "it says more later", "it was idle too long"],
)
async def test_a_connection_is_not_used_again(answer: bytes | list[bytes], closes: bool, idle_seconds: float) -> None:
    """What stands on it would be taken for the next response; and a call that meets its end would be unknown."""
    wire = Wire(answer, OK, closes=closes)
    async with client_of(wire, idle_seconds=idle_seconds) as client:
        assert (await client.get(wire.url)).content == b"ok"
        await wire.has_answered.wait()
        for _ in range(10):
            await asyncio.sleep(0)  # both ends are in this loop: what the server did has arrived
        assert (await client.get(wire.url)).content == b"ok"
    assert wire.connections == 2


async def test_a_response_that_is_not_read_to_its_end_costs_its_connection() -> None:
    wire = Wire(OK, OK)
    async with client_of(wire) as client:
        async with client.stream("GET", wire.url):
            pass
        assert (await client.get(wire.url)).content == b"ok"
    assert wire.connections == 2


async def test_a_connection_whose_response_ends_after_the_client_was_closed_is_closed_too() -> None:
    wire = Wire(OK)
    async with client_of(wire) as client:
        direct = Direct(tls=None, max_idle=2, idle_seconds=2.0)
        response = await direct.handle_async_request(client.build_request("GET", wire.url))
        await direct.aclose()
        assert await response.aread() == b"ok"
        await response.aclose()
        await asyncio.wait_for(wire.has_ended.wait(), 20)


async def test_connections_that_were_idle_too_long_are_closed_with_the_next_response() -> None:
    """Not only when their turn comes: the one that was used last is used again."""
    wire, waits = Wire(*([OK] * 4)), asyncio.Event()
    async with client_of(wire, idle_seconds=0.2) as client:
        await asyncio.gather(client.get(wire.url), client.get(wire.url))
        assert wire.connections == 2
        while not wire.has_ended.is_set():
            await client.get(wire.url)
            wire.answers.append(OK)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(waits.wait(), 0.02)
        assert wire.connections == 2


TRAILERS = b"transfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nmcp-session-id: forged\r\n\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\n" + TRAILERS,
        OK + b"HTTP/1.1 500 No\r\nmcp-session-id: forged\r\ncontent-length: 4\r\n\r\nevil",
        OK + b"HTTP/1.1 100 Continue\r\nmcp-session-id: forged\r\n\r\n",
    ],
    ids=["trailers", "a second response", "a hint behind it"],
)
async def test_what_follows_a_response_is_no_part_of_it(answer: bytes) -> None:
    """All in one segment."""
    wire = Wire(answer, OK)
    async with client_of(wire) as client:
        for _ in range(2):
            response = await client.get(wire.url)
            assert (response.status_code, response.content) == (200, b"ok")
            assert "mcp-session-id" not in response.headers


@pytest.mark.parametrize(("size", "is_taken"), [(MAX_HEAD - 1000, True), (2 * MAX_HEAD, False)])
async def test_trailers_are_limited_as_headers_are(size: int, is_taken: bool) -> None:
    """Promise 6: the parser keeps a trailer until it is complete."""
    head, end = TRAILERS.split(b"forged")
    wire = Wire([b"HTTP/1.1 200 OK\r\n" + head, *([b"y" * 1000] * (size // 1000)), b"y" * (size % 1000), end])
    async with client_of(wire) as client:
        if is_taken:
            assert (await client.get(wire.url)).content == b"ok"
        else:
            with pytest.raises(httpx2.RemoteProtocolError, match="exceeds the limit"):
                await client.get(wire.url)


async def test_a_body_that_is_reset_has_not_ended() -> None:
    """A server that closes a connection with bytes unread resets it: without a length, only a proper end is the end."""

    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(10)  # and leaves the rest of the request
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nhalf")
        await writer.drain()
        await has_head.wait()
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    has_head, wire = asyncio.Event(), Wire()
    wire.serve = reset  # type: ignore[method-assign]
    async with client_of(wire) as client, client.stream("POST", wire.url, content=b"x" * 100_000) as response:
        has_head.set()
        with pytest.raises(httpx2.ReadError):
            await response.aread()


async def test_an_answer_that_comes_before_the_request_was_sent_whole_is_taken() -> None:
    """The server reads no more, and does not close: waiting until all is sent would cost the answer."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")
        connections.append(writer)
        await is_over.wait()
        writer.close()

    wire, connections, is_over = Wire(), list[asyncio.StreamWriter](), asyncio.Event()
    wire.serve = refuse  # type: ignore[method-assign]
    async with client_of(wire) as client:
        for _ in range(2):
            assert (await client.post(wire.url, content=b"x" * (32 << 20))).content == b"no"
        assert len(connections) == 2  # what was not sent would come before the next request
        is_over.set()


async def test_a_connection_that_is_lost_while_a_request_is_sent_is_an_error() -> None:
    async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()

    wire = Wire()
    wire.serve = leave  # type: ignore[method-assign]
    async with client_of(wire) as client:
        with pytest.raises(httpx2.TransportError):
            await client.post(wire.url, content=b"x" * (32 << 20))


@pytest.mark.parametrize(
    "framing", [b"content-length: 2\r\ncontent-length: 3", b"content-length: 2\r\n" + TRAILERS[:26]]
)
async def test_a_response_with_two_lengths_is_refused(framing: bytes) -> None:
    wire = Wire(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n\r\nok")
    async with client_of(wire) as client:
        with pytest.raises(httpx2.RemoteProtocolError, match="is not HTTP"):
            await client.get(wire.url)


async def test_only_so_many_idle_connections_are_kept() -> None:
    wire = Wire(*([OK] * 8))
    async with client_of(wire) as client:
        for _ in range(2):
            await asyncio.gather(*(client.get(wire.url) for _ in range(4)))
    assert wire.connections == 6  # two of the first four were kept


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"no HTTP at all\r\n\r\n", "is not HTTP"),
        (b"", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\ncontent-le", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\no\r\n", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * (MAX_HEAD + 1), "exceeds the limit"),
        (b"HTTP/1.1 200 OK\r\nx: y\r\n" * (MAX_HEAD // 20), "is not HTTP|exceeds the limit"),
    ],
    ids=["no HTTP", "nothing", "half a head", "half a body", "half of the chunks", "a long head", "many headers"],
)
async def test_what_is_not_a_whole_response_is_an_error(answer: bytes, message: str) -> None:
    wire = Wire(answer, closes=True)
    async with client_of(wire) as client:
        with pytest.raises(httpx2.RemoteProtocolError, match=message):
            await client.get(wire.url)


async def test_a_head_within_the_limit_is_read() -> None:
    wire = Wire(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nx: " + b"y" * (MAX_HEAD - 100) + b"\r\n\r\n")
    async with client_of(wire) as client:
        assert len((await client.get(wire.url)).headers["x"]) == MAX_HEAD - 100


@pytest.mark.parametrize("value", ["a\r\nx-evil: 1", "a\nb", "a\0b"])
async def test_a_header_cannot_bring_another_one(value: str) -> None:
    wire = Wire(OK)
    async with client_of(wire) as client:
        with pytest.raises(httpx2.LocalProtocolError):
            await client.get(wire.url, headers={"x-team": value})
    assert wire.requests == []


async def test_a_server_that_says_nothing_is_waited_for_within_the_timeout() -> None:
    wire = Wire([])
    async with client_of(wire, timeout=0.2) as client:
        with pytest.raises(httpx2.ReadTimeout):
            await client.get(wire.url)


async def test_a_port_where_no_server_listens_is_a_failure_to_connect() -> None:
    wire = Wire()
    async with client_of(wire) as client:
        pass
    async with httpx2.AsyncClient(transport=Direct(tls=None, max_idle=1, idle_seconds=1.0)) as client:
        with pytest.raises(httpx2.ConnectError):
            await client.get(wire.url)
        with pytest.raises(httpx2.UnsupportedProtocol):
            await client.get("https://127.0.0.1/mcp")
        with pytest.raises(httpx2.ConnectError):
            await client.get(f"http://{'a' * 64}.example/mcp")  # no name: its first part is too long


async def test_a_host_with_several_addresses_is_reached_at_the_one_that_answers() -> None:
    """`localhost` is ::1 and 127.0.0.1 on many machines, and servers often listen at one of them."""
    wire = Wire(OK)
    async with client_of(wire) as client:
        assert (await client.get(wire.url.replace("127.0.0.1", "localhost"))).content == b"ok"


def test_it_works_in_the_loop_of_uvloop() -> None:
    async def call() -> bytes:
        wire = Wire(OK, OK)
        async with client_of(wire) as client:
            await client.get(wire.url)
            return (await client.get(wire.url.replace("127.0.0.1", "localhost"))).content

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(call()) == b"ok"


async def test_a_slow_reader_makes_the_server_wait() -> None:
    """Promise 6: what waits here is bounded, whatever the server sends."""
    sent = 0

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while True:
                writer.write(b"x" * MAX_WAITING)
                await writer.drain()
                sent += MAX_WAITING
        except ConnectionError:
            writer.close()

    wire = Wire()
    wire.serve = endless  # type: ignore[method-assign]
    async with client_of(wire) as client, client.stream("GET", wire.url) as response:
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.2)
        read = 0
        async for chunk in response.aiter_raw():
            read += len(chunk)
            assert len(chunk) <= 3 * MAX_WAITING
            if read > 2 * before:
                break
    assert sent > before


@pytest.mark.parametrize("closes", [False, True], ids=["and the response goes on", "and the connection ends"])
async def test_what_comes_while_it_is_gathered_is_received_together(closes: bool) -> None:
    gathers, was_sent, has_ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\na")
        await gathers.wait()
        for part in (b"b", b"c"):
            writer.write(part)
            await asyncio.sleep(0.01)
        was_sent.set()
        if not closes:
            await reader.read()
        writer.close()
        await writer.wait_closed()
        has_ended.set()

    server = await asyncio.start_server(slowly, "127.0.0.1", 0)
    origin = ("http", "127.0.0.1", server.sockets[0].getsockname()[1])
    direct = Direct(tls=None, max_idle=2, idle_seconds=2.0)
    async with server:
        times = Times(connect=5.0, write=5.0, read=5.0)
        exchange = await direct.exchange(origin, b"GET / HTTP/1.1\r\nhost: here\r\n\r\n", times)
        assert await exchange.receive() == b"a"
        gathering = asyncio.create_task(exchange.gather(0.2))
        gathers.set()
        await was_sent.wait()
        await gathering
        assert await exchange.receive() == b"bc"
        if closes:
            assert await exchange.receive() == b""
            await exchange.gather(0.2)
        await exchange.aclose()
        await has_ended.wait()


async def test_a_cancelled_request_costs_its_connection_and_no_other() -> None:
    wire = Wire([], OK)
    async with client_of(wire) as client:
        request = asyncio.create_task(client.get(wire.url))
        await wire.has_answered.wait()  # with nothing
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert (await client.get(wire.url)).content == b"ok"
    assert wire.connections == 2


def self_signed(tmp_path: Path) -> ssl.SSLContext:
    files = ("-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "cert"))
    about = ("-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=127.0.0.1")
    subprocess.run(("openssl", "req", *about, *files), check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    return context


async def test_it_speaks_tls_and_an_untrusted_certificate_is_a_failure_to_connect(tmp_path: Path) -> None:
    context = self_signed(tmp_path)
    wire = Wire(OK, OK)
    async with client_of(wire, tls=context) as client:
        for _ in range(2):
            assert (await client.get(wire.url)).content == b"ok"
        assert wire.connections == 1
        strict = Direct(tls=ssl.create_default_context(), max_idle=1, idle_seconds=1.0)
        async with httpx2.AsyncClient(transport=strict) as other:
            with pytest.raises(httpx2.ConnectError) as refused:
                await other.get(wire.url)
        assert isinstance(refused.value.__cause__, ssl.SSLCertVerificationError)


def test_errors_of_the_library_about_a_request_that_may_have_left_are_not_among_those_of_connecting() -> None:
    """`remote/endpoint.py` sends a request again after the others."""
    perhaps = {httpx2.ReadError, httpx2.ReadTimeout, httpx2.WriteError, httpx2.WriteTimeout, httpx2.RemoteProtocolError}
    assert not any(issubclass(error, endpoint._NOT_SENT) for error in perhaps)
