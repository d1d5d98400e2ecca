"""Tells sessions what happens to the streams of their calls.

A stream may be in memory before its session is (a call of a dead node that is being settled) and after it (an answer
that is still being written). So the streams of all calls have one owner, which looks for the session each time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from perdure._core.ids import SessionId
from perdure.log.stream import Stream, Streams
from perdure.sessions.context import ServerContext
from perdure.store.base import Event, Step

if TYPE_CHECKING:
    from perdure.sessions.session import Session


class CallStreams:
    """The owner of the streams of all calls, and of the table that they are in."""

    def __init__(self, context: ServerContext, held: Mapping[SessionId, Session]) -> None:
        """`held`: the sessions that are in memory and have not ended."""
        self._context = context
        self._held = held
        self.streams = Streams(context.journal, self, limit=context.settings.max_stream_events)

    def on_settled(self, stream: Stream) -> None:
        if self.streams.release(stream) and (session := self._held.get(stream.session)) is not None:
            session.on_call_settled(stream)

    def on_grown(self, stream: Stream) -> None:
        self._context.hub.registry.on_grown(stream)

    def on_lost(self, stream: Stream, unwritten: Sequence[Event], shown: int) -> None:
        """Another node has claimed a call that runs here: whatever it still does is no longer wanted."""
        if (session := self._held.get(stream.session)) is not None:
            session.exchange.stop_calls(stream)

    def on_step_written(self, stream: Stream, step: Step) -> None:
        if (session := self._held.get(stream.session)) is not None:
            session.keeper.on_written(step)
