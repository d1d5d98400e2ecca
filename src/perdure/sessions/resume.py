"""Decides where a reader begins: on which stream, after which event, and what its client learns before that."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from perdure._core import sse
from perdure._core.ids import Kind, Position, StreamId, place
from perdure._core.states import ContentState, WritingState
from perdure.errors import StoreUnavailable
from perdure.log.hub import warning_frames
from perdure.log.reader import BATCH
from perdure.log.reader import Connection as Connection
from perdure.log.reader import Reader as Reader
from perdure.log.stream import Stream as Stream
from perdure.sessions.home import read_record
from perdure.sessions.session import Session
from perdure.store.interface import paged, stream_by_id
from perdure.store.records import Event, Followed


class ReplayOff(Exception):
    """A position names a call's stream, and replay is switched off."""


class NothingMore(Exception):
    """The stream is over, and the client has all of it."""


class Start(NamedTuple):
    """The place where a reader begins, and what is written before the first event."""

    cursor: int
    told: bytes = b""
    named: bool = True
    """The client named the place. Otherwise it is where earlier readers have got to, also while we read."""
    progress: float | None = None
    """The progress in the client's position."""
    ahead: Sequence[Event] = ()
    """The first events after the cursor."""


class FoundStream(NamedTuple):
    """A stream, and what was read of it and its session on the way to it; nothing, if it is in memory."""

    stream: Stream
    read: Followed | None


class Resume:
    """One client that comes to read a stream of its session."""

    def __init__(self, session: Session, text: str, position: Position | None) -> None:
        """`text`: as the client sent it; empty if it names no position. `position`: `None` if the text is none."""
        self._session = session
        self._context = session.context
        self._replays = session.context.settings.enable_replay
        self._text = text
        self._position = position

    # The stream

    async def find(self) -> FoundStream | None:
        """The stream that the position names, with its next events where they were read on the way; the standalone
        stream without a position. The caller keeps it (`Stream.pinned`) in the same turn of the loop, until its
        reader is attached. Raises `ReplayOff`, and `HeldElsewhere` where another node may hold it."""
        position = self._position
        if position is None or position.kind is Kind.STANDALONE:
            return FoundStream(self._session.standalone, None)
        if not self._replays:
            raise ReplayOff
        return await self._context.nodes.found(partial(self._find_call, position.stream, position.seq))

    async def _find_call(self, stream_id: StreamId, after: int) -> FoundStream | None:
        session = self._session
        stream = session.streams.get(stream_id)
        if stream is not None and stream.writing is not WritingState.LOST:
            # A stream that this node has claimed and on which no call of its own runs may be overtaken: the call waits
            # for its principal, and the node that the principal came to has claimed the stream since, without a word.
            runs = any(call.stream is stream for call in session.link.calls.all_running())
            if stream.writer is None or stream.is_over or runs:
                return FoundStream(stream, None)
        read = (await self._context.store.follow({stream_id: after}, limit=BATCH)).get(stream_id)
        if read is None or read.record.session != session.record.id or read.record.kind is not Kind.CALL:
            return None
        return FoundStream(session.call_streams.follow(read.record), read)

    def log_unknown(self) -> None:
        """Count and log a position that names no stream of its session."""
        self._context.counters.positions_lost += 1
        self._context.peer_log.log_event(
            logging.WARNING,
            "position.unknown",
            "a position names no stream of its session",
            session=self._session.name,
            position=str(self._position or ""),
        )

    # The place

    async def start(self, found: FoundStream) -> Start:
        """Decide where the reader begins, with the first events after it: they are read before the response begins, so
        that its status says when the store fails. Raises `NothingMore`."""
        stream, read = found
        start = await self._place(stream, is_read=read is not None)
        if not self._context.nodes.alone and stream.writer is not None:
            # A reader at another node, of which this one may not know yet, is overtaken with the rest.
            await self._context.hub.registry.read_reader(stream)
        is_next = self._position is not None and start.cursor == self._position.seq
        ahead = read.events if read is not None and is_next else None
        stream.readers.advance(start.cursor)  # the client has it; or it learns now that it is gone
        is_complete = stream.content is ContentState.SEALED and start.cursor >= stream.tail.last
        if is_complete or 0 < stream.answered <= start.cursor:
            self._context.hub.marks.left(stream)
            raise NothingMore
        if ahead is None or (ahead and ahead[-1].seq > stream.tail.durable):
            ahead = await stream.read(after=start.cursor, limit=BATCH)
        if not start.named and stream.readers.delivered > start.cursor:
            return start._replace(cursor=stream.readers.delivered, ahead=())
        return start._replace(ahead=ahead)

    def begin(self, found: FoundStream, start: Start) -> None:
        """The reader is about to be attached: count it, and let orphaned calls be shown on the standalone stream."""
        session = self._session
        if found.stream is session.standalone:
            self._context.counters.standalone_readers += 1
            if not start.named:
                session.orphans.begun(cursor=start.cursor)
                session.orphans.tell_begun(cursor=start.cursor)
            session.orphans.give_time()

    async def _place(self, stream: Stream, *, is_read: bool) -> Start:
        """Without a position: where the readers of the standalone stream had got to, in whatever process, so that what
        was sent while no reader was attached still arrives. While the store fails, what is known here counts."""
        position = self._position
        if position is None and not self._text:
            if not self._context.nodes.alone:
                with contextlib.suppress(StoreUnavailable):
                    record = await read_record(self._context, stream)
                    if record is not None and record.generation == stream.generation:
                        stream.readers.advance(record.delivered)
            return Start(stream.readers.delivered, named=False)
        if position is None:
            # The client names no position of ours: warn, then send what is retained.
            self._context.peer_log.log_event(
                logging.WARNING, "position.unreadable", "a Last-Event-ID is not a position", session=self._session.name
            )
            self._context.counters.positions_lost += 1
            cursor = await _before_oldest(stream) if self._replays else stream.readers.delivered
            sentence = "the given Last-Event-ID is not a position of this server; here is the standalone stream"
            log, random = self._session.keeper.tells_by_log, self._context.random
            return Start(cursor, warning_frames(stream.position(cursor), sentence, random=random, log=log))
        if stream.kind is Kind.STANDALONE and not self._replays:
            last = stream.tail.last
            if position.stream == stream.id and position.seq == last:
                return Start(last)
            return self._gap(stream, min(position.seq + 1, last), last, reason="replay is off", cursor=last)
        if position.stream != stream.id:
            self._context.counters.positions_lost += 1
            oldest = await _before_oldest(stream)
            # 0: it is not known where the gap begins.
            return self._gap(stream, 0, oldest, reason="unknown position", cursor=oldest)
        return await self._after(position, stream, is_read=is_read)

    async def _after(self, position: Position, stream: Stream, *, is_read: bool) -> Start:
        """A position beyond its writer's end names events that were lost, unless another node, which lives, holds
        them; then the reader rests there until they are written."""
        if not is_read:
            await self._catch_up(stream)
        followed = stream.writer is None and not stream.is_over
        if followed and position.generation == stream.generation and position.seq > stream.tail.last:
            # It names what another node may have shown, and has not written.
            if stream.node in await self._context.nodes.holders():
                return Start(position.seq, progress=position.progress)
            await self._catch_up(stream)  # they may have been written before nothing was held
        same = position.generation == stream.generation
        ended = () if same else await self._context.store.generations(stream.id)
        cursor = place(position, generation=stream.generation, last=stream.tail.last, ended=ended)
        if cursor == position.seq:
            return Start(cursor, progress=position.progress)
        if await self._is_taken(stream):
            # It names what the other node has shown.
            return await self._after(position, stream, is_read=False)
        self._context.counters.positions_lost += 1
        progress = position.progress
        return self._gap(stream, cursor + 1, position.seq, reason="lost", cursor=cursor, progress=progress)

    def _gap(
        self, stream: Stream, first: int, last: int, *, reason: str, cursor: int, progress: float | None = None
    ) -> Start:
        by_log = self._session.keeper.tells_by_log
        told = self._context.hub.tell_gap(
            stream, first, last, reason=reason, behind=cursor, by_log=by_log, progress=progress
        )
        return Start(cursor, told, progress=progress)

    # Other nodes

    async def _catch_up(self, stream: Stream) -> None:
        """Read how far a stream has grown that another node writes."""
        if stream.writer is None and not stream.is_over:
            await read_record(self._context, stream)

    async def _is_taken(self, stream: Stream) -> bool:
        """Whether another node has claimed a stream since this one last read its record: this one may have stood still,
        and believe that it writes. The stream is followed then. Raises `StoreUnavailable` where what this node still
        writes has to be refused first."""
        record = await stream_by_id(self._context.store, stream.id)
        if record is None or record.fence == stream.fence:
            return False
        if stream is self._session.standalone:
            stream.follow(record)
        else:
            self._session.call_streams.follow(record)
        if stream.writer is not None:
            raise StoreUnavailable(f"another node writes stream {stream.id}, and this one is about to learn it")
        return True


