"""Calls that wait for their principal: whether they may run again is for its credentials to say, or they need them.

Whoever gets the principal's next request, on any node, claims them and runs them in its context; one that does not come
back is waited for during `session_grace`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from perdure._core import mail
from perdure._core.ids import SessionId
from perdure._core.states import CallState
from perdure.cluster.outcomes import DIED, Left, Outcomes
from perdure.errors import HeldElsewhere, StoreError
from perdure.log.chores import Chores
from perdure.log.journal import Steps
from perdure.log.stream import Stream
from perdure.sessions.context import ServerContext
from perdure.sessions.registry import SessionRegistry
from perdure.sessions.session import Session
from perdure.sessions.tool_hints import SettlingContext, ToolHints
from perdure.store.base import SendMail, StreamRecord, stream_by_id

if TYPE_CHECKING:
    from perdure.cluster.settler import Settler


class Waiting:
    """The calls that wait, as far as this node knows of them."""

    def __init__(
        self,
        context: ServerContext,
        sessions: SessionRegistry,
        settler: Settler,
        outcomes: Outcomes,
        *,
        monotonic: Callable[[], float],
    ) -> None:
        self._context = context
        self._sessions = sessions
        self._settler = settler
        self._outcomes = outcomes
        self._monotonic = monotonic
        self._chores = Chores()
        self._waiting: dict[SessionId, float] = {}
        """Sessions with such calls, here or elsewhere, and until when they wait."""

    async def add(self, session_id: SessionId, call: Left, stream: Stream) -> None:
        await self._outcomes.have_wait(call, stream)
        message = mail.encode(mail.Waiting(session=session_id))
        for node in self._context.neighbours.others:
            self._context.journal.put(Steps((SendMail(node=node, message=message),)))
        self.expect(session_id)

    def expect(self, session_id: SessionId) -> None:
        """Calls of a session wait, here or elsewhere, for its principal."""
        self._waiting[session_id] = self._monotonic() + self._context.settings.session_grace
        if (session := self._sessions.held(session_id)) is not None:
            session.mark_waiting(True)
            self.send_back()

    def send_back(self) -> None:
        """Clients that were back before their calls had to wait are asked to come again: that request has what is
        needed to run them."""
        for session_id in self._waiting:
            session = self._sessions.held(session_id)
            if session is not None and session.waits:
                running = {call.stream.id for call in session.exchange.calls.all_running()}
                for stream in session.streams.values():
                    if stream.reader is not None and not stream.over and stream.id not in running:
                        stream.reader.close_with_retry()

    async def resume(self, session: Session, origin: object) -> None:
        """The principal is back: run again, or answer, what waited for it."""
        session.mark_waiting(False)
        round_ = SettlingContext(tools=ToolHints(self._sessions), origin=origin)
        try:
            for record in await self._waiting_streams(session.id):
                await self._resume_stream(record, round_)
        except StoreError:
            session.mark_waiting(True)
            raise
        self._waiting.pop(session.id, None)

    async def _resume_stream(self, record: StreamRecord, round_: SettlingContext) -> None:
        if self._settler.has_begun(record.id) or await self._is_free(record):
            await self._settler.settle_stream(record, round_)

    async def _is_free(self, record: StreamRecord) -> bool:
        """Whether calls still wait on a stream, seen after its fence: whoever claims it with that takes it from
        nobody who runs them, and a node that holds may have answered them."""
        if record.node in await self._context.neighbours.holders():
            raise HeldElsewhere(f"node {record.node[:8]} holds what is not written yet")
        rows = await self._context.store.calls_on(record.id)
        return not self._settler.has_begun(record.id) and any(row.state is CallState.WAITING for row in rows)

    async def give_up(self) -> None:
        """Answer what has waited here for too long."""
        now = self._monotonic()
        for session_id in [session_id for session_id, until in self._waiting.items() if until <= now]:
            with self._chores.surviving("calls that waited for too long could not be answered", session_id):
                await self._give_up(session_id)

    async def _give_up(self, session_id: SessionId) -> None:
        for record in await self._waiting_streams(session_id):
            if record.node == self._context.node and await self._is_free(record):
                await self._answer_all(record, self._too_long)
        if (session := self._sessions.held(session_id)) is not None:
            session.mark_waiting(False)
        self._waiting.pop(session_id, None)

    async def cancel(self, cancelled: mail.Cancelled) -> None:
        """The client cancels a call that waits."""
        context = self._context
        row = await context.store.open_call(
            cancelled.session, incarnation=cancelled.incarnation, request_id=cancelled.request_id
        )
        record = None if row is None else await stream_by_id(context.store, row.stream)
        if row is None or record is None:
            return
        if row.state is not CallState.WAITING or not await self._is_free(record):
            if record.node and record.node != context.node:
                context.journal.put(Steps((SendMail(node=record.node, message=mail.encode(cancelled)),)))
            return

        def answer(call: Left, stream: Stream) -> None:
            if call.row.request_id == row.request_id:
                self._outcomes.cancelled(call, stream)

        await self._answer_all(record, answer)

    def _too_long(self, call: Left, stream: Stream) -> None:
        self._outcomes.unknown(call, stream, f"{DIED}, and its principal did not come back")

    async def _answer_all(self, record: StreamRecord, answer: Callable[[Left, Stream], None]) -> None:
        claimed = await self._settler.claim(record)
        if claimed is None:
            return
        left = await self._settler.left_on(record)
        stream = self._settler.take_over(self._sessions.held(record.session), claimed, owed=len(left))
        for call in left:
            answer(call, stream)

    async def _waiting_streams(self, session_id: SessionId) -> Sequence[StreamRecord]:
        rows = await self._context.store.calls(session_id)
        streams = {row.stream for row in rows if row.state is CallState.WAITING}
        return await self._context.neighbours.ends(list(streams)) if streams else ()
