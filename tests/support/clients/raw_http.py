"""HTTP as bytes on a socket, so that a test can cut, mangle, stall and flood it."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self

from perdure._core.sse import Decoder, ServerSentEvent

READ_SECONDS = 60.0
"""Whatever is read must come within this time: a hang is a failure, not a wait."""

CHUNK = 65_536
VERSION = "2025-11-25"
BOTH = "application/json, text/event-stream"


@dataclass(kw_only=True)
class Answer:
    """A response that was read to its end."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        return error

    @property
    def events(self) -> list[ServerSentEvent]:
        return Decoder().feed(self.body)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The JSON-RPC messages of an event stream."""
        return [json.loads(event.data) for event in self.events if event.data]

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)


class Parser:
    """Reads one response from bytes, cut anywhere."""

    def __init__(self, *, head_only: bool = False) -> None:
        self.status = 0
        self.headers: list[tuple[str, str]] = []
        self.complete = False
        self.rest = b""
        """What follows the end of the response."""
        self._head_only = head_only
        self._buffer = bytearray()
        self._chunked = False
        self._left = 0

    def feed(self, data: bytes) -> bytes:
        """Read bytes from the socket; returns those of the body."""
        self._buffer += data
        body = bytearray()
        while not self.complete and self._step(body):
            pass
        return bytes(body)

    def _step(self, body: bytearray) -> bool:
        if not self.status:
            return self._head()
        if self._left:
            return self._take(body)
        return self._next_chunk() if self._chunked else self._end()

    def _head(self) -> bool:
        head, blank, rest = bytes(self._buffer).partition(b"\r\n\r\n")
        if not blank:
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        self._buffer = bytearray(rest)
        status = int(first.split(" ")[1])
        if status == 100:
            return True
        self.status = status
        self.headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        known = dict(self.headers)
        if not self._head_only:
            self._chunked = known.get("transfer-encoding") == "chunked"
            self._left = int(known.get("content-length", 0))
        return True

    def _take(self, body: bytearray) -> bool:
        piece = self._buffer[: self._left]
        body += piece
        del self._buffer[: len(piece)]
        self._left -= len(piece)
        return bool(piece)

    def _next_chunk(self) -> bool:
        # The line end after a chunk's bytes comes before the next chunk's size.
        text = bytes(self._buffer).removeprefix(b"\r\n")
        size, end, rest = text.partition(b"\r\n")
        if not end or text == b"" or (self._buffer[:1] == b"\r" and len(self._buffer) < 2):
            return False
        self._left = int(size, 16)
        if self._left:
            self._buffer = bytearray(rest)
            return True
        if not rest.startswith(b"\r\n"):
            return False
        self._buffer = bytearray(rest[2:])
        return self._end()

    def _end(self) -> bool:
        self.complete = True
        self.rest = bytes(self._buffer)
        return False


class Exchange:
    """A request that was sent, and its response as far as it was read."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.parser = Parser()
        self.sse = Decoder()
        self.events: list[ServerSentEvent] = []
        self.ended = False
        """The server has closed the connection."""
        self._reader = reader
        self._writer = writer
        self._body = bytearray()
        self._paused = False

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def again(self, data: bytes) -> None:
        """Another request on the same connection, once the response before it is complete."""
        assert self.parser.complete
        self.parser, self.sse, self.events, self._body = Parser(), Decoder(), [], bytearray()
        await self.send(data)

    async def read(self, most: int = CHUNK) -> bool:
        """Read some bytes from the socket; returns whether the response continues."""
        if self.ended or self.parser.complete:
            return False
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        async with asyncio.timeout(READ_SECONDS):
            try:
                data = await self._reader.read(most)
            except ConnectionError:
                data = b""
        self.ended = not data
        body = self.parser.feed(data)
        if dict(self.parser.headers).get("content-type", "").startswith("text/event-stream"):
            self.events += self.sse.feed(body)
        self._body += body
        return not (self.ended or self.parser.complete)

    async def bytes(self, most: int) -> bytes:
        """Read some bytes from the socket as they are."""
        return await self._reader.read(most)

    async def head(self) -> int:
        """Read until the status is known."""
        while not self.parser.status and await self.read():
            pass
        return self.parser.status

    async def until_messages(self, count: int) -> list[dict[str, Any]]:
        """Read until so many messages have arrived."""
        while len(self.messages) < count and await self.read():
            pass
        return self.messages

    async def answer(self) -> Answer:
        """Read to the end of the response."""
        while await self.read():
            pass
        return Answer(status=self.parser.status, headers=self.parser.headers, body=bytes(self._body))

    def stop_reading(self) -> None:
        """Take nothing more from the socket until the next `read`."""
        self._paused = True
        self._transport.pause_reading()

    @property
    def _transport(self) -> asyncio.Transport:
        transport = self._writer.transport
        assert isinstance(transport, asyncio.Transport)
        return transport

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [json.loads(event.data) for event in self.events if event.data]

    @property
    def position(self) -> str:
        """The id of the last event that came whole."""
        return self.sse.last_event_id

    def header(self, name: str) -> str:
        return dict(self.parser.headers)[name]

    def cut(self) -> None:
        """Tear the connection down: the peer gets a reset."""
        raw = self._writer.get_extra_info("socket")
        if raw is not None and raw.fileno() >= 0:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def aclose(self) -> None:
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


