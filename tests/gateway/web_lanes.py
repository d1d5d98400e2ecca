"""A receiver that remembers what an HTTP lane brings, and lanes to upstreams of a test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from perdure._core.jsonrpc import JsonObject
from perdure.gateway.lane import Lost, Opened
from perdure.gateway.web import WebLane, WebUpstream
from perdure.runtime.base import Flow
from tests.support.servers.in_process import until

CLIENT: JsonObject = {
    "protocolVersion": "2025-11-25",
    "capabilities": {"elicitation": {}, "roots": {}},
    "clientInfo": {"name": "test", "version": "1"},
}


@dataclass
class Recorder:
    """What a lane has brought, in order."""

    told: list[tuple[Any, ...]] = field(default_factory=list)
    answers: dict[Hashable, JsonObject] = field(default_factory=dict)
    texts: dict[Hashable, bytes] = field(default_factory=dict)
    lost: dict[Hashable, Lost] = field(default_factory=dict)
    asks: dict[Hashable, tuple[str, JsonObject | None, Hashable]] = field(default_factory=dict)
    withdrawn: dict[Hashable, str] = field(default_factory=dict)
    positions: dict[Hashable, list[JsonObject]] = field(default_factory=dict)
    renewed: list[Opened] = field(default_factory=list)
    elsewhere: JsonObject | None = None
    """The state that `on_gone` returns."""
    gone: int = 0
    may_renew: asyncio.Event = field(default_factory=asyncio.Event)
    bring_up: Callable[[Opened], Awaitable[None]] | None = None
    flow: Flow | None = None

    def __post_init__(self) -> None:
        self.may_renew.set()

    def on_notification(self, method: str, params: JsonObject | None, *, key: Hashable) -> Flow | None:
        self.told.append((method, params, key))
        return self.flow

    def on_ask(self, ask: Hashable, method: str, params: JsonObject | None, *, key: Hashable) -> Flow | None:
        self.asks[ask] = (method, params, key)
        return self.flow

    def on_ask_withdrawn(self, ask: Hashable, reason: str) -> None:
        self.withdrawn[ask] = reason

    def on_answer(self, key: Hashable, body: bytes, *, failed: bool) -> None:
        assert key not in self.ended, "a request has one end"
        self.texts[key] = body
        self.answers[key] = {"failed": failed, **json.loads(body)}

    def on_lost(self, key: Hashable, lost: Lost) -> None:
        assert key not in self.ended, "a request has one end"
        self.lost[key] = lost

    def on_position(self, key: Hashable, state: JsonObject) -> None:
        self.positions.setdefault(key, []).append(state)

    async def on_gone(self) -> JsonObject | None:
        self.gone += 1
        await self.may_renew.wait()
        return self.elsewhere

    async def on_renewed(self, opened: Opened) -> None:
        self.renewed.append(opened)
        if self.bring_up is not None:
            await self.bring_up(opened)

    def on_closed(self, why: str) -> None:
        raise AssertionError(f"an HTTP lane does not close by itself: {why}")

    @property
    def ended(self) -> set[Hashable]:
        return {*self.answers, *self.lost}

    async def end(self, key: Hashable) -> JsonObject | Lost:
        await until(lambda: key in self.ended)
        return self.answers.get(key) or self.lost[key]

    async def text(self, key: Hashable) -> str:
        """The text of a tool's result."""
        found = await self.end(key)
        assert isinstance(found, dict), found
        return str(found["content"][0]["text"])

    async def loss(self, key: Hashable) -> Lost:
        found = await self.end(key)
        assert isinstance(found, Lost), found
        return found

    def progress(self, key: Hashable) -> list[float]:
        return [params["progress"] for method, params, of in self.told if method.endswith("/progress") and of == key]


class Lane(WebLane):
    """A lane with its receiver."""

    def __init__(self, upstream: WebUpstream, *, listens: bool = False) -> None:
        self.heard = Recorder()
        super().__init__(upstream, self.heard)
        self.listen(listens)

    def call(self, key: Hashable, *steps: list[Any], tool: str = "plain", token: object = None) -> None:
        params: JsonObject = {"name": tool, "arguments": {"steps": list(steps)}}
        self.request(key, "tools/call", params if token is None else {**params, "_meta": {"progressToken": token}})

    async def text(self, key: Hashable, *steps: list[Any], tool: str = "plain") -> str:
        """The text of the result of a call that is made now."""
        self.call(key, *steps, tool=tool)
        return await self.heard.text(key)


@asynccontextmanager
async def upstream_at(url: str, **options: Any) -> AsyncIterator[WebUpstream]:
    upstream = WebUpstream(url, **{"headers": {}, "token": None, "patience": 30.0, "mask": str, **options})
    try:
        yield upstream
    finally:
        await upstream.aclose()


@asynccontextmanager
async def lane_to(url: str, *, listens: bool = False, initialized: bool = True, **options: Any) -> AsyncIterator[Lane]:
    """An open lane; its session ends with the block."""
    async with asyncio.timeout(60), upstream_at(url, **options) as upstream:
        lane = Lane(upstream, listens=listens)
        await lane.open(CLIENT)
        if initialized:
            lane.notify("notifications/initialized", None)
        try:
            yield lane
        finally:
            await lane.aclose(ended=True)
