"""GET: read a stream, the standalone one or, with a position, whichever it names; from there on, and then live."""

from __future__ import annotations

import logging
from typing import NamedTuple

from starlette.types import Scope

from perdure._core.ids import Kind, Position, parse_position, place
from perdure._core.states import SessionState, StreamState
from perdure.errors import StoreError
from perdure.http.access import Headers, SessionAccess
from perdure.http.body import accepts
from perdure.http.event_stream import EventStreamResponse
from perdure.http.refusals import Refusal, Refused, refusal_of
from perdure.log.frames import warning_frames
from perdure.log.reader import BATCH
from perdure.log.stream import Stream
from perdure.sessions.reattach import tell_attached
from perdure.sessions.replay import catch_up, find_stream, look_how_far
from perdure.sessions.session import Session


class _Start(NamedTuple):
    """Where a reader begins, and what it is told before the first event."""

    stream: Stream
    cursor: int
    told: bytes = b""
    named: bool = True
    """The client named the place. Otherwise it is where the readers before have got to, also while we look."""


class GetHandler:
    """Attaches readers."""

    def __init__(self, desk: SessionAccess) -> None:
        self._desk = desk
        self._context = desk.context
        self._settings = desk.settings

    async def __call__(self, scope: Scope, headers: Headers, owner: str) -> EventStreamResponse:
        if not accepts(headers)[1]:
            raise Refused(Refusal.NOT_ACCEPTABLE_GET)
        async with self._desk.session(headers, owner, scope) as session:
            arrival = self._context.hub.arrive()
            text = headers.get(b"last-event-id", b"").decode("latin-1")
            try:
                while (response := await self._attach(session, text, arrival)) is None:
                    pass  # this node has claimed the stream meanwhile, and knows it by another object now
                return response
            except StoreError as failure:
                raise Refused(refusal_of(failure, Refusal.STORE_UNREADABLE)) from None

    async def _attach(self, session: Session, text: str, arrival: int) -> EventStreamResponse | None:
        """A reader on the stream that a position names; `None` if it has to be looked for again."""
        start = await self._start(session, text)
        if start.stream.kind is Kind.STANDALONE:
            self._desk.refuse_if_draining()
        try:
            if not self._context.neighbours.alone and start.stream.writes:
                await self._look_who_reads(start.stream)
            return await self._read(session, start, arrival)
        except BaseException:
            start.stream.unread()  # it may have been loaded for this reader, who does not come
            raise

    async def _look_who_reads(self, stream: Stream) -> None:
        """A reader on another node, of which this one may not have heard yet, is overtaken with the rest."""
        row = await self._context.store.reader(stream.id)
        elsewhere = None if row is None or row.node == self._context.node else row
        stream.read_elsewhere(elsewhere, arrival=self._context.hub.arrive())

    async def _read(self, session: Session, start: _Start, arrival: int) -> EventStreamResponse | None:
        """Attach the reader. It reads before the response begins, so that a store that fails is told by the status."""
        stream, cursor, told, named = start
        stream.delivered = max(stream.delivered, cursor)  # the client has it; or it is told now that it is gone
        if stream.state is StreamState.SEALED and cursor >= stream.last:
            self._context.hub.marks.left(stream)
            raise Refused(Refusal.NOTHING_MORE, headers=((b"allow", b"POST, DELETE"),))
        ahead = await stream.read(after=cursor, limit=BATCH)
        if not named and stream.delivered > cursor:
            cursor, ahead = stream.delivered, ()
        if self._context.hub.full and stream.reader is None:
            raise Refused(Refusal.TOO_MANY_READERS, limit=self._settings.max_readers)
        if stream.kind is Kind.CALL and session.streams.get(stream.id) is not stream:
            return None
        if stream is session.standalone:
            self._context.counters.standalone_readers += 1
            if not named:
                session.orphans.begun()
                tell_attached(session)
            session.orphans.give_time()
        return self._desk.read(session, stream, cursor=cursor, told=told, ahead=ahead, arrival=arrival)

    async def _start(self, session: Session, text: str) -> _Start:
        """What to read, and from where. Without a position: the standalone stream from where its readers had got to,
        in whatever process, so that what was sent while no reader was there still arrives."""
        if not text:
            await look_how_far(session)
            return _Start(session.standalone, session.standalone.delivered, named=False)
        self._context.counters.resumes += 1
        position = parse_position(text)
        if position is None:
            return await self._start_unreadable(session)
        if position.kind is Kind.STANDALONE:
            return await self._start_standalone(session, position)
        if not self._settings.enable_replay:
            raise Refused(Refusal.REPLAY_OFF)
        stream = await find_stream(session, position.stream)
        if session.state is SessionState.ENDED:
            raise self._desk.gone()
        if stream is None:
            self._context.counters.positions_lost += 1
            self._context.peers.log_event(
                logging.WARNING, "position.unknown", "a position names no stream of its session", session=session.name
            )
            raise Refused(Refusal.POSITION_UNKNOWN)
        try:
            return await self._place(session, stream, position)
        except BaseException:
            stream.unread()  # it may have been loaded for this reader, who does not come
            raise

    async def _start_unreadable(self, session: Session) -> _Start:
        """The client names nothing that we could have sent: warn, then give it what there is."""
        self._context.peers.log_event(
            logging.WARNING, "position.unreadable", "a Last-Event-ID is no position", session=session.name
        )
        self._context.counters.positions_lost += 1
        stream = session.standalone
        cursor = await stream.before_oldest() if self._settings.enable_replay else stream.delivered
        sentence = "the given Last-Event-ID is no position of this server's; here is the standalone stream"
        log, random = session.tells_by_log, self._context.random
        return _Start(stream, cursor, warning_frames(stream.position(cursor), sentence, random=random, log=log))

    async def _start_standalone(self, session: Session, position: Position) -> _Start:
        stream = session.standalone
        if not self._settings.enable_replay:
            if position.stream == stream.id and position.seq == stream.last:
                return _Start(stream, stream.last)
            first = min(position.seq + 1, stream.last)
            told = self._gap(session, stream, first, stream.last, reason="replay is off", behind=stream.last)
            return _Start(stream, stream.last, told)
        if position.stream != stream.id:
            self._context.counters.positions_lost += 1
            oldest = await stream.before_oldest()
            # 0: nobody knows where the gap begins.
            told = self._gap(session, stream, 0, oldest, reason="unknown position", behind=oldest)
            return _Start(stream, oldest, told)
        return await self._place(session, stream, position)

    async def _place(self, session: Session, stream: Stream, position: Position) -> _Start:
        """Where to go on, and what to tell first: a position beyond its writer's end names events that were lost,
        unless another node, which lives, holds them; then the reader rests there until they are written."""
        await catch_up(session, stream)
        context = self._context
        if _is_beyond(stream, position):
            if stream.node in await context.neighbours.holders():
                return _Start(stream, position.seq)
            await catch_up(session, stream)  # they may have been written before nothing was held
        same = position.generation == stream.generation
        ended = () if same else await context.store.generations(stream.id)
        cursor = place(position, generation=stream.generation, last=stream.last, ended=ended)
        if cursor == position.seq:
            return _Start(stream, cursor)
        self._context.counters.positions_lost += 1
        told = self._gap(session, stream, cursor + 1, position.seq, reason="lost", behind=cursor)
        return _Start(stream, cursor, told)

    def _gap(self, session: Session, stream: Stream, first: int, last: int, *, reason: str, behind: int) -> bytes:
        by_log = session.tells_by_log
        return self._context.hub.tell_gap(stream, first, last, reason=reason, behind=behind, by_log=by_log)


def _is_beyond(stream: Stream, position: Position) -> bool:
    """A position names what another node may have shown, and has not written."""
    by_its_writer = position.generation == stream.generation and not (stream.writes or stream.over)
    return by_its_writer and position.seq > stream.last
