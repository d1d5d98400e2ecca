"""Keeps the streams that are written or read here, one object for each: its newest events, its writer, its readers.

One node at a time writes a stream. Where another node does, the object here follows it (`follow`), and becomes the
writer by a claim. Where this node does (`writer` exists), the reader may be at another node, known from the store.
`_core.states.WRITING` and `CONTENT` define what may happen in which order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from perdure._core.ids import Fence, Kind, NodeId, Position, SessionId, StreamId, position_prefix
from perdure._core.retention import StreamSizes, StreamUsage
from perdure._core.states import (
    CONTENT,
    WRITING,
    ContentState,
    ContentStep,
    WritingState,
    WritingStep,
    advance,
)
from perdure.errors import Behind, PerdureError, SessionEnded
from perdure.log.journal import AHEAD, Journal, Steps
from perdure.store.records import CallRecord, Event, ReaderRecord, StreamRecord
from perdure.store.steps import Append, CallEnd, OpenStream, Step, Trim
from perdure.telemetry.log_records import log_event

if TYPE_CHECKING:
    from perdure.log.reader import Reader

TAIL_BYTES = 256 * 1024
"""Bytes of durable events kept in memory for a reader that lags; beyond, it reads from the store."""

RUN_AHEAD = 256
"""Events a call may send before they are accepted. More is faster, and an event waits longer at full load."""

RUN_AHEAD_BYTES = TAIL_BYTES
"""Bytes a call may send before they are accepted. They are written in one commit, which must be short, and sent from
the tail, which should hold them."""

LIGHT_REQUEST = 1024
"""Bytes of a request that stay with its row in memory. Most requests are smaller, and removing those costs more than
keeping them; a client that does not read its answer must not keep a large request here."""


class Tail:
    """Keeps the newest events of one stream in memory, and three marks.

    Events up to `last` are appended. Events up to `visible` may be shown: they are in the store, or held while the
    store fails. Events up to `durable` are in the store. Readers see nothing beyond `visible`, so no byte leaves before
    the store has accepted it (promise 1). The tail keeps what is not durable, and what the reader still needs, so that
    reading at the end costs no query. Anything older is read from the store.
    """

    __slots__ = ("durable", "events", "last", "pins", "size", "visible")

    def __init__(self, last: int) -> None:
        self.pins = 0
        self.reset(last)

    def reset(self, last: int) -> None:
        """Forget all events: the store has them up to `last`."""
        self.last = self.visible = self.durable = last
        self.events: list[Event] = []
        self.size = 0
        """Bytes of the visible events."""

    def read(self, after: int, limit: int) -> Sequence[Event] | None:
        """Visible events after a sequence number; `None` if they have to be read from the store."""
        events = self.events
        if events and events[0].seq <= after + 1:
            start = after + 1 - events[0].seq
            return events[start : start + min(limit, self.visible - after)]
        return () if after >= self.durable else None

    @property
    def unwritten(self) -> list[Event]:
        return [event for event in self.events if event.seq > self.durable]

    @property
    def unseen_final(self) -> int | None:
        """The number of the first final answer that may not be shown yet."""
        return next((event.seq for event in self.events if event.final and event.seq > self.visible), None)

    def after(self, last: int) -> list[Event]:
        """Durable events after a number, as far as they are in memory: the last ones, without a gap."""
        return [event for event in self.events if last < event.seq <= self.durable]

    @property
    def finals(self) -> list[Event]:
        return [event for event in self.events if event.final]

    @property
    def start(self) -> int:
        """The sequence number before the oldest event in memory."""
        return self.events[0].seq - 1 if self.events else self.last

    def release(self, floor: int, kept: int = 0) -> None:
        """Forget durable events: those up to `floor`, and those beyond `TAIL_BYTES` except the newest `kept`."""
        if self.pins:
            return
        events, durable = self.events, self.durable
        if floor > durable:
            floor = durable
        large = durable - kept
        gone = 0
        while gone < len(events) and (
            events[gone].seq <= floor or (self.size > TAIL_BYTES and events[gone].seq <= large)
        ):
            self.size -= len(events[gone].payload)
            gone += 1
        if gone:
            del events[:gone]


@dataclass(slots=True, eq=False)
class Readership:
    """The one reader of a stream, and the writers that wait for it."""

    delivered: int
    """How far the readers have got."""
    marked_unread: bool
    """The store knows that the reader of this call was lost before the end."""
    reader: Reader | None = None
    """At this node."""
    remote: ReaderRecord | None = None
    """At another node, as the store has it."""
    lost_at: int = 0
    """The arrival number (`Hub.arrive`) at which the last reader was lost."""
    pause_at: int = 0
    """The sequence number at which the writer has to wait."""
    # Mostly empty, and there are thousands of streams at rest: a tuple, which costs nothing when empty.
    waiting: tuple[asyncio.Future[bool], ...] = ()

    @property
    def present(self) -> bool:
        """A reader exists, at this node or at another one."""
        return self.reader is not None or self.remote is not None

    @property
    def through(self) -> int | None:
        """How far the present reader has got; `None` without a reader."""
        if self.reader is not None:
            return self.reader.cursor
        return None if self.remote is None else self.remote.seq

    def advance(self, through: int) -> None:
        if through > self.delivered:
            self.delivered = through

    def end_beyond(self, end: int) -> None:
        """End a reader that was shown events which the log will not have: their writer held them, and lost its claim or
        died. The client learns that from its position when it resumes."""
        if self.reader is not None and self.reader.cursor > end:
            self.reader.end()

    def wake_writers(self, over: bool) -> None:
        waiting, self.waiting = self.waiting, ()
        for future in waiting:
            if not future.done():
                future.set_result(over)

    async def wait(self) -> bool:
        """Wait until something has moved. Returns whether the stream was over at that moment."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.waiting += (future,)
        return await future


