"""Listens to the SDK's server in its own process: one `subscriptions/listen` that no client has sent.

The SDK's public `serve_one` runs the server's own handler on a dispatch context of ours. So it hears what the server
publishes, on whatever bus, without touching the bus. It reads the server's lists in the same way.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcp.server.connection import Connection
from mcp.server.lowlevel.server import Server
from mcp.server.runner import serve_one
from mcp.shared.exceptions import MCPError
from mcp_types import (
    CLIENT_CAPABILITIES_META_KEY,
    CLIENT_INFO_META_KEY,
    METHOD_NOT_FOUND,
    PROTOCOL_VERSION_META_KEY,
)
from mcp_types.version import LATEST_MODERN_VERSION

from perdure._core.envelope import LISTEN
from perdure._core.listening import ACKNOWLEDGED, LISTS, URIS, ChangeFilter, read_honoured
from perdure.runtime.base import ListeningRefused, NoListening
from perdure.runtime.own_requests import NAME, OnNotification, OwnRequestContext, pages

_READ_BY = {
    "notifications/tools/list_changed": ("tools/list",),
    "notifications/prompts/list_changed": ("prompts/list",),
    "notifications/resources/list_changed": ("resources/list", "resources/templates/list"),
}
"""The requests that a client reads a list by, by the notification that the list has changed."""

_INFO = {"name": NAME, "version": "1"}
_META = {
    PROTOCOL_VERSION_META_KEY: LATEST_MODERN_VERSION,
    CLIENT_CAPABILITIES_META_KEY: {},
    CLIENT_INFO_META_KEY: _INFO,
}


def _connect(_: OwnRequestContext) -> Connection:
    return Connection.from_envelope(LATEST_MODERN_VERSION, _INFO, {})


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
        context = OwnRequestContext(take)
        try:
            await serve_one(
                self.server,
                context,
                LISTEN,
                {"notifications": wanted, "_meta": _META},
                connection=_connect(context),
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

    async def digest(self, method: str) -> bytes | None:
        """A digest of a list, over all its pages; of the parts that the server does not serve, nothing."""
        digest = hashlib.sha256()
        for request in _READ_BY[method]:
            if self.server.get_request_handler(request) is not None:
                async for page in pages(
                    self.server, self.lifespan_state, request, OwnRequestContext(), _connect, {"_meta": _META}
                ):
                    page.pop("_meta", None)
                    digest.update(json.dumps(page, sort_keys=True).encode())
            digest.update(b"\0")
        return digest.digest()
