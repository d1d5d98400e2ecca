"""Keeps one `subscriptions/listen` of the SDK's client open, over as many connections as it takes.

The revision has no way to read a broken subscription on: a client listens again, and fetches what it knows again,
because it cannot tell what it missed. Perdure's servers say with each notification how far the listener has heard
(`dev.perdure/position`); brought back, that position has them tell what changed since. Where there is none, each thing
that is listened to is told as changed, once: that costs a fetch too many, and misses none.

A server that ends a subscription in good order (at a stop, or to balance its load) is listened to again as well.
"""

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from mcp.shared.subscriptions import SUBSCRIPTION_ID_META_KEY
from mcp_types import JSONRPCRequest

from perdure._core.codes import INVALID_PARAMS
from perdure._core.delivery import LISTEN
from perdure._core.extension import POSITION
from perdure._core.losses import GAP
from perdure.client.incoming import encoded
from perdure.client.requests import Requests
from perdure.remote.exchange import Request
from perdure.remote.message import Message, encode, messages_in
from perdure.remote.stream import Attempts

ACKNOWLEDGED = "notifications/subscriptions/acknowledged"
CANCELLED = "notifications/cancelled"
#: Of a filter's fields, the notification that tells of a change.
CHANGES = {
    "toolsListChanged": "notifications/tools/list_changed",
    "promptsListChanged": "notifications/prompts/list_changed",
    "resourcesListChanged": "notifications/resources/list_changed",
}
UPDATED = "notifications/resources/updated"


class Listening:
    """`deliver` hands a message to the SDK's client, under the id by which that knows the subscription."""

    def __init__(
        self,
        message: JSONRPCRequest,
        headers: Mapping[str, str],
        requests: Requests,
        deliver: Callable[[Message], Awaitable[None]],
    ) -> None:
        self._local_id = message.id
        self._request = encoded(message)
        self._requests = requests
        self._deliver = deliver
        self._position: Any = None
        self._honored: Mapping[str, Any] | None = None
        """What the server has agreed to; None before the first time."""
        self._has_heard = False
        self._headers = headers

    async def end(self) -> Message:
        """The answer to the request, when there is nothing to come back to."""
        request = Request(method=LISTEN, body=self._body, headers=self._headers)
        patience = self._requests.limits.listening
        returns = Attempts(patience)
        while True:
            self._has_heard = False
            answer = await self._requests.exchange(request, self._take, patience=patience).answer()
            if self._position is not None and answer.is_error and answer.body["error"].get("code") == INVALID_PARAMS:
                self._position = None  # it means nothing to this server: without it, everything is told as changed
                continue
            if answer.is_error or not self._honored:
                return answer
            if not await returns.wait_to_return(has_heard=self._has_heard):
                return answer

    def _body(self, wire_id: str) -> bytes:
        request = {**self._request, "id": wire_id}
        if self._position is not None:
            params = request["params"]
            request["params"] = {**params, "_meta": {**params.get("_meta", {}), POSITION: self._position}}
        return encode(request).encode()

    async def _take(self, message: Message) -> None:
        if message.method is None or message.is_request or message.method == CANCELLED:
            return  # the end of the connection follows, and says the same
        params = json.loads(message.text).get("params") or {}  # `message.params` is to look at only
        meta = params.get("_meta")
        meta = dict(meta) if isinstance(meta, Mapping) else {}
        brought, self._position = self._position, meta.get(POSITION, self._position)
        if SUBSCRIPTION_ID_META_KEY in meta:
            meta[SUBSCRIPTION_ID_META_KEY] = self._local_id
        await self._deliver(_notification(message.method, {**params, "_meta": meta}))
        if message.method == ACKNOWLEDGED:
            honored, found = self._honored, params.get("notifications")
            self._honored = found if isinstance(found, Mapping) else {}
            if honored is None or brought is not None:
                return
        elif message.method != GAP:
            self._has_heard = True
            return
        for cue in self._cues():
            await self._deliver(cue)

    def _cues(self) -> Iterator[Message]:
        """A notification for each thing that is listened to."""
        meta = {"_meta": {SUBSCRIPTION_ID_META_KEY: self._local_id}}
        honored = self._honored or {}
        for name, method in CHANGES.items():
            if honored.get(name) is True:
                yield _notification(method, meta)
        found = honored.get("resourceSubscriptions")
        for uri in found if isinstance(found, list) else ():
            yield _notification(UPDATED, {"uri": uri, **meta})


def _notification(method: str, params: Mapping[str, Any]) -> Message:
    return messages_in(encode({"jsonrpc": "2.0", "method": method, "params": params}))[0]
