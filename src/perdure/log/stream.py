"""Joins the parts of one stream that is written or read here (its tail, its writer and its readers), and keeps one
object for each stream of this process.

A stream is written by one node at a time. Where that is another one, this object only follows: `follow` tells it how
far the stream has grown, and it may become the writer by a claim. Where it is this one (`writer` is there), its reader
may sit at another node, known from the store. `_core.states.WRITING` and `CONTENT` say what may happen in which order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from perdure._core.ids import Fence, Kind, NodeId, Position, SessionId, StreamId, position_prefix
from perdure._core.retention import StreamSizes
from perdure._core.states import CONTENT, WRITING, ContentState, ContentStep, WritingState, WritingStep, advance
from perdure.errors import PerdureError
from perdure.log.journal import Journal, Steps
from perdure.log.stream_parts import RUN_AHEAD_BYTES, Readership, StreamWriter, Tail
from perdure.store.base import Append, CallEnd, Event, ReaderRecord, Step, StreamRecord
from perdure.telemetry.events import log_event

if TYPE_CHECKING:
    from perdure.log.reader import Reader


class StreamOwner(Protocol):
    """Learns what happens to streams."""

    def on_settled(self, stream: Stream) -> None:
        """The store knows all of a stream, or no reader needs it here: the object may go. Called whenever so."""

    def on_grown(self, stream: Stream) -> None:
        """A stream has grown that is read at another node."""

    def on_lost(self, stream: Stream, unwritten: Sequence[Event], shown: int) -> None:
        """Another node has become the writer; what could not be appended because of that, and up to which number it may
        have been shown already."""

    def on_step_written(self, stream: Stream, step: Step) -> None:
        """A further step is written that was committed together with events; or it never will be."""


class Stream:
    """One stream of this process. Appending is synchronous and never fails; `wait_for_room` is where a writer waits."""

    __slots__ = (
        "_journal",
        "_limit",
        "_most_ahead",
        "_owner",
        "content",
        "fence",
        "generation",
        "id",
        "kind",
        "node",
        "prefix",
        "readers",
        "session",
        "tail",
        "writer",
        "writing",
    )

    def __init__(
        self, record: StreamRecord, journal: Journal, owner: StreamOwner, *, limit: int, writes: bool, owed: int = 0
    ) -> None:
        self.id = record.id
        self.session = record.session
        self.kind = record.kind
        self.content = ContentState.SEALED if record.sealed else ContentState.OPEN
        self.writing = WritingState.FOLLOWING
        self.tail = Tail(record.last)
        self.readers = Readership(record.delivered, record.unread)
        self.writer: StreamWriter | None = None
        """There is one where this node writes."""
        self._journal = journal
        self._owner = owner
        self._limit = limit
        # The standalone stream never waits for its reader: its oldest events go instead.
        self._most_ahead = limit if record.kind is Kind.CALL else None
        self._set_node(record)
        self.readers.update(record.last, None, False)
        if writes:
            self.writing = WritingState.WRITING
            self.writer = StreamWriter(self.id, self.tail, self.readers, StreamSizes(record.last), owed)

    def _set_node(self, record: StreamRecord) -> None:
        self.node: NodeId = record.node
        self.fence: Fence = record.fence
        self.generation = record.generation
        self.prefix = position_prefix(record.kind, record.id, record.generation).encode()

    # Who writes

    def follow(self, record: StreamRecord) -> None:
        """Another node writes it, and it has come this far."""
        tail, readers, writes = self.tail, self.readers, self.writer is not None
        under_way = writes and (record.fence == self.fence or tail.durable < tail.last)
        if record.fence < self.fence or under_way or self.writing is WritingState.UNLOGGED:
            # Read before this node became the writer; or what it still writes will be refused, and dealt with there.
            return
        if record.generation != self.generation:
            readers.end_beyond(tail.durable)
        self._set_node(record)
        if writes:
            tail.reset(tail.durable)
            self._on_writer_lost((), shown=tail.durable)
        elif self.writing is WritingState.LOST:
            self.writing = advance(WRITING, self.writing, WritingStep.FOLLOW)
        grown = record.last > tail.visible
        tail.last = tail.visible = tail.durable = max(tail.visible, record.last)
        readers.advance(record.delivered)
        readers.marked_unread = record.unread
        if record.sealed and not self.is_over:
            self.content = advance(CONTENT, self.content, ContentStep.LAST_RESPONSE)
        if readers.reader is not None and (grown or self.is_over):
            readers.reader.wake()
        self.moved()

    def _on_writer_lost(self, unwritten: Sequence[Event], *, shown: int) -> None:
        self.writer = None
        is_call = self.kind is Kind.CALL
        self.writing = advance(WRITING, self.writing, WritingStep.LOSE_CALL if is_call else WritingStep.LOSE_HOME)
        if is_call and self.readers.reader is not None:
            self.readers.reader.end()  # its client may resume, wherever it is written now
        self._owner.on_lost(self, unwritten, shown)

    def claim(self, record: StreamRecord, *, owed: int = 0) -> None:
        """This node has become the writer; also where it was, and has claimed the stream again."""
        self._set_node(record)
        self.writing = advance(WRITING, self.writing, WritingStep.CLAIM)
        tail, readers = self.tail, self.readers
        tail.reset(record.last)
        # What a writer under an earlier claim had under way is refused by the store; what it counted is still there.
        sizes = StreamSizes(record.last) if self.writer is None else self.writer.sizes.restarted(record.last)
        self.writer = StreamWriter(self.id, tail, readers, sizes, owed)
        readers.delivered = max(min(readers.delivered, record.last), record.delivered)
        readers.marked_unread = record.unread
        readers.end_beyond(record.last)
        if readers.reader is not None:
            readers.reader.wake()
        self.moved()

    # Who reads

    @property
    def reader(self) -> Reader | None:
        """The reader at this node."""
        return self.readers.reader

    def set_remote_reader(self, record: ReaderRecord | None, *, arrival: int) -> None:
        """Take over what the store tells of a reader at another node, with the hub's arrival number of this moment."""
        readers = self.readers
        if record == readers.remote:
            return
        readers.remote = record
        if record is None:
            readers.lost_at = arrival
            readers.marked_unread = self.kind is Kind.CALL  # so its node wrote, unless it had read to the end
        else:
            if readers.reader is not None:
                readers.reader.end()  # the newest wins
            readers.advance(min(record.seq, self.tail.last))  # it may name what never was
        self.moved()

    def position(self, seq: int) -> Position:
        return Position(kind=self.kind, stream=self.id, generation=self.generation, seq=seq)

    # How far its life has come

    @property
    def is_sealed(self) -> bool:
        """Everything owed is appended; it may not be visible yet."""
        return self.content is ContentState.SEALED or (self.writer is not None and self.writer.seals)

    @property
    def is_over(self) -> bool:
        """Nothing more will come; or another node writes this call's stream, which this one wrote, and what is known
        of it here is of no use."""
        return self.content is not ContentState.OPEN or self.writing is WritingState.LOST

    @property
    def state(self) -> str:
        """The state as it is shown: an open stream is live while it is read."""
        if self.content is not ContentState.OPEN:
            return str(self.content.value)
        return "live" if self.readers.present else "detached"

    def expire(self) -> None:
        """Its session has ended: what is not sealed never will be."""
        if self.content is ContentState.OPEN:
            self.content = advance(CONTENT, self.content, ContentStep.SESSION_ENDED)
            self.moved()

    def unlog(self) -> None:
        """The store has forgotten it, with its session: what was and will be appended is for the present reader."""
        if self.writing is WritingState.WRITING:
            self.writing = advance(WRITING, self.writing, WritingStep.FORGET)
        if self.writer is None:
            return
        self.writer.drop()
        self.tail.show(self.tail.last, self.writer.ahead_bytes)
        self.tail.durable, self.writer.ahead_bytes = self.tail.last, 0
        if self.writer.seals and not self.is_over:
            self.content = advance(CONTENT, self.content, ContentStep.LAST_RESPONSE)
        if self.readers.reader is not None:
            self.readers.reader.wake()
        self.moved()

    # Writing

    def append(self, payload: bytes, *, end: CallEnd | None = None, also: Step | None = None, taken: int = 0) -> None:
        """Add a message, unless another node writes. `end` marks a final answer, `also` is committed together with it,
        `taken` is the key of a message that another node forwarded."""
        writer = self.writer
        if writer is None:
            return
        writer.pending.append(self.tail.append(self._journal.clock(), payload, end is not None))
        writer.ahead_bytes += len(payload)
        if end is not None or also is not None or taken:
            writer.add(end, also, taken)
        if writer.is_queued:
            return
        if self.writing is WritingState.UNLOGGED:
            self.unlog()
        else:
            writer.is_queued = True
            self._journal.put(self)

    @property
    def is_full(self) -> bool:
        """The writer should wait in `wait_for_room` before it goes on."""
        writer = self.writer
        return not self._journal.backlog.has_room or (
            writer is not None and (self.tail.last >= self.readers.pause_at or writer.ahead_bytes >= RUN_AHEAD_BYTES)
        )

    async def wait_for_room(self) -> None:
        """Wait until the writer may go on: events accepted, room in memory, the attached reader not too far behind."""
        while (writer := self.writer) is not None and (
            self.tail.last >= self.readers.pause_at or writer.ahead_bytes >= RUN_AHEAD_BYTES
        ):
            await self.readers.wait()
        await self._journal.backlog.wait_for_room()

    async def wait_over(self) -> None:
        """Wait until everything owed is there."""
        while not self.is_over:
            if await self.readers.wait():
                return  # it was over, and may be followed again by now

    @contextmanager
    def kept_whole(self) -> Iterator[None]:
        """Keep it, and all of it, in memory meanwhile: it will be read from its start, whatever the store does until
        then; or a reader is about to come."""
        self.tail.pins += 1
        try:
            yield
        finally:
            self.tail.pins -= 1
            self.moved()

    def moved(self) -> None:
        """A reader came, got further or left: let waiting writers look again, forget what no reader needs."""
        self.readers.update(self.tail.visible, self._most_ahead, self.is_over)
        self._release()

    def _release(self, *, kept: int = 0) -> None:
        """Forget what is not needed in memory: the front of the tail but for the newest `kept`, or the stream."""
        tail, reader = self.tail, self.readers.reader
        if tail.pins:
            return
        tail.release(tail.durable if reader is None else reader.cursor, kept)
        # What this node does not write is here for its reader only. What it writes and is over, the store knows.
        if reader is None and (self.writer is None or (self.is_over and tail.durable >= tail.last)):
            self._owner.on_settled(self)

    # A source of the journal

    def take(self) -> Sequence[Step]:
        if self.writing is not WritingState.WRITING or self.writer is None:
            return ()  # lost since it was queued, and dealt with then
        read = self.readers.through if self.kind is Kind.CALL else None
        self._journal.counters.events_appended += len(self.writer.pending)
        return self.writer.take(self.fence, limit=self._limit, read=read)

    def accepted(self, steps: Sequence[Step]) -> None:
        append = steps[0]
        assert isinstance(append, Append)
        tail, events = self.tail, append.events
        if events[-1].seq > tail.visible:  # what was held is accepted again when it is written
            size = sum([len(event.payload) for event in events])
            tail.show(events[-1].seq, size)
            if self.writer is not None:
                self.writer.ahead_bytes -= size
        if append.seal and not self.is_over:
            self.content = advance(CONTENT, self.content, ContentStep.LAST_RESPONSE)
        readers = self.readers
        if readers.reader is not None:
            readers.reader.wake()
        readers.update(tail.visible, self._most_ahead, self.is_over)  # nothing goes before it is written

    def written(self, steps: Sequence[Step]) -> None:
        append = steps[0]
        assert isinstance(append, Append)
        self.tail.durable = max(self.tail.durable, append.events[-1].seq)
        for step in steps[1:]:
            self._owner.on_step_written(self, step)
        if self.readers.remote is not None:
            self._owner.on_grown(self)
        self._release(kept=len(append.events))  # for its reader, which was woken just now

    def refused(self, steps: Sequence[Step], reason: PerdureError) -> None:
        append = steps[0]
        assert isinstance(append, Append)
        if append.fence != self.fence:
            return  # this node has claimed it again meanwhile
        extra = () if self.writer is None else self.writer.drop()
        if extra:
            self._journal.put(Steps(extra))  # they are no less so because their events go elsewhere
        for step in (*steps[1:], *extra):
            self._owner.on_step_written(self, step)
        if self.writing is not WritingState.WRITING:
            return  # more of what was held: it was lost with the first of it
        tail, readers = self.tail, self.readers
        lost = tail.unwritten
        shown = tail.visible if readers.reader is not None and readers.reader.is_writing else readers.delivered
        tail.reset(tail.durable)
        readers.delivered = min(readers.delivered, tail.durable)
        readers.end_beyond(tail.durable)
        log_event(logging.WARNING, "stream.refused", f"stream {self.id} is not written here any more: {reason}")
        self._on_writer_lost(lost, shown=shown)
        self.moved()

    # Reading

    async def read(self, *, after: int, limit: int) -> Sequence[Event]:
        """Visible events after a sequence number; from the tail where it reaches back far enough."""
        events = self.tail.read(after, limit)
        if events is None:
            events = await self._journal.store.read(self.id, after=after, limit=limit)
            if events and events[-1].seq > self.tail.durable:
                # Another node has become the writer, and this one does not know its generation yet.
                events = [event for event in events if event.seq <= self.tail.durable]
        return events


