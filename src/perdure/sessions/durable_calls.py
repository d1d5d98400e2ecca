"""Operations on durable calls of any node: begin, find by handle or key, wait, answer, cancel, run again, give up.

A durable call is a session of one call. Its record, its stream and its row are written in one commit, before its tool
runs. From then on any node can read its state, and settles it if its node dies.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

from perdure._core import heartbeats, mail
from perdure._core.codes import REQUEST_CANCELLED
from perdure._core.durable_calls import CallClient, TaskFacts, task_view
from perdure._core.ids import RecordKind, SessionId, StreamId, new_session_id, parse_session_id
from perdure._core.jsonrpc import JsonObject, Request, Response
from perdure._core.limits import Caller
from perdure._core.states import CallState, SessionState
from perdure.errors import StaleFence, StaleRecord, StoreError, StoreUnavailable, TooManySessions
from perdure.sessions.call_quota import ALL, CallQuota
from perdure.sessions.context import ServerContext
from perdure.sessions.ledger import Call, encode, encode_ask
from perdure.sessions.registry import SessionRegistry
from perdure.sessions.session import CancelWaiting, Intake, Session
from perdure.store.records import CallRecord, CallSnapshot, SessionRecord
from perdure.store.steps import EndSession, PutSession, SessionLimits

ANSWERED_SECONDS = 1.0
"""How long a request waits until its answers have arrived at the node that asked. A client asks its user again for
every ask that the next poll still shows, at whatever node."""

ROOM_SHARE = 100
"""A hundredth of a caller's calls is given up at once, so that the next ones, at whatever node, find room."""

MAX_ANSWER_BYTES = 256 << 20
"""Bytes of answers that are kept of one caller, nearly. Beyond, the answers that ended first are given up."""

MAKE_ROOM_MOST = 32
"""Times that calls are given up for a new one before it is refused: requests at other nodes may take the room each
time."""

GIVEN_UP_SECONDS = 1.0
"""How long a new call waits for the end of one that was given up for it."""

