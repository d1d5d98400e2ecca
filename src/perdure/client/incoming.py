"""From the server to the SDK's client: what streams bring, before their positions move on.

**Questions.** The position moves on when a question of the server's (sampling, elicitation, roots) is handed to the
client's callback. If the process dies before it has answered, nobody would be asked again: so open questions are
remembered, and asked again by the next process.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import anyio
from anyio.streams.memory import MemoryObjectSendStream
from mcp.shared.jsonrpc_dispatcher import cancelled_request_id_from_params
from mcp.shared.message import SessionMessage
from mcp_types import INTERNAL_ERROR, JSONRPCMessage, JSONRPCNotification, JSONRPCRequest, RequestId

from perdure._core.gap import METHOD as GAP
from perdure._core.gap import Gap, read_gap
from perdure.client.callback_limit import Pace
from perdure.errors import EventsLost
from perdure.remote.state import Ask
from perdure.telemetry.events import log_event

if TYPE_CHECKING:
    from perdure.client.link import Link

Inbox = MemoryObjectSendStream[SessionMessage | Exception]
OnGap = Callable[[Gap], Awaitable[None] | None]

#: Questions that may be open at once; each is a task of the SDK's client, and is kept in the state.
MAX_ASKS = 100
#: Of a question, to be remembered: the state is written as a whole, often. A larger one is asked, and not again.
MAX_ASK_BYTES = 65_536


class Incoming:
    """Hands on what is for the SDK's client, under the names that it knows."""

    def __init__(self, link: Link, on_gap: OnGap | None) -> None:
        self._link = link
        self._on_gap = on_gap
        self.pace = Pace()
        self.tokens: dict[str, RequestId] = {}
        """Progress tokens on the wire, and the ids behind them."""
        self.inbox: Inbox

    async def take(self, message: JSONRPCMessage, call: str | None, tool: str | None) -> None:
        """What a stream brought."""
        if isinstance(message, JSONRPCRequest):
            await self._ask(message, call)
        elif isinstance(message, JSONRPCNotification):
            await self._notification(message, call, tool)

    async def deliver(self, message: JSONRPCMessage) -> bool:
        """Whether the SDK's client was there to take it."""
        return await self._put(SessionMessage(message))

    async def complain(self, error: Exception) -> None:
        """The SDK's client hands what is no message to its `message_handler`."""
        await self._put(error)

    async def gap(self, gap: Gap) -> None:
        log_event(
            logging.WARNING,
            "client.gap",
            f"the server says that events {gap.first} to {gap.last} are gone: {gap.reason}",
            stream=gap.stream,
            tool=gap.tool,
        )
        if self._on_gap is None:
            await self.complain(EventsLost(gap))
            return
        try:
            waiting = self._on_gap(gap)
            if waiting is not None:
                await waiting
        except Exception as error:
            await self.complain(error)

    async def _ask(self, message: JSONRPCRequest, call: str | None) -> None:
        asks, key = self._link.state.asks, str(message.id)
        if key in asks:
            return  # it was remembered, and asked again, before the log brought it again
        body = encoded(message)
        if len(asks) >= MAX_ASKS:
            error = {"code": INTERNAL_ERROR, "message": f"This client has {MAX_ASKS} open questions already"}
            self._link.start(self._link.tell, {"jsonrpc": "2.0", "id": message.id, "error": error})
            return
        is_small = len(json.dumps(body)) <= MAX_ASK_BYTES
        asks[key] = Ask(message=body if is_small else {}, call=call)
        self._link.changed()
        await self.deliver(message)

    async def _notification(self, message: JSONRPCNotification, call: str | None, tool: str | None) -> None:
        if message.method == GAP:
            await self.gap(read_gap(message.params, tool=tool))
            return
        if message.method == "notifications/cancelled":
            asked = cancelled_request_id_from_params(message.params)
            if self._link.state.asks.pop(str(asked), None) is not None:
                self._link.changed()
        message = self._with_own_token(message)
        if call is not None:
            await self._link.before.hear(call, message)
        await self.pace.room()
        await self.deliver(message)

    def _with_own_token(self, message: JSONRPCNotification) -> JSONRPCNotification:
        token = (message.params or {}).get("progressToken")
        if message.method != "notifications/progress" or not isinstance(token, str) or token not in self.tokens:
            return message
        return message.model_copy(update={"params": {**(message.params or {}), "progressToken": self.tokens[token]}})

    async def _put(self, item: SessionMessage | Exception) -> bool:
        try:
            await self.inbox.send(item)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return False  # the SDK's client has left
        return True


def encoded(message: JSONRPCMessage) -> dict[str, Any]:
    return message.model_dump(by_alias=True, mode="json", exclude_unset=True)
