"""One session: its record, its streams, and what it keeps of them.

Several processes may hold the same session. What they share is in the store; the record here is what was read, with
this process's own changes on top until they are written.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic_core import to_json

from perdure._core import mail, sticky
from perdure._core.ids import Kind, NodeId, SessionId, StreamId, new_stream_id
from perdure._core.jsonrpc import Request
from perdure._core.revisions import REVISIONS, Revision
from perdure._core.states import SESSION, LogState, SessionState, SessionStep, StreamStep, advance
from perdure.errors import NodeGone, PerdureError, SessionEnded, StoreError
from perdure.exchange import Exchange
from perdure.house import House
from perdure.journal import Steps
from perdure.ledger import POSITION_LOST, Call, error_payload, rows
from perdure.observe import note
from perdure.retained import Retained
from perdure.store.base import (
    ChangeSession,
    DropStream,
    EndSession,
    Event,
    LeaveReader,
    OpenStream,
    Post,
    Release,
    SessionRecord,
    Step,
    Stick,
    StreamRecord,
)
from perdure.streams import Stream

_FORWARD_AT_ONCE = 64
"""Messages for the home that travel together."""

_FORWARD_AGAIN = 0.2
"""Seconds until the home is looked for again while the store fails."""

_MARK = b'"ask-'
"""Stands in every ask; what does not contain it need not be looked at."""


class Session:
    """A session that this process serves."""

    __slots__ = (
        "_forwarding",
        "_homing",
        "_outgoing",
        "_pending",
        "_tells_by_log",
        "_written_active",
        "active",
        "attached_at",
        "exchange",
        "house",
        "record",
        "retained",
        "seen",
        "stamp",
        "standalone",
        "streams",
        "waits",
    )

    def __init__(self, house: House, record: SessionRecord, standalone: StreamRecord) -> None:
        self.house = house
        self.record = record
        self.seen = self.active = self._written_active = record.active
        self.standalone = house.stream(standalone, writes=standalone.node == house.node)
        self.standalone.on_lost = self._home_lost
        self.streams: dict[StreamId, Stream] = {}
        self.retained = Retained(house.limits)
        self.exchange = Exchange(self)
        self.attached_at = 0
        """When its client was last here anew, as an arrival number of the hub's (R5)."""
        self.stamp: object = None
        """The store's stamp from before the record was last read."""
        self.waits = False
        """Calls of it wait for their principal to come back."""
        self._tells_by_log = _declares_logging(record.result)
        self._pending: tuple[ChangeSession | Stick, ...] = ()
        self._outgoing: list[tuple[bytes, Step | None]] = []
        self._forwarding: asyncio.Task[None] | None = None
        self._homing: asyncio.Lock | None = None

    @property
    def id(self) -> SessionId:
        return self.record.id

    @property
    def revision(self) -> Revision:
        return REVISIONS[self.record.version]

    @property
    def name(self) -> str:
        """Enough of its id to tell it from others in a log. The whole of it is a secret."""
        return self.record.id[:8]

    @property
    def state(self) -> SessionState:
        return self.record.state

    @property
    def home(self) -> bool:
        """This node is the session's home."""
        return self.standalone.writes

    @property
    def closes_early(self) -> bool:
        """A tool may close its connection before the answer is there."""
        return bool(self.record.version) and self.revision.closes_early and not self.house.settings.json_response

    @property
    def tells_by_log(self) -> bool:
        """The server declared logging, so a log message may tell of a gap."""
        return self._tells_by_log

    @property
    def connected(self) -> bool:
        return self.standalone.is_read or any(s.is_read for s in self.streams.values())

    @property
    def busy(self) -> bool:
        return bool(len(self.exchange.calls)) or bool(self._outgoing) or self.connected

    def touch(self) -> None:
        """The client is here."""
        self.seen = self.active = self.house.clock()
        if self.state is SessionState.DORMANT:
            self.update(state=advance(SESSION, self.state, SessionStep.CLIENT_CAME_BACK))

    async def come_back(self) -> None:
        """The client is here; if it was away for so long that its home went, this node is the home now."""
        rested = self.state is SessionState.DORMANT
        self.touch()
        if rested:
            await self.come_home()

    # Accepting requests

    async def accept(
        self, requests: Sequence[Request], bodies: Sequence[bytes], *steps: Step, incarnation: int
    ) -> list[Call]:
        """Write the ledger rows and the stream that will carry the answers; their ids are reserved already, in that
        incarnation (the session may have come further since).

        Only then may the runtime see them.
        """
        house, calls = self.house, self.exchange.calls
        record = StreamRecord(
            id=new_stream_id(house.random),
            session=self.record.id,
            kind=Kind.CALL,
            node=house.node,
            fence=house.fence,
            opened=house.clock(),
        )
        try:
            ledger = rows(requests, bodies, session=self.record, incarnation=incarnation, stream=record.id)
            await house.journal.write(*steps, OpenStream(record=record, calls=ledger))
            if self.state is SessionState.ENDED:
                raise SessionEnded
        except BaseException:
            calls.release(requests, incarnation=incarnation)
            self.put(DropStream(stream=record.id))  # it may have been written all the same
            raise
        stream = self._enter(record, owed=len(requests))
        house.counters.call_streams += 1
        house.counters.calls_accepted += len(requests)
        return calls.open(requests, incarnation=incarnation, stream=stream)

    def _enter(self, record: StreamRecord, *, owed: int) -> Stream:
        """A call's stream that this node writes from now on."""
        stream = self.streams.get(record.id)
        if stream is None:
            stream = self.streams[record.id] = self.house.stream(record, writes=True, owed=owed)
        else:
            stream.claimed(record, owed=owed)
        self._own(stream)
        return stream

    def _own(self, stream: Stream) -> None:
        stream.on_settled = self._settled
        stream.on_lost = self._call_lost
        stream.on_also = self._written

    def adopt(self, stream: Stream) -> None:
        """A call's stream that this node has claimed before it held the session."""
        if self.streams.get(stream.id) is not stream:
            if (before := self.streams.get(stream.id)) is not None and before.reader is not None:
                before.reader.end()  # it came while the stream was being claimed, and comes again
            self.streams[stream.id] = stream
            self._own(stream)

    def take_over(self, record: StreamRecord, *, owed: int) -> Stream:
        """A call's stream of a node that died, claimed by this one."""
        stream = self._enter(record, owed=owed)
        self.house.neighbours.now_written_here(stream)
        return stream

    def _call_lost(self, stream: Stream, _: Sequence[Event]) -> None:
        """Another node has claimed a call that runs here: whatever it still does is no longer wanted."""
        stream.on_settled = self._let_go  # it is retained by whoever writes it now
        self.exchange.stop_calls(stream)

    def consequence(self, call: Call, result: dict[str, Any]) -> Step | None:
        """What a successful answer changes in the record, to be written together with it."""
        method = call.request.method
        if method == "initialize" and self.state is SessionState.OPENING:
            return self._handshake_done(result)
        if method in sticky.METHODS:
            request = sticky.encode(call.request)
            self.exchange.stuck(request)
            return self._change(Stick(session=self.id, request=request))
        return None

    def _handshake_done(self, result: dict[str, Any]) -> Step | None:
        version = result.get("protocolVersion")
        if version not in REVISIONS:
            return None  # somebody's middleware answered in place of the SDK; the session does not open
        state = advance(SESSION, self.state, SessionStep.HANDSHAKE_DONE)
        encoded = to_json(result, inf_nan_mode="null")
        self._tells_by_log = _declares_logging(encoded)
        return self._change(ChangeSession(session=self.id, state=state, version=version, result=encoded))

    # The record

    def put(self, *steps: Step) -> None:
        """Write steps that nobody waits for."""
        self.house.journal.put(Steps(steps))

    def update(self, **changes: Any) -> None:
        """Change the record, and write it."""
        step = self._change(ChangeSession(session=self.id, active=self.active, **changes))
        self._written_active = self.active
        self.house.journal.put(_Change(self, step))

    def _change(self, step: ChangeSession | Stick) -> ChangeSession | Stick:
        self.record = _changed(self.record, step)
        self._pending += (step,)
        return step

    def _written(self, step: Step) -> None:
        self._pending = tuple(pending for pending in self._pending if pending is not step)

    def refresh(self, stored: SessionRecord, stamp: object, *, reattached: bool = False) -> None:
        """Take over what other processes have changed; or that the client has begun anew, here and now."""
        before = self.record
        self.stamp = stamp
        if before.state is SessionState.OPENING or stored.incarnation < before.incarnation:
            return  # still this node's alone; or read before the client began anew
        for step in self._pending:
            stored = _changed(stored, step)
        self.record = stored
        self.active = max(self.active, stored.active)
        if level := sticky.news(before.sticky, stored.sticky):
            self.exchange.repeat(level)
        if stored.incarnation > before.incarnation:
            self._begin_incarnation(here=reattached)
        if stored.initialized and not before.initialized:
            self.exchange.mark_initialized()

    def keep_fresh(self) -> None:
        """Write the time of the last activity if it has moved; retention goes by it."""
        if self.busy:
            self.active = self.house.clock()
        # Of a session in use it is enough to know the time roughly; the last one is written when it is left.
        settings = self.house.settings
        slack = min(settings.replay_window / 8, settings.session_grace / 2) if self.busy else 0.0
        # While the store fails this would only add to what is held, round after round.
        if self.active - self._written_active > slack and self.house.journal.state is LogState.HEALTHY:
            self.update()

    async def rest(self) -> None:
        """Nobody has used it for long: its runtime and its home go, record and answers stay (R8)."""
        if self.home:
            steps: list[Step] = [Release(stream=self.standalone.id, fence=self.standalone.fence)]
            if self.state is SessionState.ACTIVE:
                state = advance(SESSION, self.state, SessionStep.GRACE_PASSED)
                steps.insert(0, ChangeSession(session=self.id, active=self.active, state=state))
            try:
                await self.house.journal.write(*steps)
            except PerdureError as failure:  # another node is the home; or nobody will know that this one is not
                note(logging.INFO, "session.rest", f"a home could not be let go of: {failure}", session=self.name)
        await self.exchange.drop_runtime()

    async def end(self, step: SessionStep, reason: str) -> None:
        """End the session: running calls get their answer, readers their end, and everything stored goes."""
        if self.state is SessionState.ENDED:
            return
        state = advance(SESSION, self.state, step)
        self.record = replace(self.record, state=state, ended=step.value)
        await self._close(reason)
        self.house.counters.sessions_ended += 1
        tell = mail.encode(mail.Ended(session=self.id, reason=step.value))
        end = EndSession(session=self.id, time=self.house.clock(), reason=step.value)
        try:
            await self.house.journal.write(end)  # from then on every process answers 404
        except StoreError:
            self.put(end)  # it is written when the store is back
        for node in self.house.neighbours.others:
            self.put(Post(node=node, message=tell))

    async def was_ended(self, reason: str) -> None:
        """It was ended by another process: let go of it."""
        if self.state is not SessionState.ENDED:
            self.record = replace(self.record, state=SessionState.ENDED, ended=reason)
            for stream in self.streams.values():
                stream.unlog()
            await self._close("The session has ended")

    async def _close(self, reason: str) -> None:
        await self.exchange.aclose(reason)
        self.standalone.advance(StreamStep.SESSION_ENDED)
        for stream in (self.standalone, *self.streams.values()):
            if stream.reader is not None and not (stream.writes and stream.sealed):
                stream.reader.end()

    # The home, and what is sent on the standalone stream

    def say(self, payload: bytes, also: Step | None = None) -> Stream | None:
        """Send a message on the standalone stream; through the session's home, where that is another node.

        Gives the stream, if it was appended here.
        """
        if self.home and not self._outgoing:
            self.standalone.append(payload, also=also)
            return self.standalone
        if self.standalone.node and not self._outgoing:
            # In the journal's order, so that nothing is answered before what was said is in the home's mail (R2).
            self.house.journal.put(_Mailed(self, payload, also))
        else:
            self.say_later(payload, also)
        return None

    def say_later(self, payload: bytes, also: Step | None) -> None:
        """Send it when it is known who the home is."""
        self._outgoing.append((payload, also))
        if self._forwarding is None and self.state is not SessionState.ENDED:
            self._forwarding = asyncio.create_task(self._forward(), name="perdure-forward")

    async def _forward(self) -> None:
        try:
            while self._outgoing and self.state is not SessionState.ENDED:
                try:
                    await self._forward_some()
                except NodeGone:
                    continue  # the home is looked for anew
                except SessionEnded:
                    return
                except StoreError as failure:
                    note(logging.WARNING, "home.unreached", f"messages wait for their session's home: {failure}")
                    await asyncio.sleep(_FORWARD_AGAIN)
        finally:
            self._forwarding = None

    async def forwarded(self) -> None:
        """Wait until everything said so far has reached the home's mail, or this is the home."""
        if self._forwarding is not None:
            await asyncio.wait({self._forwarding})

    async def _forward_some(self) -> None:
        if await self.come_home():
            outgoing, self._outgoing = self._outgoing, []
            for payload, also in outgoing:
                self.standalone.append(payload, also=also)
            return
        some = self._outgoing[:_FORWARD_AT_ONCE]
        steps = [step for _, step in some if step is not None]
        await self.house.journal.write(*steps, self.mailed(*(payload for payload, _ in some)))
        del self._outgoing[: len(some)]

    def mailed(self, *payloads: bytes) -> Post:
        """Messages for the standalone stream, in the mail of the home."""
        texts = tuple(payload.decode() for payload in payloads)
        message = mail.Forward(id=new_stream_id(self.house.random), session=self.id, payloads=texts)
        return Post(node=self.standalone.node, message=mail.encode(message))

    async def come_home(self, *, take: bool = False) -> bool:
        """Become the session's home, if it has none that lives; with `take`, in any case. Tells whether it is."""
        if self.home:
            return True
        self._homing = self._homing or asyncio.Lock()
        async with self._homing:
            while not self.home:
                if not await self._claim_home(take=take):
                    return False
        return True

    async def _claim_home(self, *, take: bool) -> bool:
        store, journal, neighbours = self.house.store, self.house.journal, self.house.neighbours
        record = await journal.within_time(store.stream(self.standalone.id))
        if record is None or self.state is SessionState.ENDED:
            raise SessionEnded
        self.standalone.follow(record)
        if record.node and not take and not await neighbours.is_dead(record.node):
            return False
        claimed = await journal.within_time(store.claim(record.id, node=self.house.node, held=record.fence))
        if claimed is not None:
            self.standalone.claimed(claimed)
            if record.node:
                told = mail.encode(mail.Reading(session=self.id, stream=record.id))
                self.put(Post(node=record.node, message=told))  # so that its subscriptions end there
            neighbours.now_written_here(self.standalone)
            self.exchange.came_home()
        return True  # or another one was faster: look again

    def _home_lost(self, _: Stream, unwritten: Sequence[Event]) -> None:
        """Another node is the home now: it repeats the subscriptions, and what was not written goes there."""
        if self.state is SessionState.ENDED:
            return
        self.exchange.left_home()
        if self.standalone.reader is not None:
            self.house.hub.registry.attached(self.standalone.reader)
        rest, self._outgoing = self._outgoing, []
        for event in unwritten:
            self.say(event.payload)
        self._outgoing += rest

    # Incarnations

    def _begin_incarnation(self, *, here: bool) -> None:
        """The client began anew: its readers of before are ended, and what still waits for it is asked again."""
        for stream in (self.standalone, *self.streams.values()):
            if not stream.sealed:  # what is over ends by itself, with its answer
                self._end_reader(stream)
                if here:  # otherwise one elsewhere may be of this incarnation already
                    self._end_elsewhere(stream)
        self.attached()  # after its readers have left, so that they count as lost before
        self.exchange.ask_again()

    def _end_reader(self, stream: Stream) -> None:
        """End whoever reads a stream here, as if it had left in this moment."""
        if (reader := stream.reader) is not None:
            reader.end()
            self.house.hub.detach(reader)

    def _end_elsewhere(self, stream: Stream) -> None:
        """The same for whoever reads it at another node."""
        if stream.writes and (elsewhere := stream.foreign) is not None:
            stream.read_elsewhere(None, arrival=self.house.hub.arrive())
            told = mail.encode(mail.Reading(session=self.id, stream=stream.id))
            leave = LeaveReader(stream=stream.id, reader=elsewhere.reader)
            self.put(leave, Post(node=elsewhere.node, message=told))

    def attached(self) -> None:
        """The client is here anew, without positions of calls whose readers it lost (R5)."""
        self.attached_at = self.house.hub.arrive()

    def tell_attached(self) -> None:
        """Let the other nodes know of it: they may run such calls."""
        message = mail.encode(mail.Attached(session=self.id, incarnation=self.record.incarnation))
        if posts := [Post(node=node, message=message) for node in self.house.neighbours.others]:
            self.put(*posts)

    def tell_missed(self) -> None:
        """Somebody waits for the client's answer: the node that it is attached to shall say so."""
        message = mail.encode(mail.Missed(session=self.id, node=self.house.node))
        if posts := [Post(node=node, message=message) for node in self.house.neighbours.others]:
            self.put(*posts)

    def is_orphan(self, stream: Stream) -> bool:
        """Nobody reads this call's stream, and its client has come back since without asking for it."""
        return not stream.is_read and stream.lost_at < self.attached_at and stream.lost_at > 0

    # Streams that are over

    def _settled(self, stream: Stream) -> None:
        """A call's stream is over and nobody reads: from now on the store alone knows it."""
        self._let_go(stream)
        if self.state is not SessionState.ENDED:
            self.retained.add(stream.kept, time=self.house.clock())
            self.enforce_limits()

    def _let_go(self, stream: Stream) -> None:
        self.streams.pop(stream.id, None)
        self.streams = self.streams or {}

    def enforce_limits(self) -> None:
        if steps := self.retained.enforce([self.standalone, *self.streams.values()]):
            self.put(*steps)

    async def find_stream(self, stream_id: StreamId) -> Stream | None:
        """A call's stream of this session, from memory or from the store."""
        if (stream := self.streams.get(stream_id)) is not None:
            return stream
        record = await self.house.journal.within_time(self.house.store.stream(stream_id))
        if record is None or record.session != self.record.id or record.kind is not Kind.CALL:
            return None
        if (stream := self.streams.get(stream_id)) is not None:
            return stream  # another resume was faster
        stream = self.house.stream(record, writes=False)
        stream.on_settled = self._let_go
        self.streams[stream_id] = stream
        return stream

    async def catch_up(self, stream: Stream) -> None:
        """What another node writes may have grown since it was last read here."""
        if stream.writes or stream.over:
            return
        record = await self.house.journal.within_time(self.house.store.stream(stream.id))
        if record is not None:
            stream.follow(record)
        if stream.kind is Kind.CALL:  # it may be over, and let go of: but its reader comes now
            self.streams.setdefault(stream.id, stream)
            stream.on_settled = stream.on_settled or self._let_go

    async def lost_answers(self, stream: Stream) -> Sequence[bytes]:
        """Error responses for the calls of a stream whose answers are no longer retained."""
        answered = {json.loads(event.payload).get("id") for event in await self._finals(stream)}
        asked = await self.house.journal.within_time(self.house.store.requests(stream.id))
        message = "The answer to this request is no longer retained"
        return [
            error_payload(request_id, POSITION_LOST, message, {"method": method})
            for request_id, method in asked
            if request_id not in answered
        ]

    async def _finals(self, stream: Stream) -> list[Event]:
        finals: list[Event] = []
        after = 0
        while events := await self.house.journal.read(stream.id, after=after, limit=1_000):
            finals += [event for event in events if event.final]
            after = events[-1].seq
        return finals

    async def closed_asks(self, events: Sequence[Event]) -> set[int]:
        """Of replayed events, those that are asks which nobody waits for any more."""
        asked = {event.seq: ask for event in events if _MARK in event.payload and (ask := _ask_id(event.payload))}
        if not asked:
            return set()
        waiting = await self.house.journal.within_time(self.house.store.asks(self.id))
        still = {ask.id for ask in waiting if await self._lives(ask.node)} | self.exchange.open_asks
        return {seq for seq, ask in asked.items() if ask not in still}

    async def _lives(self, node: NodeId) -> bool:
        neighbours = self.house.neighbours
        return node in (self.house.node, *neighbours.others) or not await neighbours.is_dead(node)


