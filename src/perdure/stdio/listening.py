"""Keeps one `subscriptions/listen` of the host open, over as many connections as it takes.

The revision has no way to read a broken subscription on, and the host cannot tell what it missed. So when the
subscription is back, each thing that is listened to is told as changed, once; unless the server says where the
listener was (`dev.perdure/position`), and tells what changed since.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from perdure._core import splice
from perdure._core.codes import INVALID_PARAMS
from perdure._core.delivery import LISTEN
from perdure._core.envelope import SUBSCRIPTION, headers_of
from perdure._core.extension import POSITION
from perdure._core.jsonrpc import JsonObject, Request
from perdure._core.losses import GAP
from perdure._core.reconnect import Patience
from perdure.remote.exchange import Exchange
from perdure.remote.exchange import Request as Sent
from perdure.remote.message import Message, encode
from perdure.remote.stream import Attempts

ACKNOWLEDGED = "notifications/subscriptions/acknowledged"
CHANGES = {
    "toolsListChanged": "notifications/tools/list_changed",
    "promptsListChanged": "notifications/prompts/list_changed",
    "resourcesListChanged": "notifications/resources/list_changed",
}
"""Of a filter's fields, the notification that tells of a change."""


MakeExchange = Callable[[Sent, Callable[[Message], Awaitable[None]], Patience], Exchange]


class Listening:
    """`deliver` writes a message to the host, which knows the subscription by `host_id`, given as JSON."""

    def __init__(self, request: Request, text: str, host_id: str, deliver: Callable[[str], Awaitable[None]]) -> None:
        self._params: Mapping[str, Any] = request.params or {}
        self._text = text
        self._host_id = host_id
        self._deliver = deliver
        self._position: str | None = None
        """As the server wrote it, as JSON."""
        self._honored: Mapping[str, Any] | None = None
        """What the server has agreed to; None before the first time."""
        self._has_heard = False

    async def end(self, exchange: MakeExchange, patience: Patience) -> Message:
        """The answer to the request, when there is nothing to come back to."""
        sent = Sent(method=LISTEN, body=self._body, headers=headers_of(LISTEN, self._params))
        returns = Attempts(patience)
        while True:
            self._has_heard = False
            answer = await exchange(sent, self._take, patience).answer()
            if self._position is not None and answer.is_error and answer.body["error"].get("code") == INVALID_PARAMS:
                self._position = None  # it means nothing to this server: without it, everything is told as changed
                continue
            if answer.is_error or self._honored is None:
                return answer
            # A server that stops ends it in good order: it is listened to again, as after a break.
            if not await returns.wait_to_return(has_heard=self._has_heard):
                return answer

    def _body(self, wire_id: str) -> bytes:
        text = splice.replaced(self._text, encode(wire_id), "id")
        if self._position is not None:
            meta: JsonObject = {**self._params["_meta"], POSITION: None}
            text = splice.replaced(text, encode(meta), "params", "_meta")
            text = splice.replaced(text, self._position, "params", "_meta", POSITION)
        return text.encode()

    async def _take(self, message: Message) -> None:
        if message.method is None or message.is_request or message.method == "notifications/cancelled":
            return  # the end of the connection follows, and says the same
        told = splice.cut(message.text, "params", "_meta", POSITION)
        brought, self._position = self._position, told or self._position
        await self._deliver(splice.replaced(message.text, self._host_id, "params", "_meta", SUBSCRIPTION))
        if message.method == ACKNOWLEDGED:
            is_back = self._honored is not None and brought is None
            honored = message.params.get("notifications")
            self._honored = honored if isinstance(honored, Mapping) else {}
            if not is_back:
                return
        elif message.method != GAP:
            self._has_heard = True
            return
        for method, params in self._cues():
            text = encode({"jsonrpc": "2.0", "method": method, "params": {**params, "_meta": {SUBSCRIPTION: 0}}})
            await self._deliver(splice.replaced(text, self._host_id, "params", "_meta", SUBSCRIPTION))

    def _cues(self) -> Iterator[tuple[str, JsonObject]]:
        """A notification for each thing that is listened to."""
        honored = self._honored or {}
        for name, method in CHANGES.items():
            if honored.get(name) is True:
                yield method, {}
        uris = honored.get("resourceSubscriptions")
        for uri in uris if isinstance(uris, list) else ():
            yield "notifications/resources/updated", {"uri": uri}
