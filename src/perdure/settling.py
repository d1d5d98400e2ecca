"""Settling: every call of a node that died gets its final answer (promise 3).

The dead node's streams are claimed one by one; of several nodes that try, one succeeds, and the dead one, should it
only have been paused, finds that it may write nothing more. A call that may run again (`_core.settling`) does so into
the same stream, once; all others are answered: interrupted, outcome unknown. With authentication a call runs again when
its principal is back, in that request's context: until then it waits, for `session_grace` at most.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from starlette.requests import Request as HttpRequest

from perdure import spans
from perdure._core import mail, settling
from perdure._core.ids import Kind, NodeId, SessionId, StreamId
from perdure._core.jsonrpc import InvalidMessage, Request, parse_body
from perdure._core.settling import Verdict
from perdure._core.states import CALL, CallState, CallStep, SessionState, SessionStep, advance
from perdure.errors import StoreError
from perdure.house import House
from perdure.journal import Steps
from perdure.ledger import REQUEST_CANCELLED, error_payload, progress_token, unknown_outcome
from perdure.observe import note
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

_TOOL_PAGES = 100
"""Pages of `tools/list` that are read to find out which tools may run again."""

_RELEASE_AT_ONCE = 256
"""Homes of a dead node that are let go of in one commit."""

DIED = "its process died"


@dataclass(frozen=True, kw_only=True)
class _Left:
    """A call that was left behind."""

    row: CallRecord
    request: Request | None


class Settler:
    """Settles what dead nodes left behind."""

    def __init__(self, house: House, sessions: Sessions, *, monotonic: Callable[[], float]) -> None:
        self._house = house
        self._sessions = sessions
        self._monotonic = monotonic
        self._waiting: dict[SessionId, float] = {}
        """Sessions with calls that wait here for their principal, and until when they do."""
        self._tools: dict[str, bool] = {}
        """Tools that callers without a name may see, and whether they may run again; as of this round."""

    async def settle(self, dead: NodeId) -> None:
        """Settle a dead node, and bury it. What fails is tried again in the next round."""
        store = self._house.store
        self._tools = {}
        homes: list[StreamRecord] = []
        for record in await store.written_by(dead):
            if record.kind is Kind.CALL:
                await self._settle_stream(record)
            else:
                homes.append(record)
        await self._settle_homes(homes)
        await self._house.journal.flushed()
        for stream in await store.bury(dead, heir=self._house.node):
            await self._tell_unread(stream)
        self._house.counters.nodes_settled += 1
        note(logging.INFO, "node.settled", f"what node {dead[:8]} left behind is settled", node=dead)

    # A call's stream

    async def _settle_stream(self, record: StreamRecord, http: HttpRequest | None = None) -> None:
        house = self._house
        owner = await house.store.session(record.session)
        claimed = await house.store.claim(record.id, node=house.node, held=record.fence)
        if claimed is None:
            return  # another node was faster
        if owner is None or owner.state is SessionState.ENDED:
            house.journal.put(Steps((DropStream(stream=record.id),)))
        elif owner.state is SessionState.OPENING:
            # Its client has never heard of it.
            reason = SessionStep.HANDSHAKE_FAILED.value
            house.journal.put(Steps((EndSession(session=owner.id, time=house.clock(), reason=reason),)))
        else:
            rows = [row for row in await house.store.calls_on(record.id) if not _has_ended(row)]
            await self._settle_calls(owner, claimed, [_left(row) for row in rows], http)

    async def _settle_calls(
        self, owner: SessionRecord, claimed: StreamRecord, calls: Sequence[_Left], http: HttpRequest | None
    ) -> None:
        verdicts = [await self._verdict(owner, call, http) for call in calls]
        session = self._sessions.held(owner.id)
        if session is None and Verdict.RERUN in verdicts:
            session = await self._sessions.load(owner.id)
        stream = self._take_over(session, claimed, owed=len(calls))
        await self._withdraw_asks(owner, stream)
        for call, verdict in zip(calls, verdicts, strict=True):
            if verdict is Verdict.UNKNOWN or (session is None and verdict is Verdict.RERUN):
                self._answer_unknown(call, stream)
            elif verdict is Verdict.RERUN and session is not None:
                await self._run_again(session, call, stream, http)
            else:
                await self._have_wait(owner.id, call, stream)

    def _take_over(self, session: Session | None, claimed: StreamRecord, *, owed: int) -> Stream:
        if session is not None:
            return session.take_over(claimed, owed=owed)
        stream = self._house.stream(claimed, writes=True, owed=owed)
        self._house.neighbours.now_written_here(stream)
        return stream

    async def _verdict(self, owner: SessionRecord, call: _Left, http: HttpRequest | None) -> Verdict:
        if call.request is None:
            return Verdict.UNKNOWN
        at_hand = http is not None or not owner.owner  # the credentials to run it with
        verdict = settling.verdict(call.row.method, attempt=call.row.attempt)
        if verdict is Verdict.ASK:
            may = await self._tool_may_run_again(owner, str((call.request.params or {}).get("name")), http)
            if may is None and not at_hand:
                return Verdict.WAIT
            verdict = Verdict.RERUN if may else Verdict.UNKNOWN
        return Verdict.WAIT if verdict is Verdict.RERUN and not at_hand else verdict

    async def _tool_may_run_again(self, owner: SessionRecord, name: str, http: HttpRequest | None) -> bool | None:
        """What the server says of a tool; `None` if it does not show it to whoever is asking."""
        if http is None and name in self._tools:
            return self._tools[name]
        session = await self._sessions.load(owner.id)
        if session is None:
            return None
        cursor: object = None
        tools: dict[str, bool] = {}
        for _ in range(_TOOL_PAGES):
            params = {} if cursor is None else {"cursor": cursor}
            page = await session.exchange.ask_runtime("tools/list", params, http) or {}
            tools |= {str(tool.get("name")): settling.may_run_again(tool) for tool in page.get("tools", ())}
            cursor = page.get("nextCursor")
            if cursor is None:
                break
        if http is None:
            self._tools |= tools
        return tools.get(name)

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

    async def _withdraw_asks(self, owner: SessionRecord, stream: Stream) -> None:
        """Nobody waits for the answers to what dead nodes had asked, on this stream or on the standalone one."""
        house = self._house
        living = {house.node, *house.neighbours.others}
        for ask in await house.store.asks(owner.id):
            if (ask.node in living and ask.stream != stream.id) or ask.node == house.node:
                continue
            params = {"requestId": ask.id, "reason": DIED}
            cancelled = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}
            payload = json.dumps(cancelled, separators=(",", ":")).encode()
            close = CloseAsk(session=owner.id, id=ask.id)
            if ask.stream == stream.id:
                stream.append(payload, also=close)
            elif ask.stream == owner.standalone and (session := await self._sessions.load(owner.id)) is not None:
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
        if (session := self._sessions.held(session_id)) is not None:
            session.waits = True
        self._waiting[session_id] = self._monotonic() + self._house.settings.session_grace
        note(logging.INFO, "call.waits", f"a request waits for its principal ({row.method})", stream=row.stream)

    async def resume(self, session: Session, http: HttpRequest | None) -> None:
        """The principal is back: run again, or answer, what waited for it."""
        session.waits = False
        self._waiting.pop(session.id, None)
        try:
            for record in await self._waiting_streams(session.id):
                await self._settle_stream(record, http)
        except StoreError:
            session.waits = True
            raise

    async def give_up(self) -> None:
        """Answer what has waited for too long."""
        now = self._monotonic()
        for session_id, until in list(self._waiting.items()):
            if until <= now:
                del self._waiting[session_id]
                for record in await self._waiting_streams(session_id):
                    await self._answer_all(record, self._too_long)

    async def cancel(self, cancelled: mail.Cancelled) -> None:
        """The client cancels a call that waits."""
        store = self._house.store
        row = await store.open_call(
            cancelled.session, incarnation=cancelled.incarnation, request_id=cancelled.request_id
        )
        record = None if row is None else await store.stream(row.stream)
        if row is None or record is None:
            return
        if row.state is not CallState.WAITING:
            if record.node and record.node != self._house.node:
                self._house.journal.put(Steps((Post(node=record.node, message=mail.encode(cancelled)),)))
            return

        def answer(call: _Left, stream: Stream) -> None:
            if call.row.request_id == row.request_id:
                payload = error_payload(row.request_id, REQUEST_CANCELLED, "Request cancelled")
                with spans.settle(row.session[:8], row.stream, outcome="cancelled"):
                    stream.append(payload, end=_end(call.row, CallStep.CANCEL))
                self._house.counters.calls_cancelled += 1
                self._house.counters.settles_cancelled += 1

        await self._answer_all(record, answer)

    def _too_long(self, call: _Left, stream: Stream) -> None:
        self._answer_unknown(call, stream, f"{DIED}, and its principal did not come back")

    async def _answer_all(self, record: StreamRecord, answer: Callable[[_Left, Stream], None]) -> None:
        claimed = await self._house.store.claim(record.id, node=self._house.node, held=record.fence)
        if claimed is None:
            return
        rows = [row for row in await self._house.store.calls_on(record.id) if not _has_ended(row)]
        stream = self._take_over(self._sessions.held(record.session), claimed, owed=len(rows))
        for row in rows:
            answer(_left(row), stream)

    async def _waiting_streams(self, session_id: SessionId) -> Sequence[StreamRecord]:
        within, store = self._house.journal.within_time, self._house.store
        rows = await within(store.calls(session_id))
        streams = {row.stream for row in rows if row.state is CallState.WAITING}
        return await within(store.ends(list(streams))) if streams else ()

    # A stop

    async def learn_tools(self) -> None:
        """Find out, while there is time, which of the tools that run here may run again elsewhere."""
        self._tools = {}
        for session, call in self._sessions.running_calls():
            name = (call.request.params or {}).get("name")
            if call.request.method == "tools/call" and name not in self._tools:
                await self._tool_may_run_again(session.record, str(name), None)

    def hand_over(self, reason: str) -> None:
        """This node stops: calls that may run again are left to the next one, the others get their answer."""
        for session, call in self._sessions.running_calls():
            verdict = settling.verdict(call.request.method, attempt=call.attempt)
            name = (call.request.params or {}).get("name")
            again = verdict is Verdict.RERUN or (verdict is Verdict.ASK and self._tools.get(str(name), False))
            if not again:
                session.exchange.answer_unknown(call, reason)

    # Homes and readers

    async def _settle_homes(self, homes: Sequence[StreamRecord]) -> None:
        """A session with subscriptions, or in use here, gets a new home at once; the others when they are loaded."""
        releases = []
        for record in homes:
            owner = await self._house.store.session(record.session)
            wanted = owner is not None and owner.state is SessionState.ACTIVE and owner.sticky
            if wanted or self._sessions.held(record.session) is not None:
                session = await self._sessions.load(record.session)
                if session is not None:
                    await session.come_home()
                    await self._withdraw_asks(session.record, session.standalone)
                    continue
            releases.append(Release(stream=record.id, fence=record.fence))
        for start in range(0, len(releases), _RELEASE_AT_ONCE):
            await self._house.store.commit(releases[start : start + _RELEASE_AT_ONCE])

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
