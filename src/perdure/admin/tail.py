"""Following a session's events from outside: look, tell what is new, wait until something was written, look again.

Whoever follows reads the store and nothing else: it joins no node, attaches no reader, and holds nobody up. What is
trimmed before it was read is told as a gap. When the session ends its log goes, so what was written in its last moment
may not be seen.
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from perdure._core.ids import SessionId, StreamId
from perdure._core.states import SessionState
from perdure.store.base import CallRecord, Event, Store, StreamRecord

PAGE = 32
"""Events of one stream that are held at a time: they may be megabytes each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A stream is there."""

    stream: StreamRecord
    calls: Sequence[CallRecord]


@dataclass(frozen=True, kw_only=True, slots=True)
class Appended:
    stream: StreamRecord
    event: Event


@dataclass(frozen=True, kw_only=True, slots=True)
class Trimmed:
    """Events that were forgotten before they could be shown."""

    stream: StreamRecord
    first: int
    last: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Over:
    """The session has ended."""

    session: SessionId
    reason: str


Seen = Opened | Appended | Trimmed | Over


@dataclass(slots=True)
class _Cursor:
    """How far a stream was shown."""

    record: StreamRecord
    shown: int
    announced: bool
    page: list[Event] = field(default_factory=list)
    """Read and not yet shown, the last one first."""

    @property
    def is_behind(self) -> bool:
        return not self.announced or self.shown < self.record.last


class Tail:
    """One session's events, as they are appended by whatever process."""

    def __init__(self, store: Store, session: SessionId, *, only: Callable[[StreamId], bool] = lambda _: True) -> None:
        self._store = store
        self._session = session
        self._only = only
        self._cursors: dict[StreamId, _Cursor] = {}

    async def skip(self) -> None:
        """Show nothing of what is there already."""
        for record in await self._streams():
            self._cursors[record.id] = _Cursor(record, shown=record.last, announced=True)

    async def look(self) -> AsyncIterator[Seen]:
        """What is new since the last look, in the order of its times; `Over` is the last thing there is to see."""
        records = await self._streams()
        session = await self._store.session(self._session)
        if session is None or session.state is SessionState.ENDED:
            yield Over(session=self._session, reason=session.ended if session else "it is forgotten")
            return
        self._cursors = {record.id: self._moved(record) for record in records}
        async for seen in self._merged([cursor for cursor in self._cursors.values() if cursor.is_behind]):
            yield seen

    async def _streams(self) -> list[StreamRecord]:
        return [record for record in await self._store.streams(self._session) if self._only(record.id)]

    def _moved(self, record: StreamRecord) -> _Cursor:
        cursor = self._cursors.get(record.id) or _Cursor(record, shown=0, announced=False)
        cursor.record = record
        return cursor

    async def _merged(self, cursors: Sequence[_Cursor]) -> AsyncIterator[Seen]:
        """Several streams as one. A stream is read when the others have come to its beginning, so few are held."""
        heap = [(cursor.record.opened, number) for number, cursor in enumerate(cursors)]
        heapq.heapify(heap)
        while heap:
            _, number = heapq.heappop(heap)
            cursor = cursors[number]
            async for seen in self._next(cursor):
                yield seen
            if cursor.page:
                heapq.heappush(heap, (cursor.page[-1].time, number))

    async def _next(self, cursor: _Cursor) -> AsyncIterator[Seen]:
        """The next event of a stream, with what belongs before it; then there is a page, or the stream is done."""
        if not cursor.announced:
            cursor.announced = True
            yield Opened(stream=cursor.record, calls=await self._store.calls_on(cursor.record.id))
        if cursor.page:
            event = cursor.page.pop()
            if event.seq > cursor.shown + 1:
                yield Trimmed(stream=cursor.record, first=cursor.shown + 1, last=event.seq - 1)
            cursor.shown = event.seq
            yield Appended(stream=cursor.record, event=event)
        # No further than what was there when the look began: a fast writer must not hide that new streams are there.
        if not cursor.page and cursor.shown < cursor.record.last:
            cursor.page = list(await self._store.read(cursor.record.id, after=cursor.shown, limit=PAGE))[::-1]
            if not cursor.page:
                yield Trimmed(stream=cursor.record, first=cursor.shown + 1, last=cursor.record.last)
                cursor.shown = cursor.record.last
