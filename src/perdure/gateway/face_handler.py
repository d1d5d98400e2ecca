"""Runs the SDK's handler for requests of 2026-07-28 from the first of them on.

To import the SDK takes a second, for which the client of a desktop host would wait at each start. Most clients have
sessions, and need none of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.types import Receive, Scope, Send

from perdure.gateway.pool import LanePool
from perdure.runtime.base import Tools
from perdure.settings import Settings

if TYPE_CHECKING:
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager


@dataclass(eq=False)
class FaceHandler:
    """Implements `SessionlessHandler` by a server that relays to an upstream (`face.py`)."""

    _pool: LanePool
    _tools: Tools
    _settings: Settings
    _is_wanted: asyncio.Event = field(default_factory=asyncio.Event)
    _manager: asyncio.Future[StreamableHTTPSessionManager] = field(default_factory=asyncio.Future)

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        # The SDK's handler must be entered and left by one task, and no request is there from beginning to end.
        task = asyncio.create_task(self._serve(), name="perdure-face")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def _serve(self) -> None:
        await self._is_wanted.wait()
        try:
            from perdure.gateway.face import manager_of

            manager = manager_of(self._pool, self._tools, self._settings)
            async with manager.run():
                self._manager.set_result(manager)
                await asyncio.Event().wait()
        except Exception as failure:
            self._manager.set_exception(failure)

    async def handle_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._is_wanted.set()
        manager = await asyncio.shield(self._manager)
        await manager.handle_request(scope, receive, send)
