"""Holds the sessions of this process: opens, finds and loads them, puts them to rest, ends them.

A session answers only the principal that opened it; to any other caller it does not exist (promise 5). One that this
process does not hold is loaded from its record, once, however many ask for it (H1, H4). What is in memory counts as
long as the store's stamp says that no other process has written anything; otherwise the record is read again first.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from perdure._core import mail
from perdure._core.early_answers import own_tools
from perdure._core.ids import Kind, NodeId, RecordKind, SessionId, StreamId, new_session_id, parse_session_id
from perdure._core.jsonrpc import JsonObject, Request
from perdure._core.limits import Caller
from perdure._core.settling import NOTHING_KEPT, Occasion, Rerun, may_run_again, rerun
from perdure._core.states import CallState, ContentState, SessionState, SessionStep
from perdure._core.tool_steps import is_resumable
from perdure.errors import SessionEnded, StoreUnavailable, TooManySessions
from perdure.log.chores import cancel_all, start
from perdure.log.nodes import mail_to
from perdure.log.stream import Stream, StreamOwner, Streams
from perdure.sessions.context import ServerContext, Stamp
from perdure.sessions.ledger import Call, encode
from perdure.sessions.record_keeper import share
from perdure.sessions.session import Intake, Session
from perdure.store.interface import measures_of
from perdure.store.records import Loaded, SessionRecord, StreamRecord
from perdure.store.steps import EndSession, OpenAsk, OpenStream, PutSession, SessionLimits, Step
from perdure.telemetry import tracing as spans
from perdure.telemetry.log_records import log_event
from perdure.telemetry.prometheus import Snapshot, snapshot

_MAKE_ROOM_MOST = 8
"""Dormant sessions that are ended for a new one before it is refused: another process may take the room first."""


class _LoadedAt(NamedTuple):
    """A session as it was read, if it was there, and the moment of that."""

    stamp: Stamp
    loaded: Loaded | None


@dataclass(frozen=True, kw_only=True)
class StreamInfo:
    """A stream, as it is shown (S6)."""

    id: str
    kind: str
    state: str
    last: int
    """Sequence number of the last event."""
    connected_since: float | None


@dataclass(frozen=True, kw_only=True)
class SessionInfo:
    """A session, as it is shown (S6)."""

    id: str
    owner: str
    state: str
    version: str
    created: float
    active: float
    loaded: bool
    """Its runtime is in memory."""
    running_calls: tuple[str, ...]
    """Methods of the requests that are not answered yet."""
    streams: tuple[StreamInfo, ...]
    """The standalone stream, then the calls' streams that are not over."""


