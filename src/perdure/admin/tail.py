"""Follows a session's events from outside: look, show what is new, wait until something was written, look again.

It only reads the store: it joins no node, attaches no reader, and holds no writer up. Events that are trimmed before
they were read are shown as a gap. When the session ends its log goes, so what was written in its last moment may not be
seen.
"""

import heapq
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from perdure._core.ids import SessionId, StreamId
from perdure._core.jsonrpc import JsonObject
from perdure._core.states import SessionState
from perdure.admin.queries import appended, ended, opened, trimmed
from perdure.store.base import Event, Store, StreamRecord

PAGE = 32
"""Events of one stream that are held at a time: they may be megabytes each."""


@dataclass(slots=True)
class _Cursor:
    """How far a stream was shown."""

    record: StreamRecord
    shown: int
    announced: bool
    page: list[Event] = field(default_factory=list)
    """Read and not yet shown, the last one first."""


class Tail:
    """One session's events, as processes append them."""

    def __init__(self, store: Store, session: SessionId, *, only: Callable[[StreamId], bool] = lambda _: True) -> None:
        self._store = store
        self._session = session
        self._only = only
        self._cursors: dict[StreamId, _Cursor] = {}

    async def skip(self) -> None:
        """Show nothing of what is there already."""
        for record in await self._streams():
            self._cursors[record.id] = _Cursor(record, shown=record.last, announced=True)

    async def look(self) -> AsyncIterator[JsonObject]:
        """What is new since the last look, in the order of its times; after `ended` nothing follows."""
        records = await self._streams()
        session = await self._store.session(self._session)
        if session is None or session.state is SessionState.ENDED:
            yield ended(self._session, session.ended if session else "it is forgotten")
            return
        cursors = {}
        for record in records:
            cursors[record.id] = self._cursors.get(record.id) or _Cursor(record, shown=0, announced=False)
            cursors[record.id].record = record
        self._cursors = cursors
        behind = [one for one in cursors.values() if not one.announced or one.shown < one.record.last]
        # Several streams as one. A stream is read when the others have come to its beginning, so few events are held.
        heap = [(cursor.record.opened, number) for number, cursor in enumerate(behind)]
        heapq.heapify(heap)
        while heap:
            _, number = heapq.heappop(heap)
            cursor = behind[number]
            async for seen in self._next(cursor):
                yield seen
            if cursor.page:
                heapq.heappush(heap, (cursor.page[-1].time, number))

    async def _streams(self) -> list[StreamRecord]:
        return [record for record in await self._store.streams(self._session) if self._only(record.id)]

    async def _next(self, cursor: _Cursor) -> AsyncIterator[JsonObject]:
        """The next event of a stream, with what belongs before it; then there is a page, or the stream is done."""
        stream = cursor.record
        if not cursor.announced:
            cursor.announced = True
            yield opened(stream, await self._store.calls_on(stream.id))
        if cursor.page:
            event = cursor.page.pop()
            if event.seq > cursor.shown + 1:
                yield trimmed(stream, cursor.shown + 1, event.seq - 1)
            cursor.shown = event.seq
            yield appended(stream, event)
        # No further than what was there when the look began: a fast writer must not hide that new streams are there.
        if not cursor.page and cursor.shown < stream.last:
            cursor.page = list(await self._store.read(stream.id, after=cursor.shown, limit=PAGE))[::-1]
            if not cursor.page:
                yield trimmed(stream, cursor.shown + 1, stream.last)
                cursor.shown = stream.last
