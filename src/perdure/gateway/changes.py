"""Reports the changes of an upstream to the listeners of this node, by a lane of the gateway's own."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perdure._core import splice
from perdure._core.handshakes import LISTS, capabilities_in
from perdure._core.jsonrpc import JsonObject
from perdure._core.listening import ChangeFilter
from perdure._core.pages import Cursors
from perdure.gateway.pool import OWN, LanePool, RequestRefused
from perdure.gateway.watched_lane import NO_CALLER
from perdure.runtime.base import NoListening

_READ_BY = {
    "tools": ("tools/list",),
    "prompts": ("prompts/list",),
    "resources": ("resources/list", "resources/templates/list"),
}
"""The requests by which a client reads a list."""

OnChange = Callable[[str, Mapping[str, Any] | None], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class UpstreamChanges:
    _pool: LanePool
    acknowledges_within: float
    may_recover = True
    may_be_silent = True
    """The sessions of other clients report changes, too."""

    async def listen(
        self, uris: Sequence[str], *, on_acknowledged: Callable[[ChangeFilter], None], on_notification: OnChange
    ) -> None:
        if self._pool.upstream.needs_caller:  # it serves no requests of the gateway's own
            raise NoListening
        async with self._pool.lane(NO_CALLER, OWN) as lane:
            declared = capabilities_in(lane.result)
            methods = frozenset(LISTS[name] for name in LISTS if name in declared)
            if not methods:
                raise NoListening
            heard: asyncio.Queue[tuple[str | None, JsonObject | None]] = asyncio.Queue()
            with lane.hearing(lambda method, params: heard.put_nowait((method, params)), uris):
                if declared.get("resources", {}).get("subscribe"):
                    await lane.subscribe()
                subscribed = {uri: None for uri in uris if uri in lane.subscribed}
                on_acknowledged(ChangeFilter(methods=methods, uris=subscribed))
                while True:
                    method, params = await heard.get()
                    if method is None:
                        return
                    await on_notification(method, params)

    async def digest(self, method: str) -> bytes | None:
        if self._pool.upstream.needs_caller:
            return None
        digest = hashlib.sha256()
        name = next(name for name, changed in LISTS.items() if changed == method)
        async with self._pool.lane(NO_CALLER, OWN) as lane:
            if name not in capabilities_in(lane.result):
                return None
            for request in _READ_BY[name]:
                cursors = Cursors()
                cursor: str | None = ""
                while cursor is not None:
                    try:
                        page = splice.decode(
                            (await lane.call(request, {"cursor": cursor} if cursor else None)).decode()
                        )
                    except RequestRefused:  # many servers have no templates
                        page = {}
                    cursor = cursors.after(page)
                    page.pop("_meta", None)
                    digest.update(json.dumps(page, sort_keys=True).encode())
                digest.update(b"\0")
        return digest.digest()
