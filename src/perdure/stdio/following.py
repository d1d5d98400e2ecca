"""Reads one event stream of the server's, over as many connections as it takes, and hands its messages on as texts.

The client for programs has a reader of its own that gives the SDK's values (`client/reader.py`); to a bridge a message
is a text, and the SDK need not be loaded. When to come back is the same table for both (`_core/reconnect.py`).
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Protocol

import anyio
import httpx2

from perdure._core.reconnect import Course, Patience, Step, delay
from perdure._core.sse import Decoder, EventTooLarge, ServerSentEvent
from perdure.client.pulse import Pulse
from perdure.client.wire import can_be_sent
from perdure.stdio.messages import FromServer, from_server
from perdure.stdio.pipes import MAX_LINE_BYTES

#: Seconds. Servers end a call's stream right behind its answer; a new connection, with TLS, costs more than this.
LINGER = 0.005
#: Seconds between two looks at a server that stays away, for what nobody waits for as for an answer.
LOOKS = 30.0


class Listener(Protocol):
    """Who reads: it is told of each message before the position moves past it."""

    async def hear(self, message: FromServer) -> FromServer | None:
        """Take a message; give it back if it is what this stream was read for."""

    def misheard(self, reason: str) -> None: ...

    def move(self, position: str) -> None: ...


class Following:
    """One stream: where it is, and how it fares."""

    def __init__(
        self,
        listener: Listener,
        patience: Patience,
        *,
        position: str | None = None,
        since: float | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        self._listener = listener
        self._patience = patience
        self._pulse = pulse or Pulse()
        self.position = position
        self.trouble = ""
        """What went wrong last, for whoever has to be told that patience ended."""
        self._course = Course(since=since)

    async def read(self, response: httpx2.Response) -> FromServer | None:
        """The answer on this connection, or None if it ended before."""
        self._course = self._course.opened()
        decoder, commented = Decoder(max_event_bytes=MAX_LINE_BYTES), None
        try:
            chunks = response.aiter_bytes()
            while (chunk := await self._next(chunks)) is not None:
                events = decoder.feed(chunk)
                commented = self._beat(chunk, commented) if not events else None
                for event in events:
                    if (answer := await self._event(event)) is not None:
                        self._course = self._course.step(Step.ANSWERED)
                        await _linger(chunks)
                        return answer
                self._move(decoder.last_event_id, decoder.retry)
            self.trouble = self.trouble or "the connection ended"
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            self.trouble = f"the connection broke: {type(error).__name__}"
        except EventTooLarge:
            # The same event would come again and again.
            self._course = self._course.step(Step.REFUSED)
            raise
        self._course = self._course.lost()
        return None

    def failed(self, trouble: str, *, at_least: float | None = None) -> None:
        self.trouble = trouble
        # A server may ask for any time; the host is told after as long as it was promised.
        longest = min(at_least or 0.0, self._patience.max_time)
        self._course = self._course.failed(time.monotonic(), at_least=longest)

    async def wait(self) -> bool:
        """Wait until the next attempt; False if there shall be none."""
        seconds = delay(self._course, self._patience, now=time.monotonic(), chance=random.random())
        if seconds is None:
            self._course = self._course.step(Step.GAVE_UP)
            return False
        await anyio.sleep(seconds)
        self._course = self._course.step(Step.WAITED)
        return True

    async def _next(self, chunks: AsyncIterator[bytes]) -> bytes | None:
        """The next bytes; None at the end, or when the server has fallen silent (`client/pulse.py`)."""
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

    async def _event(self, event: ServerSentEvent) -> FromServer | None:
        answer = None
        if event.event == "message" and event.data:
            try:
                messages = from_server(event.data)
            except ValueError as error:
                self._listener.misheard(str(error))
                messages = []
            for message in messages:
                self._course = self._course.heard()
                answer = await self._listener.hear(message) or answer
        if answer is None:
            self._move(event.id, event.retry)
        return answer

    def _move(self, position: str, retry: int | None) -> None:
        if retry is not None:
            self._course = self._course.told(retry / 1000)
        if position and position != self.position and can_be_sent(position):
            self.position = position
            self._listener.move(position)


def endless(patience: Patience) -> Patience:
    """Never give up, and look less often."""
    return replace(patience, max_time=math.inf, max_tries=sys.maxsize, max_delay=max(patience.max_delay, LOOKS))


async def whole(response: httpx2.Response) -> str:
    """A body that is no stream. Raises `ValueError` where it is no text, or larger than a message may be."""
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > MAX_LINE_BYTES:
            raise ValueError(f"an answer exceeds the limit of {MAX_LINE_BYTES} bytes")
    return body.decode()


async def _linger(chunks: AsyncIterator[bytes]) -> None:
    """Wait for the end of an answer that is complete, so that its connection can be used again."""
    with anyio.move_on_after(LINGER), contextlib.suppress(httpx2.HTTPError, httpx2.StreamError):
        async for _ in chunks:
            return  # more than the answer: not worth waiting for
