"""Writes the response to a request of 2026-07-28: JSON, if nothing comes before the answer; else an event stream."""

import asyncio
import enum
import json

from mcp.shared.inbound import ERROR_CODE_HTTP_STATUS
from starlette.types import Receive, Send

from perdure._core.jsonrpc import JsonObject
from perdure._core.states import ReaderState
from perdure.http.event_stream import STREAM_HEADERS
from perdure.http.refusals import Answer
from perdure.log.reader import Reader
from perdure.sessions.messages import encode
from perdure.store.base import Event

_COMMENT = b": keep-alive\r\n\r\n"
_ASK = b'{"jsonrpc":"2.0","id":"ask-'
"""What every ask begins with (`sessions.messages.encode_ask`): a client of this revision is not asked on a stream."""


class MessageWriter:
    """One response on its way."""

    def __init__(self, request_id: int | str, receive: Receive, send: Send, *, streams: bool) -> None:
        """`streams`: the response may become an event stream."""
        self._id = request_id
        self._receive = receive
        self._send = send
        self._streams = streams
        self._begun = False

    @property
    def has_begun(self) -> bool:
        """The response is an event stream, whose head is written: all that follows is a part of it."""
        return self._begun

    async def write(self, frames: bytes) -> None:
        """Write messages, or a comment, in front of the answer."""
        if frames and self._streams:
            if not self._begun:
                self._begun = True
                await self._send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})
            await self._send({"type": "http.response.body", "body": frames, "more_body": True})

    async def keep_alive(self) -> None:
        await self.write(_COMMENT)

    async def result(self, result: JsonObject) -> None:
        await self.answer(encode({"jsonrpc": "2.0", "id": self._id, "result": result}))

    async def response(self, recorded: bytes) -> None:
        """Answer with a response that another request has got."""
        await self.answer(encode({**json.loads(recorded), "id": self._id}))

    async def answer(self, payload: bytes, status: int | None = None) -> None:
        if self._begun:
            await self._send({"type": "http.response.body", "body": frame_of(payload), "more_body": False})
        else:
            await Answer(status=status or self._status(payload), body=payload).send(self._receive, self._send)

    def _status(self, payload: bytes) -> int:
        if payload.startswith(b'{"jsonrpc":"2.0","id":%b,"result":' % encode(self._id)):
            return 200  # as nearly always
        error = json.loads(payload).get("error")
        return 200 if error is None else ERROR_CODE_HTTP_STATUS.get(error["code"], 200)


def frame_of(payload: bytes) -> bytes:
    return b"event: message\r\ndata: %b\r\n\r\n" % payload


class Outcome(enum.Enum):
    """How the response to a running call ended, as far as its own request waited."""

    ANSWERED = "answered"
    LEFT = "left"
    """The client closed the connection."""
    ASKED = "asked"
    """The call waits for its client's input."""
    LATE = "late"
    """The call takes longer than its client waits for the answer itself."""
    STOPPED = "stopped"
    """The process stops, and the next one goes on with the call."""


class CallReader:
    """Shows a call that runs here to the client that began it, until its answer or something else ends that."""

    def __init__(self, writer: MessageWriter, *, token: bool) -> None:
        """`token`: the client wants progress."""
        self._writer = writer
        self._token = token
        self._takes_handle = False
        self._task: asyncio.Task[object] | None = None
        self._answer: bytes | None = None
        self._is_asked = False
        self._is_finished = False
        """The task that reads is cancelled, if it was not before."""
        self._outcome: Outcome | None = None

    async def read(self, reader: Reader, receive: Receive, *, after: float | None) -> Outcome:
        """Read until the answer is written, `after` has passed, or the client leaves."""
        self._task = task = asyncio.current_task()
        self._takes_handle = after is not None
        timer = None if after is None else asyncio.get_running_loop().call_later(after, self._end, Outcome.LATE)
        try:
            await reader.begin(self)
            while (await receive())["type"] != "http.disconnect":
                pass
            self._outcome = self._outcome or Outcome.LEFT
        except asyncio.CancelledError:
            # The end of the reader, or of the time, ends here. Any other cancellation is that of a server that stops:
            # it is obeyed in order where nothing is being written, because uvicorn would log a traceback.
            if self._outcome is None and reader.state is ReaderState.RESTING:
                self._outcome = Outcome.STOPPED
            elif self._outcome is None and reader.state is not ReaderState.FINISHED:
                raise
            if task is not None and task.uncancel() > 0:
                raise
        finally:
            if timer is not None:
                timer.cancel()
            reader.leave()
        return Outcome.ANSWERED if self._answer is not None else self._outcome or Outcome.LEFT

    def hand_out(self) -> None:
        """Let the client have a handle now, if it takes one: the process is about to stop."""
        if self._takes_handle:
            self._end(Outcome.LATE)

    def _end(self, outcome: Outcome) -> None:
        if self._outcome is None and self._answer is None and not self._is_finished:
            self._outcome = outcome
            if self._task is not None:
                self._task.cancel()

    # The connection of a reader

    def frame(self, event: Event) -> bytes:
        payload = event.payload
        if event.final:
            self._answer = payload
        elif payload.startswith(_ASK):
            self._is_asked = True
        elif b'"method":"notifications/progress"' in payload[:80]:
            return frame_of(payload) if self._token else b""
        elif b'"method":"notifications/message"' in payload[:80]:
            return frame_of(payload)
        return b""

    async def write(self, body: bytes, *, last: bool) -> None:
        if self._answer is not None:
            await self._writer.write(body)
            await self._writer.answer(self._answer)
        elif last:
            self._outcome = self._outcome or Outcome.STOPPED
        else:
            await self._writer.write(body)
            if self._is_asked:  # and not answered in the same moment, or the answer would be broken off
                self._end(Outcome.ASKED)

    def finish(self) -> None:
        self._is_finished = True
        if self._task is not None and self._outcome not in (Outcome.LATE, Outcome.ASKED):  # it is cancelled already
            self._task.cancel()

    def abort(self) -> None:
        """The connection is left to its server, which ends it."""
