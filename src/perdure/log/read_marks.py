"""Writes down how far readers have got, so that the next reader goes on from there in whatever process it comes to.

Never for each event: how far the readers of standalone streams have got is written a moment later, for all of them
together, and at once when a reader leaves. So a process that is killed forgets what it delivered in its last moment,
and a client that comes back without a position is sent that again. Of a call's stream it is written only that its
reader was lost before the end, because a client that lost the position as well has to learn of it.
"""

from __future__ import annotations

import asyncio

from perdure._core.ids import Kind, StreamId
from perdure._core.states import ContentState, LogState
from perdure.log.journal import Journal, Steps
from perdure.log.stream import Stream
from perdure.store.base import Reached

MOMENT = 0.1
"""Seconds until it is written what was delivered. Less costs a busy standalone stream a write for each of its events;
more is delivered again after a crash."""


class ReadMarks:
    """How far the readers of this process have got, as far as the store does not know it yet."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._unwritten: dict[StreamId, Stream] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.one_at_a_time = asyncio.Lock()
        """Taken to look for unread calls: thousands of clients may come at once, and their requests go first."""

    def moved(self, stream: Stream) -> None:
        """A reader has got further; which is of interest on a standalone stream only."""
        if stream.kind is Kind.STANDALONE:
            self._later(stream)

    def left(self, stream: Stream) -> None:
        """The reader of a stream has left it, or came to its end."""
        if stream.kind is Kind.CALL:
            readers = stream.readers
            unread = stream.content is not ContentState.SEALED or readers.delivered < stream.tail.last
            if unread is readers.marked_unread is False:
                return  # by far the most: nothing was ever written of it, and nothing need be
            readers.marked_unread = unread
        elif stream.id not in self._unwritten:
            return
        self._later(stream)
        self._write(stream)

    def lost(self, stream: Stream) -> None:
        """The reader of a call's stream went with its process."""
        stream.readers.marked_unread = True
        self._later(stream)

    def close(self) -> None:
        """Write the rest."""
        self._write(*self._unwritten.values())
        if self._timer is not None:
            self._timer.cancel()

    def _later(self, stream: Stream) -> None:
        self._unwritten[stream.id] = stream
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(MOMENT, self._in_time)

    def _in_time(self) -> None:
        self._timer = None
        self._write(*self._unwritten.values())
        if self._unwritten:  # the store fails
            self._later(next(iter(self._unwritten.values())))

    def _write(self, *streams: Stream) -> None:
        if self._journal.state is LogState.DEGRADED:
            return  # it would only have more to catch up with; once it is back, one step for each stream says it all
        for stream in streams:
            del self._unwritten[stream.id]
        if streams:
            self._journal.put(Steps([reached(stream) for stream in streams]))


def reached(stream: Stream) -> Reached:
    """The step that writes down how far a stream's readers have got."""
    readers = stream.readers
    return Reached(
        stream=stream.id, generation=stream.generation, through=readers.delivered, unread=readers.marked_unread
    )
