"""Begins single calls, and finds them again: by the id of their task, or by their key.

A single call is a session of one call. Its record, its stream and its row are written in one commit, before its tool
runs; from then on any node can tell how far it is, and settles it if its node dies.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from perdure._core.codes import REQUEST_CANCELLED
from perdure._core.durable_calls import Client, TaskFacts
from perdure._core.ids import RecordKind, SessionId, StreamId, new_session_id, parse_session_id
from perdure._core.jsonrpc import JsonObject, Request
from perdure._core.limits import Caller
from perdure._core.states import CallState, LogState, SessionState
from perdure.errors import StaleFence, StaleRecord, StoreUnavailable, TooManySessions
from perdure.sessions.call_quota import CallerChecks, KeyRoom, TaskCount
from perdure.sessions.context import ServerContext
from perdure.sessions.ledger import Call, encode, encode_ask
from perdure.sessions.registry import SessionRegistry
from perdure.sessions.session import Intake, Session
from perdure.store.records import CallRecord, CallSnapshot, Event, SessionRecord
from perdure.store.steps import EndSession, PutSession, SessionLimits

LOOK_AGAIN = 2.0
"""Seconds after which a request that waits for a call reads again, in case it missed a hint."""

ROOM_SHARE = 100
"""A hundredth of a caller's calls is given up at once, so that the next ones, at whatever node, find room."""

_GIVEN_UP = "given up"

TRIM_MOST = 32
"""Times that a hundredth is given up for one call, because the answers that are kept have too many bytes. What is still
too much goes with the next calls."""

_RECENT = 16
"""Events at the end of a stream in which the last progress is looked for: what follows it are questions, which are few,
or log messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A request that becomes a durable call."""

    request: Request
    body: bytes
    caller: Caller
    client: Client
    names: tuple[SessionId, StreamId] | None
    """The ids of the record and the stream, where they are made of a key."""
    digest: bytes
    size: int
    """Bytes of memory that it takes, estimated."""


class TooManyKeys(Exception):
    """As many keys of a caller are kept as may be, so none of its calls can be given up."""


