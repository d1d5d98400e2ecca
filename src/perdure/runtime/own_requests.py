"""Stands in the place of a client in requests that this process makes of its own server."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
from mcp.server.connection import Connection
from mcp.server.lowlevel.server import Server
from mcp.server.runner import serve_one
from mcp.shared.dispatcher import CallOptions
from mcp.shared.exceptions import NoBackChannelError
from mcp.shared.message import MessageMetadata
from mcp.shared.transport_context import TransportContext
from mcp_types import RequestId

NAME = "perdure"
"""The id of such a request, and the name of its client."""

MAX_PAGES = 100
"""Pages of one list: a server whose pages never end must not hold a call up for ever."""

OnNotification = Callable[[str, Mapping[str, Any] | None], Awaitable[None]]


@dataclass(slots=True, eq=False)
class OwnRequestContext:
    """The SDK's `DispatchContext` of such a request: takes its notifications, or drops them."""

    _on_notification: OnNotification | None = None
    transport: TransportContext = field(default=TransportContext(kind="perdure", can_send_request=False))
    message_metadata: MessageMetadata = None
    can_send_request: bool = False
    request_id: RequestId | None = NAME
    cancel_requested: anyio.Event = field(default_factory=anyio.Event)

    async def notify(self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None) -> None:
        if self._on_notification is not None:
            await self._on_notification(method, params)

    async def send_raw_request(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> dict[str, Any]:
        raise NoBackChannelError(method)

    async def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """The request brings no progress token."""


async def pages(
    server: Server[Any],
    lifespan_state: object,
    method: str,
    context: OwnRequestContext,
    connect: Callable[[OwnRequestContext], Connection],
    params: Mapping[str, Any],
) -> AsyncIterator[dict[str, Any]]:
    """Read the pages of a list of the server, `MAX_PAGES` at most."""
    for _ in range(MAX_PAGES):
        page = await serve_one(
            server, context, method, params, connection=connect(context), lifespan_state=lifespan_state
        )
        cursor = page.get("nextCursor")
        yield page
        if not isinstance(cursor, str):
            return
        params = {**params, "cursor": cursor}
