"""Holds the parts of a stream: its newest events, its readers, and what waits here until the journal takes it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from perdure._core.ids import Fence, StreamId
from perdure._core.retention import StreamSizes, StreamUsage
from perdure.store.base import Append, CallEnd, Event, ReaderRecord, Step, Trim

if TYPE_CHECKING:
    from perdure.log.reader import Reader

TAIL_BYTES = 256 * 1024
"""Bytes of durable events kept in memory for a reader that lags; beyond, it reads from the store."""

RUN_AHEAD = 128
"""Events a call may send before they are accepted. More is faster, and the longer an event waits at full load."""

RUN_AHEAD_BYTES = TAIL_BYTES
"""Bytes a call may send before they are accepted, and the rest of the last event. They are written in one commit, which
must be short; and sent from the tail, which should hold them."""


class Tail:
    """The newest events of one stream, in memory, and three marks that tell how far the stream has come.

    `last` is appended, `visible` may be shown (it is in the store, or held while the store fails), `durable` is in the
    store. Readers see nothing beyond `visible`, so no byte leaves before the store has accepted it (promise 1). The
    tail keeps what is not durable yet or what the attached reader still needs, so that reading at the end costs no
    query; whatever the tail no longer has is read from the store. Nothing depends on the tail.
    """

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


@dataclass(slots=True, eq=False)
class Readership:
    """The reader of one stream, of which there is one at a time, and the writers that wait for it."""

    delivered: int
    """How far the readers have got."""
    marked_unread: bool
    """The store has the stream down as a call's whose reader was lost before the end."""
    reader: Reader | None = None
    """The one at this node."""
    remote: ReaderRecord | None = None
    """The one at another node, as the store tells."""
    lost_at: int = 0
    """When the last reader was lost, as an arrival number of the hub."""
    pause_at: int = 0
    """The sequence number at which the writer has to wait."""
    # Mostly empty, and there are thousands of streams at rest: a tuple, which costs nothing when empty.
    waiting: tuple[asyncio.Future[bool], ...] = ()

    @property
    def present(self) -> bool:
        """A reader is there, at this node or at another one."""
        return self.reader is not None or self.remote is not None

    @property
    def through(self) -> int | None:
        """As far as the present reader has got; `None` if there is none."""
        if self.reader is not None:
            return self.reader.cursor
        return None if self.remote is None else self.remote.seq

    def advance(self, through: int) -> None:
        """A reader has got this far, at whatever node."""
        if through > self.delivered:
            self.delivered = through

    def lose(self, arrival: int) -> None:
        """The stream has no known reader; if none was lost earlier, one counts as lost at this moment."""
        self.lost_at = self.lost_at or arrival

    def drop_remote(self) -> ReaderRecord | None:
        """The newest reader is at this node: the other one is overtaken, and given back."""
        remote, self.remote = self.remote, None
        return remote

    def end_beyond(self, end: int) -> None:
        """End a reader that was shown what the log will not have: its writer held it, and has lost its claim or died.
        The reader's client learns that from its position, when it comes again."""
        if self.reader is not None and self.reader.cursor > end:
            self.reader.end()

    def update(self, visible: int, most_ahead: int | None, over: bool) -> None:
        """Reckon how far the writer may go, and let those that wait look again; called whenever something that it
        depends on has moved. `most_ahead`: events that it may be ahead of the present reader."""
        pause_at = visible + RUN_AHEAD
        if most_ahead is not None and (through := self.through) is not None and through + most_ahead < pause_at:
            pause_at = through + most_ahead
        self.pause_at = pause_at
        if self.waiting:
            waiting, self.waiting = self.waiting, ()
            for future in waiting:
                if not future.done():
                    future.set_result(over)

    async def wait(self) -> bool:
        """Wait until something has moved. Tells whether the stream was over at that moment."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.waiting += (future,)
        return await future


@dataclass(slots=True, eq=False)
class StreamWriter:
    """The writing end of a stream. There is one only where this node writes."""

    _id: StreamId
    _tail: Tail
    _readers: Readership
    sizes: StreamSizes
    _owed: int
    seals: bool = False
    """Everything owed is appended."""
    is_queued: bool = False
    ahead_bytes: int = 0
    """Bytes that are not accepted yet."""
    pending: list[Event] = field(default_factory=list)
    """What the journal has not taken yet."""
    _taken: int = 0
    # Tuples, as `Readership.waiting`.
    _ends: tuple[CallEnd, ...] = ()
    _extra_steps: tuple[Step, ...] = ()

    def add(self, end: CallEnd | None, also: Step | None, taken: int) -> None:
        """Add what is committed together with the last event of `pending`."""
        if end is not None:
            self._ends += (end,)
            self._owed -= 1
            self.seals = self._owed == 0
        if also is not None:
            self._extra_steps += (also,)
        if taken:
            self._taken = taken

    def take(self, fence: Fence, *, limit: int, read: int | None) -> Sequence[Step]:
        """The steps that write what has collected, and keep the stream within its limit; what lies behind `read`, where
        a reader is, does not go. Sizes are counted here, once for a group of events."""
        if not self.pending:
            self.is_queued = False
            return ()
        events, sizes = tuple(self.pending), self.sizes
        if self._ends:
            finals = {event.seq: len(event.payload) for event in events if event.final}
            sizes.count([0 if event.final else len(event.payload) for event in events], finals)
        else:
            sizes.count([len(event.payload) for event in events])
        steps: list[Step] = [
            Append(stream=self._id, fence=fence, events=events, ends=self._ends, seal=self.seals, taken=self._taken),
            *self.drop(),
        ]
        through = sizes.overflow(self._tail.last, limit=limit, read=read)
        if through > sizes.trimmed:
            sizes.trim(through)
            steps.append(Trim(stream=self._id, through=through))
        return steps

    def drop(self) -> Sequence[Step]:
        """Forget what has collected; gives the steps that were to be written together with it."""
        self.is_queued = False
        extra, self._extra_steps = self._extra_steps, ()
        self.pending, self._ends, self._taken = [], (), 0
        return extra

    def usage(self, *, idle: bool) -> StreamUsage:
        return self.sizes.usage(self._id, last=self._tail.last, floor=self._floor, idle=idle)

    def forget_events(self) -> Trim:
        """Trim everything that may go, final answers excepted."""
        self.sizes.trim(self._floor)
        return Trim(stream=self._id, through=self.sizes.trimmed)

    @property
    def _floor(self) -> int:
        """Up to where no reader needs it any more."""
        through, last = self._readers.through, self._tail.last
        return last if through is None else min(last, through)
