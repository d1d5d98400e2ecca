"""Keeps one `subscriptions/listen` open for what a session wants to hear of (`_core/listening.py` has the rules).

The filter of a subscription cannot be changed. So where the session subscribes to another resource, the lane listens
with the new filter, and ends the earlier subscription when the new one is acknowledged: no change is missed between
them, and one that falls into both is reported twice at worst.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from perdure._core.envelope import LISTEN, SUBSCRIPTION
from perdure._core.jsonrpc import JsonObject
from perdure._core.listening import ACKNOWLEDGED, LISTS, ChangeFilter, read_honoured
from perdure._core.reconnect import Patience
from perdure.gateway.modern_wire import Take, Wire, WireRequest
from perdure.remote.call import Ended
from perdure.remote.listener import Listener
from perdure.remote.message import Message
from perdure.runtime.base import Flow

LISTENING = Patience(max_delay=60.0)
"""For a subscription that breaks: the pauses between attempts. They go on for as long as the lane lives."""

Heard = ChangeFilter | Message | Ended
"""What an upstream says to a filter: the part that it honours, an error, or nothing."""


def lists_in(capabilities: Mapping[str, Any]) -> frozenset[str]:
    """The notifications for changes of the lists that a server's capabilities promise."""
    found = set()
    for name, method in LISTS.items():
        declared = capabilities.get(name.removesuffix("ListChanged"))
        if isinstance(declared, Mapping) and declared.get("listChanged") is True:
            found.add(method)
    return frozenset(found)


@dataclass(eq=False)
class Listening:
    _wire: Wire
    _params: Callable[[Mapping[str, Any]], JsonObject]
    """Makes the params of a request from a filter."""
    _deliver: Take
    _start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    """Runs a task for as long as the lane lives."""
    _lists: frozenset[str]
    _hears_lists: bool = False
    _uris: dict[str, None] = field(default_factory=dict)
    _waiting: list[asyncio.Future[Heard]] = field(default_factory=list)
    _has_changed: asyncio.Event = field(default_factory=asyncio.Event)
    _driver: asyncio.Task[None] | None = None

    def hear_lists(self, wanted: bool) -> None:
        if wanted != self._hears_lists and self._lists:
            self._hears_lists = wanted
            self._change()

    async def want(self, uri: str) -> Heard:
        """Listen to a resource as well; returns what the upstream says to the filter that names it."""
        self._uris[uri] = None
        heard: asyncio.Future[Heard] = asyncio.get_running_loop().create_future()
        self._waiting.append(heard)
        self._change()
        found = await heard
        if not isinstance(found, ChangeFilter) or uri not in found.uris:
            self.forget(uri)
        return found

    def forget(self, uri: str) -> None:
        if self._uris.pop(uri, uri) is None:
            self._change()

    def _change(self) -> None:
        self._has_changed.set()
        if self._driver is None:
            self._driver = self._start(self._drive())

    async def _drive(self) -> None:
        """Have one listener for the newest filter; changes of it that come together are one."""
        listener: asyncio.Task[None] | None = None
        while True:
            await self._has_changed.wait()
            self._has_changed.clear()
            waiting, self._waiting = self._waiting, []
            lists = self._lists if self._hears_lists else frozenset[str]()
            wanted = ChangeFilter(methods=lists, uris=dict(self._uris))
            heard: asyncio.Future[Heard] = asyncio.get_running_loop().create_future()
            earlier, listener = listener, None
            if wanted.wire:
                listener = self._start(self._listen(wanted, heard))
            else:
                heard.set_result(wanted)
            found = await heard
            if earlier is not None:
                earlier.cancel()
            for one in waiting:
                if not one.done():
                    one.set_result(found)

    async def _listen(self, wanted: ChangeFilter, heard: asyncio.Future[Heard]) -> None:

        def take(method: str, params: JsonObject | None) -> Flow | None:
            hands_on, cues = listener.hear(method, params or {})
            if method != ACKNOWLEDGED:
                return self._deliver(method, _unstamped(params)) if hands_on else None
            if not heard.done():
                heard.set_result(read_honoured(listener.honored))
            flow = None
            for cue in cues:
                flow = self._deliver(cue.method, dict(cue.params))
            return flow

        async def send() -> Message | Ended:
            patience = LISTENING if heard.done() else None
            params = self._params(wanted.wire)
            found = await self._wire.send(WireRequest(method=LISTEN, params=params, take=take, patience=patience))
            if not heard.done():
                heard.set_result(found)
            return found

        listener = Listener(send, LISTENING)
        await listener.end()


def _unstamped(params: JsonObject | None) -> JsonObject | None:
    """The params of a notification without the id of its subscription, which the session does not know."""
    if params is None or not isinstance(meta := params.get("_meta"), dict):
        return params
    left = {name: value for name, value in meta.items() if name != SUBSCRIPTION}
    kept = {name: value for name, value in params.items() if name != "_meta"}
    return ({**kept, "_meta": left} if left else kept) or None
