"""Remembers which calls of dead nodes wait for their principal, and for how long.

They need its credentials to run again, or to find out whether they may. The node that gets the principal's next request
claims them and runs them in its context. A principal that does not come back is waited for during `session_grace`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from perdure._core import mail
from perdure._core.ids import SessionId
from perdure._core.settling import Occasion
from perdure._core.states import CallState
from perdure.cluster.abandoned_call import SettleRequest, abandoned_call
from perdure.cluster.remote_readers import stream_ends
from perdure.errors import StoreError
from perdure.log.chores import Chores
from perdure.log.journal import Steps
from perdure.sessions.context import ServerContext
from perdure.sessions.registry import SessionRegistry
from perdure.sessions.session import Session
from perdure.sessions.tool_hints import ToolHints
from perdure.store.base import SendMail, StreamRecord, stream_by_id


class WaitingCalls:
    """The calls that wait, as far as this node knows of them."""

    def __init__(
        self,
        context: ServerContext,
        sessions: SessionRegistry,
        settle: Callable[[StreamRecord, SettleRequest], Awaitable[bool]],
        *,
        monotonic: Callable[[], float],
    ) -> None:
        """`settle` settles the calls that wait on a stream; `False` if none does any more."""
        self._context = context
        self._sessions = sessions
        self._settle = settle
        self._monotonic = monotonic
        self._chores = Chores()
        self._until: dict[SessionId, float] = {}
        """Sessions with such calls, here or elsewhere, and until when they wait."""

    def expect(self, session_id: SessionId) -> None:
        """Calls of a session wait, here or elsewhere, for its principal."""
        self._until[session_id] = self._monotonic() + self._context.settings.session_grace
        if (session := self._sessions.held(session_id)) is not None:
            session.mark_waiting(True)
            self.send_back()

    def send_back(self) -> None:
        """Ask clients that were back before their calls had to wait to come again: that request has the credentials
        to run them with."""
        for session_id in self._until:
            session = self._sessions.held(session_id)
            if session is not None and session.waits:
                running = {call.stream.id for call in session.exchange.calls.all_running()}
                for stream in session.streams.values():
                    if stream.reader is not None and not stream.is_over and stream.id not in running:
                        stream.reader.close_with_retry()

    async def resume(self, session: Session, origin: object) -> None:
        """The principal is back: run again, or answer, what waited for it."""
        session.mark_waiting(False)
        tools = ToolHints(self._sessions)
        by = SettleRequest(occasion=Occasion.PRINCIPAL_BACK, tools=tools, origin=origin)
        try:
            for record in await self._waiting_streams(session.id):
                await self._settle(record, by)
        except StoreError:
            session.mark_waiting(True)
            raise
        if not session.waits:  # or more of its calls have begun to wait meanwhile
            self._until.pop(session.id, None)

    async def give_up(self) -> None:
        """Answer what has waited here for too long."""
        now = self._monotonic()
        by = SettleRequest(occasion=Occasion.GRACE_PASSED, tools=ToolHints(self._sessions))
        for session_id in [session_id for session_id, until in self._until.items() if until <= now]:
            with self._chores.surviving("calls that waited for too long could not be answered", session_id):
                for record in await self._waiting_streams(session_id):
                    if record.node == self._context.node:
                        await self._settle(record, by)
                if (session := self._sessions.held(session_id)) is not None:
                    session.mark_waiting(False)
                self._until.pop(session_id, None)

    async def cancel(self, cancelled: mail.Cancelled) -> None:
        """The client cancels a call that waits."""
        context = self._context
        row = await context.store.open_call(
            cancelled.session, incarnation=cancelled.incarnation, request_id=cancelled.request_id
        )
        record = None if row is None else await stream_by_id(context.store, row.stream)
        if row is None or record is None:
            return
        tools, key = ToolHints(self._sessions), abandoned_call(row).key
        by = SettleRequest(occasion=Occasion.CALL_CANCELLED, tools=tools, cancelled=frozenset({key}))
        if row.state is CallState.WAITING and await self._settle(record, by):
            return
        if record.node and record.node != context.node:
            context.journal.put(Steps((SendMail(node=record.node, message=mail.encode(cancelled)),)))

    async def _waiting_streams(self, session_id: SessionId) -> Sequence[StreamRecord]:
        rows = await self._context.store.calls(session_id)
        streams = {row.stream for row in rows if row.state is CallState.WAITING}
        return await stream_ends(self._context.store, list(streams)) if streams else ()
