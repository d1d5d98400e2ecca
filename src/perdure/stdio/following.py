"""Reads one event stream for a bridge: events become texts, as they came."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Protocol

import httpx2

from perdure._core.reconnect import Course, Patience
from perdure._core.sse import ServerSentEvent
from perdure.remote.attempts import Attempts
from perdure.remote.heartbeat import Heartbeat as Pulse
from perdure.remote.old_stream import Stream
from perdure.remote.old_wire import can_be_sent
from perdure.stdio.messages import FromServer, from_server
from perdure.stdio.pipes import MAX_LINE_BYTES

#: Seconds between two looks at a server that stays away, for what nobody waits for as for an answer.
LOOKS = 30.0


class Listener(Protocol):
    """Who reads: it is told of each message before the position moves past it."""

    async def hear(self, message: FromServer) -> FromServer | None:
        """Take a message; give it back if it is what this stream was read for."""

    def misheard(self, reason: str) -> None: ...

    def move(self, position: str) -> None: ...


class Following(Stream[FromServer]):
    """One stream, and who listens to it."""

    def __init__(
        self,
        listener: Listener,
        patience: Patience,
        *,
        position: str | None = None,
        since: float | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        super().__init__(
            patience,
            position=position,
            course=Course(since=since),
            pulse=pulse,
            max_event_bytes=MAX_LINE_BYTES,
            most_asked=patience.max_time,
        )
        self._listener = listener

    async def _event(self, event: ServerSentEvent) -> FromServer | None:
        answer = None
        if event.event == "message" and event.data:
            try:
                messages = from_server(event.data)
            except ValueError as error:
                self._listener.misheard(str(error))
                messages = []
            for message in messages:
                self.course = self.course.heard()
                answer = await self._listener.hear(message) or answer
        if answer is None:
            self._move(event.id, event.retry)
        return answer

    def _moved(self, position: str, retry: int | None) -> None:
        if can_be_sent(position):
            self.position = position
            self._listener.move(position)


def attempts(patience: Patience, *, since: float | None = None) -> Attempts:
    """A server may ask for any time; the host is told after as long as it was promised."""
    return Attempts(patience, course=Course(since=since), most_asked=patience.max_time)


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
