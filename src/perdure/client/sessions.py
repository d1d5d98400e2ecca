"""What a call needs of the link that it belongs to."""

from __future__ import annotations

from typing import Protocol

from mcp_types import JSONRPCError, JSONRPCMessage

from perdure._core.reconnect import Patience
from perdure.remote.endpoint import Wire
from perdure.remote.heartbeat import Pulse
from perdure.remote.state import Handshake


class Sessions(Protocol):
    """Where a call finds its session."""

    wire: Wire
    patience: Patience
    pulse: Pulse

    @property
    def handshake(self) -> Handshake | None: ...

    async def renew(self, gone: Handshake | None) -> JSONRPCError | None:
        """A new session in place of this one; or why there is none to be had."""

    async def take(self, message: JSONRPCMessage, call: str | None, tool: str | None) -> None: ...

    async def complain(self, error: Exception) -> None: ...

    def changed(self) -> None: ...

    def moved(self) -> None: ...

    def new_id(self) -> str: ...
