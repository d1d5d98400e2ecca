"""Settling: every call of a node that died gets its final answer (promise 3).

The dead node's streams are claimed one by one; of several nodes that try, one succeeds, and the dead one, should it
only have been paused, finds that it may write nothing more. A call that may run again (`_core.settling`) does so into
the same stream, once; all others are answered: interrupted, outcome unknown. With authentication a call runs again when
its principal is back, in that request's context: until then it waits, for `session_grace` at most.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.requests import Request as HttpRequest

from perdure import spans
from perdure._core import mail, settling
from perdure._core.ids import Kind, NodeId, SessionId, StreamId
from perdure._core.jsonrpc import InvalidMessage, Request, coerce_id, parse_body
from perdure._core.settling import Verdict
from perdure._core.states import CALL, CallState, CallStep, SessionState, SessionStep, advance
from perdure.errors import SessionEnded, StoreError
from perdure.house import House
from perdure.journal import Steps
from perdure.ledger import REQUEST_CANCELLED, error_payload, progress_token, unknown_outcome
from perdure.observe import note
from perdure.rerunnable import Rerunnable
from perdure.session import Session
from perdure.sessions import Sessions
from perdure.store.base import (
    CallEnd,
    CallRecord,
    CloseAsk,
    DropStream,
    EndSession,
    Post,
    PutCall,
    Release,
    SessionRecord,
    StreamRecord,
)
from perdure.streams import Stream

_RELEASE_AT_ONCE = 256
"""Homes of a dead node that are let go of in one commit."""

DIED = "its process died"


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class _Round:
    """What is known, and was done, while one settles."""

    tools: Rerunnable
    http: HttpRequest | None = None
    """The request of the principal whose calls are settled."""
    cancelled: frozenset[tuple[SessionId, int, int | str]] = frozenset()
    withdrawn: set[str] = field(default_factory=set)
    """Asks of dead nodes."""


@dataclass(frozen=True, kw_only=True)
class _Left:
    """A call that was left behind."""

    row: CallRecord
    request: Request | None


@dataclass(kw_only=True)
class _Begun:
    """A stream whose calls are being settled."""

    stream: Stream | None = None
    """Once it is claimed."""
    calls: list[_Left] = field(default_factory=list)
    """Those that are not dealt with yet."""
    withdrawn: bool = False
    """Its asks are."""


class Settler:
    """Settles what dead nodes left behind."""

    def __init__(self, house: House, sessions: Sessions, *, monotonic: Callable[[], float]) -> None:
        self._house = house
        self._sessions = sessions
        self._monotonic = monotonic
        self._waiting: dict[SessionId, float] = {}
        """Sessions with calls that wait for their principal, here or elsewhere, and until when they do."""
        self._begun: dict[StreamId, _Begun] = {}
        """Streams that this node may have claimed, and whose calls it has not all dealt with yet."""
        self._checked: object = None
        """The store's stamp from before it was last seen that running calls are still this node's."""
        self._at_stop = Rerunnable(sessions)

    async def settle(self, dead: NodeId) -> None:
        """Settle a dead node, and bury it. What fails does not hold up the rest, and is tried again by the next
        round."""
        house = self._house
        round_ = _Round(tools=Rerunnable(self._sessions), cancelled=await self._cancelled(dead))
        homes: list[StreamRecord] = []
        failures: list[Exception] = []
        for record in await self._ask(house.store.written_by(dead)):
            if record.kind is Kind.STANDALONE:
                homes.append(record)
                continue
            try:
                await self._settle_stream(record, round_)
            except Exception as failure:
                failures.append(failure)
        await self._settle_homes(homes, round_)
        if failures:
            raise failures[0]
        for stream in await self._ask(house.store.bury(dead, heir=house.node)):
            await self._tell_unread(stream)
        house.counters.nodes_settled += 1
        note(logging.INFO, "node.settled", f"what node {dead[:8]} left behind is settled", node=dead)

    async def go_round(self) -> None:
        """Go on with what could not be finished, answer what has waited for too long, and see whether the calls that
        run here are still this node's."""
        if self._begun:
            await self._finish()
        await self._give_up()
        self._send_back()
        if not self._house.neighbours.alone and (stamp := self._house.store.stamp()) != self._checked:
            await self._check_own()
            self._checked = stamp

    async def _ask(self, asked: Awaitable[T]) -> T:
        return await self._house.journal.within_time(asked)

    async def _cancelled(self, dead: NodeId) -> frozenset[tuple[SessionId, int, int | str]]:
        """Calls that their client has cancelled, and the dead node has not heard of it."""
        messages = [mail.decode(raw) for _, raw in await self._ask(self._house.store.mail(dead))]
        return frozenset(
            (message.session, message.incarnation, coerce_id(message.request_id))
            for message in messages
            if isinstance(message, mail.Cancelled)
        )

    async def _finish(self) -> None:
        """The store failed behind a claim: the streams are this node's, and their calls are not dealt with."""
        round_ = _Round(tools=Rerunnable(self._sessions))
        found = {record.id: record for record in await self._house.neighbours.ends(list(self._begun))}
        for stream_id in list(self._begun):
            record = found.get(stream_id)
            if record is None or record.sealed or record.node != self._house.node:
                self._begun.pop(stream_id, None)
            else:
                await self._settle_stream(record, round_)

    async def _check_own(self) -> None:
        """Somebody else may have claimed a call that runs here, and says nothing for a while."""
        own = {call.stream.id: call.stream for _, call in self._sessions.running_calls()}
        for record in await self._house.neighbours.ends(list(own)):
            own[record.id].follow(record)

    # A call's stream

    async def _settle_stream(self, record: StreamRecord, round_: _Round) -> None:
        house = self._house
        owner = await self._ask(house.store.session(record.session))
        begun = self._begun.setdefault(record.id, _Begun())
        if begun.stream is not None and begun.stream.writes and owner is not None:
            await self._settle_calls(owner, begun.stream, begun, round_)  # where the store failed
        elif (claimed := await self._claim(record)) is None:
            pass  # another node was faster
        elif owner is None or owner.state is SessionState.ENDED:
            house.journal.put(Steps((DropStream(stream=record.id),)))
        elif owner.state is SessionState.OPENING:
            # Its client has never heard of it.
            reason = SessionStep.HANDSHAKE_FAILED.value
            house.journal.put(Steps((EndSession(session=owner.id, time=house.clock(), reason=reason),)))
        else:
            begun.calls = await self._left_on(record)
            begun.stream = self._take_over(self._sessions.held(owner.id), claimed, owed=len(begun.calls))
            await self._settle_calls(owner, begun.stream, begun, round_)
        self._begun.pop(record.id, None)

    async def _claim(self, record: StreamRecord) -> StreamRecord | None:
        """Become the writer. Also where this node is it: what it had under way then finds a stale fence."""
        return await self._ask(self._house.store.claim(record.id, node=self._house.node, held=record.fence))

    async def _left_on(self, record: StreamRecord) -> list[_Left]:
        """The calls of a stream that have not ended; seen behind a claim, nobody else can end them."""
        rows = await self._ask(self._house.store.calls_on(record.id))
        return [_left(row) for row in rows if not _has_ended(row)]

    async def _settle_calls(self, owner: SessionRecord, stream: Stream, begun: _Begun, round_: _Round) -> None:
        verdicts = [await self._verdict(owner, call, round_) for call in begun.calls]
        session = await self._sessions.load(owner.id) if Verdict.RERUN in verdicts else None
        if session is not None:
            session.active = self._house.clock()  # or it might be let go of before its call has begun
            session.adopt(stream)
        if not begun.withdrawn:
            await self._withdraw_asks(owner, stream, round_)
            begun.withdrawn = True
        for verdict in verdicts:
            await self._settle_call(owner, session, stream, begun.calls[0], verdict, round_)
            del begun.calls[0]

    async def _settle_call(
        self,
        owner: SessionRecord,
        session: Session | None,
        stream: Stream,
        call: _Left,
        verdict: Verdict,
        round_: _Round,
    ) -> None:
        if (owner.id, call.row.incarnation, coerce_id(call.row.request_id)) in round_.cancelled:
            self._answer_cancelled(call, stream)
        elif verdict is Verdict.WAIT:
            await self._have_wait(owner.id, call, stream)
        elif verdict is Verdict.RERUN and session is not None:
            await self._run_again(session, call, stream, round_.http)
        else:
            self._answer_unknown(call, stream)

    def _take_over(self, session: Session | None, claimed: StreamRecord, *, owed: int) -> Stream:
        if session is not None:
            return session.take_over(claimed, owed=owed)
        stream = self._house.stream(claimed, writes=True, owed=owed)
        self._house.neighbours.now_written_here(stream)
        return stream

    async def _verdict(self, owner: SessionRecord, call: _Left, round_: _Round) -> Verdict:
        if call.request is None:
            return Verdict.UNKNOWN
        at_hand = round_.http is not None or not owner.owner  # the credentials to run it with
        verdict = settling.verdict(call.row.method, attempt=call.row.attempt)
        if verdict is Verdict.ASK:
            name = str((call.request.params or {}).get("name"))
            may = await round_.tools.ask(owner.id, name, round_.http)
            if may is None and not at_hand:
                return Verdict.WAIT
            verdict = Verdict.RERUN if may else Verdict.UNKNOWN
        return Verdict.WAIT if verdict is Verdict.RERUN and not at_hand else verdict

    def _answer_unknown(self, call: _Left, stream: Stream, reason: str = DIED) -> None:
        row = call.row
        params = None if call.request is None else call.request.params
        payload = unknown_outcome(row.request_id, method=row.method, reason=reason, params=params)
        with spans.settle(row.session[:8], row.stream, outcome="unknown"):
            stream.append(payload, end=_end(row, CallStep.SETTLE))
        self._house.counters.calls_settled += 1
        note(logging.WARNING, "call.unknown", f"a request was interrupted ({row.method}): {reason}", stream=row.stream)

    async def _run_again(self, session: Session, call: _Left, stream: Stream, http: HttpRequest | None) -> None:
        row = call.row
        assert call.request is not None
        progress = await self._progress(session, row, call.request)
        again = PutCall(
            stream=stream.id,
            fence=stream.fence,
            incarnation=row.incarnation,
            request_id=row.request_id,
            state=advance(CALL, row.state, CallStep.RUN_AGAIN),
            attempt=row.attempt + 1,
            progress=progress,
        )
        with spans.settle(session.name, stream.id, outcome="rerun"):
            await self._house.journal.write(again)
            [running] = session.exchange.calls.open([call.request], incarnation=row.incarnation, stream=stream)
            running.progress, running.attempt = progress, row.attempt + 1
            session.exchange.start(running, http)
        self._house.counters.calls_rerun += 1
        note(logging.INFO, "call.rerun", f"a request of a dead node runs again ({row.method})", stream=row.stream)

    async def _progress(self, session: Session, row: CallRecord, request: Request) -> float | None:
        """The highest progress that was sent for a call, on its own stream or, as an orphan's, on the standalone."""
        token = progress_token(request)
        if token is None:
            return None
        tokens = (token, f"{row.incarnation}:{token}")
        highest = row.progress
        for stream in (row.stream, session.record.standalone):
            async for payload in self._payloads(stream):
                if b"notifications/progress" in payload:
                    params = json.loads(payload).get("params") or {}
                    sent = params.get("progress")
                    if params.get("progressToken") in tokens and isinstance(sent, int | float):
                        highest = sent if highest is None else max(highest, sent)
        return highest

    async def _payloads(self, stream: StreamId) -> AsyncIterator[bytes]:
        after = 0
        while events := await self._house.journal.read(stream, after=after, limit=1_000):
            for event in events:
                yield event.payload
            after = events[-1].seq

    async def _withdraw_asks(self, owner: SessionRecord, stream: Stream, round_: _Round) -> None:
        """Nobody waits for the answers to what dead nodes had asked, on this stream or on the standalone one."""
        house = self._house
        living = {house.node, *house.neighbours.others}
        for ask in await self._ask(house.store.asks(owner.id)):
            if ask.node in living or ask.id in round_.withdrawn or ask.stream not in (stream.id, owner.standalone):
                continue
            round_.withdrawn.add(ask.id)
            params = {"requestId": ask.id, "reason": DIED}
            cancelled = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}
            payload = json.dumps(cancelled, separators=(",", ":")).encode()
            close = CloseAsk(session=owner.id, id=ask.id)
            if ask.stream == stream.id:
                stream.append(payload, also=close)
            elif (session := await self._sessions.load(owner.id)) is not None:
                session.say(payload, close)

    # Calls that wait for their principal

    async def _have_wait(self, session_id: SessionId, call: _Left, stream: Stream) -> None:
        row = call.row
        waits = PutCall(
            stream=stream.id,
            fence=stream.fence,
            incarnation=row.incarnation,
            request_id=row.request_id,
            state=advance(CALL, row.state, CallStep.LOSE_NODE),
            attempt=row.attempt,
            progress=row.progress,
        )
        message = mail.encode(mail.Waiting(session=session_id))
        posts = [Post(node=node, message=message) for node in self._house.neighbours.others]
        await self._house.journal.write(waits)
        self._house.journal.put(Steps(posts))
        self.expect(session_id)
        note(logging.INFO, "call.waits", f"a request waits for its principal ({row.method})", stream=row.stream)

    def expect(self, session_id: SessionId) -> None:
        """Calls of a session wait, here or elsewhere, for its principal."""
        self._waiting[session_id] = self._monotonic() + self._house.settings.session_grace
        if (session := self._sessions.held(session_id)) is not None:
            session.waits = True
            self._send_back()

    def _send_back(self) -> None:
        """Clients that were back before their calls had to wait are asked to come again: that request has what is
        needed to run them."""
        for session_id in self._waiting:
            session = self._sessions.held(session_id)
            if session is not None and session.waits:
                running = {call.stream.id for call in session.exchange.calls.all_running()}
                for stream in session.streams.values():
                    if stream.reader is not None and not stream.over and stream.id not in running:
                        stream.reader.send_home()

    async def resume(self, session: Session, http: HttpRequest | None) -> None:
        """The principal is back: run again, or answer, what waited for it."""
        session.waits = False
        round_ = _Round(tools=Rerunnable(self._sessions), http=http)
        try:
            for record in await self._waiting_streams(session.id):
                await self._resume_stream(record, round_)
        except StoreError:
            session.waits = True
            raise
        self._waiting.pop(session.id, None)

    async def _resume_stream(self, record: StreamRecord, round_: _Round) -> None:
        if record.id in self._begun or await self._is_free(record):
            await self._settle_stream(record, round_)

    async def _is_free(self, record: StreamRecord) -> bool:
        """Whether calls still wait on a stream, seen after its fence: whoever claims it with that takes it from
        nobody who runs them."""
        rows = await self._ask(self._house.store.calls_on(record.id))
        return record.id not in self._begun and any(row.state is CallState.WAITING for row in rows)

    async def _give_up(self) -> None:
        """Answer what has waited here for too long."""
        now = self._monotonic()
        for session_id in [session_id for session_id, until in self._waiting.items() if until <= now]:
            for record in await self._waiting_streams(session_id):
                if record.node == self._house.node and await self._is_free(record):
                    await self._answer_all(record, self._too_long)
            if (session := self._sessions.held(session_id)) is not None:
                session.waits = False
            self._waiting.pop(session_id, None)

    async def cancel(self, cancelled: mail.Cancelled) -> None:
        """The client cancels a call that waits."""
        house = self._house
        row = await self._ask(
            house.store.open_call(cancelled.session, incarnation=cancelled.incarnation, request_id=cancelled.request_id)
        )
        record = None if row is None else await self._ask(house.store.stream(row.stream))
        if row is None or record is None:
            return
        if row.state is not CallState.WAITING or not await self._is_free(record):
            if record.node and record.node != house.node:
                house.journal.put(Steps((Post(node=record.node, message=mail.encode(cancelled)),)))
            return

        def answer(call: _Left, stream: Stream) -> None:
            if call.row.request_id == row.request_id:
                self._answer_cancelled(call, stream)

        await self._answer_all(record, answer)

    def _answer_cancelled(self, call: _Left, stream: Stream) -> None:
        row = call.row
        payload = error_payload(row.request_id, REQUEST_CANCELLED, "Request cancelled")
        with spans.settle(row.session[:8], row.stream, outcome="cancelled"):
            stream.append(payload, end=_end(row, CallStep.CANCEL))
        self._house.counters.calls_cancelled += 1
        self._house.counters.settles_cancelled += 1

    def _too_long(self, call: _Left, stream: Stream) -> None:
        self._answer_unknown(call, stream, f"{DIED}, and its principal did not come back")

    async def _answer_all(self, record: StreamRecord, answer: Callable[[_Left, Stream], None]) -> None:
        claimed = await self._claim(record)
        if claimed is None:
            return
        left = await self._left_on(record)
        stream = self._take_over(self._sessions.held(record.session), claimed, owed=len(left))
        for call in left:
            answer(call, stream)

    async def _waiting_streams(self, session_id: SessionId) -> Sequence[StreamRecord]:
        rows = await self._ask(self._house.store.calls(session_id))
        streams = {row.stream for row in rows if row.state is CallState.WAITING}
        return await self._house.neighbours.ends(list(streams)) if streams else ()

    # A stop

    async def learn_tools(self) -> None:
        """Find out, while there is time, which of the tools that run here may run again elsewhere."""
        self._at_stop = Rerunnable(self._sessions)
        for session, call in self._sessions.running_calls():
            if call.request.method == "tools/call":
                await self._at_stop.ask(session.id, str((call.request.params or {}).get("name")), None)

    def hand_over(self, reason: str) -> None:
        """This node stops: calls that may run again are left to the next one, the others get their answer."""
        for session, call in self._sessions.running_calls():
            verdict = settling.verdict(call.request.method, attempt=call.attempt)
            name = str((call.request.params or {}).get("name"))
            again = verdict is Verdict.RERUN or (verdict is Verdict.ASK and self._at_stop.known(name))
            if not (again and self._house.store.shared):  # nothing outlives the process otherwise
                session.exchange.answer_unknown(call, reason)

    # Homes and readers

    async def _settle_homes(self, homes: Sequence[StreamRecord], round_: _Round) -> None:
        """A session with subscriptions, or in use here, gets a new home at once; the others when they are loaded."""
        releases = []
        for record in homes:
            if not await self._bring_home(record, round_):
                releases.append(Release(stream=record.id, fence=record.fence))
        for start in range(0, len(releases), _RELEASE_AT_ONCE):
            await self._ask(self._house.store.commit(releases[start : start + _RELEASE_AT_ONCE]))

    async def _bring_home(self, record: StreamRecord, round_: _Round) -> bool:
        """Become the home of a session that needs one now. Tells whether there is one."""
        held = self._sessions.held(record.session)
        owner = await self._ask(self._house.store.session(record.session)) if held is None else held.record
        if held is None and not (owner is not None and owner.state is SessionState.ACTIVE and owner.sticky):
            return False
        session = await self._sessions.load(record.session)
        if session is None:
            return False
        try:
            await session.come_home()
        except SessionEnded:
            return True  # and its streams are gone
        await self._withdraw_asks(session.record, session.standalone, round_)
        return True

    async def _tell_unread(self, record: StreamRecord) -> None:
        """The reader of a stream went with its node: let the writer know."""
        session = self._sessions.held(record.session)
        if record.node == self._house.node and session is not None:
            stream = session.standalone if session.standalone.id == record.id else session.streams.get(record.id)
            if stream is not None:
                stream.read_elsewhere(None, arrival=self._house.hub.arrive())
        elif record.node:
            message = mail.encode(mail.Reading(session=record.session, stream=record.id))
            self._house.journal.put(Steps((Post(node=record.node, message=message),)))


def _has_ended(row: CallRecord) -> bool:
    return row.state not in (CallState.RUNNING, CallState.WAITING)


def _left(row: CallRecord) -> _Left:
    try:
        parsed = parse_body(row.request)
    except InvalidMessage:
        parsed = None
    return _Left(row=row, request=parsed if isinstance(parsed, Request) else None)


def _end(row: CallRecord, step: CallStep) -> CallEnd:
    # A row that was RUNNING when its node died is lost first: both ends are in the table from there.
    state = advance(CALL, row.state, step)
    return CallEnd(incarnation=row.incarnation, request_id=row.request_id, state=state)
