"""A transport for `httpx2` that speaks HTTP/1.1 over an asyncio connection, with the parser of `httptools`.

The library's own transport takes about 900 µs of CPU for a small request, in four layers of pools, locks and parsers;
this one does without proxies and HTTP/2, and takes a third of that. Authentication, redirects and content encodings are
the library's work above either transport.

One request at a time uses a connection. The connection becomes idle when its response was read to the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import select
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import anyio
import httptools
import httpx2

#: Bytes of a response's status line and headers, and of its trailers, which the parser keeps until they are complete.
#: As `h11`, on which the library's own transport is built.
MAX_HEAD = 100 << 10
#: Bytes of a body that wait to be read; beyond that the connection is not read, and the server has to wait.
MAX_WAITING = 128 << 10
#: Seconds after which the next address of a host is tried: a network whose IPv6 leads nowhere costs no more. The last
#: address has the rest of the time.
NEXT_ADDRESS = 1.0

#: Seconds of silence after which the system asks whether the other end is there, between two such questions, and how
#: many of them may go unanswered: a peer that has vanished is noticed after two minutes, however long a call is silent.
_KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
        if hasattr(socket, name)
    ),
]

_LENGTHS = frozenset({b"content-length", b"transfer-encoding"})

Origin = tuple[str, str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds for connecting, for writing a request, and between two bytes of its response; `None`: no limit."""

    connect: float | None
    write: float | None
    read: float | None


class Direct(httpx2.AsyncBaseTransport):
    """Connects to servers without a proxy. `tls` is for https; without it there is none."""

    def __init__(self, *, tls: ssl.SSLContext | None, max_idle: int, idle_seconds: float) -> None:
        self._tls = tls
        self._max_idle = max_idle
        self._idle_seconds = idle_seconds
        self._idle: dict[Origin, list[_Connection]] = {}
        """The idle connections of each origin, the one that was used last at the end."""
        self._is_closed = False

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        timeout = request.extensions.get("timeout") or {}
        body = b"".join([chunk async for chunk in request.stream])  # type: ignore[union-attr]
        times = Times(connect=timeout.get("connect"), write=timeout.get("write"), read=timeout.get("read"))
        sent = None if request.method in ("GET", "DELETE") and not body else body
        exchange = await self.exchange(origin_of(request.url), head_of(lines_of(request), sent) + body, times)
        extensions = {"http_version": b"HTTP/1.1"}
        headers = exchange.raw_headers
        return httpx2.Response(exchange.status_code, headers=headers, stream=exchange, extensions=extensions)

    async def exchange(self, origin: Origin, data: bytes, times: Times) -> Exchange:
        """Send the bytes of a request, and return the response when its headers have arrived.

        Raises `httpx2.TransportError`. A caller that does without the library's requests and responses saves two thirds
        of the CPU time.
        """
        idle = self._idle.setdefault(origin, [])
        while idle:
            connection = idle.pop()  # the one that was used last
            is_young = time.monotonic() - connection.idle_since < self._idle_seconds
            if connection.is_idle and is_young and not connection.has_unread:
                break
            connection.abort()
        else:
            connection = await self._connect(origin, times.connect)
        try:
            await connection.send(data, times.write)
            await connection.receive_head(times.read)
        except BaseException:
            connection.abort()
            raise
        return Exchange(connection, times.read, partial(self._give_back, idle))

    async def _connect(self, origin: Origin, seconds: float | None) -> _Connection:
        scheme, host, port = origin
        tls: dict[str, Any] = {}
        if scheme == "https":
            if self._tls is None:
                raise httpx2.UnsupportedProtocol("this client was made for http:// alone")
            tls = {"ssl": self._tls, "server_hostname": host}
        loop = asyncio.get_running_loop()
        try:
            with anyio.fail_after(seconds):
                *others, last = await _addresses(host, port)
                for address in others:
                    with anyio.move_on_after(NEXT_ADDRESS), contextlib.suppress(OSError):
                        return (await loop.create_connection(_Connection, address, port, **tls))[1]
                return (await loop.create_connection(_Connection, last, port, **tls))[1]
        except TimeoutError as error:
            raise httpx2.ConnectTimeout(str(error)) from error
        except (OSError, UnicodeError) as error:  # TLS that fails is one, too; a name may be none
            raise httpx2.ConnectError(str(error)) from error

    def _give_back(self, idle: list[_Connection], connection: _Connection) -> None:
        """A response was read to its end, or is not read further."""
        now = time.monotonic()
        while idle and now - idle[0].idle_since >= self._idle_seconds:
            idle.pop(0).abort()
        if connection.is_idle and len(idle) < self._max_idle and not self._is_closed:
            connection.idle_since = now
            idle.append(connection)
        else:
            connection.abort()

    async def aclose(self) -> None:
        self._is_closed = True
        for idle in self._idle.values():
            for connection in idle:
                connection.abort()
            idle.clear()


