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
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
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

Origin = tuple[str, str, int]


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
        url, timeout = request.url, request.extensions.get("timeout") or {}
        origin = (url.scheme, url.raw_host.decode("ascii"), url.port or (443 if url.scheme == "https" else 80))
        body = b"".join([chunk async for chunk in request.stream])  # type: ignore[union-attr]
        data = _head(request, len(body)) + body
        idle = self._idle.setdefault(origin, [])
        while idle:
            connection = idle.pop()  # the one that was used last
            if connection.is_idle and time.monotonic() - connection.idle_since < self._idle_seconds:
                break
            connection.abort()
        else:
            connection = await self._connect(origin, timeout.get("connect"))
        try:
            await connection.send(data, timeout.get("write"))
            await connection.receive_head(timeout.get("read"))
        except BaseException:
            connection.abort()
            raise
        stream = _Body(connection, timeout.get("read"), partial(self._give_back, idle))
        extensions = {"http_version": b"HTTP/1.1"}
        return httpx2.Response(connection.status, headers=connection.headers, stream=stream, extensions=extensions)

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


class _Body(httpx2.AsyncByteStream):
    def __init__(
        self, connection: _Connection, seconds: float | None, give_back: Callable[[_Connection], None]
    ) -> None:
        self._connection: _Connection | None = connection
        self._seconds = seconds
        self._give_back = give_back

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self._connection is not None and (chunk := await self._connection.receive_body(self._seconds)):
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
        """Why nothing more comes on this connection."""
        self._changed = asyncio.Event()
        self._may_write = True

    @property
    def is_idle(self) -> bool:
        """The response was read to its end, and another request may follow."""
        is_over = self._parser is None and self._failure is None and not self._body
        return is_over and self._may_be_kept and self._may_write

    def abort(self) -> None:
        self._socket.abort()

    async def send(self, data: bytes, seconds: float | None) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._has_head, self._bare_bytes, self.headers = False, 0, []
        self._socket.write(data)
        # A response may come, and the connection end, before all is written.
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

    async def _change(self, seconds: float | None, late: type[httpx2.TimeoutException] = httpx2.ReadTimeout) -> None:
        if self._failure is not None:
            raise self._failure
        self._changed.clear()
        try:
            with anyio.fail_after(seconds):
                await self._changed.wait()
        except TimeoutError as error:
            raise late(str(error)) from error

    def _fail(self, failure: httpx2.TransportError) -> None:
        self._failure = self._failure or failure
        self._socket.abort()
        self._changed.set()

    # Called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast("asyncio.Transport", transport)  # uvloop's is not a subclass

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
        self._changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._has_head and self._ends_with_connection and exc is None:
            self._parser = None  # the end of the connection ends the body
        closed = "the server closed the connection before the response was complete"
        self._fail(httpx2.RemoteProtocolError(closed) if exc is None else httpx2.ReadError(str(exc)))

    def pause_writing(self) -> None:
        self._may_write = False

    def resume_writing(self) -> None:
        self._may_write = True
        self._changed.set()

    # Called by the parser

    def on_message_begin(self) -> None:
        if self._has_head:
            raise ValueError("the server sent more than its response")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # otherwise it is a trailer
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self.status = self._parser.get_status_code()
        if self.status < 200:
            self.headers = []  # the response is still to come (RFC 9110, 15.2)
            return
        names = {name.lower() for name, _ in self.headers}
        has_body = self.status not in (204, 304)
        self._ends_with_connection = has_body and not names & {b"content-length", b"transfer-encoding"}
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


def _head(request: httpx2.Request, length: int) -> bytes:
    lines = [b"%s %s HTTP/1.1" % (request.method.encode("ascii"), request.url.raw_path)]
    for name, value in request.headers.raw:
        if name.lower() == b"transfer-encoding":
            lines.append(b"content-length: %d" % length)  # the body is sent in one piece
        else:
            lines.append(b"%s: %s" % (name, value))
    head = b"\r\n".join(lines) + b"\r\n\r\n"
    if head.count(b"\n") != len(lines) + 1 or head.count(b"\r") != len(lines) + 1 or b"\0" in head:
        raise httpx2.LocalProtocolError("a header has a line end in it")
    return head
