"""A stream reads one event stream of a server, over as many connections as it takes.

Bytes become events, events become messages, messages are handed on, and the position follows them. The course
(`_core/reconnect.py`) decides when to connect again.
"""

import contextlib
import math
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace

import anyio

from perdure._core.delivery import Attempt, Failure, Meaning, body_of, is_answer, is_read, of_failure
from perdure._core.reconnect import Course, Patience, delay
from perdure._core.rush import GATHER, Rush
from perdure._core.sse import Decoder, ServerSentEvent
from perdure.remote.endpoint import HttpResponse, Refused, RequestFailed, can_be_sent
from perdure.remote.message import Message, messages_in
from perdure.remote.route import Route

#: Seconds. Servers end a call's stream right after its answer; a new connection, with TLS, costs more than this.
LINGER = 0.005
#: Seconds of silence after which a resumed stream is resumed again (`asks_again`), where nothing came in between: some
#: servers replay what they have and then say nothing more on that connection.
FIRST_SILENCE, MAX_SILENCE = 3.0, 60.0

Take = Callable[[Message], Awaitable[None]]
"""Takes a message that is not the answer, before the position moves past it."""
Move = Callable[[str | None, int | None], None]
"""Takes another position, and the milliseconds before the next connection, if the server names them."""
OnResponse = Callable[[Meaning, int], None]
"""The headers of a response have arrived: its meaning and its status."""


async def ignore(_: object) -> None:
    """For requests whose messages have no reader."""


