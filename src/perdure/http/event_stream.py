"""Writes responses that are event streams, in any era: the head, frames, comments that keep them open, and the end."""

import asyncio
import contextlib
import enum
import json
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from starlette.types import Receive, Scope, Send

from perdure._core import sse
from perdure._core.jsonrpc import JsonObject
from perdure._core.states import ReaderState
from perdure.http.credentials import ending_with_token
from perdure.http.refusals import json_answer
from perdure.sessions.ledger import encode
from perdure.sessions.resume import Connection, Reader
from perdure.sessions.session import Session

BREAK_OFF = "perdure.break_off"
"""In the scope of a request: a function that breaks its connection off. A peer that takes nothing cannot be ended
politely, and closing would wait for it."""

END_SECONDS = 0.5
"""For the last write of a request that is cancelled: the server that runs us has waited for as long as it means to."""

_HEADERS = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)


class Ending(enum.Enum):
    """The end of a request, as far as its response was waited for."""

    WRITTEN = "written"
    """All is written."""
    LEFT = "left"
    """The client closed the connection."""
    STOPPED = "stopped"
    """The process stops, or the server that runs it cancels the request."""
    ASKED = "asked"
    """A call waits for its client's input."""
    LATE = "late"
    """A call takes longer than its client waits for the answer itself."""


@dataclass(slots=True, eq=False)
class EventStream:
    """One response. With its first frame it becomes an event stream; until then it may be a whole answer."""

    _receive: Receive
    _send: Send
    _: KW_ONLY
    break_off: Callable[[], None] | None = None
    """Breaks the connection off, where the server that runs us can do that."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    streams: bool = True
    """The response may become an event stream."""
    _task: asyncio.Task[object] | None = None
    has_begun: bool = False
    """The head is written: all that follows is a part of the event stream."""
    _ending: Ending | None = None

    # Writing

    async def write(self, body: bytes, *, last: bool = False) -> None:
        """Write the head, if it is not written, and frames. A JSON response omits everything before the answer."""
        if not self.streams:
            return
        if not self.has_begun:
            self.has_begun = True
            headers = [*_HEADERS, *self.headers]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        # Also where it is empty: the server that runs us may hold the head until then.
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})

    async def answer(self, payload: bytes, status: int | None = None) -> None:
        """Write a response as the last frame; or as JSON, if nothing came before it."""
        if self.has_begun:
            await self.write(sse.encode_message(payload), last=True)
        else:
            if status is None:
                status = 200
                error = json.loads(payload).get("error") if b'"error"' in payload else None
                if error is not None:
                    from mcp.shared.inbound import ERROR_CODE_HTTP_STATUS

                    status = ERROR_CODE_HTTP_STATUS.get(error["code"], 200)
            await json_answer(payload, status=status)({"type": "http"}, self._receive, self._send)

    async def result(self, request_id: int | str, result: JsonObject) -> None:
        await self.answer(encode({"jsonrpc": "2.0", "id": request_id, "result": result}), 200)

    # Waiting

    async def wait(self, reader: Reader | None = None, connection: Connection | None = None) -> Ending:
        """Wait for the client to leave, for `finish`, or for a cancellation by the server that runs us; meanwhile a
        reader writes, to this stream or to a `connection` in front of it.

        uvicorn would log a traceback for each request that ends by a cancellation. So it is obeyed in order, unless the
        reader is writing in this moment."""
        self._ending, self._task = None, (task := asyncio.current_task())
        try:
            if reader is not None:
                await reader.begin(connection or self)
            while (await self._receive())["type"] != "http.disconnect":
                pass
            if self._ending is not None:  # set in this task, in `begin`: the cancellation is still to come
                await asyncio.sleep(0)
            return Ending.LEFT
        except asyncio.CancelledError:
            if self._ending is None and reader is not None and reader.state is not ReaderState.RESTING:
                raise
            if task is not None and task.uncancel() > 0:
                raise
            return self._ending or Ending.STOPPED
        finally:
            self._task = None
            if reader is not None:
                reader.leave()

    async def serve(self, writing: asyncio.Task[None], end: Callable[[], object]) -> Ending:
        """Wait while a task writes, and cancel the task if the client leaves. If the request is cancelled, `end` makes
        the task write its last frame. A peer that takes nothing is broken off."""
        writing.add_done_callback(self._on_written)
        try:
            ending = await self.wait()
            if ending is Ending.STOPPED:
                end()
                await asyncio.wait({writing}, timeout=END_SECONDS)
                if not writing.done():
                    raise asyncio.CancelledError
        finally:
            writing.remove_done_callback(self._on_written)
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
        failure = None if writing.cancelled() else writing.exception()
        if isinstance(failure, TimeoutError) and self.break_off is not None:
            self.break_off()
            with contextlib.suppress(OSError):
                while (await self._receive())["type"] != "http.disconnect":
                    pass
        elif failure is not None and not isinstance(failure, OSError):
            raise failure
        return ending

    def _on_written(self, _: object) -> None:
        self.finish()

    def finish(self, ending: Ending = Ending.WRITTEN) -> None:
        """Wait for the client no longer."""
        if self._ending is None and self._task is not None:
            self._ending = ending
            self._task.cancel()

    def abort(self) -> None:
        if self.break_off is not None:
            self.break_off()


@dataclass(frozen=True, slots=True, eq=False)
class EventStreamResponse:
    """Shows a stream of a session. At rest it waits for its client to leave."""

    session: Session
    reader: Reader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve until the stream is over, another reader takes it, the token expires, or the client leaves."""
        headers = ((b"mcp-session-id", self.session.id.encode()),)
        stream = EventStream(receive, send, break_off=scope.get(BREAK_OFF), headers=headers)
        try:
            with ending_with_token(scope, self.reader.end):
                if await stream.wait(self.reader) is Ending.STOPPED:
                    with contextlib.suppress(OSError):
                        await stream.write(self.reader.preamble, last=True)
        finally:
            self.session.touch()