@dataclass(kw_only=True)
class Peer:
    """A client of a server at a port of this machine."""

    port: int
    headers: dict[str, str] = field(default_factory=dict)
    """Sent with every request."""
    address: str = "127.0.0.1"
    """Where it calls from: one of this machine's own, 127.0.0.1 to 127.255.255.254."""
    path: str = "/mcp"
    """Of requests that name none."""

    async def open(self, data: bytes) -> Exchange:
        """A connection of its own, on which these bytes are sent."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(self.address, 0))
        if writer.get_extra_info("sockname") == writer.get_extra_info("peername"):
            # The system may take the very port of a server that is gone for the near end, and connect it to itself.
            writer.transport.abort()
            raise ConnectionRefusedError
        exchange = Exchange(reader, writer)
        try:
            await exchange.send(data)
        except ConnectionError:
            exchange.ended = True
        return exchange

    async def begin(
        self, method: str, body: bytes | None = None, *, path: str = "", headers: Mapping[str, str] | None = None
    ) -> Exchange:
        return await self.open(self.request(method, body, path=path, headers=headers))

    async def ask(
        self, method: str, body: bytes | None = None, *, path: str = "", headers: Mapping[str, str] | None = None
    ) -> Answer:
        """A request and its whole response."""
        async with await self.begin(method, body, path=path, headers=headers) as exchange:
            return await exchange.answer()

    def request(
        self, method: str, body: bytes | None = None, *, path: str = "", headers: Mapping[str, str] | None = None
    ) -> bytes:
        """The bytes of a request. A header that is given as "" is left out."""
        fields = {"host": f"127.0.0.1:{self.port}", "accept": BOTH if method == "POST" else "text/event-stream"}
        if body is not None:
            fields |= {"content-type": "application/json", "content-length": str(len(body))}
        fields |= {**self.headers, **(headers or {})}
        lines = [
            f"{method} {path or self.path} HTTP/1.1",
            *(f"{name}: {value}" for name, value in fields.items() if value),
            "",
            "",
        ]
        return "\r\n".join(lines).encode("latin-1") + (body or b"")

    async def initialize(self, version: str = VERSION, **headers: str) -> Answer:
        client = {"name": "peer", "version": "1"}
        params = {"protocolVersion": version, "capabilities": {"roots": {}}, "clientInfo": client}
        return await self.ask("POST", message("initialize", params, id=0), headers=headers)

    async def session(self, version: str = VERSION, **headers: str) -> SessionPeer:
        """A session of one's own, initialized."""
        own = {name: value for name, value in self.headers.items() if not name.startswith("mcp-")}
        stranger = Peer(port=self.port, headers=own, address=self.address, path=self.path)
        answer = await stranger.initialize(version, **headers)
        assert answer.status == 200, answer
        known = answer.header("mcp-session-id")
        assert known is not None
        fields = {**self.headers, **headers, "mcp-session-id": known, "mcp-protocol-version": version}
        peer = SessionPeer(port=self.port, headers=fields, address=self.address, path=self.path, id=known)
        done = await peer.ask("POST", message("notifications/initialized"))
        assert done.status == 202, done
        return peer

    async def health(self) -> str:
        status: str = (await self.ask("GET", path="/healthz")).json["status"]
        return status


@dataclass(kw_only=True)
class SessionPeer(Peer):
    """A client that has a session."""

    id: str
    calls: int = 0

    def call_body(self, tool: str, *, id: int | str | None = None, **arguments: object) -> bytes:  # noqa: A002
        self.calls += 1
        number = self.calls if id is None else id
        params = {"name": tool, "arguments": arguments, "_meta": {"progressToken": number}}
        return message("tools/call", params, id=number)

    async def begin_call(self, tool: str, *, id: int | str | None = None, **arguments: object) -> Exchange:  # noqa: A002
        return await self.begin("POST", self.call_body(tool, id=id, **arguments))

    async def call(self, tool: str, *, id: int | str | None = None, **arguments: object) -> Answer:  # noqa: A002
        return await self.ask("POST", self.call_body(tool, id=id, **arguments))

    async def resume(self, position: str) -> Exchange:
        """Resume after a position; without one, read the standalone stream."""
        return await self.begin("GET", headers={"last-event-id": position})

    async def delete(self) -> Answer:
        return await self.ask("DELETE")


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def message(method: str, params: object = None, *, id: int | str | None = None) -> bytes:  # noqa: A002
    """A JSON-RPC request, or without an id a notification."""
    fields: dict[str, object] = {"jsonrpc": "2.0", "method": method}
    if params is not None:
        fields["params"] = params
    if id is not None:
        fields["id"] = id
    return json.dumps(fields).encode()


@asynccontextmanager
async def flood(peer: Peer, count: int, data: bytes) -> AsyncIterator[list[Exchange]]:
    """Many connections that have each sent the same and wait."""
    exchanges = [await peer.open(data) for _ in range(count)]
    try:
        yield exchanges
    finally:
        for exchange in exchanges:
            exchange.cut()
            await exchange.aclose()


def progress(messages: list[dict[str, Any]]) -> list[int]:
    """What the tool said, which counts from 1: a call of an older revision begins with a 0 of the server's own."""
    said = [int(m["params"]["progress"]) for m in messages if m.get("method") == "notifications/progress"]
    return said[1:] if said[:1] == [0] else said


def text_of(response: dict[str, Any]) -> str:
    """Return the text of a tool's result."""
    text: str = response["result"]["content"][0]["text"]
    return text