async def _before_oldest(stream: Stream) -> int:
    """The sequence number before the oldest event that is retained."""
    events = await stream.read(after=0, limit=1)
    return events[0].seq - 1 if events else stream.tail.start


def attach(
    session: Session,
    stream: Stream,
    start: Start,
    *,
    arrival: int | None = None,
    frame: Callable[[Event], bytes] | None = None,
    beats: bool = True,
) -> Reader:
    """Attach a reader, primed where the revision knows that (A9): its priming id is exactly where it starts. `frame`:
    writes an event, where that is not done with its position. `beats`: progress may be sent for a silent call."""
    hub, preamble = session.context.hub, start.told
    is_primed = session.keeper.revision.primes
    if is_primed:
        name = stream.position(start.cursor, start.progress).priming(hub.random)
        preamble = sse.encode_priming(name.encode(), hub.retry) + start.told
    reader = Reader(
        hub,
        stream,
        session,
        cursor=start.cursor,
        arrival=hub.arrive() if arrival is None else arrival,
        caller=session.link.calls.caller,
        ahead=start.ahead,
        preamble=preamble,
        is_primed=is_primed,
        retry=b"" if is_primed or frame is not None else sse.retry_field(hub.retry),
        frame=frame,
        progress=start.progress,
        beats=beats and stream.kind is Kind.CALL,
    )
    hub.attach(reader)
    return reader


async def read_answers(stream: Stream) -> list[bytes]:
    """The answers on a stream that is over. There are none where the store refused it for good."""
    events = paged(lambda after: stream.read(after=after, limit=stream.tail.last))
    return [event.payload async for event in events if event.final]
