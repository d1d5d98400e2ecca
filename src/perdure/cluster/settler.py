"""Settling: every call of a node that died gets its final answer (promise 3).

The dead node's streams are claimed one by one; of several nodes that try, one succeeds, and the dead one, should it
only have been paused, finds that it may write nothing more. A call that may run again (`_core.settling`) does so into
the same stream, once; all others are answered: interrupted, outcome unknown. With authentication a call runs again when
its principal is back, in that request's context: until then it waits, for `session_grace` at most.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

from perdure._core import mail, settling
from perdure._core.ids import Kind, NodeId, SessionId, StreamId
from perdure._core.jsonrpc import coerce_id
from perdure._core.settling import Verdict
from perdure._core.states import SessionState, SessionStep
from perdure.cluster.outcomes import DIED, Left, Outcomes, has_ended, left
from perdure.cluster.waiting_calls import Waiting
from perdure.errors import SessionEnded, StaleFence, StoreUnavailable
from perdure.log.chores import Chores
from perdure.log.journal import Steps
from perdure.log.stream import Stream
from perdure.sessions.context import ServerContext
from perdure.sessions.registry import SessionRegistry
from perdure.sessions.session import Session
from perdure.sessions.tool_hints import SettlingContext, ToolHints
from perdure.store.base import (
    CloseAsk,
    DropStream,
    EndSession,
    Release,
    SendMail,
    SessionRecord,
    StreamRecord,
)
from perdure.telemetry.events import log_event

_RELEASE_AT_ONCE = 256
"""Homes of a dead node that are let go of in one commit."""

T = TypeVar("T")


@dataclass(kw_only=True)
class _Begun:
    """A stream whose calls are being settled."""

    stream: Stream | None = None
    """Once it is claimed."""
    calls: list[Left] = field(default_factory=list)
    """Those that are not dealt with yet."""
    withdrawn: bool = False
    """Its asks are."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One at a time: its principal may come back while it is being settled."""