class DurableCalls:
    """The durable calls of this process, and those that any process has begun."""

    def __init__(self, context: ServerContext, sessions: SessionRegistry) -> None:
        self._context = context
        self._sessions = sessions
        self._beginning: dict[SessionId, asyncio.Future[None]] = {}
        """Calls with a key whose rows are being written."""
        self._count = TaskCount(context.store, context.settings.max_tasks, context.clock)
        self._checks = CallerChecks(context.settings.max_principal_tasks)
        self._sizes = CallerChecks(context.settings.max_principal_tasks)
        self._trimming = asyncio.Lock()
        self.keys = KeyRoom(context.store, context.settings.max_keys, context.clock)

    async def begin(self, asked: Asked) -> tuple[Session, Call] | None:
        """Accept a call. `None` if a call with the same key exists or existed, at any node. Raises `TooManySessions`
        beyond the limit of the caller or of all, `TooManyKeys`, and `StoreUnavailable`."""
        session_id = new_session_id(self._context.random) if asked.names is None else asked.names[0]
        if session_id in self._beginning or self._sessions.held(session_id) is not None:
            return None
        if await self._count.is_full():
            if asked.names is not None and await self._context.store.session(session_id) is not None:
                return None
            raise TooManySessions(of_caller=False)
        if self._sizes.is_due(asked.caller):
            await self._trim(asked.caller)
            self._sizes.found_room(asked.caller)
        if asked.names is None:
            return await self._begin(asked, session_id)
        if session_id in self._beginning or self._sessions.held(session_id) is not None:
            return None  # in this moment
        begun = self._beginning[session_id] = asyncio.get_running_loop().create_future()
        try:
            return await self._begin(asked, session_id)
        except (StaleFence, StaleRecord):
            return None
        finally:
            del self._beginning[session_id]
            begun.set_result(None)

    async def _begin(self, asked: Asked, session_id: SessionId) -> tuple[Session, Call]:
        context, client, caller = self._context, asked.client, asked.caller
        if asked.names is not None and context.journal.state is LogState.DEGRADED:
            raise StoreUnavailable("the store cannot tell now whether there is a call with this key")
        now = context.clock()
        record = SessionRecord(
            id=session_id,
            owner=caller.owner,
            address=caller.address,
            state=SessionState.ACTIVE,
            version=client.version,
            client_params=encode(client.told),
            result=b"",
            initialized=asked.names is not None,
            sticky=(),
            incarnation=1,
            standalone=StreamId(""),
            created=now,
            active=now,
            kind=RecordKind.CALL,
        )
        session = Session(context, record, None, self._sessions.streams, stamp=context.stamp())
        self._sessions.hold(session)
        due = self._checks.is_due(caller)
        limits = SessionLimits(total=None, caller=context.settings.max_principal_tasks) if due else None
        try:
            with Intake(session, (asked.request,), size=asked.size) as intake:
                put = PutSession(record=record, limits=limits)
                stream = None if asked.names is None else asked.names[1]
                # A record that is there and is not as it was put may be a key whose answer was given up.
                seen = None if stream is None else record.revision
                [call] = await intake.accept((asked.body,), put, stream_id=stream, digest=asked.digest, seen=seen)
        except BaseException:
            self._sessions.let_go(session)
            raise
        if due:
            self._checks.found_room(caller)
        self._count.begun()
        return session, call

    def leave(self, session: Session) -> None:
        """The request that began a call is through with it."""
        if not session.record.initialized:
            self._count.gone()  # nothing of it is kept
        self._sessions.let_go(session)

    async def make_room(self, caller: Caller) -> bool:
        """Give up a hundredth of a caller's own calls that have ended: first those that were delivered whole, and of
        these the ones that ended longest ago. Returns whether there was one. Raises `TooManyKeys`."""
        for done in range(max(1, self._context.settings.max_principal_tasks // ROOM_SHARE)):
            if not (await self._give_up_oldest(caller)):
                return done > 0
        return True

    async def _give_up_oldest(self, caller: Caller) -> bool:
        longest = self._context.store.longest_dormant
        for delivered in (True, False):
            record = await longest(*caller, kind=RecordKind.CALL, delivered=delivered)
            if record is not None:
                if not await self.keys.take(caller):
                    raise TooManyKeys
                return await self._give_up(record)
        return False

    async def _give_up(self, record: SessionRecord) -> bool:
        """Delete the answer of a call that has ended, unless a node uses it, and keep its key for as long as the answer
        would have been kept. Returns whether it is given up."""
        row = await self.row(record)
        if row is None and await self._context.store.session(record.id) != record:
            return True  # another process has given it up in this moment
        digest = b"" if row is None else row.digest
        key = replace(record, kind=RecordKind.KEY, version="", client_params=b"", result=b"", digest=digest, revision=1)
        end = EndSession(session=record.id, time=record.active, reason=_GIVEN_UP, unused_since=record.active)
        await self._context.journal.write(end, PutSession(record=key))
        now = await self._context.store.session(record.id)
        if now is not None and now.kind is RecordKind.CALL:
            return False
        self._count.gone()
        self._context.counters.answers_given_up += 1
        sentence = "the answer of a call that has ended was given up for newer ones of its caller (max_principal_tasks)"
        self._context.peers.log_event(logging.WARNING, "call.given_up", sentence, session=record.id[:8])
        return True

    async def _trim(self, caller: Caller) -> None:
        """Give up calls of a caller until no more bytes of it are kept than may be."""
        most = self._context.settings.max_principal_task_bytes
        async with self._trimming:
            for _ in range(TRIM_MOST):
                if await self._context.store.bytes_of(*caller) <= most or not await self.make_room(caller):
                    return

    def is_here(self, record: SessionRecord) -> bool:
        """Whether a call runs at this node, or has ended here and the store may not know that yet."""
        return self._held_facts(record.id) is not None

    # Finding

    async def find(self, text: object, owner: str) -> SessionRecord | None:
        """The record of a caller's own call. A foreign call is treated as one that does not exist."""
        session_id = parse_session_id(text) if isinstance(text, str) else None
        if session_id is None:
            return None
        if (beginning := self._beginning.get(session_id)) is not None:
            await asyncio.shield(beginning)
        record = await self._own_record(session_id, owner)
        if record is None:
            await self._context.nodes.refuse_while_held()
            record = await self._own_record(session_id, owner)
        return record

    async def given_up(self, text: object, owner: str) -> SessionRecord | None:
        """What is left of a caller's own call whose answer was given up."""
        session_id = parse_session_id(text) if isinstance(text, str) else None
        record = None if session_id is None else await self._context.store.session(session_id)
        return record if record is not None and record.kind is RecordKind.KEY and record.owner == owner else None

    async def look(self, text: object, owner: str) -> tuple[SessionRecord, TaskFacts] | None:
        """A caller's own call and its state, with one query at most."""
        session_id = parse_session_id(text) if isinstance(text, str) else None
        held = None if session_id is None else self._sessions.held(session_id)
        if held is not None and _is_call_of(owner, held.record) and (facts := self._held_facts(held.id)) is not None:
            return held.record, facts
        kept = None if session_id is None else await self._context.store.single_call(session_id, recent=_RECENT)
        if kept is not None and kept.call is not None and _is_call_of(owner, kept.record):
            return kept.record, _facts(kept, kept.call)
        # It may be held at another node, or in another form here: looked for as whatever concerns a call.
        record = await self.find(text, owner)
        found = None if record is None else await self.facts(record)
        return None if record is None or found is None else (record, found)

    async def _own_record(self, session_id: SessionId, owner: str) -> SessionRecord | None:
        """The record of a call, if it is the owner's. A foreign call causes the same queries as one that does not
        exist, so that a failure of the store does not distinguish them."""
        held = self._sessions.held(session_id)
        if held is not None and held.streams and _is_call_of(owner, held.record):
            return held.record
        record = await self._context.store.session(session_id)
        return record if record is not None and _is_call_of(owner, record) else None

    async def row(self, record: SessionRecord) -> CallRecord | None:
        """A call's row, with the digest of its request."""
        rows = await self._context.store.calls(record.id)
        return rows[0] if rows else None

    async def facts(self, record: SessionRecord) -> TaskFacts | None:
        """The state of a call at this moment: what this process holds of it counts before the store."""
        if (held := self._held_facts(record.id)) is not None:
            return held
        kept = await self._context.store.single_call(record.id, recent=_RECENT)
        if kept is None or kept.call is None:
            return None
        return _facts(kept, kept.call)

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

    async def _stream(self, record: SessionRecord) -> StreamId | None:
        if (session := self._sessions.held(record.id)) is not None:
            for stream_id in session.streams:
                return stream_id
        row = await self.row(record)
        return None if row is None else row.stream

    async def wait(
        self, record: SessionRecord, until: Callable[[TaskFacts], bool], *, seconds: float
    ) -> TaskFacts | None:
        """Wait for a call to come as far as wanted, for some time at most. Returns its state; `None`: it is gone."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        if (stream := await self._stream(record)) is None:
            return None
        with self._context.waiters.watch(stream) as watched:
            while True:
                facts = await self.facts(record)
                left = deadline - loop.time()
                if facts is None or left <= 0 or until(facts):
                    return facts
                await watched.changed(min(left, LOOK_AGAIN))


def _is_call_of(owner: str, record: SessionRecord) -> bool:
    return record.owner == owner and record.kind is RecordKind.CALL and record.state is not SessionState.ENDED


def _facts(kept: CallSnapshot, call: CallRecord) -> TaskFacts:
    record, recent = kept.record, kept.recent
    return TaskFacts(
        id=record.id,
        created=record.created,
        updated=recent[-1].time if recent else record.created,
        state=call.state,
        asks={ask.id: ask.request for ask in kept.asks},
        progress=_last_progress(recent),
        answer=next((event.payload for event in recent if event.final), None),
    )


def _last_progress(events: Sequence[Event]) -> JsonObject | None:
    for event in reversed(events):
        if b"notifications/progress" in event.payload:
            message = json.loads(event.payload)
            if message.get("method") == "notifications/progress":
                params: JsonObject = message["params"]
                return params
    return None
