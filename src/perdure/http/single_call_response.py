"""Shows a call of 2026-07-28 that runs here to the client that began it."""

import asyncio

from perdure._core import sse
from perdure.http.event_stream import Ending, EventStream
from perdure.log.reader import Reader
from perdure.store.records import Event

_ASK = b'{"jsonrpc":"2.0","id":"ask-'
"""What every ask begins with (`sessions.messages.encode_ask`): a client of this revision is not asked on a stream."""


class CallReader:
    """The connection of a reader: picks what the client is shown before the answer, and notices what ends that."""

    def __init__(self, stream: EventStream, *, token: bool) -> None:
        """`token`: the client wants progress."""
        self._stream = stream
        self._token = token
        self._takes_handle = False
        self._answer: bytes | None = None
        self._is_asked = False

    async def read(self, reader: Reader, *, after: float | None) -> Ending:
        """Read until the answer is written, `after` has passed, or the client leaves."""
        self._takes_handle = after is not None
        timer = None if after is None else asyncio.get_running_loop().call_later(after, self._end, Ending.LATE)
        try:
            ending = await self._stream.wait(reader, self)
        finally:
            if timer is not None:
                timer.cancel()
        if self._answer is not None:
            return Ending.WRITTEN
        return Ending.LEFT if ending is Ending.WRITTEN else ending

    def hand_out(self) -> None:
        """Let the client have a handle now, if it takes one: the process is about to stop."""
        if self._takes_handle:
            self._end(Ending.LATE)

    def _end(self, ending: Ending) -> None:
        if self._answer is None:
            self._stream.finish(ending)

    def frame(self, event: Event) -> bytes:
        payload = event.payload
        if event.final:
            self._answer = payload
        elif payload.startswith(_ASK):
            self._is_asked = True
        elif b'"method":"notifications/progress"' in payload[:80]:
            return sse.encode_message(payload) if self._token else b""
        elif b'"method":"notifications/message"' in payload[:80]:
            return sse.encode_message(payload)
        return b""

    async def write(self, body: bytes, *, last: bool) -> None:
        if self._answer is not None:
            await self._stream.write(body)
            await self._stream.answer(self._answer)
        elif last:
            self._stream.finish(Ending.STOPPED)
        else:
            await self._stream.write(body)
            if self._is_asked:  # and not answered in the same moment, or the answer would be broken off
                self._end(Ending.ASKED)

    def finish(self) -> None:
        self._stream.finish()

    def abort(self) -> None:
        """The connection is left to its server, which ends it."""