class _Mailed:
    """A source for a message that the home appends; if that is gone, another one is looked for."""

    __slots__ = ("_also", "_payload", "_session")

    def __init__(self, session: Session, payload: bytes, also: Step | None) -> None:
        self._session = session
        self._payload = payload
        self._also = also

    def take(self) -> Sequence[Step]:
        post = self._session.mailed(self._payload)
        return (post,) if self._also is None else (self._also, post)

    def accepted(self, steps: Sequence[Step]) -> None:
        pass

    def written(self, steps: Sequence[Step]) -> None:
        pass

    def refused(self, steps: Sequence[Step], reason: PerdureError) -> None:
        self._session.say_later(self._payload, self._also)


class _Change:
    """A source for a change of a session's record."""

    __slots__ = ("_session", "_step")

    def __init__(self, session: Session, step: ChangeSession | Stick) -> None:
        self._session = session
        self._step = step

    def take(self) -> Sequence[Step]:
        return (self._step,)

    def accepted(self, steps: Sequence[Step]) -> None:
        pass

    def written(self, steps: Sequence[Step]) -> None:
        self._session._written(self._step)

    def refused(self, steps: Sequence[Step], reason: PerdureError) -> None:
        self._session._written(self._step)


def _changed(record: SessionRecord, step: ChangeSession | Stick) -> SessionRecord:
    """The record after a change of ours."""
    if isinstance(step, Stick):
        return replace(record, sticky=sticky.after(record.sticky, step.request))
    given = {
        name: value
        for name in ("state", "version", "result", "initialized")
        if (value := getattr(step, name)) is not None
    }
    return replace(record, active=max(record.active, step.active or 0.0), **given)


def _declares_logging(result: bytes) -> bool:
    return bool(result) and "logging" in json.loads(result).get("capabilities", {})


def _ask_id(payload: bytes) -> str | None:
    message = json.loads(payload)
    ask = message.get("id")
    return ask if "method" in message and isinstance(ask, str) and ask.startswith("ask-") else None
