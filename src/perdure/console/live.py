"""Sends objects to a page as they come: server-sent events, a bounded number of readers."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from perdure._core.jsonrpc import JsonObject
from perdure.console.entrance import refuse
from perdure.console.payloads import encoded
from perdure.errors import StoreError

MAX_READERS = 32
"""Live views at the same time: each looks at the store five times a second. A page has two, so sixteen people can look
at once."""

KEEP_ALIVE = 15.0
"""Seconds of silence behind which a comment is sent: proxies end connections that are silent for 30 or 60."""

AGAIN = 1.0
"""Seconds until a store that was lost is looked for again."""

RETRY = 2_000
"""Milliseconds until a browser comes again when a view has ended."""

TOO_MANY = f"{MAX_READERS} live views are open already; close one of them"

_HEAD = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]


@dataclass(slots=True)
class Seats:
    """Counts the live views."""

    taken: int = 0


class LiveResponse(Response):
    """Sends what an iterator gives; `None` says that there is nothing new. A client that takes nothing holds the
    iterator up, and nothing else: no queue is kept for it."""

    def __init__(self, begin: Callable[[], AsyncGenerator[JsonObject | None]], seats: Seats) -> None:
        """`begin` gives the iterator; it is called again when the store is back."""
        self._begin = begin
        self._seats = seats
        self.status_code = 200
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._seats.taken >= MAX_READERS:
            await refuse(scope, 429, TOO_MANY)(scope, receive, send)
            return
        self._seats.taken += 1
        try:
            sending = asyncio.create_task(self._send_all(send))
            leaving = asyncio.create_task(_disconnected(receive))
            try:
                await asyncio.wait([sending, leaving], return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (sending, leaving):
                    task.cancel()
                await asyncio.wait([sending, leaving])
            if not sending.cancelled():
                sending.result()
        finally:
            self._seats.taken -= 1

    async def _send_all(self, send: Send) -> None:
        """A failing store is told once. The page is told again how things are when it is back."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": list(_HEAD)})
        await _write(send, f"retry: {RETRY}\n\n")
        is_lost = False
        while True:
            try:
                async with contextlib.aclosing(self._begin()) as objects:
                    async for one in _with_comments(objects):
                        is_lost = False
                        await _write(send, one)
                break
            except StoreError as error:
                if not is_lost:
                    await _write(send, _data({"what": "lost", "error": " ".join(str(error).split())}))
                is_lost = True
                await asyncio.sleep(AGAIN)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _with_comments(objects: AsyncGenerator[JsonObject | None]) -> AsyncIterator[str]:
    """Each object as it is sent, and a comment where there was none for long."""
    loop = asyncio.get_running_loop()
    said = loop.time()
    async for one in objects:
        if one is not None or loop.time() - said >= KEEP_ALIVE:
            yield ": still here\n\n" if one is None else _data(one)
            said = loop.time()


def _data(one: JsonObject) -> str:
    return f"data: {encoded(one)}\n\n"


async def _write(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})


async def _disconnected(receive: Receive) -> None:
    message: Any = None
    while message is None or message["type"] != "http.disconnect":
        message = await receive()