class Settler:
    """Settles what dead nodes left behind."""

    def __init__(self, context: ServerContext, sessions: SessionRegistry, *, monotonic: Callable[[], float]) -> None:
        self._context = context
        self._sessions = sessions
        self._outcomes = Outcomes(context)
        self.waiting = Waiting(context, sessions, self, self._outcomes, monotonic=monotonic)
        self._begun: dict[StreamId, _Begun] = {}
        """Streams that this node may have claimed, and whose calls it has not all dealt with yet."""
        self._chores = Chores()
        self._checked: object = None
        """The store's stamp from before it was last seen that running calls are still this node's."""

    async def settle(self, dead: NodeId) -> None:
        """Settle a dead node, and bury it. What fails does not hold up the rest, and is tried again by the next
        round."""
        context = self._context
        round_ = SettlingContext(tools=ToolHints(self._sessions), cancelled=await self._cancelled(dead))
        homes: list[StreamRecord] = []
        failures: list[Exception] = []
        for record in await context.store.written_by(dead):
            if record.kind is Kind.STANDALONE:
                homes.append(record)
                continue
            try:
                await self.settle_stream(record, round_)
            except Exception as failure:
                failures.append(failure)
        failures += await self._settle_homes(homes, round_)
        if failures:
            raise failures[0]
        for stream in await context.store.bury(dead, heir=context.node):
            await self._tell_unread(stream)
        context.counters.nodes_settled += 1
        log_event(logging.INFO, "node.settled", f"what node {dead[:8]} left behind is settled", node=dead)

    async def go_round(self) -> None:
        """Go on with what could not be finished, answer what has waited for too long, and see whether the calls that
        run here are still this node's."""
        surviving = self._chores.surviving
        if self._begun:
            with surviving("what was begun to be settled could not be finished"):
                await self._finish()
        with surviving("what has waited for too long could not be answered"):
            await self.waiting.give_up()
        with surviving("clients could not be asked to come again"):
            self.waiting.send_back()
        if not self._context.neighbours.alone and (stamp := self._context.store.stamp()) != self._checked:
            with surviving("it could not be seen whose the running calls are"):
                await self._check_own()
                self._checked = stamp

    def has_begun(self, stream: StreamId) -> bool:
        """This node is about to settle a stream."""
        return stream in self._begun

    async def _cancelled(self, dead: NodeId) -> frozenset[tuple[SessionId, int, int | str]]:
        """Calls that their client has cancelled, and the dead node has not heard of it."""
        messages: list[mail.Message | None] = []
        after = 0
        while page := await self._context.store.mail(dead, after=after):
            messages += [mail.decode(raw) for _, raw in page]
            after = page[-1].key
        return frozenset(
            (message.session, message.incarnation, coerce_id(message.request_id))
            for message in messages
            if isinstance(message, mail.Cancelled)
        )

    async def _finish(self) -> None:
        """The store failed behind a claim: the streams are this node's, and their calls are not dealt with."""
        round_ = SettlingContext(tools=ToolHints(self._sessions))
        found = {record.id: record for record in await self._context.neighbours.ends(list(self._begun))}
        for stream_id in list(self._begun):
            record = found.get(stream_id)
            if record is None or record.sealed or record.node != self._context.node:
                self._begun.pop(stream_id, None)
            else:
                with self._chores.surviving(f"stream {stream_id} could not be settled", stream_id):
                    await self.settle_stream(record, round_)

    async def _check_own(self) -> None:
        """Another node may have claimed a call that runs here, or that waits here for its principal, and says nothing
        for a while."""
        held = [stream for session in self._sessions for stream in session.streams.values()]
        own = {stream.id: stream for stream in held if stream.writes and not stream.over}
        for record in await self._context.neighbours.ends(list(own)):
            with self._chores.surviving(f"stream {record.id} could not be followed", record.id):
                own[record.id].follow(record)

    # A call's stream

    async def settle_stream(self, record: StreamRecord, round_: SettlingContext) -> None:
        begun = self._begun.setdefault(record.id, _Begun())
        async with begun.turn:
            await self._settle_stream(record, begun, round_)
        self._begun.pop(record.id, None)

    async def _settle_stream(self, record: StreamRecord, begun: _Begun, round_: SettlingContext) -> None:
        context = self._context
        owner = await context.store.session(record.session)
        if begun.stream is not None and begun.stream.writes and owner is not None:
            await self._settle_calls(owner, begun.stream, begun, round_)  # where the store failed
        elif (claimed := await self.claim(record)) is None:
            pass  # another node was faster
        elif owner is None or owner.state is SessionState.ENDED:
            context.journal.put(Steps((DropStream(stream=record.id),)))
        elif owner.state is SessionState.OPENING:
            # Its client has never heard of it.
            reason = SessionStep.HANDSHAKE_FAILED.value
            context.journal.put(Steps((EndSession(session=owner.id, time=context.clock(), reason=reason),)))
        else:
            begun.calls = await self.left_on(record)
            begun.stream = self.take_over(self._sessions.held(owner.id), claimed, owed=len(begun.calls))
            await self._settle_calls(owner, begun.stream, begun, round_)

    async def claim(self, record: StreamRecord) -> StreamRecord | None:
        """Become the writer. Also where this node is it: what it had under way then finds a stale fence."""
        return await self._context.store.claim(record.id, node=self._context.node, held=record.fence)

    async def left_on(self, record: StreamRecord) -> list[Left]:
        """The calls of a stream that have not ended; seen behind a claim, nobody else can end them."""
        rows = await self._context.store.calls_on(record.id)
        return [left(row) for row in rows if not has_ended(row)]

    async def _settle_calls(self, owner: SessionRecord, stream: Stream, begun: _Begun, round_: SettlingContext) -> None:
        verdicts = [await self._verdict(owner, call, round_) for call in begun.calls]
        session = await self._sessions.load(owner.id) if Verdict.RERUN in verdicts else None
        # It must not be put to rest before its calls have begun.
        with nullcontext() if session is None else session.in_use():
            if session is not None:
                session.adopt(stream)
            await self._give_outcomes(owner, session, stream, begun, verdicts, round_)

    async def _give_outcomes(
        self,
        owner: SessionRecord,
        session: Session | None,
        stream: Stream,
        begun: _Begun,
        verdicts: Sequence[Verdict],
        round_: SettlingContext,
    ) -> None:
        if not begun.withdrawn:
            await self._withdraw_asks(owner, stream, round_)
            begun.withdrawn = True
        for verdict in verdicts:
            if (held := self._sessions.held(owner.id)) is not None:
                held.adopt(stream)  # it may have been loaded meanwhile, for a reader of this very stream
            await self._settle_call(owner, session, stream, begun.calls[0], verdict, round_)
            del begun.calls[0]

    async def _settle_call(
        self,
        owner: SessionRecord,
        session: Session | None,
        stream: Stream,
        call: Left,
        verdict: Verdict,
        round_: SettlingContext,
    ) -> None:
        if (owner.id, call.row.incarnation, coerce_id(call.row.request_id)) in round_.cancelled:
            self._outcomes.cancelled(call, stream)
        elif verdict is Verdict.WAIT:
            await self.waiting.add(owner.id, call, stream)
        elif verdict is Verdict.RERUN and session is not None:
            await self._run_again(session, call, stream, round_.origin)
        else:
            self._outcomes.unknown(call, stream)

    async def _run_again(self, session: Session, call: Left, stream: Stream, origin: object) -> None:
        try:
            await self._outcomes.run_again(session, call, stream, origin)
        except (StoreUnavailable, StaleFence):
            raise  # trying again may help; or another node has it
        except Exception as failure:
            # It would fail in each round, and its client would wait for ever.
            row = call.row
            log_event(
                logging.ERROR,
                "call.poison",
                f"a request cannot run again ({row.method}): {failure!r}",
                stream=row.stream,
            )
            self._outcomes.unknown(call, stream)

    def take_over(self, session: Session | None, claimed: StreamRecord, *, owed: int) -> Stream:
        if session is not None:
            stream = session.take_over(claimed, owed=owed)
        else:
            stream = self._context.stream(claimed, writes=True, owed=owed)
            self._context.neighbours.now_written_here(stream)
        if not stream.is_read:
            self._lost_its_reader(session, stream)
        return stream

    def _lost_its_reader(self, session: Session | None, stream: Stream) -> None:
        """The reader went with the node. Its client may be here, or at another node, and never ask for the call."""
        context = self._context
        context.hub.marks.lost(stream)
        if session is not None and session.standalone.reader is not None:
            session.orphans.give_time()
        told = mail.encode(mail.Lost(session=stream.session))
        if posts := [SendMail(node=node, message=told) for node in context.neighbours.others]:
            context.journal.put(Steps(posts))

    async def _verdict(self, owner: SessionRecord, call: Left, round_: SettlingContext) -> Verdict:
        if call.request is None:
            return Verdict.UNKNOWN
        at_hand = round_.origin is not None or not owner.owner  # the credentials to run it with
        verdict = settling.verdict(call.row.method, attempt=call.row.attempt)
        if verdict is Verdict.ASK:
            name = str((call.request.params or {}).get("name"))
            may = await round_.tools.ask(owner.id, name, round_.origin)
            if may is None and not at_hand:
                return Verdict.WAIT
            verdict = Verdict.RERUN if may else Verdict.UNKNOWN
        return Verdict.WAIT if verdict is Verdict.RERUN and not at_hand else verdict

    async def _withdraw_asks(self, owner: SessionRecord, stream: Stream, round_: SettlingContext) -> None:
        """Nobody waits for the answers to what dead nodes had asked, on this stream or on the standalone one."""
        context = self._context
        living = {context.node, *context.neighbours.others}
        for ask in await context.store.asks(owner.id):
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
                await session.home.caught_up()  # the ask may still wait for the home
                session.home.send(payload, close)

    # Homes and readers

    async def _settle_homes(self, homes: Sequence[StreamRecord], round_: SettlingContext) -> list[Exception]:
        """A session with subscriptions, or in use here, gets a new home at once; the others when they are loaded.

        Gives what went wrong with single ones.
        """
        releases = []
        failures: list[Exception] = []
        waited_for = {record.id for home in homes[:1] for record in await self._context.store.forwarded_to(home.node)}
        for record in homes:
            try:
                if not await self._bring_home(record, round_, needed=record.id in waited_for):
                    releases.append(Release(stream=record.id, fence=record.fence))
            except Exception as failure:
                failures.append(failure)
        for start in range(0, len(releases), _RELEASE_AT_ONCE):
            await self._context.store.commit(releases[start : start + _RELEASE_AT_ONCE])
        return failures

    async def _bring_home(self, record: StreamRecord, round_: SettlingContext, *, needed: bool) -> bool:
        """Become the home of a session that needs one now (`needed`: messages wait for it). Tells whether there is
        one."""
        held = self._sessions.held(record.session)
        owner = await self._context.store.session(record.session) if held is None else held.record
        subscribes = owner is not None and owner.state is SessionState.ACTIVE and bool(owner.sticky)
        if held is None and not subscribes and not needed:
            return False
        session = await self._sessions.load(record.session)
        if session is None:
            return False
        with session.in_use():
            try:
                session.standalone.follow(record)  # the dead node may have taken it from this one without a word
                await session.home.claim()
            except SessionEnded:
                return True  # and its streams are gone
            await self._withdraw_asks(session.record, session.standalone, round_)
        return True

    async def _tell_unread(self, record: StreamRecord) -> None:
        """The reader of a stream went with its node: let the writer know."""
        session = self._sessions.held(record.session)
        if record.node == self._context.node and session is not None:
            if (stream := session.held_stream(record.id)) is not None:
                stream.read_elsewhere(None, arrival=self._context.hub.arrive())
        elif record.node:
            message = mail.encode(mail.Reading(session=record.session, stream=record.id))
            self._context.journal.put(Steps((SendMail(node=record.node, message=message),)))
