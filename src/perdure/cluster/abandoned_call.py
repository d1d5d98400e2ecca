"""Describes calls that a dead node left behind, and requests to settle them."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from perdure._core import settling
from perdure._core.ids import SessionId, StreamId
from perdure._core.jsonrpc import InvalidMessage, Request, coerce_id, parse_body
from perdure._core.settling import Occasion
from perdure.sessions.context import ServerContext
from perdure.sessions.ledger import logged_in, progress_token
from perdure.sessions.tool_hints import ToolHints
from perdure.store.base import CallRecord

CallKey = tuple[SessionId, int, int | str]
"""Session, incarnation and request id, as the SDK compares ids."""


@dataclass(frozen=True, kw_only=True)
class AbandonedCall:
    """A call that its node left behind."""

    row: CallRecord
    request: Request | None
    """`None` if the recorded bytes cannot be read."""

    @property
    def key(self) -> CallKey:
        return self.row.session, self.row.incarnation, coerce_id(self.row.request_id)


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


def abandoned_call(row: CallRecord) -> AbandonedCall:
    try:
        parsed = parse_body(row.request)
    except InvalidMessage:
        parsed = None
    return AbandonedCall(row=row, request=parsed if isinstance(parsed, Request) else None)


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
    elsewhere = () if token is None else (_forwarded(context, standalone), _payloads(context, standalone))
    for payloads in (*elsewhere, own := _payloads(context, row.stream)):
        async for payload in payloads:
            if token is not None:
                sent = settling.progress_in(payload, (token, f"{row.incarnation}:{token}"))
                progress += () if sent is None else (sent,)
            if payloads is own and (key := logged_in(payload)) is not None:
                logged[key] += 1
    if logged and len(await context.store.calls_on(row.stream)) > 1:
        logged.clear()
    return max(progress, default=None), logged


async def _payloads(context: ServerContext, stream: StreamId) -> AsyncIterator[bytes]:
    after = 0
    while events := await context.store.read(stream, after=after, limit=1_000):
        for event in events:
            yield event.payload
        after = events[-1].seq


async def _forwarded(context: ServerContext, stream: StreamId) -> AsyncIterator[bytes]:
    after = 0
    while page := await context.store.forwarded(stream, after=after):
        for message in page:
            yield message.payload
        after = page[-1].key
