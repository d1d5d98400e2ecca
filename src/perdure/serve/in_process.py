"""Carries requests of an HTTP client to an ASGI application in the same event loop, without a socket.

No other process can reach the application, so it needs no credentials. A response is handed over as it is written, and
the application waits while its client leaves more than `MAX_UNREAD` of it unread, as it would for a connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import httpx2
from starlette.types import ASGIApp, Message, Scope

from perdure.http.event_stream import BREAK_OFF

#: Bytes of a response that wait for their reader; as many as a connection of `remote.http11` keeps.
MAX_UNREAD = 128 << 10
#: Seconds for the requests that still run when the client is closed: each of them learns that its client has left.
STOP_SECONDS = 1.0

_logger = logging.getLogger("perdure")


class InProcess(httpx2.AsyncBaseTransport):
    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._exchanges: dict[asyncio.Task[None], _Exchange] = {}

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        body = b"".join([chunk async for chunk in request.stream])  # type: ignore[union-attr]
        exchange = _Exchange(body)
        task = asyncio.create_task(exchange.run(self._app, _scope(request, exchange)), name="perdure-request")
        self._exchanges[task] = exchange
        task.add_done_callback(self._exchanges.pop)
        try:
            await exchange.receive_head()
        except BaseException:
            await exchange.aclose()
            raise
        return httpx2.Response(exchange.status, headers=exchange.headers, stream=exchange)

    async def aclose(self) -> None:
        for exchange in self._exchanges.values():
            await exchange.aclose()
        if tasks := set(self._exchanges):
            _, late = await asyncio.wait(tasks, timeout=STOP_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)


class _Exchange(httpx2.AsyncByteStream):
    """One request and its response. Iterating over it reads the response's body."""

    def __init__(self, body: bytes) -> None:
        self._request: bytes | None = body
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._unread = bytearray()
        self._is_complete = False
        self._is_left = False
        """The client reads no more."""
        self._is_broken = False
        """An incomplete response has ended."""
        self._written, self._taken, self._over = asyncio.Event(), asyncio.Event(), asyncio.Event()

    # For the client

    async def receive_head(self) -> None:
        while not self.status:
            await self._next()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            if self._unread:
                chunk = bytes(self._unread)
                self._unread.clear()
                self._taken.set()
                yield chunk
            elif self._is_complete:
                return
            else:
                await self._next()

    async def _next(self) -> None:
        """Wait until the application has written something."""
        if self._is_broken:
            raise httpx2.RemoteProtocolError("the server ended the request before the response was complete")
        self._written.clear()
        await self._written.wait()

    async def aclose(self) -> None:
        self._is_left = True
        self._taken.set()
        self._over.set()

    # For the application

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        try:
            await app(scope, self.receive, self.send)
        except Exception:
            _logger.exception("a request failed", extra={"action": "request.failed"})
        finally:
            self.break_off()

    def break_off(self) -> None:
        self._is_broken = True
        for event in (self._written, self._taken, self._over):
            event.set()

    async def receive(self) -> Message:
        if self._request is not None:
            body, self._request = self._request, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._over.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message.get("headers", ()))
        else:
            self._unread += message.get("body", b"")
            if not message.get("more_body", False):
                self._is_complete = True
                self._over.set()
        self._written.set()
        while len(self._unread) > MAX_UNREAD and not self._is_left and not self._is_broken:
            self._taken.clear()
            await self._taken.wait()
        if self._is_left:
            self._unread.clear()


def _scope(request: httpx2.Request, exchange: _Exchange) -> Scope:
    url = request.url
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": url.scheme,
        "path": url.path,
        "raw_path": url.raw_path.partition(b"?")[0],
        "query_string": url.query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "client": ("127.0.0.1", 0),
        "server": (url.host, url.port),
        BREAK_OFF: exchange.break_off,
    }
