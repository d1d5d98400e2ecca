"""A lane to an upstream that is a table in memory: pages of tools by their cursors, with all that a lane promises."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from perdure._core.jsonrpc import JsonObject
from perdure.gateway.lane import AskKey, Lane, Lost, Opened, Receiver, RequestKey, UpstreamUnavailable


@dataclass(kw_only=True)
class MemoryServer:
    """What an upstream answers, and what it was sent."""

    pages: Mapping[str, JsonObject] = field(default_factory=dict)
    """The result of `tools/list` by its cursor; "" is the first page."""
    capabilities: object = field(default_factory=lambda: {"tools": {}})
    info: object = field(default_factory=lambda: {"name": "table", "version": "1"})
    unavailable: UpstreamUnavailable | None = None
    lost: Lost | None = None
    error: JsonObject | None = None
    sent: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def lane(self, receiver: Receiver) -> AsyncIterator[Lane]:
        """A lane, not opened yet."""
        yield _Lane(self, receiver)


class _Lane:
    def __init__(self, server: MemoryServer, receiver: Receiver) -> None:
        self._server = server
        self._receiver = receiver
        self._running: dict[RequestKey, asyncio.Handle] = {}

    @property
    def state(self) -> JsonObject:
        return {}

    def listen(self, wanted: bool) -> None: ...

    async def open(self, client_params: JsonObject, state: JsonObject | None = None) -> Opened:
        self._server.sent.append("initialize")
        if self._server.unavailable is not None:
            raise self._server.unavailable
        version, server = client_params["protocolVersion"], self._server
        result = {"protocolVersion": version, "capabilities": server.capabilities, "serverInfo": server.info}
        return Opened(version=version, result=result)

    def request(self, key: RequestKey, method: str, params: JsonObject | None) -> None:
        self._server.sent.append(f"{method} {(params or {}).get('cursor', '')}".strip())
        self._running[key] = asyncio.get_running_loop().call_soon(self._answer, key, method, params or {})

    def _answer(self, key: RequestKey, method: str, params: JsonObject) -> None:
        del self._running[key]
        if self._server.lost is not None:
            self._receiver.on_lost(key, self._server.lost)
        elif self._server.error is not None or method != "tools/list":
            unknown = {"code": -32601, "message": "Method not found"}
            self._receiver.on_answer(key, json.dumps(self._server.error or unknown).encode(), failed=True)
        else:
            page = self._server.pages[params.get("cursor", "")]
            self._receiver.on_answer(key, json.dumps(page).encode(), failed=False)

    def follow(self, key: RequestKey, method: str, params: JsonObject | None, state: JsonObject) -> None:
        self._receiver.on_lost(key, Lost(ran=True, why="nothing can be followed in memory"))

    def cancel(self, key: RequestKey, params: JsonObject | None) -> None:
        if (running := self._running.pop(key, None)) is not None:
            running.cancel()

    def notify(self, method: str, params: JsonObject | None) -> None:
        self._server.sent.append(method)

    def reply(self, ask: AskKey, response: JsonObject) -> None: ...

    async def aclose(self, *, ended: bool) -> None:
        for running in self._running.values():
            running.cancel()
        self._server.sent.append("ended" if ended else "closed")
