"""A lean HTTP and SSE client, so that the client is not what is measured.

While the clock runs it only keeps what arrives, with the time of each read; what was received is taken apart and
checked afterwards.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, cast

from bench.received import BrokenAnswerError, Response

VERSION = "2025-11-25"
LAST_CHUNK = b"\r\n0\r\n\r\n"
RESULT_EVENT = re.compile(rb'"(?:result|error)":.*?\}\r?\n\r?\n', re.DOTALL)
TAIL = 4096  # more than one result event of ours, so that one split between reads is still seen


class Wire(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._response = Response(asked=0)
        self._head = b""
        self._left = 0
        self._tail = b""
        self._until_result = False
        self._started: asyncio.Future[Response] | None = None
        self._finished: asyncio.Future[Response] | None = None

    async def ask(self, request: bytes, *, until_result: bool = False) -> Response:
        """Send, and wait for the whole response, or only until the final answer was read."""
        _, finished = self._send(request, until_result)
        return await finished

    async def open(self, request: bytes) -> Response:
        """Send, and wait for the response to begin."""
        started, _ = self._send(request, False)
        return await started

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _send(self, request: bytes, until_result: bool) -> tuple[asyncio.Future[Response], asyncio.Future[Response]]:
        if self._transport is None or self._transport.is_closing():
            raise BrokenAnswerError("the connection is closed")
        loop = asyncio.get_running_loop()
        self._started, self._finished = loop.create_future(), loop.create_future()
        self._until_result, self._head, self._tail = until_result, b"", b""
        self._response = Response(asked=perf_counter_ns())
        self._transport.write(request)
        return self._started, self._finished

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        now = perf_counter_ns()
        if self._response.status == 0:
            data = self._take_head(data)
            if self._response.status == 0:
                return
        if data:
            self._response.reads.append((now, data))
        if self._is_whole(data) and self._finished is not None and not self._finished.done():
            self._finished.set_result(self._response)

    def connection_lost(self, exc: Exception | None) -> None:
        for future in (self._started, self._finished):
            if future is not None and not future.done():
                future.set_exception(BrokenAnswerError(f"the connection ended before the answer did ({exc})"))
                future.exception()  # asked for, so that nobody warns when no one waits for it

    def _take_head(self, data: bytes) -> bytes:
        self._head += data
        head, found, rest = self._head.partition(b"\r\n\r\n")
        if not found:
            return b""
        first, *lines = head.decode("latin-1").split("\r\n")
        self._response.status = int(first.split()[1])
        for line in lines:
            name, _, value = line.partition(":")
            self._response.headers[name.lower()] = value.strip()
        self._left = int(self._response.headers.get("content-length", "0"))
        if self._started is not None and not self._started.done():
            self._started.set_result(self._response)
        return rest

    def _is_whole(self, data: bytes) -> bool:
        if self._response.headers.get("transfer-encoding") != "chunked":
            self._left -= len(data)
            return self._left <= 0
        seen = self._tail + data if self._until_result or len(data) < len(LAST_CHUNK) else data
        self._tail = seen[-TAIL:]
        if seen.endswith(LAST_CHUNK) or (seen == LAST_CHUNK[2:]):
            return True
        return self._until_result and RESULT_EVENT.search(seen) is not None


@dataclass(frozen=True, kw_only=True)
class Client:
    """Where a candidate listens, and how its requests are spelled."""

    port: int
    path: str

    async def connect(self) -> Wire:
        loop = asyncio.get_running_loop()
        _, wire = await loop.create_connection(Wire, "127.0.0.1", self.port)
        return wire

    def post(self, message: dict[str, Any], session: str = "", headers: Mapping[str, object] | None = None) -> bytes:
        body = json.dumps(message).encode()
        given = {"Content-Type": "application/json", "Content-Length": len(body), **(headers or {})}
        return self._head("POST", session, "".join(f"{name}: {value}\r\n" for name, value in given.items())) + body

    def call(self, number: int, tool: str, arguments: dict[str, Any], session: str) -> bytes:
        params = {"name": tool, "arguments": arguments, "_meta": {"progressToken": number}}
        return self.post({"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}, session)

    def get(self, session: str, last_event_id: str = "") -> bytes:
        return self._head("GET", session, f"Last-Event-ID: {last_event_id}\r\n" if last_event_id else "")

    async def once(self, request: bytes) -> Response:
        """One request on a connection of its own."""
        wire = await self.connect()
        try:
            return await wire.ask(request)
        finally:
            wire.close()

    async def open_session(self) -> str:
        """`initialize` and `initialized`; the session's id."""
        params = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": {"name": "bench", "version": "1"}}
        answer = await self.once(self.post({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}))
        if answer.status != 200 or "mcp-session-id" not in answer.headers:
            raise BrokenAnswerError(f"initialize was answered {answer.status}: {answer.body()[:200]!r}")
        session = answer.headers["mcp-session-id"]
        told = await self.once(self.post({"jsonrpc": "2.0", "method": "notifications/initialized"}, session))
        if told.status != 202:
            raise BrokenAnswerError(f"initialized was answered {told.status}: {told.body()[:200]!r}")
        return session

    def _head(self, method: str, session: str, more: str) -> bytes:
        if session:
            more += f"Mcp-Session-Id: {session}\r\nMcp-Protocol-Version: {VERSION}\r\n"
        accept = "text/event-stream" if method == "GET" else "application/json, text/event-stream"
        return (
            f"{method} {self.path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nAccept: {accept}\r\n{more}\r\n".encode()
        )
