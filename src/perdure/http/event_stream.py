"""Serves an event stream as a response: a reader, joined to the connection that it writes to."""

import asyncio
import contextlib
from collections.abc import Callable

from starlette.types import Receive, Scope, Send

from perdure._core.states import ReaderState
from perdure.http.credentials import Expiry
from perdure.log.reader import Reader
from perdure.sessions.session import Session
from perdure.telemetry.counters import Counters
from perdure.telemetry.tracing import Request

BREAK_OFF = "perdure.break_off"
"""In the scope of a request: a function that breaks its connection off. A peer that takes nothing cannot be ended
politely, and closing would wait for it."""

STREAM_HEADERS = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)


class EventStreamResponse:
    """The response, and the connection that its reader writes to. At rest it waits for its client to leave."""

    __slots__ = ("_reader", "_send", "_session", "_task", "breaks", "expiry")

    def __init__(self, session: Session, reader: Reader) -> None:
        self._session = session
        self._reader = reader
        self._send: Send
        self._task: asyncio.Task[object] | None = None
        self.breaks: Callable[[], None] | None = None
        """Breaks the connection off, where the server that runs us can do that."""
        self.expiry: Expiry | None = None
        """Of the token that the request showed: its client comes back with another."""

    def watch(self, span: Request, scope: Scope, counters: Counters) -> None:
        """Let a span know what this response is, and time and count what it missed."""
        resumes = scope["method"] == "GET"
        replay = span.reads(self._reader, session=self._session.name, resumes=resumes, counters=counters)
        if replay is not None:
            self._reader.watch(replay)

    async def send(self, receive: Receive, send: Send) -> None:
        """Serve until the stream is over, another reader takes it, the token expires, or the client leaves."""
        self._send = send
        self._task = task = asyncio.current_task()
        watch = None if self.expiry is None else self.expiry.watch(self._reader.end)
        try:
            headers = [*STREAM_HEADERS, (b"mcp-session-id", self._session.id.encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            del headers
            await self._reader.begin(self)
            while (await receive())["type"] != "http.disconnect":
                pass
        except asyncio.CancelledError:
            # The reader's own (`finish`) ends here; any other cancellation goes on, unless it can be obeyed in order.
            if self._reader.state is not ReaderState.FINISHED:
                if not await self._ended_in_order():
                    raise
            elif task is not None and task.uncancel() > 0:
                raise
        finally:
            if watch is not None:
                watch.cancel()
            self._reader.leave()
            self._session.touch()

    async def _ended_in_order(self) -> bool:
        """Complete the response if that needs no waiting: the server that runs us stops. It cancels what is open, and
        uvicorn would log a traceback for each response that ends by that."""
        if self._reader.state is not ReaderState.RESTING:
            return False
        self._reader.leave()
        with contextlib.suppress(OSError):
            await self.write(b"", last=True)
        return True

    def finish(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def abort(self) -> None:
        if self.breaks is not None:
            self.breaks()

    async def write(self, body: bytes, *, last: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})
