"""Reads one stream, over as many connections as it takes.

What all streams have in common: bytes become messages, messages are handed on, the position follows them, and the
course (`_core/reconnect.py`) says when to come back.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import AsyncIterator
from typing import Protocol

import anyio
import httpx2
from mcp_types import JSONRPCError, JSONRPCMessage, JSONRPCResponse, jsonrpc_message_adapter
from pydantic import ValidationError

from perdure._core.reconnect import Course, Patience, Phase, Step, delay
from perdure._core.sse import Decoder, EventTooLarge, ServerSentEvent
from perdure.client.pulse import Pulse
from perdure.client.wire import can_be_sent

Answer = JSONRPCResponse | JSONRPCError

#: Seconds. Servers end a call's stream right behind its answer; a new connection, with TLS, costs more than this.
LINGER = 0.005


async def _linger(chunks: AsyncIterator[bytes]) -> None:
    """Wait for the end of an answer that is complete, so that its connection can be used again."""
    with anyio.move_on_after(LINGER), contextlib.suppress(httpx2.HTTPError, httpx2.StreamError):
        async for _ in chunks:
            return  # more than the answer: not worth waiting for


class Listener(Protocol):
    """Who reads: it is told of each message before the position moves past it."""

    def awaits(self, answer: Answer) -> bool:
        """Whether this is what the stream is read for."""

    async def take(self, message: JSONRPCMessage) -> None: ...

    async def complain(self, error: Exception) -> None: ...

    def move(self, position: str | None, retry: int | None) -> None: ...


class Reader:
    """One stream: where it is, and how it fares."""

    def __init__(
        self,
        listener: Listener,
        patience: Patience,
        *,
        position: str | None,
        retry: int | None,
        pulse: Pulse | None = None,
    ) -> None:
        self._listener = listener
        self._patience = patience
        self._pulse = pulse or Pulse()
        self.position = position
        self.trouble = ""
        """What went wrong last, for whoever has to be told that patience ended."""
        self.course = Course() if retry is None else Course().told(retry / 1000)

    async def read(self, response: httpx2.Response) -> Answer | None:
        """The answer on this connection, or None if it ended before."""
        self.course = self.course.opened()
        decoder, commented = Decoder(), None
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

    def failed(self, trouble: str, *, at_least: float | None = None) -> None:
        self.trouble = trouble
        self.course = self.course.failed(time.monotonic(), at_least=at_least or 0.0)

    def not_opened(self, error: Exception) -> None:
        """Whatever kept a connection from being made is worth another try: where the network is gone, so may be the
        place that an auth flow of the user's gets its tokens from. What comes later is not for us to judge."""
        if self.course.phase is not Phase.CONNECTING:
            raise error
        self.failed(f"{type(error).__name__}: {error}")

    async def wait(self) -> bool:
        """Wait until the next attempt; False if there shall be none."""
        seconds = delay(self.course, self._patience, now=time.monotonic(), chance=random.random())
        if seconds is None:
            self.course = self.course.step(Step.GAVE_UP)
            return False
        await anyio.sleep(seconds)
        self.course = self.course.step(Step.WAITED)
        return True

    async def _next(self, chunks: AsyncIterator[bytes]) -> bytes | None:
        """The next bytes; None at the end, or when the server has fallen silent."""
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

    async def _event(self, event: ServerSentEvent) -> Answer | None:
        message = None
        if event.event == "message" and event.data:
            try:
                message = jsonrpc_message_adapter.validate_json(event.data, by_name=False)
            except ValidationError as error:
                await self._listener.complain(error)
        if isinstance(message, JSONRPCResponse | JSONRPCError):
            if self._listener.awaits(message):
                return message
            await self._listener.complain(ValueError(f"an answer that nobody here waits for: {message.id!r}"))
        elif message is not None:
            self.course = self.course.heard()
            await self._listener.take(message)
        self._move(event.id, event.retry)
        return None

    def _move(self, position: str, retry: int | None) -> None:
        if retry is not None:
            self.course = self.course.told(retry / 1000)
        usable = position if can_be_sent(position) else None
        if position and usable != self.position:
            self.position = usable
            self._listener.move(usable, retry)
