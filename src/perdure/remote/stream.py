"""A stream reads one event stream of a server, over as many connections as it takes.

Bytes become events, events become messages, messages are handed on, and the position follows them. The course
(`_core/reconnect.py`) says when to come back.
"""

import contextlib
import math
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

import anyio

from perdure._core.delivery import body_of, is_answer
from perdure._core.reconnect import Course, Patience, Phase, Step, delay
from perdure._core.sse import Decoder, EventTooLarge, ServerSentEvent
from perdure.remote.endpoint import Endpoint, RequestFailed, Response, can_be_sent
from perdure.remote.message import Message, messages_in

#: Seconds. Servers end a call's stream right after its answer; a new connection, with TLS, costs more than this.
LINGER = 0.005


class Attempts:
    """Attempts at one thing until it works remember what went wrong last, and wait until the next one is due.

    `counts_from_request`: as in `Limits`; `begins_now`: what is attempted was handed over in this moment.
    """

    def __init__(self, patience: Patience, *, counts_from_request: bool = False, begins_now: bool = True) -> None:
        self.trouble = ""
        """What went wrong last; the caller reads it when patience has ended."""
        self.course = Course(since=time.monotonic() if counts_from_request and begins_now else None)
        self._patience = patience
        self._most_asked = patience.max_time if counts_from_request else math.inf

    def failed(self, trouble: str, *, at_least: float | None = None) -> None:
        self.trouble = trouble
        asked = min(at_least or 0.0, self._most_asked)
        self.course = self.course.failed(time.monotonic(), at_least=asked)

    async def wait(self) -> bool:
        """Wait until the next attempt; False if there shall be none."""
        seconds = delay(self.course, self._patience, now=time.monotonic(), chance=random.random())
        if seconds is None:
            self.course = self.course.step(Step.GAVE_UP)
            return False
        await anyio.sleep(seconds)
        self.course = self.course.step(Step.WAITED)
        return True


async def pause_before_return(barren: int, patience: Patience) -> None:
    """Wait after a server has ended a subscription in good order: longer for each end in a row that brought nothing."""
    course = Course(phase=Phase.WAITING, barren=barren)
    await anyio.sleep(delay(course, patience, now=time.monotonic(), chance=random.random()) or 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How long one client waits for what, and how large a message may be."""

    patience: Patience
    """For requests, and for what has no answer."""
    listening: Patience
    """For the standalone stream."""
    handshake: Patience
    handshake_seconds: float
    """For one handshake, however lively the server is."""
    message_bytes: int
    """The largest message of the server that is read."""
    counts_from_request: bool
    """Patience runs from the moment when a message was handed over, and a server that asks for more time than it has
    does not get it. Otherwise it runs from the first failure, and a server may ask for any time."""


class StrayAnswer(ValueError):
    """An answer came to a request that this stream is not read for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Listener:
    """Takes what a stream brings: each message before the position moves past it."""

    take: Callable[[Message], Awaitable[None]]
    complain: Callable[[Exception], Awaitable[object]]
    """For what is not a message, and for stray answers."""
    move: Callable[[str | None, int | None], None]
    """The server names another position, and the milliseconds after which it wants us back, if it says."""


class Stream(Attempts):
    """The place up to which one stream was read, and the attempts to read on."""

    def __init__(
        self,
        endpoint: Endpoint,
        limits: Limits,
        listener: Listener,
        *,
        patience: Patience,
        position: str | None = None,
        retry: int | None = None,
        begins_now: bool = False,
        has_positions: bool = True,
        may_break: bool = False,
    ) -> None:
        """Without `has_positions` the server's ids say nothing (2026-07-28); `may_break`: it can be asked for again."""
        super().__init__(patience, counts_from_request=limits.counts_from_request, begins_now=begins_now)
        if retry is not None:
            self.course = self.course.told(retry / 1000)
        self.position = position
        self._heartbeat = endpoint.heartbeat
        self._listener = listener
        self._max_bytes = limits.message_bytes
        self._has_positions = has_positions
        self._may_break = may_break

    async def read(self, response: Response, *, awaited: str | None) -> Message | None:
        """The answer to the request `awaited` on this connection, or None if it ended before."""
        self.course = self.course.opened()
        decoder = Decoder(max_event_bytes=self._max_bytes)
        commented: float | None = None
        self.trouble = "the connection ended"
        try:
            async with aclosing(response.chunks()) as chunks:
                while True:
                    # A server that has fallen silent (`Heartbeat`) ends the connection as well.
                    limit = self._heartbeat.limit if self._may_break or self.position is not None else None
                    with anyio.move_on_after(limit) as silence:
                        chunk = await anext(chunks, None)
                    if silence.cancelled_caught:
                        self._heartbeat.missed()
                        self.trouble = f"the server has fallen silent for {limit:.0f} s"
                        break
                    if chunk is None:
                        break
                    events = decoder.feed(chunk)
                    if events or not chunk.startswith(b":"):
                        commented = None
                    else:  # a comment alone: two in a row, with nothing between them, are a beat
                        before, commented = commented, time.monotonic()
                        if before is not None:
                            self._heartbeat.heard(commented - before)
                    for event in events:
                        if (answer := await self._event(event, awaited)) is not None:
                            self.course = self.course.step(Step.ANSWERED)
                            # Wait for the end of the response, so that its connection can be used again.
                            with anyio.move_on_after(LINGER), contextlib.suppress(RequestFailed):
                                await anext(chunks, None)
                            return answer
                    self._move(decoder.last_event_id, decoder.retry)
        except RequestFailed as failed:
            self.trouble = f"the connection broke: {failed}"
        except EventTooLarge:
            # The same event would come again and again.
            self.course = self.course.step(Step.REFUSED)
            raise
        self.course = self.course.lost()
        return None

    def failed(self, trouble: str, *, at_least: float | None = None) -> None:
        """An attempt failed. One that brought a stream, which then ended, has been counted already."""
        if self.course.phase is Phase.CONNECTING:
            super().failed(trouble, at_least=at_least)

    async def _event(self, event: ServerSentEvent, awaited: str | None) -> Message | None:
        """Hand on what an event holds, then move; or give it back, if it is what the stream is read for."""
        answer = None
        if event.event == "message" and event.data:
            try:
                messages = messages_in(event.data)
            except ValueError as error:
                await self._listener.complain(error)
                messages = []
            for message in messages:
                if awaited is not None and is_answer(body_of(message.body, awaited)):
                    answer = message
                elif message.is_answer:
                    stray = f"an answer that no request here waits for: {message.body.get('id')!r}"
                    await self._listener.complain(StrayAnswer(stray))
                else:
                    self.course = self.course.heard()
                    await self._listener.take(message)
        if answer is None:
            self._move(event.id, event.retry)
        return answer

    def _move(self, position: str, retry: int | None) -> None:
        if retry is not None:
            self.course = self.course.told(retry / 1000)
        if self._has_positions and position and position != self.position:
            usable = position if can_be_sent(position) else None
            if usable != self.position:
                self.position = usable
                self._listener.move(usable, retry)
