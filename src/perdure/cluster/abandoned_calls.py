"""Abandoned calls: the calls that dead nodes left behind, what they had said, and which wait for their principal.

A call that waits needs its principal's credentials to run again, or to find out whether it may. The node that gets the
principal's next request claims it and runs it in that request's context. A principal that does not come back is waited
for during `session_grace`.
"""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from perdure._core import mail, settling
from perdure._core.ids import SessionId, StreamId
from perdure._core.jsonrpc import InvalidMessage, Request, coerce_id, parse_body
from perdure._core.settling import Occasion
from perdure._core.states import CALL, CallState, CallStep, advance
from perdure.cluster.remote_readers import stream_ends
from perdure.errors import StoreError
from perdure.log.chores import Chores
from perdure.log.journal import Steps
from perdure.log.stream import Stream
from perdure.sessions.context import ServerContext, mail_to
from perdure.sessions.ledger import logged_in, progress_token
from perdure.sessions.registry import SessionRegistry
from perdure.sessions.session import Session
from perdure.sessions.tool_hints import ToolHints
from perdure.store.base import CallEnd, CallRecord, Event, PutCall, StreamRecord, stream_by_id

T = TypeVar("T")

CallKey = tuple[SessionId, int, int | str]
"""Session, incarnation and request id, as the SDK compares ids."""


@dataclass(frozen=True, kw_only=True)
class AbandonedCall:
    """A call that its node left behind."""

    row: CallRecord

    @cached_property
    def request(self) -> Request | None:
        """`None` if the recorded bytes cannot be read."""
        try:
            parsed = parse_body(self.row.request)
        except InvalidMessage:
            return None
        return parsed if isinstance(parsed, Request) else None

    @property
    def key(self) -> CallKey:
        return self.row.session, self.row.incarnation, coerce_id(self.row.request_id)

    def ended(self, step: CallStep) -> CallEnd:
        row = self.row
        return CallEnd(incarnation=row.incarnation, request_id=row.request_id, state=advance(CALL, row.state, step))

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
    """The request whose credentials a call runs with; only the runtime looks into it."""
    cancelled: frozenset[CallKey] = frozenset()
    """Calls that their client has cancelled."""
    withdrawn: set[str] = field(default_factory=set)
    """Asks of dead nodes that were cancelled."""
    reported: set[SessionId] = field(default_factory=set)
    """Sessions of which the other nodes know that their calls lost readers: one message each, not one for each call,
    which could fill a mailbox."""


async def said_before(
    context: ServerContext, call: AbandonedCall, standalone: StreamId
) -> tuple[float | None, Counter[bytes]]:
    """What a call had sent before it was left behind: its highest progress, and its log messages.

    Progress is on its own stream or, as an orphan's, on the standalone one, and may still wait for the session's home.
    Log messages are looked for on its own stream; where several calls share that, it is not known whose they are.
    """
    row, token = call.row, None if call.request is None else progress_token(call.request)
    progress = [] if token is None or row.progress is None else [row.progress]
    logged: Counter[bytes] = Counter()
    # What waits is read first: the home may append it meanwhile.
    waiting = paged(lambda after: context.store.forwarded(standalone, after=after), lambda message: message.key)
    elsewhere = () if token is None else (waiting, _events(context, standalone))
    for messages in (*elsewhere, own := _events(context, row.stream)):
        async for message in messages:
            if token is not None:
                sent = settling.progress_in(message.payload, (token, f"{row.incarnation}:{token}"))
                progress += () if sent is None else (sent,)
            if messages is own and (key := logged_in(message.payload)) is not None:
                logged[key] += 1
    if logged and len(await context.store.calls_on(row.stream)) > 1:
        logged.clear()
    return max(progress, default=None), logged


def _events(context: ServerContext, stream: StreamId) -> AsyncIterator[Event]:
    return paged(lambda after: context.store.read(stream, after=after, limit=1_000), lambda event: event.seq)


async def paged(read: Callable[[int], Awaitable[Sequence[T]]], key: Callable[[T], int]) -> AsyncIterator[T]:
    """All that a store gives page by page; `read` gives the page behind a key."""
    after = 0
    while page := await read(after):
        for item in page:
            yield item
        after = key(page[-1])


_Settle = Callable[[StreamRecord, SettleRequest], Awaitable[bool]]
"""Settles the calls that wait on a stream; `False` if none does any more."""


class WaitingCalls:
    """The calls that wait, as far as this node knows of them."""

    def __init__(self, context: ServerContext, sessions: SessionRegistry, settle: _Settle) -> None:
        self._context = context
        self._sessions = sessions
        self._settle = settle
        self._monotonic = context.hub.monotonic
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
        tools, key = ToolHints(self._sessions), AbandonedCall(row=row).key
        by = SettleRequest(occasion=Occasion.CALL_CANCELLED, tools=tools, cancelled=frozenset({key}))
        if row.state is CallState.WAITING and await self._settle(record, by):
            return
        if record.node and record.node != context.node:
            context.journal.put(Steps(mail_to([record.node], cancelled)))

    async def _waiting_streams(self, session_id: SessionId) -> Sequence[StreamRecord]:
        rows = await self._context.store.calls(session_id)
        streams = {row.stream for row in rows if row.state is CallState.WAITING}
        return await stream_ends(self._context.store, list(streams)) if streams else ()