TRIM_MOST = 32
"""Times that a hundredth is given up for one call, because the answers that are kept have too many bytes. What is still
too much is given up with the next calls."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewCall:
    request: Request
    body: bytes
    caller: Caller
    client: CallClient
    names: tuple[SessionId, StreamId] | None
    """The ids of the record and the stream, where they are made of a key."""
    digest: bytes
    size: int
    """Bytes of memory that it takes, estimated."""


class DurableCalls:
    """The durable calls on the log, whichever node runs them. Every method that reads or writes raises `StoreError`."""

    def __init__(self, context: ServerContext, sessions: SessionRegistry, cancel_waiting: CancelWaiting) -> None:
        """`cancel_waiting`: as in `Session.receive`."""
        self._context = context
        self._sessions = sessions
        self._cancel_waiting = cancel_waiting
        self._beginning: dict[SessionId, asyncio.Future[None]] = {}
        """Calls with a key whose rows are being written."""
        self._trimming = asyncio.Lock()
        self._making_room = asyncio.Lock()
        settings, clock = context.settings, context.clock
        self._tasks = CallQuota(settings.max_tasks, clock)
        self._own_tasks = CallQuota(settings.max_principal_tasks, clock)
        self._own_bytes = CallQuota(settings.max_principal_tasks, clock)

    # Beginning

    async def begin(self, new: NewCall) -> tuple[Session, Call] | None:
        """Accept a call, if need be in place of others of its caller. `None` if a call with the same key exists or
        existed, at any node. Raises `TooManySessions` beyond the limit of the caller or of all, `TooManyKeys`, and
        `StoreUnavailable`."""
        with contextlib.suppress(TooManySessions):
            return await self._begin_within_limits(new)
        async with self._making_room:  # one after the other, or all would give up the same call
            for _ in range(MAKE_ROOM_MOST):
                try:
                    return await self._begin_within_limits(new)
                except TooManySessions:
                    if not await self._make_room(new.caller) and not await self.give_up_round(new.caller):
                        raise
            return await self._begin_within_limits(new)

    async def _begin_within_limits(self, new: NewCall) -> tuple[Session, Call] | None:
        session_id = new_session_id(self._context.random) if new.names is None else new.names[0]
        if session_id in self._beginning or self._sessions.held(session_id) is not None:
            return None
        if not await self._tasks.has_room(ALL, self._count_tasks):
            if new.names is not None and await self._context.store.session(session_id) is not None:
                return None
            raise TooManySessions(of_caller=False)
        if self._own_bytes.is_due(new.caller):
            async with self._trimming:
                for _ in range(TRIM_MOST):
                    size = await self._context.store.bytes_of(new.caller)
                    if size <= MAX_ANSWER_BYTES or not await self._make_room(new.caller):
                        break
            self._own_bytes.found_room(new.caller)
        if new.names is None:
            return await self._begin(new, session_id)
        if session_id in self._beginning or self._sessions.held(session_id) is not None:
            return None  # in this moment
        begun, keyed = asyncio.get_running_loop().create_future(), self._context.keyed
        self._beginning[session_id] = begun
        try:
            async with keyed.one_at_a_time(new.names[1]):
                return None if keyed.is_running(new.names[1]) else await self._begin(new, session_id)
        except (StaleFence, StaleRecord):
            return None
        finally:
            del self._beginning[session_id]
            begun.set_result(None)

    async def _count_tasks(self) -> int:
        if self._context.journal.is_degraded:
            return 0  # live traffic goes on, and does not wait for a store that hangs (promise 7)
        try:
            states = await self._context.store.count_states(RecordKind.CALL)
        except StoreError:
            return 0
        return sum(count for state, count in states.items() if state is not SessionState.ENDED)

    async def _begin(self, new: NewCall, session_id: SessionId) -> tuple[Session, Call]:
        context, client, caller = self._context, new.client, new.caller
        if new.names is not None and context.journal.is_degraded:
            raise StoreUnavailable("the store cannot say now whether a call with this key exists")
        now = context.clock()
        record = SessionRecord(
            id=session_id,
            owner=caller.owner,
            address=caller.address,
            state=SessionState.ACTIVE,
            version=client.version,
            client_params=encode(client.told),
            is_task=new.names is not None,
            standalone=StreamId(""),
            created=now,
            active=now,
            kind=RecordKind.CALL,
        )
        registry = self._sessions
        session = Session(context, record, None, registry.streams, registry.end_soon, stamp=context.stamp())
        self._sessions.hold(session)
        due = self._own_tasks.is_due(caller)
        limits = SessionLimits(total=None, caller=self._own_tasks.limit) if due else None
        try:
            with Intake(session, (new.request,), size=new.size) as intake:
                put = PutSession(record=record, limits=limits)
                stream = None if new.names is None else new.names[1]
                # A record that exists and differs from the one that was put may be a key whose answer was given up.
                seen = None if stream is None else record.revision
                _, [call] = await intake.accept((new.body,), put, stream_id=stream, digest=new.digest, seen=seen)
        except BaseException:
            self._sessions.let_go(session)
            raise
        if due:
            self._own_tasks.found_room(caller)
        return session, call

    # Giving up

    async def _make_room(self, caller: Caller) -> bool:
        """Give up a hundredth of a caller's own calls that have ended: first those that were delivered whole, and of
        these the ones that ended longest ago. Returns whether there was one. Raises `TooManyKeys`."""
        store = self._context.store
        for done in range(max(1, self._own_tasks.limit // ROOM_SHARE)):
            record = await store.longest_dormant(caller, kind=RecordKind.CALL, delivered=True)
            record = record or await store.longest_dormant(caller, kind=RecordKind.CALL, delivered=False)
            if record is None:
                return done > 0
            await self._context.keyed.check_room(self._context, caller)
            if not await self._give_up(record):
                return done > 0
        return True

    async def give_up_round(self, caller: Caller) -> bool:
        """Cancel the call of a caller that has waited longest here for the answer to a round, and whose client may
        never come again. Returns whether there was one."""
        rounds = [session for session in self._sessions if session.asks_by_round]
        own = [session for session in rounds if (session.record.owner, session.record.address) == caller]
        if not own:
            return False
        record = min(own, key=attrgetter("seen")).record
        await self.cancel(record, "its client did not answer, and there was no room for others")
        await self.wait(record, attrgetter("is_over"), seconds=GIVEN_UP_SECONDS)
        sentence = "a call whose client was asked something was given up for newer ones of its caller"
        self._context.peer_log.log_event(logging.WARNING, "round.given_up", sentence, session=record.id[:8])
        return True

    async def _give_up(self, record: SessionRecord) -> bool:
        """Delete the answer of a call that has ended, unless a node uses it, and keep its key for as long as the answer
        would have been kept. Returns whether it is given up."""
        row = await self.row(record)
        if row is None and await self._context.store.session(record.id) != record:
            return True  # another process has given it up in this moment
        digest = b"" if row is None else row.digest
        key = replace(record, kind=RecordKind.KEY, version="", client_params=b"", result=b"", digest=digest, revision=1)
        end = EndSession(session=record.id, time=record.active, reason="given up", unused_since=record.active)
        await self._context.journal.write(end, PutSession(record=key))
        now = await self._context.store.session(record.id)
        if now is not None and now.kind is RecordKind.CALL:
            return False
        self._tasks.made_room(ALL)
        self._context.counters.answers_given_up += 1
        sentence = "the answer of a call that has ended was given up for newer ones of its caller (max_principal_tasks)"
        self._context.peer_log.log_event(logging.WARNING, "call.given_up", sentence, session=record.id[:8])
        return True

    # Finding

    async def find(self, text: object, owner: str) -> SessionRecord | None:
        """The record of a caller's own call. A foreign call is treated as one that does not exist."""
        if (session_id := parse_session_id(text)) is None:
            return None
        if (beginning := self._beginning.get(session_id)) is not None:
            await asyncio.shield(beginning)
        return await self._context.nodes.found(partial(self._own_record, session_id, owner))

    async def given_up(self, text: object, owner: str) -> SessionRecord | None:
        """The key of a caller's own call whose answer was given up."""
        session_id = parse_session_id(text)
        record = None if session_id is None else await self._context.store.session(session_id)
        return record if record is not None and record.kind is RecordKind.KEY and record.owner == owner else None

    async def find_with_facts(self, text: object, owner: str) -> tuple[SessionRecord, TaskFacts] | None:
        """A caller's own call and its state, with one query at most."""
        if (session_id := parse_session_id(text)) is None:
            return None
        held, facts = self._sessions.held(session_id), self._held_facts(session_id)
        if held is not None and facts is not None and held.record.is_own(owner, RecordKind.CALL):
            return held.record, facts
        kept = await self._context.store.durable_call(session_id, recent=heartbeats.RECENT)
        if kept is not None and kept.call is not None and kept.record.is_own(owner, RecordKind.CALL):
            return kept.record, _facts(kept, kept.call)
        # It may be held at another node, or in another form here.
        record = await self.find(text, owner)
        found = None if record is None else await self.facts(record)
        return None if record is None or found is None else (record, found)

    async def _own_record(self, session_id: SessionId, owner: str) -> SessionRecord | None:
        """The record of a call, if it is the owner's. A foreign call causes the same queries as one that does not
        exist, so that a failure of the store does not distinguish them."""
        held = self._sessions.held(session_id)
        if held is not None and held.streams and held.record.is_own(owner, RecordKind.CALL):
            return held.record
        record = await self._context.store.session(session_id)
        return record if record is not None and record.is_own(owner, RecordKind.CALL) else None

    async def row(self, record: SessionRecord) -> CallRecord | None:
        rows = await self._context.store.calls(record.id)
        return rows[0] if rows else None

    async def facts(self, record: SessionRecord) -> TaskFacts | None:
        """The state of a call at this moment: what this process holds of it counts before the store."""
        if (held := self._held_facts(record.id)) is not None:
            return held
        kept = await self._context.store.durable_call(record.id, recent=heartbeats.RECENT)
        return None if kept is None or kept.call is None else _facts(kept, kept.call)

    def _held_facts(self, session_id: SessionId) -> TaskFacts | None:
        """The state of a call that runs here, or that has ended here and whose end the store may not have yet."""
        if (session := self._sessions.held(session_id)) is None:
            return None
        facts = TaskFacts(
            id=session_id,
            created=session.record.created,
            updated=session.keeper.active,
            state=CallState.RUNNING,
            asks={name: encode_ask(name, ask.method, ask.params) for name, ask in session.link.asks.open.items()},
        )
        if running := session.link.calls.all_running():
            return replace(facts, progress=running[0].progress_params)
        # What has ended is not shown before the store has accepted it; what waits for its principal is in the store.
        for stream in session.streams.values():
            if stream.is_over and (finals := stream.tail.finals):
                error = json.loads(answer := finals[-1].payload).get("error")
                cancelled = error is not None and error["code"] == REQUEST_CANCELLED
                state = CallState.CANCELLED if cancelled else CallState.ANSWERED
                return replace(facts, updated=finals[-1].time, state=state, asks={}, answer=answer)
        return None

    def view(self, facts: TaskFacts) -> JsonObject:
        """A call as its client sees it as a task."""
        settings = self._context.settings
        return task_view(facts, now=self._context.clock(), ttl=min(settings.task_ttl, settings.replay_window))

    # Waiting

    async def wait(
        self, record: SessionRecord, until: Callable[[TaskFacts], bool], *, seconds: float
    ) -> TaskFacts | None:
        """Wait for a call to come as far as wanted, for some time at most. Returns its state; `None`: it is gone."""
        end = asyncio.get_running_loop().time() + seconds
        session = self._sessions.held(record.id)
        stream = None if session is None else next(iter(session.streams), None)
        if stream is None:
            if (row := await self.row(record)) is None:
                return None
            stream = row.stream
        with self._context.waiters.watch(stream, until=end) as watch:
            while True:
                facts = await self.facts(record)
                if facts is None or until(facts) or not await watch.again():
                    return facts

    async def follow(self, record: SessionRecord, *, answered: Collection[str], seconds: float) -> TaskFacts | None:
        """Wait until a call has ended or asks its client something, for some time at most. `answered`: asks that the
        client has answered, although the node that asked may not have the answers yet. `None`: the call is gone."""
        facts = await self.wait(record, partial(needs_its_client, answered=answered), seconds=seconds)
        if facts is None:
            return None
        return replace(facts, asks={name: ask for name, ask in facts.asks.items() if name not in answered})

    async def wait_answered(self, record: SessionRecord, names: Collection[str]) -> None:
        """Wait, for a short time, until the node that asked has the answers."""
        await self.wait(record, lambda facts: facts.asks.keys().isdisjoint(names), seconds=ANSWERED_SECONDS)

    # Acting on a call, wherever it runs

    async def waits_for_principal(self, record: SessionRecord) -> bool:
        """Whether a call runs again only with a request of its principal."""
        if not record.owner or self._held_facts(record.id) is not None:
            return False
        row = await self.row(record)
        return row is not None and row.state is CallState.WAITING

    async def cancel(self, record: SessionRecord, reason: str) -> None:
        """Cancel a call, wherever it runs or waits; one that has ended stays as it is."""
        if (row := await self.row(record)) is None:
            return
        params = {"requestId": row.request_id, "reason": reason}
        cancelled = mail.Cancelled(session=record.id, incarnation=1, request_id=row.request_id, params=params)
        async with self._sessions.using(record.id) as session:
            if session is not None:
                await session.cancel_call(cancelled, self._cancel_waiting)

    async def answer(self, record: SessionRecord, responses: Mapping[str, Any], origin: object) -> None:
        """Hand the client's answers to the node that asked."""
        async with self._sessions.using(record.id) as session:
            if session is None:
                return
            for name, result in responses.items():
                answer = Response(id=name, raw={"jsonrpc": "2.0", "id": name, "result": result})
                await session.receive(answer, origin, size=0, cancel_waiting=self._cancel_waiting)


def needs_its_client(facts: TaskFacts, *, answered: Collection[str] = ()) -> bool:
    """Whether a call has ended, or waits for an answer that its client has not given."""
    return facts.is_over or any(name not in answered for name in facts.asks)


def _facts(kept: CallSnapshot, call: CallRecord) -> TaskFacts:
    record, recent = kept.record, kept.recent
    return TaskFacts(
        id=record.id,
        created=record.created,
        updated=recent[-1].time if recent else record.created,
        state=call.state,
        asks={ask.id: ask.request for ask in kept.asks},
        progress=heartbeats.last_progress([event.payload for event in recent]),
        answer=next((event.payload for event in recent if event.final), None),
    )
