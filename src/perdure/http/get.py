"""Handles GET: reads a stream, the standalone one or the one that a position names; from there on, and then live."""

import contextlib
import logging
from collections.abc import Sequence
from typing import NamedTuple

from starlette.types import Scope

from perdure._core.ids import Kind, Position, parse_position, place
from perdure._core.states import ContentState, SessionState
from perdure.http.access import SessionAccess
from perdure.http.body import Headers, accepts
from perdure.http.event_stream import EventStreamResponse
from perdure.http.refusals import Refusal, Refused
from perdure.log.hub import warning_frames
from perdure.log.reader import BATCH
from perdure.log.stream import Stream
from perdure.sessions.session import Found, Session, catch_up, find_stream, is_taken, look_how_far
from perdure.store.records import Event


class _Start(NamedTuple):
    """The place where a reader begins, and what is written before the first event."""

    cursor: int
    told: bytes = b""
    named: bool = True
    """The client named the place. Otherwise it is where earlier readers have got to, also while we look."""
    progress: float | None = None
    """As the client's position says."""


class GetHandler:
    """Attaches readers."""

    def __init__(self, access: SessionAccess) -> None:
        self._access = access
        self._context = access.context
        self._settings = access.settings

    async def __call__(self, scope: Scope, headers: Headers, owner: str) -> EventStreamResponse:
        try:
            return await self._attach(scope, headers, owner)
        except Refused as refused:
            if headers.get(b"last-event-id") and refused.refusal is not Refusal.NOTHING_MORE:
                self._context.counters.replays_refused += 1
            raise

    async def _attach(self, scope: Scope, headers: Headers, owner: str) -> EventStreamResponse:
        if not accepts(headers)[1]:
            raise Refused(Refusal.NOT_ACCEPTABLE_GET)
        text = headers.get(b"last-event-id", b"").decode("latin-1")
        position = parse_position(text)
        # With a call's stream the store tells whether its session is still as it is known here.
        of_call = position is not None and position.kind is Kind.CALL and self._settings.enable_replay
        # Before anything is waited for: of two that come, the store may answer the later one first.
        arrival = self._context.hub.arrive()
        session = await self._access.find(headers, owner, scope, checked_later=of_call)
        with session.in_use():
            await self._access.come_back(session, scope)
            if text:
                self._context.counters.resumes += 1
            with self._access.refusing(Refusal.STORE_UNREADABLE):
                found = await self._find(session, position)
                with contextlib.nullcontext() if found is None else found.stream.pinned():
                    read = None if found is None else found.read
                    if of_call and (read is None or read.revision != session.record.revision):
                        await self._access.check(session, headers, owner, scope)
                    if session.state is SessionState.ENDED:
                        raise self._access.gone()
                    if found is None:
                        raise self._unknown(session, position)
                    stream = found.stream
                    start = await self._start(session, stream, text, position, is_read=read is not None)
                    if stream.kind is Kind.STANDALONE:
                        self._access.refuse_if_draining()
                    if not self._context.nodes.alone and stream.writer is not None:
                        # A reader at another node, of which this one may not know yet, is overtaken with the rest.
                        await self._context.hub.registry.look_who_reads(stream)
                    is_next = position is not None and start.cursor == position.seq
                    ahead = read.events if read is not None and is_next else None
                    return await self._read(session, stream, start, arrival, ahead)

    async def _find(self, session: Session, position: Position | None) -> Found | None:
        """The stream that a position names; the standalone one without a position."""
        if position is None or position.kind is Kind.STANDALONE:
            return Found(session.standalone, None)
        if not self._settings.enable_replay:
            raise Refused(Refusal.REPLAY_OFF)
        return await find_stream(session, position.stream, after=position.seq, limit=BATCH)

    def _unknown(self, session: Session, position: Position | None) -> Refused:
        self._context.counters.positions_lost += 1
        self._context.peers.log_event(
            logging.WARNING,
            "position.unknown",
            "a position names no stream of its session",
            session=session.name,
            position=str(position or ""),
        )
        return Refused(Refusal.POSITION_UNKNOWN)

    async def _read(
        self, session: Session, stream: Stream, start: _Start, arrival: int, ahead: Sequence[Event] | None
    ) -> EventStreamResponse:
        """Attach the reader. It reads before the response begins, so that the status says when the store fails, unless
        that was read on the way to the stream (`ahead`)."""
        cursor, told, named, progress = start
        stream.readers.advance(cursor)  # the client has it; or it learns now that it is gone
        if stream.content is ContentState.SEALED and cursor >= stream.tail.last:
            self._context.hub.marks.left(stream)
            raise Refused(Refusal.NOTHING_MORE, headers=((b"allow", b"POST, DELETE"),))
        if ahead is None or (ahead and ahead[-1].seq > stream.tail.durable):
            ahead = await stream.read(after=cursor, limit=BATCH)
        if not named and stream.readers.delivered > cursor:
            cursor, ahead = stream.readers.delivered, ()
        if stream.readers.reader is None:
            self._access.refuse_readers(session.link.calls.caller)
        if stream is session.standalone:
            self._context.counters.standalone_readers += 1
            if not named:
                session.orphans.begun(cursor=cursor)
                session.orphans.tell_begun(cursor=cursor)
            session.orphans.give_time()
        return self._access.read(
            session, stream, cursor=cursor, told=told, ahead=ahead, arrival=arrival, progress=progress
        )

    async def _start(
        self, session: Session, stream: Stream, text: str, position: Position | None, *, is_read: bool
    ) -> _Start:
        """Where to begin. Without a position: where the readers of the standalone stream had got to, in whatever
        process, so that what was sent while no reader was there still arrives."""
        if position is None and not text:
            await look_how_far(session)
            return _Start(stream.readers.delivered, named=False)
        if position is None:
            # The client names nothing that we could have sent: warn, then give it what there is.
            self._context.peers.log_event(
                logging.WARNING, "position.unreadable", "a Last-Event-ID is not a position", session=session.name
            )
            self._context.counters.positions_lost += 1
            cursor = await _before_oldest(stream) if self._settings.enable_replay else stream.readers.delivered
            sentence = "the given Last-Event-ID is not a position of this server; here is the standalone stream"
            log, random = session.keeper.tells_by_log, self._context.random
            return _Start(cursor, warning_frames(stream.position(cursor), sentence, random=random, log=log))
        if stream.kind is Kind.STANDALONE and not self._settings.enable_replay:
            last = stream.tail.last
            if position.stream == stream.id and position.seq == last:
                return _Start(last)
            return self._gap(session, stream, min(position.seq + 1, last), last, reason="replay is off", cursor=last)
        if position.stream != stream.id:
            self._context.counters.positions_lost += 1
            oldest = await _before_oldest(stream)
            # 0: it is not known where the gap begins.
            return self._gap(session, stream, 0, oldest, reason="unknown position", cursor=oldest)
        return await self._place(session, stream, position, is_read=is_read)

    async def _place(self, session: Session, stream: Stream, position: Position, *, is_read: bool) -> _Start:
        """Where to go on, and what to tell first: a position beyond its writer's end names events that were lost,
        unless another node, which lives, holds them; then the reader rests there until they are written."""
        if not is_read:
            await catch_up(session, stream)
        context = self._context
        followed = stream.writer is None and not stream.is_over
        if followed and position.generation == stream.generation and position.seq > stream.tail.last:
            # It names what another node may have shown, and has not written.
            if stream.node in await context.nodes.holders():
                return _Start(position.seq, progress=position.progress)
            await catch_up(session, stream)  # they may have been written before nothing was held
        same = position.generation == stream.generation
        ended = () if same else await context.store.generations(stream.id)
        cursor = place(position, generation=stream.generation, last=stream.tail.last, ended=ended)
        if cursor == position.seq:
            return _Start(cursor, progress=position.progress)
        if await is_taken(session, stream):
            # It names what the other node has shown.
            return await self._place(session, stream, position, is_read=False)
        context.counters.positions_lost += 1
        lost = (cursor + 1, position.seq)
        return self._gap(session, stream, *lost, reason="lost", cursor=cursor, progress=position.progress)

    def _gap(
        self,
        session: Session,
        stream: Stream,
        first: int,
        last: int,
        *,
        reason: str,
        cursor: int,
        progress: float | None = None,
    ) -> _Start:
        told = self._context.hub.tell_gap(
            stream, first, last, reason=reason, behind=cursor, by_log=session.keeper.tells_by_log, progress=progress
        )
        return _Start(cursor, told, progress=progress)


async def _before_oldest(stream: Stream) -> int:
    """The sequence number before the oldest event that is retained."""
    events = await stream.read(after=0, limit=1)
    return events[0].seq - 1 if events else stream.tail.start
