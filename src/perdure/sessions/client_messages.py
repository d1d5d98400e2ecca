"""What a client says beside its requests: it may come to one node and concern another."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from perdure._core import mail
from perdure._core.ids import NodeId
from perdure._core.jsonrpc import Notification, Response
from perdure._core.orphan import read_call
from perdure.errors import NodeGone, StoreUnavailable
from perdure.sessions.asks import node_of_ask
from perdure.store.base import CallRecord, SendMail, stream_by_id
from perdure.telemetry.events import log_event

if TYPE_CHECKING:
    from perdure.sessions.session import Session

CancelWaiting = Callable[[mail.Cancelled], Awaitable[None]]


async def receive(
    session: Session,
    message: Notification | Response,
    origin: object,
    *,
    size: int,
    cancel_waiting: CancelWaiting,
) -> None:
    """What the client says beside its requests, wherever it is to be heard.

    Late and unknown answers and cancellations are dropped: the race is the client's right. `size`: the bytes of memory
    that the message takes. `cancel_waiting` is called for a call that waits at this node for its principal.
    """
    if isinstance(message, Response):
        if not session.exchange.asks.answer(message, origin) and not await _answer_elsewhere(session, message):
            log_event(logging.DEBUG, "ask.unknown", "an answer to no open ask was dropped", session=session.name)
    elif message.method == "notifications/cancelled":
        await _receive_cancelled(session, message.params or {}, cancel_waiting)
    elif (node := _waiting_node(message)) in (None, session.context.node):
        session.exchange.pass_on(message, origin, size=size)
    elif node is not None and await _may_be_asked(session, (message.params or {})["progressToken"], node):
        await _tell(session, node, mail.Notified(session=session.id, method=message.method, params=message.params))


async def _answer_elsewhere(session: Session, response: Response) -> bool:
    node = node_of_ask(response.id)
    if node is None or node == session.context.node:
        return False
    assert isinstance(response.id, str)
    if not await _may_be_asked(session, response.id, node):
        return False
    return await _tell(session, node, mail.AskAnswered(session=session.id, response=response.raw))


async def _may_be_asked(session: Session, ask: str, node: NodeId) -> bool:
    """Whether an ask waits at a node, or may: one that holds may have asked what is not in the store yet."""
    if await _is_asked(session, ask) or node in await session.context.nodes.holders():
        return True
    return await _is_asked(session, ask)  # it may have been written before nothing was held


async def _is_asked(session: Session, ask: str) -> bool:
    return any(record.id == ask for record in await session.context.store.asks(session.id))


async def _receive_cancelled(session: Session, params: dict[str, Any], cancel_waiting: CancelWaiting) -> None:
    request_id = params.get("requestId")
    if not isinstance(request_id, str | int) or isinstance(request_id, bool):
        return
    # An id of this incarnation; or the name of a call that is an orphan, which holds in any incarnation.
    named = (session.record.incarnation, request_id), read_call(request_id)
    for incarnation, name in filter(None, named):
        cancelled = mail.Cancelled(session=session.id, incarnation=incarnation, request_id=name, params=params)
        if await _cancel(session, cancelled, cancel_waiting):
            return


async def _cancel(session: Session, cancelled: mail.Cancelled, cancel_waiting: CancelWaiting) -> bool:
    """Cancel a call, in whatever process it runs or waits. Tells whether there is one."""
    context, incarnation, request_id = session.context, cancelled.incarnation, cancelled.request_id
    if session.exchange.cancel(request_id, incarnation=incarnation, params=cancelled.params):
        return True
    if context.nodes.alone and not session.waits:
        return False

    async def running() -> CallRecord | None:
        asked = context.store.open_call(session.id, incarnation=incarnation, request_id=request_id)
        return await asked

    row = await running()
    if row is None:
        for node in (holders := await context.nodes.holders()):
            await _tell(session, node, cancelled)  # one of them may run it, and have its row in memory alone
        row = None if holders else await running()
    stream = None if row is None else await stream_by_id(context.store, row.stream)
    if stream is None or not stream.node:
        return False
    if stream.node == context.node:
        await cancel_waiting(cancelled)
    else:
        await _tell(session, stream.node, cancelled)
    return True


async def _tell(session: Session, node: NodeId, message: mail.Message) -> bool:
    """Send mail; tells whether the node is still there."""
    if session.context.journal.refuses:
        raise StoreUnavailable  # as requests are refused, so that what clients say does not pile up
    try:
        await session.context.journal.write(SendMail(node=node, message=mail.encode(message)))
    except NodeGone:
        return False
    return True


def _waiting_node(notification: Notification) -> NodeId | None:
    """The node that a notification is for: progress of an ask is for the one that waits for it."""
    if notification.method != "notifications/progress":
        return None
    return node_of_ask((notification.params or {}).get("progressToken"))
