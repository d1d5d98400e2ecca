"""Listens to the SDK's server in its own process: one `subscriptions/listen` that no client has sent.

The SDK's public `serve_one` runs the server's own handler on a dispatch context of ours. So it hears what the server
publishes, on whatever bus, without touching the bus.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
from mcp.server.connection import Connection
from mcp.server.lowlevel.server import Server
from mcp.server.runner import serve_one
from mcp.shared.dispatcher import CallOptions
from mcp.shared.exceptions import MCPError, NoBackChannelError
from mcp.shared.message import MessageMetadata
from mcp.shared.transport_context import TransportContext
from mcp_types import (
    CLIENT_CAPABILITIES_META_KEY,
    CLIENT_INFO_META_KEY,
    METHOD_NOT_FOUND,
    PROTOCOL_VERSION_META_KEY,
    RequestId,
)
from mcp_types.version import LATEST_MODERN_VERSION

from perdure._core.changes import LISTS, URIS, ChangeFilter, read_honoured
from perdure.runtime.base import ListeningRefused, NoListening

LISTEN = "subscriptions/listen"
ACKNOWLEDGED = "notifications/subscriptions/acknowledged"

_NAME = "perdure"
"""The id of the request, and the name of its client."""

OnNotification = Callable[[str, Mapping[str, Any] | None], Awaitable[None]]


@dataclass(slots=True, eq=False)
class ListenContext:
    """The dispatch context of a request that comes from no client: takes its notifications."""

    _on_notification: OnNotification
    transport: TransportContext = field(default=TransportContext(kind="perdure", can_send_request=False))
    can_send_request: bool = False
    request_id: RequestId | None = _NAME
    message_metadata: MessageMetadata = None
    cancel_requested: anyio.Event = field(default_factory=anyio.Event)

    async def notify(self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None) -> None:
        await self._on_notification(method, params)

    async def send_raw_request(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> dict[str, Any]:
        raise NoBackChannelError(method)

    async def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """The request brings no progress token."""


@dataclass(frozen=True, kw_only=True)
class SdkChanges:
    """The SDK's server as a source of changes."""

    server: Server[Any]
    lifespan_state: Any
    may_be_silent: bool = False

    async def listen(
        self, uris: Sequence[str], *, on_acknowledged: Callable[[ChangeFilter], None], on_notification: OnNotification
    ) -> None:
        """Listen to all lists and to these resources, until it is cancelled or the server ends it."""
        acknowledged = False

        async def take(method: str, params: Mapping[str, Any] | None) -> None:
            nonlocal acknowledged
            if method == ACKNOWLEDGED:
                acknowledged = True
                on_acknowledged(read_honoured((params or {}).get("notifications") or {}))
            else:
                await on_notification(method, params)

        wanted: dict[str, Any] = dict.fromkeys(LISTS, True)
        if uris:
            wanted[URIS] = list(uris)
        info = {"name": _NAME, "version": "1"}
        meta = {
            PROTOCOL_VERSION_META_KEY: LATEST_MODERN_VERSION,
            CLIENT_CAPABILITIES_META_KEY: {},
            CLIENT_INFO_META_KEY: info,
        }
        connection = Connection.from_envelope(LATEST_MODERN_VERSION, info, {})
        params = {"notifications": wanted, "_meta": meta}
        try:
            await serve_one(
                self.server,
                ListenContext(take),
                LISTEN,
                params,
                connection=connection,
                lifespan_state=self.lifespan_state,
            )
        except MCPError as error:
            if error.error.code == METHOD_NOT_FOUND:
                raise NoListening from None
            if not acknowledged:
                raise ListeningRefused(error.error.message) from None
            raise
        if not acknowledged:
            raise ListeningRefused("it was answered without an acknowledgement")