@dataclass(slots=True, eq=False)
class StreamWriter:
    """The state of a stream that this node writes."""

    sizes: StreamSizes
    owed: int
    """Final answers that are not appended yet."""
    record: StreamRecord
    """As it was when this node became the writer."""
    calls: Sequence[CallRecord]
    written_ends: tuple[CallEnd, ...] = ()
    """Ends of calls that are written; mostly empty, because few streams have more than one call."""
    loss: str = ""
    """What the store lacked when it was last behind."""
    written_taken: int = 0
    """The key of the last forwarded message whose event is written."""
    seals: bool = False
    """Everything owed is appended."""
    answered: int = 0
    """The number of an early answer that the journal has not taken yet."""
    is_queued: bool = False
    ahead_bytes: int = 0
    pending: list[Event] = field(default_factory=list)
    """Events that the journal has not taken yet. The fields below are committed together with the last of them."""
    taken: int = 0
    # Tuples, as `Readership.waiting`.
    ends: tuple[CallEnd, ...] = ()
    extra_steps: tuple[Step, ...] = ()

    @property
    def opening(self) -> OpenStream:
        """The step that opens the stream again if the store has lost it. A call whose row was lost is written without
        its request: if its node dies as well, it does not run again, and its outcome is unknown."""
        return OpenStream(record=self.record, calls=tuple([replace(call, request=b"") for call in self.calls]))

    def drop(self) -> Sequence[Step]:
        """Forget what is pending. Returns the steps that were to be written together with it."""
        self.is_queued = False
        extra, self.extra_steps = self.extra_steps, ()
        self.pending, self.ends, self.taken, self.answered = [], (), 0, 0
        return extra


class StreamOwner:
    """Is notified of changes of streams. By default the methods do nothing."""

    __slots__ = ()

    def on_settled(self, stream: Stream) -> None:
        """The store has all of a stream, or no reader needs it here: it may be released. Called repeatedly."""

    def on_grown(self, stream: Stream) -> None:
        """A stream that is read at another node has grown."""

    def on_lost(self, stream: Stream, unwritten: Sequence[Event], shown: int) -> None:
        """Another node has become the writer. `unwritten` could not be appended; events up to `shown` may have been
        shown."""

    def on_reader_lost(self, stream: Stream) -> None:
        """The reader of a stream has left before its end, at this node or at another one."""

    def on_step_written(self, stream: Stream, step: Step) -> None:
        """A step that was committed together with events is written, or never will be."""


