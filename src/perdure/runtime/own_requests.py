"""Stands in the place of a client in requests that this process makes of its own server."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
from mcp.shared.dispatcher import CallOptions
from mcp.shared.exceptions import NoBackChannelError
from mcp.shared.message import MessageMetadata
from mcp.shared.transport_context import TransportContext
from mcp_types import RequestId

NAME = "perdure"
"""The id of such a request, and the name of its client."""

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