class Exchange(httpx2.AsyncByteStream):
    """A response whose headers have arrived, on its connection."""

    def __init__(
        self, connection: _Connection, seconds: float | None, give_back: Callable[[_Connection], None]
    ) -> None:
        self.status_code = connection.status
        self.raw_headers, connection.headers = connection.headers, []
        self._connection: _Connection | None = connection
        self._seconds = seconds
        self._give_back = give_back

    @property
    def headers(self) -> dict[str, str]:
        """By their names in small letters; of several with one name the last."""
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in self.raw_headers}

    @property
    def has_ended(self) -> bool:
        """Whether the body was read to its end."""
        return self._connection is None or self._connection.is_idle

    async def receive(self) -> bytes:
        """The next bytes of the body; b"" at its end."""
        return b"" if self._connection is None else await self._connection.receive_body(self._seconds)

    async def gather(self, seconds: float) -> None:
        """Leave arriving bytes in the system for so long: `receive` then returns all of them together."""
        if self._connection is not None:
            await self._connection.gather(seconds)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while chunk := await self.receive():
            yield chunk

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._give_back(connection)


class _Connection(asyncio.Protocol):
    """One connection, and the response that is on it. The last methods are called by the loop and by the parser."""

    def __init__(self) -> None:
        self.idle_since = 0.0
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._socket: asyncio.Transport
        self._parser: httptools.HttpResponseParser | None = None
        """The parser of the expected response; None before a request and after its response."""
        self._may_be_kept = False
        self._ends_with_connection = False
        self._bare_bytes = 0
        """Bytes received since the last byte of a body."""
        self._has_head = False
        self._body = bytearray()
        self._failure: httpx2.TransportError | None = None
        """Why no more bytes arrive on this connection."""
        self._changed: asyncio.Future[None] | None = None
        """What the one task waits for that uses the connection. (An `Event` takes 800 bytes, of each open stream.)"""
        self._may_write = True

    @property
    def is_idle(self) -> bool:
        """The response was read to its end, and another request may follow."""
        is_over = self._parser is None and self._failure is None and not self._body
        return is_over and self._may_be_kept and self._may_write

    @property
    def has_unread(self) -> bool:
        """Whether the system has something that the loop has not read yet: of an idle connection, most likely its end.
        A request on it would be lost, and could have run."""
        return bool(select.select([self._number], [], [], 0)[0] if self._poll is None else self._poll.poll(0))

    def abort(self) -> None:
        self._socket.abort()

    async def send(self, data: bytes, seconds: float | None) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._has_head, self._bare_bytes, self.headers = False, 0, []
        self._socket.write(data)
        # A response may arrive, and the connection end, before all is written.
        while not self._may_write and not self._has_head and self._failure is None:
            await self._change(seconds, httpx2.WriteTimeout)

    async def receive_head(self, seconds: float | None) -> None:
        while not self._has_head:
            await self._change(seconds)

    async def receive_body(self, seconds: float | None) -> bytes:
        """The next bytes of the body; b"" at its end."""
        while not self._body and self._parser is not None:
            await self._change(seconds)
        found = bytes(self._body)
        self._body.clear()
        self._socket.resume_reading()
        return found

    async def gather(self, seconds: float) -> None:
        if self._parser is None or self._failure is not None:
            return
        self._socket.pause_reading()
        try:
            await asyncio.sleep(seconds)
        finally:
            if self._failure is None:
                self._socket.resume_reading()

    async def _change(self, seconds: float | None, late: type[httpx2.TimeoutException] = httpx2.ReadTimeout) -> None:
        if self._failure is not None:
            raise self._failure
        self._changed = asyncio.get_running_loop().create_future()
        try:
            if seconds is None:
                await self._changed
            else:
                with anyio.fail_after(seconds):
                    await self._changed
        except TimeoutError as error:
            raise late(str(error)) from error
        finally:
            self._changed = None

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def _fail(self, failure: httpx2.TransportError) -> None:
        self._failure = self._failure or failure
        self._socket.abort()
        self._wake()

    # Called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast("asyncio.Transport", transport)  # uvloop's is not a subclass
        opened = transport.get_extra_info("socket")
        self._number = opened.fileno()
        self._poll = select.poll() if hasattr(select, "poll") else None
        if self._poll is not None:
            self._poll.register(self._number, select.POLLIN)
        for level, option, value in _KEEP_ALIVE:
            opened.setsockopt(level, option, value)

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            self._fail(httpx2.RemoteProtocolError("the server sent more than its response"))
            return
        before = len(self._body)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(httpx2.RemoteProtocolError(f"the response is not HTTP: {error}"))
            return
        self._bare_bytes = 0 if len(self._body) > before else self._bare_bytes + len(data)
        if self._parser is not None and self._bare_bytes > MAX_HEAD:
            part = "the end" if self._has_head else "the head"
            self._fail(httpx2.RemoteProtocolError(f"{part} of the response exceeds the limit of {MAX_HEAD} bytes"))
        elif len(self._body) > MAX_WAITING:
            self._socket.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._has_head and self._ends_with_connection and exc is None:
            self._parser = None  # the end of the connection ends the body
        closed = "the server closed the connection before the response was complete"
        self._fail(httpx2.RemoteProtocolError(closed) if exc is None else httpx2.ReadError(str(exc)))

    def pause_writing(self) -> None:
        self._may_write = False

    def resume_writing(self) -> None:
        self._may_write = True
        self._wake()

    # Called by the parser

    def on_message_begin(self) -> None:
        if self._has_head:
            raise ValueError("the server sent more than its response")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # otherwise it is a trailer
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self.status = self._parser.get_status_code()
        if self.status < 200:
            self.headers = []  # the final response follows (RFC 9110, 15.2)
            return
        has_body = self.status not in (204, 304)
        self._ends_with_connection = has_body and _LENGTHS.isdisjoint([name for name, _ in self.headers])
        self._may_be_kept = self._parser.should_keep_alive()
        self._has_head = True

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._has_head:
            self._parser = None


