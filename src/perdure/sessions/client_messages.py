"""Takes what a client sends beside its requests: it may come to one node and concern another."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from perdure._core import mail
from perdure._core.ids import NodeId
from perdure._core.jsonrpc import Notification, Response
from perdure._core.losses import read_call
from perdure.errors import NodeGone, StoreUnavailable
from perdure.sessions.context import mail_to
from perdure.sessions.runtime_link import node_of_ask
from perdure.store.interface import stream_by_id
from perdure.telemetry.log_records import log_event

if TYPE_CHECKING:
    from perdure.sessions.session import Session

CancelWaiting = Callable[[mail.Cancelled], Awaitable[None]]


async def receive(
    session: Session, message: Notification | Response, origin: object, *, size: int, cancel_waiting: CancelWaiting
) -> None:
    """Take what is not a request, at the node where it belongs. Late and unknown answers and cancellations are dropped:
    the race is the client's right. `size`: the bytes of memory that the message takes. `cancel_waiting` is called for a
    call that waits at this node for its principal."""
    here = session.context.node
    if isinstance(message, Response):
        if session.link.asks.answer(message, origin):
            return
        node, answer = node_of_ask(message.id), mail.AskAnswered(session=session.id, response=message.raw)
        asked = node not in (None, here) and await _may_be_asked(session, message.id, node)
        if node is None or not asked or not await _send_mail(session, node, answer):
            log_event(logging.DEBUG, "ask.unknown", "an answer to no open ask was dropped", session=session.name)
        return
    params = message.params or {}
    if message.method == "notifications/cancelled":
        request_id = params.get("requestId")
        if isinstance(request_id, str | int) and not isinstance(request_id, bool):
            # An id of this incarnation; or the name of a call that is an orphan, which holds in any incarnation.
            numbers = session.link.calls.numbers(session.record.incarnation, request_id)
            named = [*((number, request_id) for number in numbers), read_call(request_id)]
            for incarnation, name in filter(None, named):
                cancelled = mail.Cancelled(session=session.id, incarnation=incarnation, request_id=name, params=params)
                if await cancel_call(session, cancelled, cancel_waiting):
                    return
        return
    # Progress of an ask is for the node that waits for it.
    ask = params.get("progressToken") if message.method == "notifications/progress" else None
    node = node_of_ask(ask)
    if node in (None, here):
        session.link.pass_on(message, origin, size=size)
    elif node is not None and await _may_be_asked(session, ask, node):
        await _send_mail(session, node, mail.Notified(session=session.id, method=message.method, params=message.params))


async def _may_be_asked(session: Session, ask: object, node: NodeId | None) -> bool:
    """Whether an ask waits at a node, or may: one that holds may have asked what is not in the store yet."""

    async def is_stored() -> bool:
        return any(record.id == ask for record in await session.context.store.asks(session.id))

    # Looked at twice: it may have been written before nothing was held.
    return await is_stored() or node in await session.context.nodes.holders() or await is_stored()


async def cancel_call(session: Session, cancelled: mail.Cancelled, cancel_waiting: CancelWaiting) -> bool:
    """Cancel a call, in whatever process it runs or waits. Tells whether there is one."""
    context, incarnation, request_id = session.context, cancelled.incarnation, cancelled.request_id
    if session.link.cancel(request_id, incarnation=incarnation, params=cancelled.params):
        return True
    if context.nodes.alone and not session.waits:
        return False
    row = await context.store.open_call(session.id, incarnation=incarnation, request_id=request_id)
    if row is None:
        for node in (holders := await context.nodes.holders()):
            await _send_mail(session, node, cancelled)  # one of them may run it, and have its row in memory alone
        if not holders:
            row = await context.store.open_call(session.id, incarnation=incarnation, request_id=request_id)
    stream = None if row is None else await stream_by_id(context.store, row.stream)
    if stream is None or not stream.node:
        return False
    if stream.node == context.node:
        await cancel_waiting(cancelled)
    else:
        await _send_mail(session, stream.node, cancelled)
    return True


async def _send_mail(session: Session, node: NodeId, message: mail.Message) -> bool:
    """Send mail; tells whether the node is still there."""
    if session.context.journal.refuses:
        raise StoreUnavailable  # as requests are refused, so that what clients say does not pile up
    try:
        await session.context.journal.write(*mail_to([node], message))
    except NodeGone:
        return False
    return True
