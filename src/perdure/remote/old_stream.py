"""One event stream of a server's, read over as many connections as it takes.

What all streams have in common: bytes become events, events are handed on, the position follows them, and the course
(`_core/reconnect.py`) says when to come back. What a message is differs: for programs it is a value of the SDK's
(`client/reader.py`); for a bridge it is a text (`stdio/following.py`), and the SDK is not even loaded.
"""

from __future__ import annotations

import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

import anyio
import httpx2

from perdure._core.reconnect import Course, Patience, Phase, Step
from perdure._core.sse import Decoder, EventTooLarge, ServerSentEvent
from perdure.remote.attempts import Attempts
from perdure.remote.heartbeat import Heartbeat as Pulse

Answer = TypeVar("Answer")

#: Seconds. Servers end a call's stream right behind its answer; a new connection, with TLS, costs more than this.
LINGER = 0.005


class Stream(Attempts, ABC, Generic[Answer]):
    """Where the reading of one stream is, and how it fares."""

    def __init__(
        self,
        patience: Patience,
        *,
        position: str | None,
        course: Course,
        pulse: Pulse | None,
        max_event_bytes: int,
        most_asked: float = math.inf,
    ) -> None:
        super().__init__(patience, course=course, most_asked=most_asked)
        self.position = position
        self._pulse = pulse or Pulse()
        self._max_event_bytes = max_event_bytes

    @abstractmethod
    async def _event(self, event: ServerSentEvent) -> Answer | None:
        """Hand on what an event holds, then `_move`; or give it back, if it is what the stream is read for."""

    @abstractmethod
    def _moved(self, position: str, retry: int | None) -> None:
        """The server names another position."""

    async def read(self, response: httpx2.Response) -> Answer | None:
        """The answer on this connection, or None if it ended before."""
        self.course = self.course.opened()
        decoder, commented = Decoder(max_event_bytes=self._max_event_bytes), None
        try:
            chunks = response.aiter_bytes()
            while (chunk := await self._next(chunks)) is not None:
                events = decoder.feed(chunk)
                commented = self._beat(chunk, commented) if not events else None
                for event in events:
                    if (answer := await self._event(event)) is not None:
                        self.course = self.course.step(Step.ANSWERED)
                        await _linger(chunks)
                        return answer
                self._move(decoder.last_event_id, decoder.retry)
            self.trouble = self.trouble or "the connection ended"
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            self.trouble = f"the connection broke: {type(error).__name__}"
        except EventTooLarge:
            # The same event would come again and again.
            self.course = self.course.step(Step.REFUSED)
            raise
        self.course = self.course.lost()
        return None

    def not_opened(self, error: Exception) -> None:
        """Whatever kept a connection from being made is worth another try: where the network is gone, so may be the
        place that tokens come from, and a file that holds one may be in the middle of being written. What comes later
        is not for us to judge."""
        if self.course.phase is not Phase.CONNECTING:
            raise error
        self.failed(f"{type(error).__name__}: {error}")

    def _move(self, position: str, retry: int | None) -> None:
        if retry is not None:
            self.course = self.course.told(retry / 1000)
        if position and position != self.position:
            self._moved(position, retry)

    async def _next(self, chunks: AsyncIterator[bytes]) -> bytes | None:
        """The next bytes; None at the end, or when the server has fallen silent (`pulse.py`)."""
        self.trouble = ""
        limit = None if self.position is None else self._pulse.limit
        with anyio.move_on_after(limit):
            return await anext(chunks, None)
        self._pulse.missed()
        self.trouble = f"the server has fallen silent for {limit:.0f} s"
        return None

    def _beat(self, chunk: bytes, before: float | None) -> float | None:
        """Bytes without an event, and when the comment before them came, if nothing stands between."""
        if not chunk.startswith(b":"):
            return None
        now = time.monotonic()
        if before is not None:
            self._pulse.heard(now - before)
        return now


async def _linger(chunks: AsyncIterator[bytes]) -> None:
    """Wait for the end of an answer that is complete, so that its connection can be used again."""
    with anyio.move_on_after(LINGER), contextlib.suppress(httpx2.HTTPError, httpx2.StreamError):
        async for _ in chunks:
            return  # more than the answer: not worth waiting for