_NO_STREAMS: Mapping[StreamId, Stream] = MappingProxyType({})


class Streams:
    """The streams of calls that are in memory, by session and id.

    Sessions, settling and resumed readers all ask here, so a stream that one of them has is the stream that the others
    get. It stays until it is over, written and unread, or until no reader needs what another node writes. A session's
    standalone stream is not here: it lives and goes with its session.
    """

    def __init__(self, journal: Journal, owner: StreamOwner, *, limit: int) -> None:
        self._journal = journal
        self._owner = owner
        self._limit = limit
        self._by_session: dict[SessionId, dict[StreamId, Stream]] = {}

    def __iter__(self) -> Iterator[Stream]:
        return iter([stream for streams in self._by_session.values() for stream in streams.values()])

    def of(self, session: SessionId) -> Mapping[StreamId, Stream]:
        """A session's, the oldest first."""
        return self._by_session.get(session, _NO_STREAMS)

    def write(self, record: StreamRecord, *, owed: int) -> Stream:
        """The stream of a record that this node has opened or claimed: from now on it writes here."""
        stream = self.of(record.session).get(record.id)
        if stream is None:
            stream = Stream(record, self._journal, self._owner, limit=self._limit, writes=True, owed=owed)
            self._by_session.setdefault(stream.session, {})[stream.id] = stream
        else:
            stream.claim(record, owed=owed)
        return stream

    def follow(self, record: StreamRecord) -> Stream:
        """The stream of a record that a reader needs; where this node does not write it, it has come this far.

        The caller keeps it (`Stream.kept_whole`) in the same turn of the loop, until its reader is there.
        """
        stream = self.of(record.session).get(record.id)
        if stream is None:
            stream = Stream(record, self._journal, self._owner, limit=self._limit, writes=False)
        else:
            stream.follow(record)
            if stream.writing is WritingState.LOST:
                stream.follow(record)  # this node does not write it any more; it is read here all the same
        self._by_session.setdefault(stream.session, {})[stream.id] = stream  # again, if that let go of it
        return stream

    def release(self, stream: Stream) -> bool:
        """Let go of a stream. Tells whether it was here."""
        streams = self._by_session.get(stream.session, {})
        if streams.pop(stream.id, None) is None:
            return False
        if not streams:
            del self._by_session[stream.session]
        return True

    def release_parked(self, is_needed: Callable[[Stream], bool]) -> None:
        """Let go of streams that are not needed, and on which nothing is under way: calls wait there for their
        principal while their session is not in memory, or their session has ended."""
        for stream in self:
            tail = stream.tail
            at_rest = stream.reader is None and not tail.pins and tail.durable >= tail.last
            if at_rest and not is_needed(stream):
                self.release(stream)