class SessionRegistry(StreamOwner):
    """The sessions that this process holds. It owns the streams of all calls: a stream may be in memory before its
    session is (a call of a dead node that is being settled) and after it (an answer that is still being written)."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._by_id: dict[SessionId, Session] = {}
        self._loading: dict[SessionId, asyncio.Task[Session | None]] = {}
        self._ending: dict[SessionId, bool] = {}
        """Sessions that this process ends (`True`: has ended), of which the store may not know yet."""
        self._resting: dict[SessionId, tuple[Session, asyncio.Task[None]]] = {}
        """Sessions on their way out of memory: no request gets them any more."""
        self._making_room = asyncio.Lock()
        self.streams = Streams(
            context.journal,
            self,
            limit=context.settings.max_stream_events,
            wait_for_readers=context.runtimes.waits_for_readers,
        )
        """The streams of all calls in memory."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_id.values()))

    def hold(self, session: Session) -> None:
        """Keep a durable call in memory, from before it is written."""
        self._by_id[session.id] = session

    def let_go(self, session: Session) -> None:
        """A durable call is over here: remove it from memory, unless a request is about to use it."""
        if self._by_id.get(session.id) is session and not session.is_busy:
            del self._by_id[session.id]
            session.link.runtime.leave()

    # The owner of the streams of calls

    def on_settled(self, stream: Stream) -> None:
        if not self.streams.release(stream):
            return
        session = self._by_id.get(stream.session)
        has_key = self._context.keyed.on_settled(stream.id)
        if session is None or session.keeper.record.is_task or stream.answered or has_key:
            self._context.waiters.tell(stream.id)  # a request may wait for its end
        if session is not None:
            session.on_call_settled(stream)
            if session.is_durable_call:
                self.let_go(session)

    def on_grown(self, stream: Stream) -> None:
        self._context.hub.registry.on_grown(stream)

    def on_lost(self, stream: Stream, unwritten: Sequence[object], shown: int) -> None:
        """Another node has claimed a call that runs here: its further messages are dropped."""
        if (session := self._by_id.get(stream.session)) is not None:
            session.link.stop_calls(stream)

    def on_reader_lost(self, stream: Stream) -> None:
        session = self._by_id.get(stream.session)
        if session is not None and stream.writer is not None and not session.is_durable_call:
            session.orphans.give_time(came=False)

    def on_step_written(self, stream: Stream, step: Step) -> None:
        if (session := self._by_id.get(stream.session)) is not None:
            session.keeper.on_written(step)
            if type(step) is OpenAsk and session.record.is_task:
                self._context.waiters.tell(stream.id)  # its client may wait for something to answer

    # Finding and loading

    async def find(self, text: str, owner: str, *, checked_later: bool = False) -> Session | None:
        """The session of that id, if it belongs to that principal and has not ended. Raises `HeldElsewhere` where that
        is not certain: another node may serve it, and hold its record. Only a caller that is about to be denied waits
        for that answer, and a foreign session is answered as one that does not exist.

        `checked_later`: the commit of the caller is refused if the record has changed (`OpenStream.seen`), so the
        record in memory will do.
        """
        session_id = parse_session_id(text)
        if session_id is None:
            return None
        session = self._by_id.get(session_id) if checked_later else None
        if session is not None and session.keeper.record.owner == owner and not session.is_durable_call:
            stamp = session.keeper.stamp
            if stamp is None or stamp.doubts == self._context.journal.doubts:
                return session
        return await self._context.nodes.found(partial(self._find, session_id, owner))

    async def _find(self, session_id: SessionId, owner: str) -> Session | None:
        held = self._by_id.get(session_id)
        try:
            seen = None
            if held is None:
                # Before anything is loaded: a stranger causes no more work than a caller that names no session.
                seen = _LoadedAt(self._context.stamp(), await self._context.store.load(session_id))
                if seen.loaded is None or not _is_session_of(owner, seen.loaded.record):
                    return None
            session = await self.load(session_id, seen)
        except StoreUnavailable:
            # Live traffic goes on (promise 7) with what is known here, after the wait as before it.
            if held is not None and held is self._by_id.get(session_id) and _is_session_of(owner, held.record):
                return held
            raise
        if session is not None and not _is_session_of(owner, session.record):
            # A session that does not exist is read from the store too: a failing store must not distinguish them.
            await self._context.store.session(session_id)
            return None
        return session

    async def load(self, session_id: SessionId, seen: _LoadedAt | None = None) -> Session | None:
        """The session as the store has it at this moment, or as it was `seen` just now. A caller that awaits anything
        before it has made the session busy keeps it with `Session.in_use`: until then it may be put to rest."""
        while True:
            if (resting := self._resting.get(session_id)) is not None:
                await asyncio.wait({resting[1]})  # or its home would be let go of under the caller
                seen = None
                continue
            session = self._by_id.get(session_id)
            if session is not None and session.keeper.stamp == self._context.stamp():
                return session
            if (task := self._loading.get(session_id)) is None:
                task = self._loading[session_id] = asyncio.create_task(self._read(session_id, seen))

                def forget(done: asyncio.Task[Session | None]) -> None:
                    del self._loading[session_id]
                    if not done.cancelled():
                        done.exception()  # all that waited for it may have left; asyncio would complain

                task.add_done_callback(forget)
            session, seen = await asyncio.shield(task), None
            # The task was done a moment before this goes on: in between the session may have gone to rest, or ended.
            if session is None or self._by_id.get(session_id) is session:
                return session

    @asynccontextmanager
    async def using(self, session_id: SessionId) -> AsyncIterator[Session | None]:
        """Keep a session in memory as long as the block runs; a durable call also while it runs here."""
        session = await self.load(session_id)
        if session is None:
            yield None
            return
        try:
            with session.in_use():
                yield session
        finally:
            if session.is_durable_call:
                self.let_go(session)

    async def _read(self, session_id: SessionId, seen: _LoadedAt | None = None) -> Session | None:
        store = self._context.store
        stamp = self._context.stamp()
        complete = not self._context.journal.is_degraded  # nothing is held that reading would miss
        session = self._by_id.get(session_id)
        changes = 0 if session is None else session.keeper.changes
        loaded: Loaded | None = None
        if session is not None:
            record = await store.session(session_id)
        else:
            stamp, loaded = seen or _LoadedAt(stamp, await store.load(session_id))
            record = None if loaded is None else loaded.record
        if session_id in self._ending:
            return None
        if (resting := self._resting.get(session_id)) is not None:
            await asyncio.wait({resting[1]})
        if self._by_id.get(session_id) is not session or (session is not None and session.keeper.changes != changes):
            return await self._read(session_id)  # what was read may be older than a change of this process, or its rest
        if record is None or record.state is SessionState.ENDED:
            if session is None or not complete or (record is None and session.state is SessionState.OPENING):
                return session
            self._by_id.pop(session.id, None)
            await session.was_ended("" if record is None else record.ended)
            return None
        if session is not None:
            session.refresh(record, stamp)
            return session
        if record.state is SessionState.OPENING:
            return None  # a handshake at another node, whose client does not know the id yet
        if self._has_expired(record) and await self.end_unused(record):
            return None
        with spans.load(record.id[:8]):
            return await self._build(record, None if loaded is None else loaded.standalone, stamp)

    def _has_expired(self, record: SessionRecord) -> bool:
        return self._context.clock() - record.active >= self._context.settings.replay_window

    async def expire(self, session_id: SessionId) -> bool:
        """End a session whose time has passed, unless a node uses it. Returns whether it has ended."""
        record = await self._context.store.session(session_id)
        if record is None or record.state is SessionState.ENDED or not self._has_expired(record):
            return False
        return await self.end_unused(record)

    async def end_unused(self, record: SessionRecord) -> bool:
        """End a session that rests in the store, if it is still as it was seen there; returns whether it has ended. The
        store compares: another process may have begun to use it at this moment, whatever the clocks say."""
        store, reason = self._context.store, SessionStep.WINDOW_PASSED.value
        # With the time of now, so that the record stays for a while, and says why its id is unknown.
        now = self._context.clock()
        end = EndSession(session=record.id, time=now, reason=reason, unused_since=record.active)
        await self._context.journal.write(end)
        stored = await store.session(record.id)
        if stored is not None and stored.state is not SessionState.ENDED:
            return False
        is_session = record.kind is RecordKind.SESSION
        self._context.counters.sessions_ended += is_session
        ended = f"a {'session' if is_session else 'task'} ended: {reason}"
        log_event(logging.INFO, "session.ended", ended, session=record.id[:8])
        return True

    async def _build(self, record: SessionRecord, standalone: StreamRecord | None, stamp: Stamp) -> Session | None:
        store = self._context.store
        if standalone is None and record.kind is RecordKind.SESSION:
            return None  # it ended in this very moment
        may_wait = bool(record.owner) and self._context.runtimes.needs_principal
        waiting = may_wait and any(call.state is CallState.WAITING for call in await store.calls(record.id))
        kept = await store.kept(record.id)
        context, streams = self._context, self.streams
        session = Session(context, record, standalone, streams, self.end_soon, stamp=stamp, waits=waiting, kept=kept)
        self._by_id[record.id] = session
        self._context.counters.sessions_loaded += 1
        try:
            with session.in_use():
                await session.home.claim(seen=standalone)
        except SessionEnded:
            self._by_id.pop(record.id, None)
            return None
        log_event(logging.DEBUG, "session.loaded", "a session was loaded from its record", session=session.name)
        return session

    async def reattach(self, text: str, owner: str, params: dict[str, Any]) -> tuple[Session, int] | None:
        """Begin an incarnation of the caller's own session, if it is the same client by version and capabilities.
        Returns its number as well: the session may be further already, if two clients come back at once."""
        session = await self.find(text, owner)
        if session is None or session.state is SessionState.OPENING:
            return None
        before = json.loads(session.record.client_params)
        versions = before.get("protocolVersion"), session.record.version
        if params.get("protocolVersion") not in versions or params.get("capabilities") != before.get("capabilities"):
            return None
        with session.in_use():
            try:
                record = await self._context.store.reattach(session.id)
            except StoreUnavailable:
                if self._context.journal.refuses:
                    raise
                # As all live traffic it goes on from memory (promise 7), in the incarnation that the store knows: the
                # client may use the ids and tokens of its running calls again.
                record = session.record
                for call in session.link.calls.all_running():
                    call.is_displaced = True
                session.begin_again(reattached=True)
            else:
                if record is None:
                    return None
                # Without a stamp: the next request reads again, for a change of ours may have been written in between.
                session.refresh(record, None, reattached=True)
            await session.come_back()
        session.orphans.tell_begun()
        self._context.counters.reattaches += 1
        log_event(logging.INFO, "session.reattached", "a client came back to its session", session=session.name)
        return session, record.incarnation

    def held(self, session_id: SessionId) -> Session | None:
        return self._by_id.get(session_id)

    async def open(
        self, caller: Caller, request: Request, body: bytes, *, makes_room: bool = True
    ) -> tuple[Session, Call]:
        """Begin a session with its `initialize` request. Raises `TooManyProcesses`, or `TooManySessions` beyond the
        limits that the store enforces: of several that come at once, in any process, no more get in than there is room
        for. `makes_room`: a dormant session is given up for it."""
        async with self._context.runtimes.admitting(caller):
            try:
                return await self._open(caller, request, body)
            except TooManySessions:
                if not makes_room:
                    raise
            async with self._making_room:  # one after the other, or all would give up the same session
                for _ in range(_MAKE_ROOM_MOST):
                    try:
                        return await self._open(caller, request, body)
                    except TooManySessions as full:
                        # Many clients leave without a word, and must not lock others out for as long as answers are
                        # kept: end the longest-dormant session; a caller at its own limit loses one of its own.
                        whose = caller if full.of_caller else None
                        if (record := await self._context.store.longest_dormant(whose)) is None:
                            raise
                        await self.end_unused(record)
                return await self._open(caller, request, body)

    async def _open(self, caller: Caller, request: Request, body: bytes) -> tuple[Session, Call]:
        context, settings = self._context, self._context.settings
        limits: SessionLimits | None = None
        if not context.journal.is_degraded:
            most = settings.max_principal_sessions if caller.owner else settings.max_address_sessions
            limits = SessionLimits(total=settings.max_sessions, caller=most)
        elif len(self) >= settings.max_sessions:
            # The store cannot count at the moment, and what is held must not be refused later: memory counts.
            raise StoreUnavailable("the store fails, and as many sessions are in memory as may be")
        standalone = context.new_stream(new_session_id(context.random), Kind.STANDALONE)
        record = SessionRecord(
            id=standalone.session,
            owner=caller.owner,
            address=caller.address,
            state=SessionState.OPENING,
            client_params=share(encode(request.params or {})),
            standalone=standalone.id,
            created=standalone.opened,
            active=standalone.opened,
        )
        session = Session(context, record, standalone, self.streams, self.end_soon, stamp=self._context.stamp())
        self._by_id[session.id] = session
        try:
            with Intake(session, (request,)) as intake:
                steps = PutSession(record=record, limits=limits), OpenStream(record=standalone)
                _, [call] = await intake.accept((body,), *steps)
        except BaseException:
            self._by_id.pop(session.id, None)
            raise
        context.counters.sessions_opened += 1
        return session, call

    async def end(self, session: Session, step: SessionStep, reason: str) -> None:
        """End a session; from this moment on its id is unknown."""
        if self._by_id.pop(session.id, None) is not None:
            self._ending[session.id] = False
            await session.end(step, reason)
            self._ending[session.id] = True
            self.forget_ended()
            log_event(logging.INFO, "session.ended", f"a session ended: {step.value}", session=session.name)

    def end_soon(self, session_id: SessionId, why: str) -> None:
        """End a session from within, where the caller cannot wait: its server cannot go on with it."""
        if (session := self._by_id.get(session_id)) is not None:
            self._context.task_context.run(start, self.end(session, SessionStep.SERVER_ENDED, why))

    def is_ending(self, session_id: str) -> bool:
        return session_id in self._ending

    def forget_ended(self) -> None:
        """The store knows all sessions that this process has ended, once nothing is held."""
        if self._ending and not self._context.journal.is_degraded:
            self._ending = {session_id: False for session_id, ended in self._ending.items() if not ended}

    async def was_ended(self, session_id: SessionId, reason: str) -> None:
        if (session := self._by_id.pop(session_id, None)) is not None:
            await session.was_ended(reason)

    def info(self, session_id: str) -> SessionInfo | None:
        session = self._by_id.get(SessionId(session_id))
        if session is None and (resting := self._resting.get(SessionId(session_id))) is not None:
            session = resting[0]
        if session is None:
            return None
        record = session.record
        return SessionInfo(
            id=record.id,
            owner=record.owner,
            state=record.state.value,
            version=record.version,
            created=record.created,
            active=session.keeper.active,
            loaded=session.link.runtime.is_loaded,
            running_calls=tuple(call.request.method for call in session.link.calls.all_running()),
            streams=tuple(
                StreamInfo(
                    id=stream.id,
                    kind="standalone" if stream.kind is Kind.STANDALONE else "call",
                    state=stream.content.value
                    if stream.content is not ContentState.OPEN
                    else "live"
                    if stream.readers.present
                    else "detached",
                    last=stream.tail.last,
                    connected_since=stream.readers.reader.since if stream.readers.reader else None,
                )
                for stream in (session.standalone, *session.streams.values())
            ),
        )

    def ids(self) -> Sequence[str]:
        return [session_id for session_id, session in self._by_id.items() if not session.is_durable_call] + [
            *self._resting
        ]

    async def rest(self, session: Session) -> None:
        """Let go of a session: from now on the store alone knows it, and the next request loads it again. It leaves the
        table at the moment at which it is seen to be unused, so that no request gets an object that is let go of.
        Requests that come meanwhile wait in `load` and read it from the store."""
        if self._by_id.get(session.id) is not session or session.is_busy:
            return  # it has ended meanwhile, or is in use again
        del self._by_id[session.id]
        task = asyncio.create_task(session.rest())
        self._resting[session.id] = session, task
        task.add_done_callback(lambda _: self._resting.pop(session.id, None))
        await task

    async def aclose(self) -> None:
        """Drop every runtime. No session ends."""
        for session in self._by_id.values():
            session.orphans.close()
        await asyncio.gather(*(session.link.runtime.drop() for session in list(self._by_id.values())))
        answering = [call.answering for _, call in running_calls(self) if call.answering is not None]
        await cancel_all(answering)


