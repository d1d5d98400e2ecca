"""Numbers and collects what this node appends to a stream, until the journal takes it."""

from __future__ import annotations

from collections.abc import Sequence

from perdure._core.ids import Fence, StreamId
from perdure._core.retention import StreamSizes, StreamUsage
from perdure.log.readership import Readership
from perdure.log.tail import TAIL_BYTES, Tail
from perdure.store.base import Append, CallEnd, Event, Step, Trim

RUN_AHEAD_BYTES = TAIL_BYTES
"""Bytes a call may send before they are accepted, and the rest of the last event. They are written in one commit, which
must be short; and sent from the tail, which should hold them."""


class StreamWriter:
    """The writing side of a stream. There is one only where this node writes."""

    __slots__ = (
        "_ends",
        "_extra_steps",
        "_id",
        "_owed",
        "_readers",
        "_sizes",
        "_tail",
        "_taken",
        "ahead_bytes",
        "is_queued",
        "pending",
        "seals",
    )

    def __init__(
        self,
        stream: StreamId,
        tail: Tail,
        readers: Readership,
        *,
        owed: int,
        before: StreamWriter | None = None,
    ) -> None:
        """`before`: this node's writer under an earlier claim. What it had under way is refused by the store."""
        self._id = stream
        self._tail = tail
        self._readers = readers
        self._owed = owed
        self.seals = False
        """Everything owed is appended."""
        self.is_queued = False
        self.ahead_bytes = 0
        """Bytes that are not accepted yet."""
        self._taken = 0
        self.pending: list[Event] = []
        """What the journal has not taken yet."""
        # Mostly empty, and there are thousands of streams at rest: tuples, which cost nothing when empty.
        self._ends: tuple[CallEnd, ...] = ()
        self._extra_steps: tuple[Step, ...] = ()
        self._sizes: StreamSizes = StreamSizes(tail.last) if before is None else before._sizes.restarted(tail.last)

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
        events = tuple(self.pending)
        if self._ends:
            finals = {event.seq: len(event.payload) for event in events if event.final}
            self._sizes.count([0 if event.final else len(event.payload) for event in events], finals)
        else:
            self._sizes.count([len(event.payload) for event in events])
        append = Append(
            stream=self._id,
            fence=fence,
            events=events,
            ends=self._ends,
            seal=self.seals,
            taken=self._taken,
        )
        steps: list[Step] = [append, *self._extra_steps]
        self.drop()
        through = self._sizes.overflow(self._tail.last, limit=limit, read=read)
        if through > self._sizes.trimmed:
            self._sizes.trim(through)
            steps.append(Trim(stream=self._id, through=through))
        return steps

    def drop(self) -> Sequence[Step]:
        """Forget what has collected; gives the steps that were to be written together with it."""
        self.is_queued = False
        extra, self._extra_steps = self._extra_steps, ()
        self.pending, self._ends, self._taken = [], (), 0
        return extra

    # Retention

    def usage(self, *, idle: bool) -> StreamUsage:
        return self._sizes.usage(self._id, last=self._tail.last, floor=self._floor, idle=idle)

    def forget_events(self) -> Trim:
        """Trim everything that may go, final answers excepted."""
        self._sizes.trim(self._floor)
        return Trim(stream=self._id, through=self._sizes.trimmed)

    @property
    def _floor(self) -> int:
        """Up to where no reader needs it any more."""
        through, last = self._readers.through, self._tail.last
        return last if through is None else min(last, through)
