"""Reads one stream for a program: events become the SDK's values."""

from __future__ import annotations

from typing import Protocol

from mcp_types import JSONRPCError, JSONRPCMessage, JSONRPCResponse, jsonrpc_message_adapter
from pydantic import ValidationError

from perdure._core.reconnect import Course, Patience
from perdure._core.sse import MAX_EVENT_BYTES, ServerSentEvent
from perdure.remote.endpoint import can_be_sent
from perdure.remote.heartbeat import Pulse
from perdure.remote.stream import Stream

Answer = JSONRPCResponse | JSONRPCError


class Listener(Protocol):
    """Who reads: it is told of each message before the position moves past it."""

    def awaits(self, answer: Answer) -> bool:
        """Whether this is what the stream is read for."""

    async def take(self, message: JSONRPCMessage) -> None: ...

    async def complain(self, error: Exception) -> None: ...

    def move(self, position: str | None, retry: int | None) -> None: ...


class Reader(Stream[Answer]):
    """One stream, and who listens to it."""

    def __init__(
        self,
        listener: Listener,
        patience: Patience,
        *,
        position: str | None,
        retry: int | None,
        pulse: Pulse | None = None,
    ) -> None:
        course = Course() if retry is None else Course().told(retry / 1000)
        super().__init__(patience, position=position, course=course, pulse=pulse, max_event_bytes=MAX_EVENT_BYTES)
        self._listener = listener

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

    def _moved(self, position: str, retry: int | None) -> None:
        usable = position if can_be_sent(position) else None
        if usable != self.position:
            self.position = usable
            self._listener.move(usable, retry)