def _is_session_of(owner: str, record: SessionRecord) -> bool:
    """Whether a record is that of a session of the owner. The id of a durable call is not the id of a session."""
    return record.owner == owner and record.kind is RecordKind.SESSION


def running_calls(sessions: SessionRegistry) -> list[tuple[Session, Call]]:
    return [(session, call) for session in sessions for call in session.link.calls.all_running()]


def busy_calls(sessions: SessionRegistry) -> list[tuple[Session, Call]]:
    """The running calls that a stop waits for."""
    return [(session, call) for session, call in running_calls(sessions) if not call.is_standing]


def has_tasks(sessions: SessionRegistry) -> bool:
    """Whether a call runs here that its client can ask for again, as a task, by its key, or by the id in its early
    answer, and that a stop waits for."""
    return any(_is_kept(session, call) for session, call in busy_calls(sessions))


def _is_kept(session: Session, call: Call) -> bool:
    return session.record.is_task or call.stream.answered > 0


class ToolHints:
    """Asks the server which of its tools may run again, and ends the calls of a process that stops accordingly. Answers
    are kept for one round of settling, or one stop."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._known: Mapping[str, JsonObject] | None = None
        """As callers without credentials see them."""
        self._owners: dict[str, Mapping[str, JsonObject]] = {}
        """As the owners of running calls see them, where the others do not see the tool."""
        self._offered: set[tuple[StreamId, NodeId]] = set()
        """The calls that stand still, and the nodes that were notified of them."""

    async def ask(self, record: SessionRecord, request: Request, origin: object) -> Rerun:
        """Whether the tool of a session's request may run again."""
        if origin is not None:
            return self._of_tool(record, request, await self._list(record, origin))
        if self._known is None:  # asked once: a server that does not answer is not waited for with each call
            self._known = {}
            self._known = await self._list(record, None)
        return self._of_tool(record, request, self._known)

    async def _list(self, record: SessionRecord, origin: object) -> Mapping[str, JsonObject]:
        try:
            async with asyncio.timeout(self._context.runtimes.answers_within):
                return await self._context.runtimes.tools(record, origin)
        except Exception as failure:  # whatever the server's handler raises
            log_event(logging.WARNING, "tools.unlisted", f"the server did not list its tools: {failure!r}")
            return {}

    async def learn_running(self, sessions: SessionRegistry) -> None:
        """Learn, while there is time, which of the tools that run here may run again elsewhere."""
        for session, call in running_calls(sessions):
            if call.request.method == "tools/call" and call.upstream == NOTHING_KEPT:
                may, record = await self.ask(session.record, call.request, None), session.record
                if may is Rerun.HIDDEN and call.origin is not None and record.owner not in self._owners:
                    self._owners[record.owner] = await self._list(record, call.origin)

    def end_calls(self, sessions: SessionRegistry, reason: str, *, outlived: bool, but_tasks: bool) -> None:
        """Leave calls that may run again to the next process, and answer the others. `outlived`: there may be a next
        process, because the store outlives this one. `but_tasks`: let calls run on that clients can ask for again."""
        for session, call in running_calls(sessions):
            if but_tasks and _is_kept(session, call):
                continue
            may, steps = self._may_go_on(session, call), call.steps
            if may is Rerun.STEPS and steps is not None and steps.course.is_unknown:
                may = Rerun.NO
            if not outlived or may not in (Rerun.YES, Rerun.STEPS, Rerun.FOLLOW):
                session.link.answer_unknown(call, reason)

    def leave_at_steps(self, sessions: SessionRegistry) -> None:
        """Let the calls of resumable tools begin no other step here, and let other nodes go on with those that stand
        still."""
        context = self._context
        for session, call in running_calls(sessions):
            call.leaves = call.leaves or self._may_go_on(session, call) is Rerun.STEPS
            link, stream = session.link, call.stream
            is_standing = all(other.is_standing for other in link.calls.all_running() if other.stream is stream)
            if not is_standing or link.asks.of(stream.id):
                continue  # something of this stream goes on here
            if nodes := [node for node in context.nodes.others if (stream.id, node) not in self._offered]:
                self._offered.update((stream.id, node) for node in nodes)
                context.put(*mail_to(nodes, mail.Standing(session=session.id, node=context.node, stream=stream.id)))

    def _may_go_on(self, session: Session, call: Call) -> Rerun:
        method, kept = call.request.method, call.upstream
        progressed = 0 if call.steps is None else call.steps.course.progressed
        may = rerun(method, attempt=call.attempt, occasion=Occasion.NODE_LEFT, kept=kept, progressed=progressed)
        tools = self._owners.get(session.record.owner) or self._known or {}
        return self._of_tool(session.record, call.request, tools) if may is Rerun.ASK else may

    def _of_tool(self, record: SessionRecord, request: Request, tools: Mapping[str, JsonObject]) -> Rerun:
        name = str((request.params or {}).get("name"))
        if (tool := tools.get(name)) is not None:
            return Rerun.YES if may_run_again(tool) else Rerun.STEPS if is_resumable(tool) else Rerun.NO
        # One of Perdure's own may not have been marked as such before its process died. Of a server that lists nothing
        # it is not known which names are its own.
        early = self._context.early
        is_own = early is not None and early.within(record) is not None and name in own_tools(tools)
        return Rerun.YES if is_own and tools else Rerun.HIDDEN


def numbers(context: ServerContext, sessions: SessionRegistry) -> Snapshot:
    held = [session for session in sessions if not session.is_durable_call]
    states = Counter(session.state.value for session in held)
    single = len(sessions) - len(held)
    return snapshot(
        context.node,
        context.counters,
        sessions={state.value: states[state.value] for state in SessionState if state is not SessionState.ENDED},
        durable_calls=single,
        streams={"standalone": len(held), "call": single + sum(len(session.streams) for session in held)},
        readers=len(context.hub.readers),
        open_readers=context.hub.count_readers(),
        held_bytes=context.journal.backlog.bytes,
        degraded=context.journal.is_degraded,
        measures=measures_of(context.store),
    )
