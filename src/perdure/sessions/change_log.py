"""Writes this node's changes stream: what its server has changed, each item once for each commit.

All changes streams belong to one record of the store, which is made by the first node that needs it. A stream ends with
the word that its node has left in good order, or, written by another node, that it has died: a node that dies may have
published what it had no time to write.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from perdure._core.changes import EVERYTHING, KEPT_CHANGES, Change, encode_change, encode_state
from perdure._core.ids import Kind, RecordKind, SessionId, StreamId
from perdure._core.states import SessionState
from perdure.log.chores import OnDemand, cancel_all
from perdure.log.stream import Stream
from perdure.sessions.context import ServerContext
from perdure.store.records import Event, SessionRecord
from perdure.store.steps import OpenStream, PutSession, Release, Step
from perdure.telemetry.log_records import log_event

OnShown = Callable[[StreamId, int, Sequence[Change]], None]
"""Called with this node's stream, how far it may be shown, and what is new in it."""


def plain_record(session: SessionId, now: float, *, state: SessionState, owner: str = "") -> SessionRecord:
    """A record that is no client's session: it holds streams, or only its time of last activity."""
    return SessionRecord(
        id=session,
        owner=owner,
        state=state,
        version="",
        client_params=b"{}",
        result=b"",
        initialized=True,
        sticky=(),
        incarnation=1,
        standalone=StreamId(""),
        created=now,
        active=now,
        kind=RecordKind.MARK,
    )


class ChangeLog:
    """The changes stream of this node. It is the owner of its `Stream`."""

    def __init__(self, context: ServerContext, *, on_shown: OnShown, on_opened: Callable[[], None]) -> None:
        self.stream: Stream | None = None
        self._context = context
        self._on_shown = on_shown
        self._on_opened = on_opened
        self._session: SessionId | None = None
        self._unshown: dict[Change, int] = {}
        """Changes that may not be shown yet, with their numbers: another change of the same item is the same event."""
        self._unwritten: dict[Change, None] = {}
        """Changes for which there was no stream."""
        self._shows: asyncio.Task[None] | None = None
        self._opens = OnDemand(self._open, name="perdure-changes-open", on_failure=self._not_opened)
        self._is_closed = False

    async def open(self, session: SessionId) -> None:
        """Begin a stream. Raises `StoreError`."""
        self._session = session
        await self._open()

    def reopen(self) -> None:
        """Begin another stream if this node's is not written any more."""
        if self.stream is None and self._session is not None and not self._is_closed:
            self._opens.want()

    async def _open(self) -> None:
        if self.stream is not None or self._session is None or self._is_closed:
            return
        context, record = self._context, self._context.new_stream(self._session, Kind.STANDALONE)
        session = plain_record(self._session, context.clock(), state=SessionState.ACTIVE)
        await context.journal.write(PutSession(record=session), OpenStream(record=record))
        stream = Stream(record, context.journal, self, limit=KEPT_CHANGES, writes=True)
        self.stream, self._unshown = stream, {}
        self._shows = asyncio.create_task(self._show(stream), name="perdure-changes")
        self._on_opened()
        unwritten, self._unwritten = self._unwritten, {}
        for change in unwritten:
            self.append(change)

    def _not_opened(self, failure: Exception, again: bool) -> None:
        level = logging.DEBUG if again else logging.WARNING
        log_event(level, "changes.unwritten", f"changes cannot be written for listeners, and wait: {failure!r}")

    def append(self, change: Change) -> None:
        """Write a change, unless one of the same item is about to be written."""
        if self.stream is None:
            self._unwritten[change] = None
        elif change not in self._unshown:
            self.stream.append(encode_change(change))
            self._unshown[change] = self.stream.tail.last

    async def wait_for_room(self) -> None:
        """Wait while more is heard than the store takes."""
        if self.stream is not None and self.stream.is_full:
            await self.stream.wait_for_room()

    async def _show(self, stream: Stream) -> None:
        """Tell the listeners at this node, and hint to the other nodes, what may be shown."""
        shown = stream.tail.visible
        while stream is self.stream:
            if stream.tail.visible == shown:
                await stream.readers.wait()
                continue
            shown = stream.tail.visible
            news = [change for change, seq in self._unshown.items() if seq <= shown]
            for change in news:
                del self._unshown[change]
            self._on_shown(stream.id, shown, news)
            for node in self._context.nodes.others:
                self._context.store.hint(node, [stream.id])

    async def aclose(self) -> None:
        """End the stream with the word that this node leaves."""
        self._is_closed = True
        await self._opens.aclose()
        if self._shows is not None:
            await cancel_all([self._shows])
        if (stream := self.stream) is not None:
            stream.append(encode_state("left"), also=Release(stream=stream.id, fence=stream.fence))

    # The owner of the stream

    def on_settled(self, stream: Stream) -> None: ...

    def on_grown(self, stream: Stream) -> None: ...

    def on_reader_lost(self, stream: Stream) -> None: ...

    def on_step_written(self, stream: Stream, step: Step) -> None: ...

    def on_lost(self, stream: Stream, unwritten: Sequence[Event], shown: int) -> None:
        """Other nodes took this one for dead, or the store has lost its record. What was heard since is not known to
        be written."""
        if stream is self.stream:
            self.stream, self._unshown = None, {}
            self._unwritten[EVERYTHING] = None
            self.reopen()
