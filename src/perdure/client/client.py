"""The SDK's client, with what lasts: named outcomes, calls of before, and tools that may be called again."""

from __future__ import annotations

import logging
from typing import Any

import mcp
import mcp_types as types
from mcp.client import Transport
from mcp.shared.dispatcher import ProgressFnT
from mcp.shared.exceptions import MCPError

from perdure.client.link import Link
from perdure.client.outcomes import named
from perdure.client.pending import PendingCall
from perdure.errors import OutcomeUnknown
from perdure.observe import note

#: Pages of `tools/list` that are read to find out what a tool says of itself.
TOOL_PAGES = 100


class Client(mcp.Client):
    """Everything that `mcp.Client` has, over a session that lasts. Made by `perdure.connect`."""

    def __init__(self, transport: Transport, *, link: Link | None, rerun_safe_tools: bool, **options: Any) -> None:
        super().__init__(transport, **options)
        self._link_below = link
        self._rerun_safe_tools = rerun_safe_tools
        self._safe: dict[str, bool] = {}
        if link is not None:
            link.on_renewed = self._renewed

    @property
    def session_id(self) -> str | None:
        """The session as the server knows it; None where there are no sessions."""
        handshake = None if self._link_below is None else self._link_below.handshake
        return None if handshake is None else handshake.session or None

    def pending(self) -> list[PendingCall]:
        """The calls that a process of before has left running and whose results nobody has taken yet."""
        return [] if self._link_below is None else self._link_below.before.calls

    async def call_tool(
        self,
        name: str,
        arguments: dict[str, Any] | None = None,
        read_timeout_seconds: float | None = None,
        progress_callback: ProgressFnT | None = None,
        *,
        input_responses: types.InputResponses | None = None,
        request_state: str | None = None,
        meta: types.RequestParamsMeta | None = None,
    ) -> types.CallToolResult:
        """As the SDK's; a call of which nobody knows what became raises `OutcomeUnknown`."""

        async def once() -> types.CallToolResult:
            try:
                return await super(Client, self).call_tool(
                    name,
                    arguments,
                    read_timeout_seconds,
                    progress_callback,
                    input_responses=input_responses,
                    request_state=request_state,
                    meta=meta,
                )
            except MCPError as error:
                raise named(error, name, arguments) from error

        try:
            return await once()
        except OutcomeUnknown as error:
            # What the server calls unknown it has run again already, where it could (docs/protocol.md, Settling).
            told_by_server = not isinstance(error.data, dict) or error.data.get("told_by") != "client"
            if told_by_server or not self._rerun_safe_tools or not await self._is_safe(name):
                raise
            note(logging.INFO, "client.call_again", "a tool that may run twice is called again", tool=name)
        return await once()

    async def _is_safe(self, tool: str) -> bool:
        """Whether the server marks a tool as read-only or idempotent."""
        if tool not in self._safe:
            cursor: str | None = None
            for _ in range(TOOL_PAGES):
                page = await self.list_tools(cursor=cursor)
                self._safe.update({found.name: _says_safe(found) for found in page.tools})
                cursor = page.next_cursor
                if cursor is None:
                    break
        return self._safe.get(tool, False)

    def _renewed(self, result: types.InitializeResult) -> None:
        """Another session may be another server's: what was negotiated and learnt is that of the new one."""
        self.session.adopt(result)
        self._safe.clear()


def _says_safe(tool: types.Tool) -> bool:
    hints = tool.annotations
    return hints is not None and (hints.read_only_hint is True or hints.idempotent_hint is True)
