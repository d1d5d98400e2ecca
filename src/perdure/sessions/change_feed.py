"""Follows the changes streams of all nodes while listeners are here, and tells each listener what has changed.

What other nodes write is read when they hint at it, and with everything else when the store says that something was
written. A stream without a writer that does not end with its writer's last word gets it from here: the node has died,
and every listener is told that anything may have changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from perdure._core.changes import (
    CLOCK_SLACK,
    EVERYTHING,
    Change,
    ChangeFilter,
    ChangesPosition,
    DueChanges,
    EndedStream,
    Notification,
    decode_event,
    encode_state,
    is_end,
    streams_to_drop,
)
from perdure._core.ids import SessionId, StreamId
from perdure.errors import PerdureError, StoreError
from perdure.log.chores import OnDemand
from perdure.log.journal import Steps
from perdure.log.stream import Stream
from perdure.sessions.context import ServerContext
from perdure.store.records import Event, Followed, StreamRecord
from perdure.store.steps import Append, ChangeSession, DropStream, Release, Step
from perdure.telemetry.log_records import log_event

_AT_ONCE = 256
"""Events of one stream that are read in one go."""


@dataclass(slots=True, eq=False)
class ChangeListener:
    """One listener: what is due to it, and the way to wake it."""

    due: DueChanges
    _position: Callable[[], ChangesPosition]
    _leave: Callable[[ChangeListener], None]
    on_due: Callable[[], None] = field(default=lambda: None)
    """Called whenever something is due."""
    on_left: Callable[[], None] = field(default=lambda: None)

    @property
    def honoured(self) -> ChangeFilter:
        """What it hears of."""
        return self.due.filter

    def begin(self) -> ChangesPosition:
        """The position that it has before it is sent anything: with what it has missed, its own; else the present."""
        if self.due.is_empty:
            self.due.sent = self._position()
        return self.due.sent

    def hear(self, *changes: Change) -> None:
        """Take changes in."""
        wanted = [self.due.add(change) for change in changes]
        if any(wanted):
            self.on_due()

    def take(self) -> Sequence[Notification]:
        """All that is due at the moment."""
        return () if self.due.is_empty else self.due.take(self._position())

    def close(self) -> None:
        """Let it go; once."""
        self._leave(self)
        left, self.on_left = self.on_left, lambda: None
        left()


class ChangeFeed:
    """The changes of all nodes, as far as they were read here."""

    def __init__(self, context: ServerContext, own: Callable[[], Stream | None]) -> None:
        self._context = context
        self._own = own
        """This node's changes stream."""
        self._session: SessionId | None = None
        self._listeners: set[ChangeListener] = set()
        self._read: dict[StreamId, int] = {}
        """How far each stream was read. There is nothing here while no listener is."""
        self._ended: dict[StreamId, tuple[float, bool]] = {}
        """Streams that are over: when, and whether their node has died."""
        self._failing_since: float | None = None
        """The time from which on it is not known what other nodes have changed; `None` while it is."""
        self._named: set[StreamId] = set()
        self._all = False
        self._turn = asyncio.Lock()
        self._looks = OnDemand(self._look, name="perdure-changes-look", on_failure=self._not_looked)

    async def begin(self, session: SessionId) -> None:
        """Know where the streams are, and tidy them up: each start of a process leaves one. Raises `StoreError`."""
        self._session = session
        await self._look_at_ends(await self._context.store.streams(session))

    def __len__(self) -> int:
        return len(self._listeners)

    async def aclose(self) -> None:
        await self._looks.aclose()

    # Listeners

    async def join(self, make: Callable[[ChangesPosition], DueChanges]) -> ChangeListener:
        """Add a listener, which hears all from this moment on. Raises `StoreError`."""
        async with self._turn:
            if not self._listeners:
                await self._begin()
            listener = ChangeListener(make(self.position()), self.position, self._leave)
            self._listeners.add(listener)
            if len(self._listeners) == 1:
                self.go_round()  # what was written while all streams were read
        return listener

    def _leave(self, listener: ChangeListener) -> None:
        self._listeners.discard(listener)
        if not self._listeners:
            self._read = {}

    def position(self) -> ChangesPosition:
        """As far as all listeners here were told."""
        time = self._context.clock() if self._failing_since is None else self._failing_since
        return ChangesPosition(time=time, seqs=dict(self._read))

    def _tell(self, changes: Collection[Change]) -> None:
        news = [EVERYTHING] if EVERYTHING in changes else changes
        for listener in list(self._listeners):
            listener.hear(*news)

    def show_own(self, stream: StreamId, seq: int, changes: Sequence[Change]) -> None:
        """This node's stream has grown."""
        if self._listeners:
            self._read[stream] = seq
            self._tell(changes)

    # What has changed since

    async def catch_up(self, due: DueChanges, since: ChangesPosition) -> None:
        """Add what has changed between a position and now. Raises `StoreError`."""
        assert self._session is not None
        record = await self._context.store.session(self._session)
        floor = -math.inf if record is None or not record.result else float(record.result)
        if since.time < floor:
            due.add_gap("the position is older than what is kept of changes")
            return
        after = {stream: since.seqs.get(stream, 0) for stream in self._read}
        behind = {stream: seq for stream, seq in after.items() if seq < self._read[stream]}
        async for events, is_whole in self._pages(behind):
            if not is_whole:
                due.add_gap("some of the changes since the position are no longer kept")
            _add(due, events)

    async def catch_up_from(self, due: DueChanges, time: float) -> None:
        """Add what has changed since a time of the store's. Raises `StoreError`."""
        time -= CLOCK_SLACK
        async for events, is_whole in self._pages(dict.fromkeys(self._read, 0)):
            if not is_whole and events and events[0].time >= time:
                due.add(EVERYTHING)  # what is no longer kept may be as young
            _add(due, [event for event in events if event.time >= time])

    def add_deaths(self, due: DueChanges, since: float) -> None:
        """Add that anything may have changed, if a node has died since a time."""
        if any(died and time >= since - CLOCK_SLACK for time, died in self._ended.values()):
            due.add(EVERYTHING)

    async def _pages(self, after: dict[StreamId, int]) -> AsyncIterator[tuple[Sequence[Event], bool]]:
        """All events of streams behind numbers, a page at a time, and whether none is missing in front of the page."""
        while after:
            following: dict[StreamId, int] = {}
            for stream, (record, events, _) in (await self._follow(after)).items():
                events = events or ()
                yield events, (events[0].seq if events else record.last + 1) == after[stream] + 1
                if events and events[-1].seq < record.last:
                    following[stream] = events[-1].seq
            after = following

    async def _follow(self, after: Mapping[StreamId, int]) -> Mapping[StreamId, Followed]:
        """Read streams; of this node's own, what is in memory counts."""
        found: dict[StreamId, Followed] = {}
        own = self._own()
        others = {stream: seq for stream, seq in after.items() if own is None or stream != own.id}
        if others:
            found |= await self._read_others(others)
        if own is not None and own.id in after:
            events = await own.read(after=after[own.id], limit=_AT_ONCE)
            record = StreamRecord(
                id=own.id,
                session=own.session,
                kind=own.kind,
                node=own.node,
                fence=own.fence,
                opened=0.0,
                last=own.tail.visible,
            )
            found[own.id] = Followed(record, events)
        return found

    async def _read_others(self, after: Mapping[StreamId, int], *, limit: int = _AT_ONCE) -> dict[StreamId, Followed]:
        """Read streams that other nodes write; their events also from a store that does not give them at once."""
        store, found = self._context.store, {}
        for stream, followed in (await store.follow(after, limit=limit)).items():
            if followed.events is None:
                events = await store.read(stream, after=after[stream], limit=limit)
                followed = Followed(followed.record, events)
            found[stream] = followed
        return found

    # Looking

    def on_hint(self, streams: Sequence[StreamId]) -> Sequence[StreamId]:
        """Streams may have changed; without any, all may have. Gives those that are no changes streams."""
        if self._listeners:
            known = [stream for stream in streams if stream in self._read]
            self._named.update(known)
            self._all = self._all or not streams
            if known or not streams:
                self._looks.want()
            return [stream for stream in streams if stream not in self._read]
        return streams

    def go_round(self) -> None:
        """Look at all streams."""
        self.on_hint(())

    async def _begin(self) -> None:
        assert self._session is not None
        records = await self._context.store.streams(self._session)
        self._read = {record.id: record.last for record in records}
        if (own := self._own()) is not None:
            self._read[own.id] = own.tail.visible
        self._failing_since = None
        self._ended = {stream: end for stream, end in self._ended.items() if stream in self._read}
        try:
            await self._look_at_ends(records)
        except StoreError:
            self._read = {}
            raise

    async def _look(self) -> None:
        everything, self._all = self._all, False
        named, self._named = self._named, set()
        if not self._listeners or self._session is None:
            return
        own = self._own()
        records: Sequence[StreamRecord] = ()
        if everything:
            records = await self._context.store.streams(self._session)
            if not self._listeners:
                return
            self._meet(records, own)
            named = {record.id for record in records if record.last > self._read[record.id]}
        own_id = None if own is None else own.id
        after = {stream: self._read[stream] for stream in named if stream in self._read and stream != own_id}
        while after and self._listeners:
            found = await self._read_others(after)
            after = self._take(found) if self._listeners else {}
        if self._listeners:
            await self._look_at_ends(records)
        self._failing_since = None

    def _meet(self, records: Sequence[StreamRecord], own: Stream | None) -> None:
        """Streams have come and gone."""
        there = {record.id for record in records}
        for stream in [stream for stream in self._read if stream not in there and (own is None or stream != own.id)]:
            del self._read[stream]
            self._ended.pop(stream, None)
        for record in records:
            if record.last < self._read.setdefault(record.id, 0) and (own is None or record.id != own.id):
                self._read[record.id] = record.last  # the store has lost the end of it
                self._tell([EVERYTHING])

    def _take(self, found: Mapping[StreamId, Followed]) -> dict[StreamId, int]:
        """Tell the listeners what was read; gives the streams that have more. In one turn of the loop, so that no
        position says more than was told."""
        following: dict[StreamId, int] = {}
        changes: dict[Change, None] = {}
        for stream, (record, events, _) in found.items():
            if stream not in self._read:
                continue
            read = self._read[stream]
            if (events[0].seq if events else record.last + 1) > read + 1:
                changes[EVERYTHING] = None  # some of it is no longer kept
            told = (decode_event(event.payload) for event in events or ())
            changes.update(dict.fromkeys(change for change in told if change is not None))
            self._read[stream] = max(read, events[-1].seq if events else record.last)
            if self._read[stream] < record.last:
                following[stream] = self._read[stream]
        self._tell(changes)
        return following

    def _not_looked(self, failure: Exception, again: bool) -> None:
        if self._failing_since is None:
            self._failing_since = self._context.clock()
        self._all = True
        level = logging.DEBUG if again or isinstance(failure, StoreError) else logging.ERROR
        log_event(level, "changes.look", f"what other nodes have changed could not be read: {failure!r}")

    # Streams whose node is gone

    async def _look_at_ends(self, records: Sequence[StreamRecord]) -> None:
        """See which streams are over, end those of nodes that died, and drop what is not kept any longer."""
        gone = [record for record in records if not record.node and record.id not in self._ended]
        if gone:
            last = {record.id: max(0, record.last - 1) for record in gone}
            found = await self._read_others(last, limit=1)
            for record in gone:
                await self._look_at_end(record, found.get(record.id))
        await self._drop_old()

    async def _look_at_end(self, record: StreamRecord, found: Followed | None) -> None:
        if found is None or found.record.node:
            return  # it was dropped, or another node ends it in this moment
        events = found.events or ()
        if events and is_end(events[-1].payload):
            self._ended[record.id] = events[-1].time, decode_event(events[-1].payload) is not None
        elif record.last > 0 and not events:
            self._ended[record.id] = -math.inf, False  # its last word has expired
        elif await _tell_death(self._context, record):
            self._all = True
            self._looks.want()

    async def _drop_old(self) -> None:
        ended = [EndedStream(stream, time) for stream, (time, _) in self._ended.items()]
        now, ttl = self._context.clock(), self._context.settings.event_ttl
        dropped, floor = streams_to_drop(ended, now=now, ttl=ttl)
        if not dropped or self._session is None:
            return
        record = await self._context.store.session(self._session)
        if record is not None and record.result:
            floor = max(floor, float(record.result))
        if math.isinf(floor):
            floor = now - ttl
        steps: list[Step] = [ChangeSession(session=self._session, result=repr(floor).encode())]
        steps += [DropStream(stream=stream) for stream in dropped]
        self._context.journal.put(Steps(steps))
        for stream in dropped:
            del self._ended[stream]
            self._read.pop(stream, None)


async def _tell_death(context: ServerContext, record: StreamRecord) -> bool:
    """Write that the node of a stream has died; of several nodes that try, one does. Tells whether this one has."""
    context.journal.check_claim()
    claimed = await context.store.claim(record.id, node=context.node, held=record.fence)
    if claimed is None:
        return False
    event = Event(claimed.last + 1, context.clock(), encode_state("died"))
    append = Append(stream=claimed.id, fence=claimed.fence, events=(event,))
    with contextlib.suppress(PerdureError):  # another node does it when this one has died
        await context.journal.write(append, Release(stream=claimed.id, fence=claimed.fence))
    for node in context.nodes.others:
        context.store.hint(node, [claimed.id])
    return True


def _add(due: DueChanges, events: Sequence[Event]) -> None:
    for change in (decode_event(event.payload) for event in events):
        if change is not None:
            due.add(change)
