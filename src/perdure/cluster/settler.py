"""Settles the calls of dead nodes: every one gets its final answer (promise 3).

The dead node's streams are claimed one by one; of several nodes that try, one succeeds, and the dead one, should it
only have been paused, finds that it may write nothing more. The table in `_core.settling` decides what becomes of each
call. One that may run again does so into the same stream, once; all others are answered: interrupted, outcome unknown.

With authentication a call waits: it needs its principal's credentials to run again, or to find out whether it may. The
node that gets the principal's next request claims it and runs it in that request's context. A principal that does not
come back is waited for during `session_grace`.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from perdure._core import mail, session_tasks, settling
from perdure._core.durable_calls import TaskFacts
from perdure._core.ids import Fence, Kind, NodeId, RecordKind, SessionId, StreamId
from perdure._core.jsonrpc import JsonObject, Request, coerce_id
from perdure._core.settling import VERDICTS, Occasion, Rerun, Verdict
from perdure._core.states import CALL, SESSION, UNENDED, CallState, CallStep, SessionState, SessionStep, advance
from perdure._core.tool_steps import StepHistory, ToolStepKind
from perdure._core.unknown_outcome import Outline
from perdure.errors import HeldElsewhere, IdTaken, SessionEnded, StaleFence, StoreError, StoreUnavailable
from perdure.log.chores import Chores
from perdure.log.nodes import mail_to
from perdure.log.stream import Stream
from perdure.sessions.context import ServerContext
from perdure.sessions.ledger import cancelled, end_of_call, request_of, unknown_outcome
from perdure.sessions.registry import SessionRegistry, ToolHints
from perdure.sessions.second_run import said_before
from perdure.sessions.session import Session
from perdure.sessions.tool_steps import ask_name, course_of, recorded_answer
from perdure.store.interface import open_call, paged, stream_by_id, streams_by_id
from perdure.store.records import AskRecord, CallRecord, SessionRecord, StreamRecord, ToolStepRecord
from perdure.store.steps import (
    CallEnd,
    ChangeSession,
    CloseAsk,
    DropStream,
    EndSession,
    MailReceived,
    PutCall,
    PutToolStep,
    Release,
    Step,
)
from perdure.telemetry import tracing as spans
from perdure.telemetry.log_records import log_event

CallKey = tuple[SessionId, int, int | str]
"""Session, incarnation and request id, as the SDK compares ids."""


@dataclass(frozen=True, kw_only=True)
class AbandonedCall:
    row: CallRecord
    course: StepHistory = field(default_factory=StepHistory)
    """The steps that its tool has done."""
    asks: Sequence[AskRecord] = ()
    """The questions that its client had to answer."""
    dead: NodeId = field(default=NodeId(""))
    """The node that has asked them."""
    claims: int = 1
    """How often nodes have claimed its stream: its generation, before the claim that settles it."""

    @cached_property
    def request(self) -> Request | None:
        """`None` if the recorded bytes cannot be parsed."""
        return request_of(self.row)

    @property
    def key(self) -> CallKey:
        return self.row.session, self.row.incarnation, coerce_id(self.row.request_id)

    @property
    def ids(self) -> dict[str, Any]:
        return {"session": self.row.session, "stream": self.row.stream, "call": self.row.request_id}

    def outline(self, now: float) -> Outline | None:
        return self.course.outline(now) if self.course.marks else None

    def stands(self, now: float) -> bool:
        """Whether it did nothing but wait when its process ended. Then that end was not due to it, and does not
        count."""
        waits = settling.is_wait(self.row.method, settling.decode_kept(self.row.upstream))
        return waits or bool(self.asks) or self.course.sleeps(now)

    def ended(self, step: CallStep) -> CallEnd:
        row, state, stepped = self.row, advance(CALL, self.row.state, step), bool(self.course.marks)
        return CallEnd(incarnation=row.incarnation, request_id=row.request_id, state=state, stepped=stepped)

    def changed(self, step: CallStep, stream: Stream) -> PutCall:
        row = self.row
        return PutCall(
            stream=stream.id,
            fence=stream.fence,
            incarnation=row.incarnation,
            request_id=row.request_id,
            state=advance(CALL, row.state, step),
            attempt=row.attempt,
            progress=row.progress,
        )


@dataclass(frozen=True, kw_only=True)
class SettleRequest:
    """One request to settle calls: the occasion, and what is known and was done on it."""

    occasion: Occasion
    tools: ToolHints
    origin: object = None
    """The request whose credentials a call runs with; only the runtime reads it."""
    cancelled: frozenset[CallKey] = frozenset()
    withdrawn: set[str] = field(default_factory=set)
    """Asks of dead nodes that were cancelled."""
    reported: set[SessionId] = field(default_factory=set)
    """Sessions of which the other nodes know that their calls lost readers: one message each, not one for each call,
    which could fill a mailbox."""


_Settle = Callable[[StreamRecord, SettleRequest], Awaitable[bool]]
"""Settles the calls that wait on a stream; `False` if none waits any more."""


def is_of(ask: AskRecord, row: CallRecord) -> bool:
    """Whether a question is that of a call's tool."""
    return (ask.call, ask.incarnation, ask.request_id) == (row.stream, row.incarnation, row.request_id)