async def _addresses(host: str, port: int) -> list[str]:
    """The addresses of a host, in the order in which they are tried."""
    try:
        return [str(ipaddress.ip_address(host))]
    except ValueError:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(address[0]) for *_, address in found))


def origin_of(url: httpx2.URL) -> Origin:
    return url.scheme, url.raw_host.decode("ascii"), url.port or (443 if url.scheme == "https" else 80)


def lines_of(request: httpx2.Request) -> list[bytes]:
    """The lines of a request's head, but for its length."""
    own = [(name, value) for name, value in request.headers.raw if name.lower() not in _LENGTHS]
    first = b"%s %s HTTP/1.1" % (request.method.encode("ascii"), request.url.raw_path)
    return [first, *(b"%s: %s" % header for header in own)]


def head_of(lines: list[bytes], body: bytes | None) -> bytes:
    """The head of a request whose body is sent in one piece. Raises `httpx2.LocalProtocolError`."""
    lines = lines if body is None else [*lines, b"content-length: %d" % len(body)]
    head = b"\r\n".join(lines) + b"\r\n\r\n"
    if head.count(b"\n") != len(lines) + 1 or head.count(b"\r") != len(lines) + 1 or b"\0" in head:
        raise httpx2.LocalProtocolError("a header has a line end in it")
    return head
