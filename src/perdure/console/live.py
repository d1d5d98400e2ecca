"""Sends objects to a page as they come: server-sent events, a bounded number of readers."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from perdure._core.jsonrpc import JsonObject
from perdure.console.entrance import refuse
from perdure.errors import PerdureError

MAX_READERS = 32
"""Live views at the same time: each looks at the store five times a second. A page has two, so sixteen people can look
at once."""

KEEP_ALIVE = 15.0
"""Seconds of silence behind which a comment is sent: proxies end connections that are silent for 30 or 60."""

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

    def __init__(self, objects: AsyncGenerator[JsonObject | None], seats: Seats) -> None:
        self._objects = objects
        self._seats = seats
        self.status_code = 200
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._seats.taken >= MAX_READERS:
            await self._objects.aclose()
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
        await send({"type": "http.response.start", "status": self.status_code, "headers": list(_HEAD)})
        await _write(send, f"retry: {RETRY}\n\n")
        loop = asyncio.get_running_loop()
        said = loop.time()
        try:
            async with contextlib.aclosing(self._objects) as objects:
                async for one in objects:
                    if one is not None:
                        await _write(send, f"data: {json.dumps(one, separators=(',', ':'))}\n\n")
                        said = loop.time()
                    elif loop.time() - said >= KEEP_ALIVE:
                        await _write(send, ": still here\n\n")
                        said = loop.time()
        except PerdureError as error:  # the page comes again, and is told the reason by the status
            await _write(send, f"data: {json.dumps({'what': 'error', 'error': str(error)})}\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _write(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})


async def _disconnected(receive: Receive) -> None:
    message: Any = None
    while message is None or message["type"] != "http.disconnect":
        message = await receive()