ELSEWHERE = StreamId("")


class PrincipalCalls:
    """The calls that wait for their principal, as far as this node knows."""

    def __init__(self, context: ServerContext, sessions: SessionRegistry, settle: _Settle) -> None:
        self._context = context
        self._sessions = sessions
        self._settle = settle
        self._monotonic = context.hub.monotonic
        self._chores = Chores()
        self._until: dict[SessionId, dict[StreamId, float]] = {}
        """Sessions with such calls, and until when the calls of a stream wait here. Those elsewhere have no stream."""

    def expect(self, session_id: SessionId, stream: StreamId = ELSEWHERE, *, goes_on: bool = True) -> None:
        """Calls of a session wait, here or elsewhere, for its principal. A resumable call
        waits for `task_ttl`, because nothing about it is unknown."""
        settings = self._context.settings
        seconds = max(settings.session_grace, settings.task_ttl if goes_on else 0.0)
        until = self._until.setdefault(session_id, {})
        until[stream] = max(until.get(stream, 0.0), self._monotonic() + seconds)
        if (session := self._sessions.held(session_id)) is not None:
            session.waits = True
            self.send_back()

    def send_back(self) -> None:
        """Ask clients that were back before their calls had to wait to come again: that request has the credentials to
        run them with."""
        for session_id in self._until:
            if (session := self._sessions.held(session_id)) is not None:
                session.waits = True  # it may have been loaded while the call began to wait
                running = {call.stream.id for call in session.link.calls.all_running()}
                for stream in session.streams.values():
                    if stream.readers.reader is not None and not stream.is_over and stream.id not in running:
                        stream.readers.reader.close_with_retry()

    async def resume(self, session: Session, origin: object) -> None:
        """The principal is back: run again, or answer, the calls that waited for it."""
        session.waits = False  # until more of its calls begin to wait
        until = self._until.pop(session.id, None)
        by = SettleRequest(occasion=Occasion.PRINCIPAL_BACK, tools=ToolHints(self._context), origin=origin)
        try:
            for record in await self._waiting_streams(session.id):
                await self._settle(record, by)
        except StoreError:
            session.waits = True
            if until is not None:
                self._until.setdefault(session.id, until)
            raise

    async def give_up(self) -> None:
        """Answer calls that have waited here for too long."""
        now = self._monotonic()
        by = SettleRequest(occasion=Occasion.GRACE_PASSED, tools=ToolHints(self._context))
        for session_id, until in [*self._until.items()]:
            if not (due := [stream for stream, end in until.items() if end <= now]):
                continue
            with self._chores.surviving("calls that waited for too long could not be answered", session_id):
                for record in await self._waiting_streams(session_id):
                    if record.node == self._context.node and record.id in due:
                        await self._settle(record, by)
                for stream in due:
                    until.pop(stream, None)
                if not until and self._until.get(session_id) is until:
                    del self._until[session_id]
                    if (session := self._sessions.held(session_id)) is not None:
                        session.waits = False

    async def cancel(self, cancelled: mail.Cancelled) -> None:
        """The client cancels a call that waits."""
        context = self._context
        incarnation, request_id = cancelled.incarnation, cancelled.request_id
        row = await open_call(context.store, cancelled.session, incarnation=incarnation, request_id=request_id)
        record = None if row is None else await stream_by_id(context.store, row.stream)
        if row is None or record is None:
            return
        tools, key = ToolHints(self._context), AbandonedCall(row=row).key
        by = SettleRequest(occasion=Occasion.CALL_CANCELLED, tools=tools, cancelled=frozenset({key}))
        if row.state is CallState.WAITING and await self._settle(record, by):
            return
        if record.node and record.node != context.node:
            context.put(*mail_to([record.node], cancelled))

    async def _waiting_streams(self, session_id: SessionId) -> Sequence[StreamRecord]:
        rows = await self._context.store.calls(session_id)
        streams = {row.stream for row in rows if row.state is CallState.WAITING}
        return list((await streams_by_id(self._context.store, streams)).values())