class Attempts:
    """Attempts at one thing until it works: remembers what went wrong last, and waits until the next attempt is due.

    `counts_from_request`: as in `ClientLimits`; `begins_now`: what is attempted was handed over in this moment.
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

    async def wait(self, patience: Patience | None = None) -> bool:
        """Wait until the next attempt; False if there shall be none. `patience`: in place of the one for all."""
        seconds = delay(self.course, patience or self._patience, now=time.monotonic(), chance=random.random())
        if seconds is not None:
            await anyio.sleep(seconds)
        return seconds is not None


async def pause_before_return(barren: int, patience: Patience) -> None:
    """Wait after a server has ended a subscription in good order: longer for each end in a row that brought nothing."""
    course = Course(barren=barren)
    await anyio.sleep(delay(course, patience, now=time.monotonic(), chance=random.random()) or 0.0)


class StrayAnswer(ValueError):
    """An answer came to a request that this stream is not read for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one HTTP request came to."""

    meaning: Meaning
    why: str = ""
    message: Message | None = None
    """The response message to the request, if there is one."""
    refusal: Refused | None = None
    """The words for `Meaning.REFUSED`."""
    failure: Failure | None = None
    """Why there is no response."""
    status: int = 0
    at_least: float | None = None
    """Seconds that the server asked for."""
    session: str = ""
    """The session that the server has named."""
    doubts_session: bool = False
    """The response reads as if the server did not know the session (`_core/delivery.py`)."""


class Stream(Attempts):
    """The place up to which one stream was read, and the attempts to read on.

    Without `has_positions` the server's ids say nothing (2026-07-28); `may_break`: it can be asked for again.
    `asks_again`: so it is, where it was resumed and falls silent.
    """

    def __init__(
        self,
        route: Route,
        *,
        patience: Patience,
        take: Take = ignore,
        move: Move = lambda position, retry: None,
        position: str | None = None,
        retry: int | None = None,
        begins_now: bool = False,
        has_positions: bool = True,
        may_break: bool = False,
        asks_again: bool = False,
    ) -> None:
        super().__init__(patience, counts_from_request=route.limits.counts_from_request, begins_now=begins_now)
        if retry is not None:
            self.course = self.course.told(retry / 1000)
        self.position = position
        self._route = route
        self._take = take
        self._tell_position = move
        self._has_positions = has_positions
        self._may_break = may_break
        self._asks_again = asks_again
        self._may_fall_silent = False
        self._silence = FIRST_SILENCE
        self._heard_at = 0.0
        """When the last message came."""
        self.has_fallen_silent = False
        """The last attempt was ended because of its silence: the next one needs no pause."""
        self._was_opened = False
        """The last attempt has brought an event stream."""

    async def attempt(
        self,
        opened: AbstractAsyncContextManager[HttpResponse],
        attempt: Attempt,
        request_id: str | None,
        on_response: OnResponse = lambda meaning, status: None,
    ) -> Outcome:
        """Make one HTTP request, and read its answer to the end. Raises `EventTooLarge`."""
        self._was_opened = self.has_fallen_silent = False
        limit, endpoint = self._route.limits.message_bytes, self._route.endpoint
        try:
            async with opened as response:
                is_resumed = is_read(attempt)
                meaning, message = await response.meaning(attempt, None if is_resumed else request_id, limit)
                on_response(meaning, response.status)
                if meaning is Meaning.FOLLOW:
                    message = await self.read(response, awaited=request_id, may_fall_silent=is_resumed)
                    if message is not None:
                        return Outcome(
                            meaning=Meaning.ANSWER,
                            message=message,
                            session=response.session,
                            doubts_session=message.is_error and response.doubts_session(message),
                        )
                    attempt = replace(attempt, has_position=self.position is not None)
                    return Outcome(meaning=of_failure(attempt, Failure.LOST), why=self.trouble)
                if response.status < 300 and meaning is Meaning.ANSWER and not (message and message.is_error):
                    return Outcome(meaning=meaning, message=message, session=response.session, status=response.status)
                refusal = endpoint.refusal(response)
                return Outcome(
                    meaning=meaning,
                    why=str(refusal) if response.status < 300 else f"HTTP {response.status}",
                    message=message,
                    refusal=refusal,
                    status=response.status,
                    at_least=response.retry_after,
                    session=response.session,
                    doubts_session=response.doubts_session(message),
                )
        except RequestFailed as failed:
            meaning = of_failure(attempt, failed.failure)
            return Outcome(meaning=meaning, why=str(failed), refusal=failed.refusal, failure=failed.failure)

    async def read(
        self, response: HttpResponse, *, awaited: str | None, may_fall_silent: bool = False
    ) -> Message | None:
        """The answer to the request `awaited` on this connection, or None if it ended before."""
        self._was_opened = True
        self.course = self.course.opened()
        decoder = Decoder(max_event_bytes=self._route.limits.message_bytes)
        heartbeat = self._route.endpoint.heartbeat
        self._may_fall_silent = may_fall_silent and self._asks_again
        commented: float | None = None
        self._heard_at = asked_at = time.monotonic()
        rush = Rush()
        self.trouble = "the connection ended"
        try:
            while True:
                # A server that has fallen silent (`Heartbeat`) ends the connection as well.
                beat = heartbeat.limit if self._may_break or self.position is not None else None
                left = self._heard_at + self._silence - time.monotonic() if self._may_fall_silent else None
                limit = beat if left is None or (beat is not None and beat < left) else left
                if limit is None:
                    chunk = await response.receive()
                else:
                    with anyio.move_on_after(limit) as silence:
                        chunk = await response.receive()
                    if silence.cancelled_caught:
                        self.trouble = f"the server has fallen silent for {limit:.0f} s"
                        if limit is beat:
                            heartbeat.missed()
                        else:
                            self.has_fallen_silent, self._silence = True, min(self._silence * 2, MAX_SILENCE)
                        break
                if not chunk:
                    break
                came_at = time.monotonic()
                before_chunk = decoder.last_event_id
                events = decoder.feed(chunk)
                if events and self._has_positions and decoder.last_event_id == before_chunk:
                    pass  # progress of a silent call, which is not in the server's log: comments come as ever
                elif events or not chunk.startswith(b":"):
                    commented = None
                else:  # a comment alone: two in a row, with nothing between them, are a beat
                    before, commented = commented, time.monotonic()
                    if before is not None:
                        heartbeat.heard(commented - before)
                for event in events:
                    if (answer := await self._event(event, awaited)) is not None:
                        if not response.has_ended:
                            # Wait for the end of the response, so that its connection can be used again.
                            with anyio.move_on_after(LINGER), contextlib.suppress(RequestFailed):
                                await response.receive()
                        return answer
                self._move(decoder.last_event_id, decoder.retry)
                if rush.gathers(waited=came_at - asked_at, events=len(events)):
                    await response.gather(GATHER)
                asked_at = time.monotonic()
        except RequestFailed as failed:
            self.trouble = f"the connection broke: {failed}"
        return None

    def failed(self, trouble: str, *, at_least: float | None = None) -> None:
        """An attempt failed. One that brought a stream, which then ended, has been counted already."""
        if not self._was_opened:
            super().failed(trouble, at_least=at_least)

    async def _event(self, event: ServerSentEvent, awaited: str | None) -> Message | None:
        """Hand on the messages of an event, then move; or return the message that the stream is read for."""
        answer = None
        if event.event == "message" and event.data:
            try:
                messages = messages_in(event.data)
            except ValueError as error:
                await self._route.complain(error)
                messages = []
            for message in messages:
                if message.body.get("method") is None:
                    if awaited is not None and is_answer(body_of(message.body, awaited)):
                        answer = message
                        continue
                    if message.is_answer:
                        stray = f"an answer that no request here waits for: {message.body.get('id')!r}"
                        await self._route.complain(StrayAnswer(stray))
                        continue
                if self.course.barren:
                    self.course = self.course.heard()
                if self._may_fall_silent:
                    self._heard_at, self._silence = time.monotonic(), FIRST_SILENCE
                await self._take(message)
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
                self._tell_position(usable, retry)
