"""A stream while somebody writes or reads it: numbers, tail, limits.

Three numbers tell how far it is: `last` (appended), `visible` (may be shown: in the store, or held while the store
fails) and `durable` (in the store). Readers see nothing beyond `visible`, so no byte leaves before the store has
accepted it (promise 1). The tail keeps in memory what is not durable yet or what the attached reader still needs, so
that reading at the end costs no query; whatever the tail no longer has is read from the store. Nothing depends on the
tail.

A stream is written by one node at a time. Where that is another one, this object only follows: `follow` tells it how
far the stream has grown, and it may become the writer by a claim. Where it is this one, its reader may sit elsewhere
(`foreign`), known from the store.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from perdure._core.ids import Fence, Kind, NodeId, Position, position_prefix
from perdure._core.retention import StreamUsage
from perdure._core.states import STREAM, StreamState, StreamStep, advance
from perdure.errors import PerdureError
from perdure.log.journal import Journal, Steps
from perdure.store.base import Append, CallEnd, Event, ReaderRecord, Step, StreamRecord, Trim
from perdure.telemetry.events import log_event

if TYPE_CHECKING:
    from perdure.log.reader import Reader

RUN_AHEAD = 128
"""Events a call may send before they are accepted. More is faster, and the longer an event waits at full load."""

TAIL_BYTES = 256 * 1024
"""Bytes of durable events kept in memory for a reader that lags; beyond, it reads from the store."""

RUN_AHEAD_BYTES = TAIL_BYTES
"""Bytes a call may send before they are accepted, and the rest of the last event. They are written in one commit, which
must be short; and sent from the tail, which should hold them."""


class Stream:
    """One stream of this process. Appending is synchronous and never fails; `wait_for_room` is where a writer waits."""

    __slots__ = (
        "_ahead_bytes",
        "_also",
        "_blocked",
        "_clock",
        "_ends",
        "_event_bytes",
        "_fenced",
        "_final_bytes",
        "_finals",
        "_journal",
        "_limit",
        "_pause_at",
        "_pending",
        "_queued",
        "_seal",
        "_sized_from",
        "_sizes",
        "_tail",
        "_tail_bytes",
        "_taken",
        "_trimmed",
        "_unlogged",
        "_whole",
        "delivered",
        "durable",
        "fence",
        "foreign",
        "generation",
        "id",
        "kind",
        "last",
        "lost_at",
        "marked_unread",
        "node",
        "on_also",
        "on_grown",
        "on_lost",
        "on_settled",
        "owed",
        "prefix",
        "reader",
        "session",
        "state",
        "visible",
        "writes",
    )

    def __init__(
        self,
        record: StreamRecord,
        journal: Journal,
        *,
        clock: Callable[[], float],
        limit: int,
        writes: bool,
        owed: int = 0,
    ) -> None:
        self.id = record.id
        self.session = record.session
        self.kind = record.kind
        self.last = self.visible = self.durable = record.last
        self._show(record)
        self.writes = writes
        self.delivered = record.delivered
        """How far its readers have got."""
        self.marked_unread = record.unread
        """The store has it down as a call's whose reader was lost before the end."""
        self.owed = owed
        self.state = StreamState.SEALED if record.sealed else StreamState.DETACHED
        self.reader: Reader | None = None
        self.foreign: ReaderRecord | None = None
        self.lost_at = 0
        """When its last reader was lost, as an arrival number of the hub's."""
        self.on_settled: Callable[[Stream], None] | None = None
        self.on_grown: Callable[[Stream], None] | None = None
        """Told when it has grown and a reader elsewhere should look."""
        self.on_lost: Callable[[Stream, Sequence[Event], int], None] | None = None
        """Told that another node has become the writer, what could not be appended because of that, and up to which
        number it may have been shown already."""
        self.on_also: Callable[[Step], None] | None = None
        """Told of each further step that was written together with events."""
        self._journal = journal
        self._clock = clock
        self._limit = limit
        self._pending: list[Event] = []
        self._ahead_bytes = self._taken = 0
        # Mostly empty, and there are thousands of streams at rest: tuples, which cost nothing when empty.
        self._ends: tuple[CallEnd, ...] = ()
        self._also: tuple[Step, ...] = ()
        self._finals: tuple[int, ...] = ()
        self._blocked: tuple[asyncio.Future[None], ...] = ()
        self._seal = self._queued = self._fenced = self._whole = self._unlogged = False
        self._trimmed = self._final_bytes = 0
        self._forget_sizes()
        self._tail: list[Event] = []
        self._tail_bytes = 0
        self._pace()

    def _show(self, record: StreamRecord) -> None:
        self.node: NodeId = record.node
        self.fence: Fence = record.fence
        self.generation = record.generation
        self.prefix = position_prefix(record.kind, record.id, record.generation).encode()

    # Who writes

    def follow(self, record: StreamRecord) -> None:
        """Another node writes it, and it has come this far."""
        if record.fence < self.fence or (self.writes and (record.fence == self.fence or self.durable < self.last)):
            # Read before this node became the writer; or what it still writes will be refused, and dealt with there.
            return
        lost, self.writes = self.writes, False
        if record.generation != self.generation:
            self._end_reader_beyond(self.durable)
        self._show(record)
        if lost:
            self._lose((), shown=self.durable)
        grown = record.last > self.visible
        self.last = self.visible = self.durable = max(self.visible, record.last)
        self.delivered = max(self.delivered, record.delivered)
        self.marked_unread = record.unread
        if record.sealed and not self.over:
            self.advance(StreamStep.LAST_RESPONSE)
        if self.reader is not None and (grown or self.over):
            self.reader.wake()
        self.moved()

    def _lose(self, unwritten: Sequence[Event], *, shown: int) -> None:
        if self.kind is Kind.CALL:
            self._fenced = True
            if self.reader is not None:
                self.reader.end()  # its client may resume, wherever it is written now
        if self.on_lost is not None:
            self.on_lost(self, unwritten, shown)

    def claimed(self, record: StreamRecord, *, owed: int = 0) -> None:
        """This node has become the writer."""
        self._show(record)
        self.writes, self._fenced, self._seal = True, False, False
        # What this node had under way under an earlier claim is refused.
        self._tail, self._tail_bytes, self._pending, self._ends, self._also, self._taken = [], 0, [], (), (), 0
        self._ahead_bytes = 0
        self._finals = tuple(seq for seq in self._finals if seq <= record.last)
        self.last = self.visible = self.durable = record.last
        self._forget_sizes()
        self.delivered = max(min(self.delivered, record.last), record.delivered)
        self.marked_unread = record.unread
        self.owed = owed
        self._pace()
        self._end_reader_beyond(record.last)
        if self.reader is not None:
            self.reader.wake()

    def _end_reader_beyond(self, end: int) -> None:
        """End a reader that was shown what the log will not have: its writer held it, and has lost its claim or died.
        Its position tells, when it comes again."""
        if self.reader is not None and self.reader.cursor > end:
            self.reader.end()

    def read_elsewhere(self, record: ReaderRecord | None, *, arrival: int) -> None:
        """What the store tells of a reader on another node, and an arrival number of the hub's for this moment."""
        if record == self.foreign:
            return
        before, self.foreign = self.foreign, record
        if record is None:
            self.lost_at = arrival
            self.marked_unread = self.kind is Kind.CALL  # so its node wrote, unless it had read to the end
        if record is not None and self.reader is not None:
            self.reader.end()  # the newest wins
        if record is not None:
            self.delivered = max(self.delivered, min(record.seq, self.last))  # it may name what never was
        if not self.over and self.reader is None and (before is None) != (record is None):
            self.advance(StreamStep.READER_LOST if record is None else StreamStep.READER_ATTACHED)
        self.moved()

    @property
    def is_read(self) -> bool:
        """Somebody reads it, here or elsewhere."""
        return self.reader is not None or self.foreign is not None

    @property
    def is_read_through(self) -> bool:
        """Readers have got to its end."""
        return self.state is StreamState.SEALED and self.delivered >= self.last

    def _read_through(self) -> int | None:
        """As far as its reader has got; `None` if nobody reads."""
        if self.reader is not None:
            return self.reader.cursor
        return None if self.foreign is None else self.foreign.seq

    def position(self, seq: int) -> Position:
        return Position(kind=self.kind, stream=self.id, generation=self.generation, seq=seq)

    @property
    def sealed(self) -> bool:
        """Everything owed is appended; it may not be visible yet."""
        return self._seal or self.state is StreamState.SEALED

    @property
    def is_overtaken(self) -> bool:
        """Another node writes this call's stream, which this one wrote: what is known of it here is of no use."""
        return self._fenced

    @property
    def over(self) -> bool:
        """Nothing more will come."""
        return self.state in (StreamState.SEALED, StreamState.EXPIRED) or self._fenced

    def advance(self, step: StreamStep) -> None:
        self.state = advance(STREAM, self.state, step)

    # Writing

    def append(self, payload: bytes, *, end: CallEnd | None = None, also: Step | None = None, taken: int = 0) -> None:
        """Add a message. `end` marks a final answer, `also` is committed together with it, `taken` is the key of a
        message that another node forwarded."""
        self.last += 1
        event = Event(self.last, self._clock(), payload, end is not None)
        self._pending.append(event)
        self._tail.append(event)
        size = len(payload)
        self._ahead_bytes += size
        self._tail_bytes += size
        self._count(size, final=end is not None)
        if end is not None:
            self._finals += (self.last,)
            self._ends += (end,)
            self.owed -= 1
            self._seal = self.owed == 0
        if also is not None:
            self._also += (also,)
        if taken:
            self._taken = taken
        if self._unlogged:
            self._show_unlogged()
        elif not self._queued:
            self._queued = True
            self._journal.put(self)

    def unlog(self) -> None:
        """The store has forgotten it, with its session: what still comes is for the reader that is there."""
        self._unlogged = self.writes

    def _show_unlogged(self) -> None:
        self._pending, self._ahead_bytes, self._ends, self._also = [], 0, (), ()
        self.visible = self.durable = self.last
        if self._seal and not self.over:
            self.advance(StreamStep.LAST_RESPONSE)
        if self.reader is not None:
            self.reader.wake()
        self.moved()

    @property
    def is_full(self) -> bool:
        """The writer should wait in `wait_for_room` before it goes on."""
        return self.last >= self._pause_at or self._ahead_bytes >= RUN_AHEAD_BYTES or not self._journal.has_room

    async def wait_for_room(self) -> None:
        """Wait until the writer may go on: events accepted, room in memory, the attached reader not too far behind."""
        while (self.last >= self._pause_at or self._ahead_bytes >= RUN_AHEAD_BYTES) and not self._fenced:
            await self._wait()
        if not self._journal.has_room:
            await self._journal.room()

    def _pace(self) -> None:
        """Reckon how far the writer may go; called whenever something that it depends on has moved."""
        self._pause_at = self.visible + RUN_AHEAD
        # The standalone stream never makes anybody wait for its reader: its oldest events go instead.
        if self.kind is Kind.CALL and (through := self._read_through()) is not None:
            self._pause_at = min(self._pause_at, through + self._limit)

    async def _wait(self) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._blocked += (future,)
        await future

    def moved(self) -> None:
        """A reader came, got further or left: let waiting writers look again, forget what nobody needs."""
        self._pace()
        if self._blocked:
            blocked, self._blocked = self._blocked, ()
            for future in blocked:
                if not future.done():
                    future.set_result(None)
        self._release()
        self._look_settled()

    async def wait_over(self) -> None:
        """Wait until everything owed is there."""
        while not self.over:
            await self._wait()

    @contextmanager
    def kept_whole(self) -> Iterator[None]:
        """Keep all of it in memory meanwhile: it will be read from its start, whatever the store does until then."""
        self._whole = True
        try:
            yield
        finally:
            self._whole = False
            self.moved()

    def _look_settled(self) -> None:
        """Once it is over, written and unread, the store has all there is to know of it: this object may go."""
        if self.on_settled is None or self._whole or not (self.writes or self._fenced):
            return  # one that another node writes, or wrote, goes with its reader (`unread`), who may be about to come
        if self.over and self.reader is None and (self.durable >= self.last or self._fenced):
            settled, self.on_settled = self.on_settled, None
            settled(self)

    def unread(self) -> None:
        """Its reader has left, or does not come."""
        self.moved()
        # One that another node writes is here for its reader only.
        if self.reader is None and not self.writes and self.on_settled is not None:
            settled, self.on_settled = self.on_settled, None
            settled(self)

    # A source of the journal

    def take(self) -> Sequence[Step]:
        self._queued = False
        if not self.writes:
            return ()  # lost since it was queued, and dealt with then
        append = Append(
            stream=self.id,
            fence=self.fence,
            events=tuple(self._pending),
            ends=self._ends,
            seal=self._seal,
            taken=self._taken,
        )
        self._journal.counters.events_appended += len(append.events)
        steps: list[Step] = [append, *self._also]
        self._pending, self._ends, self._also, self._taken = [], (), (), 0
        through = self._overflow()
        if through > self._trimmed:
            self._trim(through)
            steps.append(Trim(stream=self.id, through=through))
        return steps

    def accepted(self, steps: Sequence[Step]) -> None:
        append = steps[0]
        assert isinstance(append, Append)
        if append.events and append.events[-1].seq > self.visible:  # what was held is accepted again when it is written
            self.visible = append.events[-1].seq
            self._ahead_bytes -= sum([len(event.payload) for event in append.events])
        if append.seal and not self.over:
            self.advance(StreamStep.LAST_RESPONSE)
        if self.reader is not None:
            self.reader.wake()
        self.moved()

    def written(self, steps: Sequence[Step]) -> None:
        append = steps[0]
        assert isinstance(append, Append)
        if append.events:
            self.durable = max(self.durable, append.events[-1].seq)
        if self.on_also is not None:
            for step in steps[1:]:
                self.on_also(step)
        if self.foreign is not None and self.on_grown is not None:
            self.on_grown(self)
        self._release(kept=len(append.events))  # for its reader, which was woken just now
        self._look_settled()

    def refused(self, steps: Sequence[Step], reason: PerdureError) -> None:
        append = steps[0]
        assert isinstance(append, Append)
        if append.fence != self.fence:
            return  # this node has claimed it anew meanwhile
        also, self._also = self._also, ()
        if also:
            self._journal.put(Steps(also))  # they are no less so because their events go elsewhere
        if self.on_also is not None:
            for step in (*steps[1:], *also):
                self.on_also(step)
        if not self.writes:
            return  # more of what was held: it was lost with the first of it
        lost = [event for event in self._tail if event.seq > self.durable]
        self._tail, self._tail_bytes, self._pending, self._ends, self._taken = [], 0, [], (), 0
        self._ahead_bytes = 0
        shown = self.visible if self.reader is not None and self.reader.is_writing else self.delivered
        self.last = self.visible = self.durable
        self._forget_sizes()
        self.writes = False
        self.delivered = min(self.delivered, self.durable)
        self._end_reader_beyond(self.durable)
        log_event(logging.WARNING, "stream.refused", f"stream {self.id} is not written here any more: {reason}")
        self._lose(lost, shown=shown)
        self.moved()

    # Reading

    async def read(self, *, after: int, limit: int) -> Sequence[Event]:
        """Visible events after a sequence number; from the tail where it reaches back far enough."""
        tail = self._tail
        if tail and tail[0].seq <= after + 1:
            start = after + 1 - tail[0].seq
            return tail[start : start + min(limit, self.visible - after)]
        if after >= self.durable:
            return ()
        events = await self._journal.read(self.id, after=after, limit=limit)
        if events and events[-1].seq > self.durable:
            # Another node has become the writer, and this one does not know its generation yet.
            events = [event for event in events if event.seq <= self.durable]
        return events

    def finals_in_memory(self) -> Sequence[Event]:
        """Final answers that the store may not have yet."""
        return [event for event in self._tail if event.final]

    async def before_oldest(self) -> int:
        """The sequence number before the oldest event that is retained."""
        if events := await self.read(after=0, limit=1):
            return events[0].seq - 1
        return self._tail[0].seq - 1 if self._tail else self.last

    def _release(self, *, kept: int = 0) -> None:
        """Forget the front of the tail: what is durable and read, or too much to carry for a reader that lags; of the
        latter not the newest `kept`."""
        if self._whole:
            return
        tail = self._tail
        floor = self.durable if self.reader is None else min(self.durable, self.reader.cursor)
        large = self.durable - kept
        gone = 0
        while gone < len(tail) and (
            tail[gone].seq <= floor or (self._tail_bytes > TAIL_BYTES and tail[gone].seq <= large)
        ):
            self._tail_bytes -= len(tail[gone].payload)
            gone += 1
        del tail[:gone]

    # Retention

    @property
    def kept(self) -> StreamUsage:
        floor = self._floor()
        events = floor - self._trimmed - sum(1 for seq in self._finals if self._trimmed < seq <= floor)
        return StreamUsage(
            stream=self.id,
            events=max(0, events),
            answers=len(self._finals),
            idle=self.over and not self.is_read,
            event_bytes=self._bytes_through(floor),
            answer_bytes=self._final_bytes,
        )

    def _forget_sizes(self) -> None:
        """Begin to count bytes here. What another node, or this one before, has appended is known to the store only."""
        self._sizes: array[int] | None = None
        self._sized_from = self.last
        self._event_bytes = 0

    def _count(self, size: int, *, final: bool) -> None:
        if final:
            self._final_bytes += size
            size = 0
        self._event_bytes += size
        if self._sizes is None:
            self._sizes = array("Q")
        self._sizes.append(size)

    def _trim(self, through: int) -> None:
        """Events up to a number are forgotten, final answers excepted."""
        self._trimmed = through
        gone = through - self._sized_from
        if self._sizes is not None and gone > 0:
            self._event_bytes -= sum(self._sizes[:gone])
            del self._sizes[:gone]
            self._sized_from = through

    def _bytes_through(self, seq: int) -> int:
        """Bytes of the events up to a number, final answers excepted."""
        if seq >= self.last or self._sizes is None:
            return self._event_bytes
        return sum(self._sizes[: max(0, seq - self._sized_from)])

    def forget_events(self) -> Trim:
        """Trim everything that may go, final answers excepted."""
        self._trim(self._floor())
        return Trim(stream=self.id, through=self._trimmed)

    def _floor(self) -> int:
        """Up to where nobody needs it any more."""
        through = self._read_through()
        return self.last if through is None else min(self.last, through)

    def _overflow(self) -> int:
        """Up to where events must go so that no more than the limit are kept; never past a call's attached reader."""
        events = self.last - self._trimmed - sum(1 for seq in self._finals if seq > self._trimmed)
        through = self._trimmed + max(0, events - self._limit)
        for seq in self._finals:
            if self._trimmed < seq <= through:
                through += 1
        read = self._read_through()
        if read is None or self.kind is Kind.STANDALONE:  # which makes nobody wait, so its oldest events go
            return through
        return max(self._trimmed, min(through, read))