REASONS = {
    Occasion.NODE_LEFT: "its process was stopped",
    Occasion.GRACE_PASSED: "its process died, and its principal did not come back",
    Occasion.STORE_BEHIND: "the store lost its answer",
}
"""Why an outcome is unknown, where the reason is not that a process died."""
DIED = "its process died"
_BROKE = "its connection broke"

_RUNS = {Verdict.RERUN: "rerun", Verdict.FOLLOW: "followed", Verdict.BEGIN: "begun"}
"""Verdicts by which a call runs, and how that is reported in its span."""

_SEARCH_AGAIN = 30.0
"""Seconds after which a node searches for calls whose end the store has lost, also where nothing indicated a loss. It
is one query, and a client waits that long for such a call."""

_RELEASE_AT_ONCE = 256
"""Homes of a dead node that are released in one commit."""


@dataclass(kw_only=True)
class _InProgress:
    by: SettleRequest
    stream: Stream | None = None
    """Set once it is claimed."""
    calls: list[AbandonedCall] = field(default_factory=list)
    """Calls that are not settled yet."""
    withdrawn: bool = False
    """The open asks of the dead node were cancelled."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One at a time: its principal may come back while it is being settled."""


class Settler:
    def __init__(self, context: ServerContext, sessions: SessionRegistry) -> None:
        self._context = context
        self._sessions = sessions
        self.principal_calls = PrincipalCalls(context, sessions, self.settle_waiting)
        self._in_progress: dict[StreamId, _InProgress] = {}
        """Streams that this node may have claimed, and whose calls it has not all settled yet."""
        self._chores = Chores()
        self._checked: object = None
        """The store's stamp from before it was last seen that running calls are still this node's."""
        self.is_leaving = False
        """This process stops: it takes no call over that stands still at another node."""
        self._doubts = 0
        self._searched_for_lost = context.hub.monotonic()

    async def settle_node(self, dead: NodeId, beat: int, *, has_left: bool) -> bool:
        """Settle a dead node and bury it, unless it has beaten since: then it is back, and keeps what was not claimed
        yet. A failure does not hold up the rest, and is tried again by the next round. `has_left`: the node was
        stopped."""
        context = self._context
        cancelled = set()  # by their clients, in mail that the dead node has not read
        async for _, raw in paged(lambda after: context.store.mail(dead, after=after)):
            if isinstance(message := mail.decode(raw), mail.Cancelled):
                cancelled.add((message.session, message.incarnation, coerce_id(message.request_id)))
        occasion = Occasion.NODE_LEFT if has_left else Occasion.NODE_DIED
        by = SettleRequest(occasion=occasion, tools=ToolHints(self._context), cancelled=frozenset(cancelled))
        homes: list[StreamRecord] = []
        failures: list[Exception] = []
        # All of a session are settled in one go, and reported once.
        calls: dict[SessionId, list[StreamRecord]] = {}
        for record in await context.store.written_by(dead):
            if record.kind is Kind.STANDALONE:
                homes.append(record)
            else:
                calls.setdefault(record.session, []).append(record)
        for record in (record for records in calls.values() for record in records):
            try:
                await self._settle(record, by)
            except Exception as failure:
                failures.append(failure)
        failures += await self._settle_homes(homes, by)
        if failures:
            raise failures[0]
        read = await context.store.bury(dead, heir=context.node, beat=beat)
        if read is None:
            sentence = f"node {dead[:8]} is back; it continues with the streams that were not claimed"
            log_event(logging.WARNING, "node.back", sentence, node=dead)
            return False
        for record in read:
            # The reader of this stream went with its node: let the writer know.
            session = self._sessions.held(record.session)
            if record.node == context.node and session is not None:
                if (stream := session.held_stream(record.id)) is not None:
                    stream.set_remote_reader(None, arrival=context.hub.arrive())
            elif record.node:
                self._context.put(*mail_to([record.node], mail.Reading(session=record.session, stream=record.id)))
        context.counters.nodes_settled += 1
        log_event(logging.INFO, "node.settled", f"everything that node {dead[:8]} left is settled", node=dead)
        return True

    async def go_round(self) -> None:
        """Go on with what could not be finished, answer calls that have waited for too long, and check whether the
        calls that run here still belong to this node."""
        surviving = self._chores.surviving
        if self._in_progress:
            with surviving("streams that are half settled could not be finished"):
                # The store failed after a claim: the streams are this node's, and their calls are not settled.
                found = await streams_by_id(self._context.store, self._in_progress)
                for stream_id, progress in list(self._in_progress.items()):
                    record = found.get(stream_id)
                    if record is None or record.sealed or record.node != self._context.node:
                        self._in_progress.pop(stream_id, None)
                    else:
                        with surviving(f"stream {stream_id} could not be settled", stream_id):
                            await self._settle(record, progress.by)
        with surviving("calls that have waited for too long could not be answered"):
            await self.principal_calls.give_up()
        with surviving("clients could not be asked to come again"):
            self.principal_calls.send_back()
        with surviving("calls whose end was lost could not be looked for"):
            await self._settle_lost()
        self._sessions.streams.release_parked(
            lambda stream: stream.id in self._in_progress or self._sessions.held(stream.session) is not None
        )
        if not self._context.nodes.alone and (stamp := self._context.store.stamp()) != self._checked:
            with surviving("it could not be seen whose the running calls are"):
                # Another node may have claimed a call that runs here, or that waits here for its principal, and says
                # nothing for a while.
                streams = self._sessions.streams
                own = {stream.id: stream for stream in streams if stream.writer is not None and not stream.is_over}
                for stream_id, record in (await streams_by_id(self._context.store, own)).items():
                    with surviving(f"stream {stream_id} could not be followed", stream_id):
                        own[stream_id].follow(record)
                self._checked = stamp

    async def _settle_lost(self) -> None:
        """Answer the calls that run under this node's name in the store, and that nothing here runs: the store has lost
        their answers. Looked for where there was a sign of a loss, and now and then, because an idle node sees none."""
        context, journal, now = self._context, self._context.journal, self._context.hub.monotonic()
        doubts = journal.doubts
        if journal.is_degraded or (doubts == self._doubts and now < self._searched_for_lost + _SEARCH_AGAIN):
            return
        await self._repair_own()
        by = SettleRequest(occasion=Occasion.STORE_BEHIND, tools=ToolHints(self._context))
        if suspects := [record.id for record in await context.store.written_by(context.node) if self._is_left(record)]:
            # Some may be about to begin: they are written, and their callers have not gone on yet. Or they have just
            # ended. Behind a step of this moment neither is so.
            await journal.write(MailReceived(node=context.node, through=0))
            await asyncio.sleep(0)
            for record in (await streams_by_id(context.store, suspects)).values():
                if self._is_left(record) and not record.sealed and record.node == context.node:
                    rows = await context.store.calls(record.session, stream=record.id)
                    if any(row.state is CallState.RUNNING for row in rows):  # others wait for their principal
                        await self._settle(record, by)
        self._doubts, self._searched_for_lost = doubts, now

    async def _repair_own(self) -> None:
        """Let streams that are written here, and that the store has lost all or the end of, not wait for their next
        event: a call may be silent because its client is to answer an ask. It is asked again, and other nodes find the
        call in the ledger, to cancel it."""
        homes = [session.standalone for session in self._sessions if session.link.asks.open]
        own = [stream for stream in (*self._sessions.streams, *homes) if stream.writer is not None]
        known = {stream.id: stream.tail.durable for stream in own if not stream.is_over}
        found = await streams_by_id(self._context.store, known)
        lost: dict[SessionId, set[StreamId]] = {}
        for stream in own:
            record = found.get(stream.id)
            if stream.id not in known or (record is not None and record.last >= known[stream.id]):
                continue
            if record is None and stream.writer is not None:
                with contextlib.suppress(SessionEnded, IdTaken):  # refused, so nothing waits for it
                    await self._context.journal.write(stream.writer.opening)
            if record is None or record.fence == stream.fence:
                lost.setdefault(stream.session, set()).add(stream.id)
        for session_id, streams in lost.items():
            if (session := self._sessions.held(session_id)) is not None:
                asks = session.link.asks
                asks.repeat([name for name, ask in asks.open.items() if ask.on in streams], why="the question was lost")

    def _is_left(self, record: StreamRecord) -> bool:
        """Whether no writer of a call's stream is in memory, and the stream is not being settled."""
        stream = self._sessions.streams.of(record.session).get(record.id)
        is_written = stream is not None and stream.writer is not None
        return record.kind is Kind.CALL and not is_written and record.id not in self._in_progress

    # A call's stream

    async def settle_waiting(self, record: StreamRecord, by: SettleRequest) -> bool:
        """Settle calls that wait on a stream. Returns `False` if none waits any more, or if they are being settled
        already and this brings no credentials.

        That they wait is read after the fence of the stream: a claim with that fence takes it from no node that runs
        them. A node that holds may have answered them.
        """
        if by.origin is None or record.id not in self._in_progress:
            if record.node in await self._context.nodes.holders():
                raise HeldElsewhere(f"node {record.node[:8]} holds events that are not written yet")
            rows = await self._context.store.calls(record.session, stream=record.id)
            if record.id in self._in_progress or all(row.state is not CallState.WAITING for row in rows):
                return False
        await self._settle(record, by)
        return True

    async def begin(self, session: Session, stream_id: StreamId) -> None:
        """Run requests that another node has handed over to this one as the session's home; or hand them on."""
        node = await session.runner()
        if node is not None:
            self._context.put(*mail_to([node], mail.HandedOver(session=session.id, stream=stream_id)))
            return
        record = await stream_by_id(self._context.store, stream_id)
        rows = await self._context.store.calls(session.id, stream=stream_id)
        if record is not None and any(row.state is CallState.WAITING for row in rows):
            await self._settle(record, SettleRequest(occasion=Occasion.HANDED_OVER, tools=ToolHints(self._context)))

    async def take_standing(self, standing: mail.Standing) -> None:
        """Go on with a call of a node that stops, unless this node stops as well, or another one was faster."""
        if self.is_leaving:
            return
        record = await stream_by_id(self._context.store, standing.stream)
        if record is not None and record.node == standing.node and not record.sealed:
            await self._settle(record, SettleRequest(occasion=Occasion.NODE_LEFT, tools=ToolHints(self._context)))

    async def _settle(self, record: StreamRecord, by: SettleRequest) -> None:
        context, store = self._context, self._context.store
        # What is left when the store fails is finished without the credentials: their request is over by then.
        progress = self._in_progress.setdefault(record.id, _InProgress(by=replace(by, origin=None)))
        async with progress.turn:
            owner = await store.session(record.session)
            context.journal.check_claim()
            held = self._sessions.streams.of(record.session).get(record.id)
            known = 0 if held is None else held.generation
            if progress.stream is not None and progress.stream.writer is not None and owner is not None:
                await self._settle_calls(owner, progress.stream, progress, by)  # where the store failed
            # Also where this node is the writer: what it had under way then finds a stale fence.
            elif (claimed := await store.claim(record.id, node=context.node, held=record.fence, known=known)) is None:
                pass  # another node was faster
            elif owner is None or owner.state is SessionState.ENDED:
                context.put(DropStream(stream=record.id))
            elif owner.state is SessionState.OPENING:
                # Its client does not know of it.
                reason = SessionStep.HANDSHAKE_FAILED.value
                context.put(EndSession(session=owner.id, time=context.clock(), reason=reason))
            else:
                # Read after a claim: no other node can end them.
                rows = [row for row in await store.calls(record.session, stream=record.id) if row.state in UNENDED]
                progress.calls = await self._abandoned(rows, claimed, record.node)
                progress.stream = self._take_over(claimed, rows, by=by)
                await self._settle_calls(owner, progress.stream, progress, by)
        self._in_progress.pop(record.id, None)

    async def _abandoned(self, rows: Sequence[CallRecord], stream: StreamRecord, dead: NodeId) -> list[AbandonedCall]:
        """The calls of a stream with what their tools have done. The answer to a question that is in the mail of the
        dead node is recorded first: its client was told that it is accepted."""
        store, steps, asks = self._context.store, list[ToolStepRecord](), list[AskRecord]()
        if any(row.method == "tools/call" for row in rows):
            steps += await store.tool_steps(stream.id)
            asks += [ask for ask in await store.asks(stream.session) if ask.call == stream.id]
        if asks:
            answered = await self._record_mail(rows, steps, asks, dead, stream.fence)
            asks = [ask for ask in asks if ask not in answered]
        return [
            AbandonedCall(
                row=row,
                course=course_of(steps, row.incarnation, row.request_id),
                asks=tuple(ask for ask in asks if is_of(ask, row)),
                claims=stream.generation - 1,
                dead=dead,
            )
            for row in rows
        ]

    async def _record_mail(
        self,
        rows: Sequence[CallRecord],
        steps: list[ToolStepRecord],
        asks: Sequence[AskRecord],
        dead: NodeId,
        fence: Fence,
    ) -> list[AskRecord]:
        """Record the answers to questions that are in the mail of the dead node. Returns those questions."""
        answers, answered = dict[str, JsonObject](), list[AskRecord]()
        async for _, raw in paged(lambda after: self._context.store.mail(dead, after=after)):
            if isinstance(message := mail.decode(raw), mail.AskAnswered):
                answers.setdefault(str(message.response.get("id")), message.response)
        for ask in asks:
            for row in rows if ask.id in answers else ():
                if is_of(ask, row):
                    step = self._answer_step(row, steps, ask, answers[ask.id], fence)
                    await self._context.journal.write(CloseAsk(session=ask.session, id=ask.id), step, may_be_held=False)
                    steps.append(step.record)
                    answered.append(ask)
        return answered

    async def _with_late_answers(self, call: AbandonedCall, stream: Stream) -> AbandonedCall:
        """Record the answers that other nodes accepted before its questions were withdrawn: afterwards they accept
        none."""
        if not call.asks:
            return call
        context, row = self._context, call.row
        await context.journal.write(MailReceived(node=context.node, through=0))  # the withdrawal is written before it
        steps = list(await context.store.tool_steps(stream.id))
        if not await self._record_mail([row], steps, call.asks, call.dead, stream.fence):
            return call
        course = course_of(steps, row.incarnation, row.request_id)
        course.goes_on = call.course.goes_on
        return replace(call, course=course)

    def _answer_step(
        self, row: CallRecord, steps: Sequence[ToolStepRecord], ask: AskRecord, answer: JsonObject, fence: Fence
    ) -> PutToolStep:
        request, now = json.loads(ask.request), self._context.clock()
        state, value = recorded_answer(answer)
        record = ToolStepRecord(
            stream=row.stream,
            incarnation=row.incarnation,
            request_id=row.request_id,
            number=max((step.number for step in steps), default=0) + 1,
            kind=ToolStepKind.ASK,
            name=ask_name(request["method"], request.get("params")),
            state=state,
            again=True,
            own=False,
            attempt=row.attempt,
            began=now,
            ended=now,
            value=value,
        )
        return PutToolStep(fence=fence, record=record)

    def _take_over(self, claimed: StreamRecord, rows: Sequence[CallRecord], *, by: SettleRequest) -> Stream:
        context, session = self._context, self._sessions.held(claimed.session)
        stream = self._sessions.streams.write(claimed, owed=len(rows), calls=rows)
        context.hub.registry.on_claimed(stream)
        if not stream.readers.present and by.occasion is not Occasion.HANDED_OVER:
            # The reader went with the node. Its client may be here, or at another node, and never ask for the call.
            context.hub.marks.lost(stream)
            if session is not None and session.standalone.readers.reader is not None:
                session.orphans.give_time()
            if claimed.session not in by.reported:
                by.reported.add(claimed.session)
                self._send_all(mail.Lost(session=claimed.session, waited=False))
        return stream

    async def _settle_calls(
        self, owner: SessionRecord, stream: Stream, progress: _InProgress, by: SettleRequest
    ) -> None:
        verdicts = [await self._verdict(owner, call, by) for call in progress.calls]
        runs = any(verdict in _RUNS for verdict in verdicts)
        session = await self._sessions.load(owner.id) if runs else None
        # It must not be put to rest before its calls have begun.
        with contextlib.nullcontext() if session is None else session.in_use():
            if not progress.withdrawn:
                await self._withdraw_asks(owner, stream, by)
                progress.calls = [await self._with_late_answers(call, stream) for call in progress.calls]
                progress.withdrawn = True
            for verdict in verdicts:
                call = progress.calls[0]
                match verdict:
                    case Verdict.KEEP:
                        pass
                    case Verdict.CANCEL:
                        payload = cancelled(call.row.request_id, call.outline(self._context.clock()))
                        early = self._context.early
                        keeps = early is not None and early.keeps(owner)
                        also = end_of_call(owner, self._context.clock(), _BROKE, keeps=keeps)
                        with spans.settle(owner.id[:8], stream.id, outcome="cancelled"):
                            stream.append(payload, end=call.ended(CallStep.CANCEL), also=also)
                        await self._tell_status(owner, call, stream, CallState.CANCELLED, payload)
                        self._context.counters.calls_cancelled += 1
                        self._context.counters.settles_cancelled += 1
                    case Verdict.WAIT:
                        await self._context.journal.write(call.changed(CallStep.LOSE_NODE, stream))
                        sentence = f"a request waits for its principal ({call.row.method})"
                        log_event(logging.INFO, "call.waits", sentence, **call.ids)
                        self._send_all(mail.Waiting(session=owner.id))
                        self._context.waiters.tell(stream.id)  # a request for its result may have the credentials
                        goes_on = False  # whether it is resumable, and no step's outcome is unknown
                        if call.request is not None and call.row.method == "tools/call" and not call.course.is_unknown:
                            may = await by.tools.ask(owner, call.request, None)
                            goes_on = may is Rerun.STEPS or (may is Rerun.HIDDEN and bool(call.course.marks))
                        self.principal_calls.expect(owner.id, stream.id, goes_on=goes_on)
                    case Verdict.RERUN | Verdict.FOLLOW | Verdict.BEGIN if session is not None:
                        await self._run(session, call, stream, by, verdict)
                    case _:
                        await self._answer_unknown(owner, call, stream, REASONS.get(by.occasion, DIED))
                del progress.calls[0]

    async def _verdict(self, owner: SessionRecord, call: AbandonedCall, by: SettleRequest) -> Verdict:
        if call.key in by.cancelled:
            return Verdict.CANCEL
        if call.row.state is CallState.WAITING and not self._context.runtimes.needs_principal:
            return Verdict.BEGIN  # it was handed over to a node that had not begun it
        if owner.kind is RecordKind.CALL and not owner.is_task:
            return Verdict.CANCEL  # its client has neither handle nor key, and its connection broke with the process
        left = by.occasion in (Occasion.NODE_DIED, Occasion.NODE_LEFT)
        needs_credentials = left and owner.owner and self._context.runtimes.needs_principal
        row = VERDICTS[Occasion.PRINCIPAL_AWAY if needs_credentials else by.occasion]
        if call.request is None:
            return row[Rerun.NO]
        attempt, kept = call.row.attempt, settling.decode_kept(call.row.upstream)
        progressed = attempt if call.stands(self._context.clock()) else call.course.progressed
        may = settling.rerun(
            call.row.method,
            attempt=attempt,
            occasion=by.occasion,
            kept=kept,
            progressed=progressed,
            claims=call.claims,
        )
        if row[may] is Verdict.ASK:
            may = await by.tools.ask(owner, call.request, by.origin)
            call.course.goes_on = may is Rerun.STEPS
            if may is Rerun.STEPS and call.course.is_unknown:
                may = Rerun.NO
        return row[may]

    # What becomes of a call

    async def _tell_status(
        self, owner: SessionRecord, call: AbandonedCall, stream: Stream, state: CallState, answer: bytes
    ) -> None:
        """Notify the client of a task that has ended without its tool, on the session's standalone stream."""
        is_task = stream.answered and session_tasks.is_ours(owner.result)
        if not is_task or call.request is None or not session_tasks.wants_task(call.request.params):
            return
        facts = TaskFacts(
            id=stream.id, created=stream.opened, updated=self._context.clock(), state=state, asks={}, answer=answer
        )
        if (session := await self._sessions.load(owner.id)) is not None:
            with session.in_use():
                await session.home.caught_up()  # what the task said before comes first
                self._context.tasks.tell(session.home, facts)

    async def _answer_unknown(self, owner: SessionRecord, call: AbandonedCall, stream: Stream, reason: str) -> None:
        row = call.row
        params = None if call.request is None else call.request.params
        steps = call.outline(self._context.clock())
        payload = unknown_outcome(row.request_id, method=row.method, reason=reason, params=params, steps=steps)
        also = end_of_call(owner, self._context.clock(), _BROKE)
        with spans.settle(row.session[:8], row.stream, outcome="unknown"):
            stream.append(payload, end=call.ended(CallStep.SETTLE), also=also)
        await self._tell_status(owner, call, stream, CallState.SETTLED, payload)
        self._context.counters.calls_settled += 1
        sentence = f"a request was interrupted ({row.method}): {reason}"
        self._context.peer_log.log_event(logging.WARNING, "call.unknown", sentence, **call.ids)

    async def _run(
        self, session: Session, call: AbandonedCall, stream: Stream, by: SettleRequest, verdict: Verdict
    ) -> None:
        """Run a call that another node has accepted: once more, for the first time, or by reading on what a server
        outside the dead process runs."""
        row, request, follows = call.row, call.request, verdict is Verdict.FOLLOW
        assert request is not None
        try:
            await session.home.caught_up()  # what the call said before it was left behind comes first
            place, record = row.incarnation, session.record
            progress, logged = await said_before(
                self._context, request, row.stream, incarnation=place, sent=row.progress, session=record
            )
            counts = verdict is Verdict.RERUN and not call.stands(self._context.clock())
            attempt = row.attempt + counts
            again = replace(call.changed(CallStep.RUN_AGAIN, stream), attempt=attempt, progress=progress)
            with spans.settle(session.name, stream.id, outcome=_RUNS[verdict]):
                await self._context.journal.write(again)
                session.link.start_again(
                    request,
                    by.origin,
                    incarnation=row.incarnation,
                    stream=stream,
                    attempt=again.attempt,
                    progress=progress,
                    logged=logged,
                    course=call.course,
                    upstream=settling.decode_kept(row.upstream),
                    follows=follows,
                    repeats=verdict is not Verdict.BEGIN,
                )
        except (StoreUnavailable, StaleFence):
            raise  # trying again may help; or another node has it
        except Exception as failure:
            # It would fail in each round, and its client would wait for ever.
            sentence = f"a request cannot run again ({row.method}): {failure!r}"
            log_event(logging.ERROR, "call.poison", sentence, **call.ids)
            await self._answer_unknown(session.record, call, stream, DIED)
        else:
            if verdict is Verdict.RERUN:
                self._context.counters.calls_rerun += 1
                finished = call.course.finished
                returning = f"; {finished} {'step returns' if finished == 1 else 'steps return'}" if finished else ""
                sentence = f"a request that was interrupted runs again ({row.method}){returning}"
                log_event(logging.INFO, "call.rerun", sentence, **call.ids)
            elif follows:
                self._context.counters.calls_followed += 1
                sentence = f"a request that was interrupted is followed ({row.method})"
                log_event(logging.INFO, "call.followed", sentence, **call.ids)
            else:
                sentence = f"a request that another node accepted runs here ({row.method})"
                log_event(logging.INFO, "call.begun", sentence, **call.ids)

    async def _withdraw_asks(self, owner: SessionRecord, stream: Stream, by: SettleRequest) -> None:
        """Cancel what dead nodes had asked, on this stream or on the standalone one: no node waits for the answers."""
        context = self._context
        living = {context.node, *context.nodes.others}
        for ask in await context.store.asks(owner.id):
            if ask.node in living or ask.id in by.withdrawn or not await self._is_withdrawn_with(ask, owner, stream):
                continue
            by.withdrawn.add(ask.id)
            params = {"requestId": ask.id, "reason": DIED}
            cancelled = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}
            payload = json.dumps(cancelled, separators=(",", ":")).encode()
            close = CloseAsk(session=owner.id, id=ask.id)
            if ask.stream == stream.id:
                stream.append(payload, also=close)
            elif (session := await self._sessions.load(owner.id)) is not None:
                await session.home.caught_up()  # the ask may still wait for the home
                session.home.send(payload, close)

    async def _is_withdrawn_with(self, ask: AskRecord, owner: SessionRecord, stream: Stream) -> bool:
        """Whether a question of a dead node is withdrawn when a stream is settled. That of another call's tool is
        withdrawn with its call, after an answer to it was searched."""
        if ask.call == stream.id:
            return True
        if ask.stream not in (stream.id, owner.standalone):
            return False
        asking = await stream_by_id(self._context.store, ask.call) if ask.call else None
        return asking is None or asking.sealed

    # Homes

    async def _settle_homes(self, homes: Sequence[StreamRecord], by: SettleRequest) -> list[Exception]:
        """Become the home of sessions that have subscriptions, are in use here, or have messages waiting. The homes of
        other sessions are released, and the sessions put to rest, or they would expire without a log record; they get a
        home when they are loaded. Returns the failures."""
        store = self._context.store
        releases: list[Step] = []
        failures: list[Exception] = []
        waited_for = {record.id for home in homes[:1] for record in await store.written_by(home.node, forwarded=True)}
        for record in homes:
            try:
                held = self._sessions.held(record.session)
                owner = await store.session(record.session) if held is None else held.record
                active = owner if owner is not None and owner.state is SessionState.ACTIVE else None
                session = None
                if held is not None or record.id in waited_for or (active is not None and active.sticky):
                    session = await self._sessions.load(record.session)
                elif active is not None:
                    state = advance(SESSION, active.state, SessionStep.GRACE_PASSED)
                    releases.append(ChangeSession(session=active.id, state=state))
                if session is None:
                    releases.append(Release(stream=record.id, fence=record.fence))
                    continue
                with session.in_use(), contextlib.suppress(SessionEnded):  # then its streams are gone
                    session.standalone.follow(record)  # the dead node may have taken it from this one without a word
                    await session.home.claim()
                    await self._withdraw_asks(session.record, session.standalone, by)
            except Exception as failure:
                failures.append(failure)
        for start in range(0, len(releases), _RELEASE_AT_ONCE):
            await store.commit(releases[start : start + _RELEASE_AT_ONCE])
        return failures

    def _send_all(self, message: mail.Message) -> None:
        self._context.put(*mail_to(self._context.nodes.others, message))