class Stream:
    """One stream in this process. Appending is synchronous and never fails; writers wait in `wait_for_room`."""

    __slots__ = (
        "_journal",
        "_limit",
        "_most_ahead",
        "_owner",
        "answered",
        "content",
        "fence",
        "generation",
        "id",
        "kind",
        "node",
        "opened",
        "prefix",
        "readers",
        "session",
        "tail",
        "writer",
        "writing",
    )

    def __init__(
        self,
        record: StreamRecord,
        journal: Journal,
        owner: StreamOwner,
        *,
        limit: int,
        writes: bool,
        owed: int = 0,
        calls: Sequence[CallRecord] = (),
        waits_for_reader: bool = True,
    ) -> None:
        self.id = record.id
        self.session = record.session
        self.kind = record.kind
        self.opened = record.opened
        self.answered = record.answered
        """The number of the early answer, behind which no reader reads; 0 without one."""
        self.content = ContentState.SEALED if record.sealed else ContentState.OPEN
        self.writing = WritingState.FOLLOWING
        self.tail = Tail(record.last)
        self.readers = Readership(record.delivered, record.unread)
        self.writer: StreamWriter | None = None
        self._journal = journal
        self._owner = owner
        self._limit = limit
        # The standalone stream never waits for its reader: its oldest events are trimmed instead.
        self._most_ahead = limit if record.kind is Kind.CALL and waits_for_reader else None
        self._set_node(record)
        self.readers.pause_at = record.last + RUN_AHEAD
        if writes:
            self.writing = WritingState.WRITING
            self.writer = StreamWriter(StreamSizes(record.last), owed, record, _light(calls))

    def _set_node(self, record: StreamRecord) -> None:
        self.answered = record.answered or self.answered
        self.node: NodeId = record.node
        self.fence: Fence = record.fence
        self.generation = record.generation
        self.prefix = position_prefix(record.kind, record.id, record.generation).encode()

    # Who writes

    def follow(self, record: StreamRecord, *, kept: int | None = None) -> None:
        """Take over the record of a stream that another node writes. `kept`: the store has lost what was followed here
        after that number, and the writer continued from there. The reader is ended, and its client learns of the gap
        when it resumes."""
        tail, readers, writes = self.tail, self.readers, self.writer is not None
        if record.generation > self.generation and record.last < tail.durable and kept is None:
            kept = record.last  # a claim changes no end: the store has lost the last claim and its events
        if kept is not None and not writes:
            if readers.reader is not None:
                readers.reader.end()
            self._set_node(record)
            tail.reset(kept)
            readers.delivered = min(readers.delivered, kept)
        under_way = writes and (record.fence == self.fence or tail.durable < tail.last)
        if record.generation < self.generation or under_way or self.writing is WritingState.UNLOGGED:
            # Read before this node became the writer; or its next write is refused, and handled there.
            return
        if record.fence != self.fence:
            readers.end_beyond(tail.durable)
        self._set_node(record)
        if writes:
            tail.reset(tail.durable if kept is None else kept)
            readers.end_beyond(tail.durable)
            self._on_writer_lost((), shown=tail.durable)
        elif self.writing is WritingState.LOST:
            self.writing = advance(WRITING, self.writing, WritingStep.FOLLOW)
        grown = record.last > tail.visible
        tail.last = tail.visible = tail.durable = max(tail.visible, record.last)
        self.answered = record.answered or self.answered
        readers.advance(record.delivered)
        readers.marked_unread = record.unread
        if record.sealed and not self.is_over:
            self.content = advance(CONTENT, self.content, ContentStep.LAST_RESPONSE)
        if readers.reader is not None and (grown or self.is_over):
            readers.reader.wake()
        self.moved()

    def _on_writer_lost(self, unwritten: Sequence[Event], *, shown: int) -> None:
        self.writer = None
        if self.answered > self.tail.durable:
            self.answered = 0  # it was not written: another event has its number
        is_call = self.kind is Kind.CALL
        self.writing = advance(WRITING, self.writing, WritingStep.LOSE_CALL if is_call else WritingStep.LOSE_HOME)
        if is_call and self.readers.reader is not None:
            self.readers.reader.end()  # its client may resume, wherever it is written now
        self._owner.on_lost(self, unwritten, shown)

    def claim(self, record: StreamRecord, *, owed: int = 0, calls: Sequence[CallRecord] = ()) -> None:
        """Become the writer, also where this node was the writer before."""
        self._set_node(record)
        self.answered = record.answered  # also where the one of an earlier claim was not written
        self.writing = advance(WRITING, self.writing, WritingStep.CLAIM)
        tail, readers = self.tail, self.readers
        tail.reset(record.last)
        # The store refuses the pending steps of an earlier claim, but their counts still stand.
        sizes = StreamSizes(record.last) if self.writer is None else self.writer.sizes.restarted(record.last)
        self.writer = StreamWriter(sizes, owed, record, _light(calls))
        readers.delivered = max(min(readers.delivered, record.last), record.delivered)
        readers.marked_unread = record.unread
        readers.end_beyond(record.last)
        if readers.reader is not None:
            readers.reader.wake()
        self.moved()

    # Who reads

    def set_remote_reader(self, record: ReaderRecord | None, *, arrival: int) -> None:
        """Take over the store's row of a reader at another node. `arrival`: the present arrival number."""
        readers = self.readers
        if record == readers.remote:
            return
        readers.remote = record
        if record is None:
            readers.lost_at = arrival
            # So its node wrote, unless it had read to the end.
            readers.marked_unread = self.kind is Kind.CALL and not self.answered
            self.on_reader_left()
        else:
            if readers.reader is not None:
                readers.reader.end()  # the newest wins
            readers.advance(min(record.seq, self.tail.last))  # it may name what never was
        self.moved()

    def on_reader_left(self) -> None:
        if not self.answered and (self.content is ContentState.OPEN or self.readers.delivered < self.tail.last):
            self._owner.on_reader_lost(self)

    @property
    def has_one_call(self) -> bool:
        """All progress on it is of one call. (Where another node writes, that is not known.)"""
        return self.kind is Kind.CALL and (self.writer is None or len(self.writer.calls) == 1)

    def position(self, seq: int, progress: float | None = None) -> Position:
        return Position(kind=self.kind, stream=self.id, generation=self.generation, seq=seq, progress=progress)

    # State

    @property
    def is_sealed(self) -> bool:
        """Everything owed is appended; it may not be visible yet."""
        return self.content is ContentState.SEALED or (self.writer is not None and self.writer.seals)

    @property
    def is_withheld(self) -> bool:
        """Everything owed is appended, and is not shown while the store fails."""
        return self.is_sealed and not self.is_over and self._journal.is_degraded

    @property
    def is_over(self) -> bool:
        """Sealed, expired, or claimed by another node."""
        return self.content is not ContentState.OPEN or self.writing is WritingState.LOST

    def expire(self) -> None:
        """Its session has ended: a stream that is not sealed never will be."""
        if self.content is ContentState.OPEN:
            self.content = advance(CONTENT, self.content, ContentStep.SESSION_ENDED)
            self.moved()

    def unlog(self) -> None:
        """The store has deleted it with its session: its events are for the present reader only."""
        if self.writing is WritingState.WRITING:
            self.writing = advance(WRITING, self.writing, WritingStep.FORGET)
        if self.writer is None:
            return
        self.writer.drop()
        tail = self.tail
        tail.size += self.writer.ahead_bytes
        tail.visible = tail.durable = tail.last
        self.writer.ahead_bytes = 0
        if self.writer.seals and not self.is_over:
            self.content = advance(CONTENT, self.content, ContentStep.LAST_RESPONSE)
        if self.readers.reader is not None:
            self.readers.reader.wake()
        self.moved()

    # Writing

    def append(
        self,
        payload: bytes,
        *,
        end: CallEnd | None = None,
        also: Step | None = None,
        taken: int = 0,
        early: bool = False,
    ) -> bool:
        """Add a message, unless another node writes. `end` marks a final answer, `early` a response to a call that
        continues, `also` is committed together with it, `taken` is the key of a message that another node forwarded.
        Returns whether the writer should wait in `wait_for_room` before it continues."""
        writer = self.writer
        if writer is None:
            return False
        journal, tail, unlogged = self._journal, self.tail, False
        if not writer.is_queued:
            unlogged = self.writing is WritingState.UNLOGGED
            if not unlogged:
                writer.is_queued = True
                journal.put(self)
        tail.last += 1
        event, size = Event(tail.last, journal.time, payload, end is not None or early), len(payload)
        if early:
            self.answered = writer.answered = tail.last
        tail.events.append(event)
        writer.pending.append(event)
        writer.ahead_bytes += size
        turns = journal.turns
        turns.sent += 1
        turns.queued += size
        if also is not None:
            writer.extra_steps += (also,)
        if taken:
            writer.taken = taken
        if end is not None:
            writer.ends += (end,)
            writer.owed -= 1
            writer.seals = writer.owed == 0
        if unlogged:
            self.unlog()
        return end is None and (
            tail.last >= self.readers.pause_at
            or writer.ahead_bytes >= RUN_AHEAD_BYTES
            or (tail.last >= tail.visible + AHEAD and turns.is_over)
            or not journal.backlog.has_room
        )

    async def wait_for_room(self) -> None:
        """Wait until events are accepted, memory has room, and the reader is near. Calls take turns to send."""
        while (writer := self.writer) is not None and (
            self.tail.last >= self.readers.pause_at or writer.ahead_bytes >= RUN_AHEAD_BYTES
        ):
            await self.readers.wait()
        await self._journal.backlog.wait_for_room()
        if self._journal.turns.is_over:
            await self._journal.turns.wait()

    async def wait_over(self) -> None:
        """Wait until it is over, or its early answer may be shown."""
        while not self.is_over and not 0 < self.answered <= self.tail.visible:
            if await self.readers.wait():
                return  # it was over, and may be followed again by now

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Keep all of the stream in memory during the block: it will be read from its start even if the store fails, or
        a reader is expected."""
        self.tail.pins += 1
        try:
            yield
        finally:
            self.tail.pins -= 1
            self.moved()

    def moved(self, *, kept: int = 0) -> None:
        """Note that a reader came, moved or left, or that more events may be shown: compute how far the writer may go,
        wake waiting writers, and release the front of the tail except the newest `kept`, or the whole stream."""
        readers, tail = self.readers, self.tail
        reader, pause_at = readers.reader, tail.visible + RUN_AHEAD
        if self._most_ahead is not None:
            remote = readers.remote
            through = reader.cursor if reader is not None else None if remote is None else remote.seq
            if through is not None and through + self._most_ahead < pause_at:
                pause_at = through + self._most_ahead
        readers.pause_at = pause_at
        if readers.waiting:
            readers.wake_writers(self.is_over)
        if tail.pins:
            return
        if tail.events:
            tail.release(tail.durable if reader is None else reader.cursor, kept)
        # A foreign stream is kept for its reader only; an ended own one is in the store.
        if reader is None and (self.writer is None or (tail.durable >= tail.last and self.is_over)):
            self._owner.on_settled(self)

    # A source of the journal

    def take(self) -> Sequence[Step]:
        """The steps that write the pending events and keep the stream within its limit. Sizes are counted here, once
        for a group of events."""
        writer = self.writer
        if self.writing is not WritingState.WRITING or writer is None:
            return ()  # lost since it was queued, and dealt with then
        if not writer.pending:
            writer.is_queued = False
            return ()
        events, sizes, last = tuple(writer.pending), writer.sizes, self.tail.last
        self._journal.counters.events_appended += len(events)
        if writer.ends or writer.answered:
            finals = {event.seq: len(event.payload) for event in events if event.final}
            sizes.count([0 if event.final else len(event.payload) for event in events], finals)
        else:
            sizes.count([len(event.payload) for event in events])
        steps: list[Step] = [
            Append(
                stream=self.id,
                fence=self.fence,
                events=events,
                ends=writer.ends,
                seal=writer.seals,
                taken=writer.taken,
                answered=writer.answered,
            ),
            *writer.drop(),
        ]
        if last - sizes.trimmed > self._limit:
            # Events that the present reader of a call still needs stay, if the call waits for its reader.
            read = None if self._most_ahead is None else self.readers.through
            through = sizes.overflow(last, limit=self._limit, read=read)
            if through > sizes.trimmed:
                sizes.trim(through)
                steps.append(Trim(stream=self.id, through=through))
        return steps

    def held(self, steps: Sequence[Step]) -> None:
        append = _append_of(steps)
        through, final = append.events[-1].seq, self.tail.unseen_final if self._journal.lapses else None
        self._show(append, through if final is None else min(through, final - 1))
        self.moved()

    def _show(self, append: Append, through: int) -> None:
        """Let readers see the events of an append, up to a number."""
        tail, events = self.tail, append.events
        last = events[-1].seq
        if through > tail.visible:  # held events are accepted again when they are written
            if events[0].seq <= tail.visible or through < last:
                events = tuple([event for event in events if tail.visible < event.seq <= through])
            size = sum([len(event.payload) for event in events])
            tail.visible = through
            tail.size += size
            if self.writer is not None:
                self.writer.ahead_bytes -= size
        if append.seal and through == last and not self.is_over:
            self.content = advance(CONTENT, self.content, ContentStep.LAST_RESPONSE)
        if self.readers.reader is not None:
            self.readers.reader.wake()

    def written(self, steps: Sequence[Step]) -> None:
        append = _append_of(steps)
        last = append.events[-1].seq
        self._show(append, last)
        self.tail.durable = max(self.tail.durable, last)
        if (writer := self.writer) is not None:
            # What has to be written again if the store loses it.
            if append.ends and not append.seal:
                writer.written_ends += append.ends
            if append.taken:
                writer.written_taken = append.taken
            if append.answered:
                writer.record = replace(writer.record, answered=append.answered)
            if append.lost:  # not before: a session that has ended loses its streams, and nothing is amiss
                sentence = f"the store has lost what a stream had: {writer.loss}"
                log_event(logging.ERROR, "stream.behind", sentence, session=self.session, stream=self.id)
        for step in steps[1:]:
            self._owner.on_step_written(self, step)
        if self.readers.remote is not None:
            self._owner.on_grown(self)
        self.moved(kept=len(append.events))  # for its reader, which was woken just now

    def after_loss(self, steps: Sequence[Step], reason: Behind) -> Sequence[Step]:
        """Open a stream again whose end, or all of it, the store has lost. It continues with the numbers that its
        readers know. Lost events that are still in memory are written again, the others leave a hole. Ended calls stay
        ended, and messages that were taken stay taken."""
        append, writer = _append_of(steps), self.writer
        if append.lost or append.fence != self.fence or writer is None or self.writing is not WritingState.WRITING:
            return ()
        events = append.events
        if events[0].seq == self.tail.durable + 1:  # the events held after it follow it then
            events = (*self.tail.after(reason.last), *events)
        ends, taken = (*writer.written_ends, *append.ends), max(append.taken, writer.written_taken)
        again = replace(append, events=events, ends=ends, taken=taken, lost=True)
        first, last = reason.last + 1, events[0].seq - 1
        writer.loss = f"events {first} to {last} are gone" if last >= first else "they were written again"
        return (writer.opening, again, *steps[1:])

    def refused(self, steps: Sequence[Step], reason: PerdureError) -> None:
        append = _append_of(steps)
        if append.fence != self.fence:
            return  # this node has claimed it again meanwhile
        extra = () if self.writer is None else self.writer.drop()
        if extra:
            self._journal.put(Steps(extra))  # also if their events go elsewhere
        for step in (*steps[1:], *extra):
            self._owner.on_step_written(self, step)
        if self.writing is not WritingState.WRITING:
            return  # more of the held events: lost with the first of them
        if isinstance(reason, SessionEnded) and self.kind is Kind.CALL:
            self.unlog()
            return
        tail, readers = self.tail, self.readers
        lost = tail.unwritten
        shown = tail.visible if readers.reader is not None and readers.reader.is_writing else readers.delivered
        tail.reset(tail.durable)
        readers.delivered = min(readers.delivered, tail.durable)
        readers.end_beyond(tail.durable)
        sentence = f"this node no longer writes a stream: {reason}"
        log_event(logging.WARNING, "stream.refused", sentence, session=self.session, stream=self.id)
        self._on_writer_lost(lost, shown=shown)
        self.moved()

    # What it keeps

    def usage(self, *, idle: bool) -> StreamUsage:
        assert self.writer is not None
        return self.writer.sizes.usage(self.id, last=self.tail.last, read=self.readers.through, idle=idle)

    def forget_events(self) -> Trim:
        """Trim everything that no reader needs, except final answers."""
        assert self.writer is not None
        read, last = self.readers.through, self.tail.last
        through = last if read is None else min(last, read)
        self.writer.sizes.trim(through)
        return Trim(stream=self.id, through=through)

    # Reading

    async def read(self, *, after: int, limit: int) -> Sequence[Event]:
        """Visible events after a sequence number, from the tail where that reaches back far enough."""
        events = self.tail.read(after, limit)
        if events is None:
            events = await self._journal.store.read(self.id, after=after, limit=limit)
            if events and events[-1].seq > self.tail.durable:
                # Another node has become the writer, and this one does not know its generation yet.
                events = [event for event in events if event.seq <= self.tail.durable]
        return events


def _append_of(steps: Sequence[Step]) -> Append:
    """The append among the steps of a part: the first, or after the step that opens its stream again."""
    append = steps[0] if type(steps[0]) is Append else steps[1]
    assert isinstance(append, Append)
    return append


def _light(calls: Sequence[CallRecord]) -> Sequence[CallRecord]:
    """Rows without large requests, because they are kept for as long as their stream is in memory."""
    return [replace(call, request=b"") if len(call.request) > LIGHT_REQUEST else call for call in calls]


_NO_STREAMS: Mapping[StreamId, Stream] = MappingProxyType({})


class Streams:
    """Keeps the call streams that are in memory, by session and id.

    Sessions, settling and resumed readers all share these objects. A stream stays until it is over, written and unread,
    or, if another node writes it, until no reader needs it. A session keeps its standalone stream itself.
    """

    def __init__(self, journal: Journal, owner: StreamOwner, *, limit: int, wait_for_readers: bool = True) -> None:
        self._journal = journal
        self._owner = owner
        self._limit = limit
        self._wait_for_readers = wait_for_readers
        self._by_session: dict[SessionId, dict[StreamId, Stream]] = {}

    def __iter__(self) -> Iterator[Stream]:
        return iter([stream for streams in self._by_session.values() for stream in streams.values()])

    def of(self, session: SessionId) -> Mapping[StreamId, Stream]:
        """The streams of a session, the oldest first."""
        return self._by_session.get(session, _NO_STREAMS)

    def write(self, record: StreamRecord, *, owed: int, calls: Sequence[CallRecord] = ()) -> Stream:
        """Enter a stream that this node has opened or claimed."""
        stream = self.of(record.session).get(record.id)
        if stream is None:
            stream = Stream(
                record,
                self._journal,
                self._owner,
                limit=self._limit,
                writes=True,
                owed=owed,
                calls=calls,
                waits_for_reader=self._wait_for_readers,
            )
            self._by_session.setdefault(stream.session, {})[stream.id] = stream
        else:
            stream.claim(record, owed=owed, calls=calls)
        return stream

    def follow(self, record: StreamRecord) -> Stream:
        """Enter a stream that a reader needs. The caller pins it (`Stream.pinned`) in the same turn of the loop, until
        its reader exists."""
        stream = self.of(record.session).get(record.id)
        if stream is None:
            stream = Stream(record, self._journal, self._owner, limit=self._limit, writes=False)
        else:
            stream.follow(record)
            if stream.writing is WritingState.LOST:
                stream.follow(record)  # this node does not write it any more; it is read here all the same
        self._by_session.setdefault(stream.session, {})[stream.id] = stream  # again, if `follow` removed it
        return stream

    def release(self, stream: Stream) -> bool:
        """Remove a stream. Returns whether it was here."""
        streams = self._by_session.get(stream.session, {})
        if streams.pop(stream.id, None) is None:
            return False
        if not streams:
            del self._by_session[stream.session]
        return True

    def release_parked(self, is_needed: Callable[[Stream], bool]) -> None:
        """Remove streams at rest that are not needed: their calls wait for their principal while their session is not
        in memory, or their session has ended."""
        for stream in self:
            tail = stream.tail
            at_rest = stream.readers.reader is None and not tail.pins and tail.durable >= tail.last
            if at_rest and not is_needed(stream):
                self.release(stream)
