"""Keeps the newest events of a stream in memory, and three marks that tell how far the stream has come.

`last` is appended, `visible` may be shown (it is in the store, or held while the store fails), `durable` is in the
store. Readers see nothing beyond `visible`, so no byte leaves before the store has accepted it (promise 1). The tail
keeps what is not durable yet or what the attached reader still needs, so that reading at the end costs no query;
whatever the tail no longer has is read from the store. Nothing depends on the tail.
"""

from __future__ import annotations

from collections.abc import Sequence

from perdure.store.base import Event

TAIL_BYTES = 256 * 1024
"""Bytes of durable events kept in memory for a reader that lags; beyond, it reads from the store."""


class Tail:
    """The end of one stream."""

    __slots__ = ("_events", "_size", "durable", "last", "pins", "visible")

    def __init__(self, last: int) -> None:
        self.pins = 0
        """How many need all of it to stay in memory."""
        self.reset(last)

    def reset(self, last: int) -> None:
        """Forget all events; the stream has come this far, in the store."""
        self.last = self.visible = self.durable = last
        self._events: list[Event] = []
        self._size = 0
        """Bytes of the visible ones."""

    def append(self, time: float, payload: bytes, final: bool) -> Event:
        self.last = seq = self.last + 1
        event = Event(seq, time, payload, final)
        self._events.append(event)
        return event

    def show(self, through: int, size: int) -> None:
        """Events up to a number may be shown; those that could not be before have so many bytes."""
        self.visible = through
        self._size += size

    def read(self, after: int, limit: int) -> Sequence[Event] | None:
        """Visible events after a sequence number; `None` if only the store can tell."""
        events = self._events
        if events and events[0].seq <= after + 1:
            start = after + 1 - events[0].seq
            return events[start : start + min(limit, self.visible - after)]
        return () if after >= self.durable else None

    @property
    def unwritten(self) -> list[Event]:
        """Events that are not in the store."""
        return [event for event in self._events if event.seq > self.durable]

    @property
    def finals(self) -> list[Event]:
        """Final answers that the store may not have yet."""
        return [event for event in self._events if event.final]

    @property
    def start(self) -> int:
        """The sequence number before the oldest event that is in memory."""
        return self._events[0].seq - 1 if self._events else self.last

    def release(self, floor: int, kept: int = 0) -> None:
        """Forget the front: what is durable and read (up to `floor`), or too much to carry for a reader that lags; of
        the latter not the newest `kept`."""
        events = self._events
        if self.pins or not events:
            return
        durable = self.durable
        if floor > durable:
            floor = durable
        large = durable - kept
        gone = 0
        while gone < len(events) and (
            events[gone].seq <= floor or (self._size > TAIL_BYTES and events[gone].seq <= large)
        ):
            self._size -= len(events[gone].payload)
            gone += 1
        if gone:
            del events[:gone]
