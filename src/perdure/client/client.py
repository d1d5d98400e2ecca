"""The SDK's client over a session that lasts: names outcomes, lists earlier calls, calls safe tools again."""

import contextlib
import functools
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import mcp
import mcp_types as types
from mcp.client import Transport as SDKTransport
from mcp.shared.dispatcher import ProgressFnT
from mcp.shared.exceptions import MCPError

from perdure.client.incoming import CallbackLimit, naming
from perdure.client.pending import PendingCall
from perdure.client.transport import Transport
from perdure.errors import OutcomeUnknown, Unreachable
from perdure.telemetry.events import log_event

#: Pages of `tools/list` that are read to find out what a tool says of itself.
TOOL_PAGES = 100


class Client(mcp.Client):
    """Everything that `mcp.Client` has, over a session that lasts. Made by `perdure.connect`."""

    def __init__(
        self,
        plain: SDKTransport | None,
        lasting: Callable[..., Transport] | None,
        *,
        rerun_safe_tools: bool,
        **options: Any,
    ) -> None:
        """`plain` is a transport of the SDK, `lasting` makes ours; one of them is given."""
        limit = self._callback_limit = CallbackLimit()
        self._rerun_safe_tools = rerun_safe_tools
        self._transport: Transport | None = None
        if lasting is not None:
            # Another session may be another server's: what was negotiated is that of the new one.
            self._transport = lasting(callback_limit=limit, on_renewed=lambda result: self.session.adopt(result))
            plain = self._transport.streams()
            for name in ("logging_callback", "message_handler"):
                if options[name] is not None:
                    options[name] = limit.counted(options[name])
        assert plain is not None
        super().__init__(plain, **options)

    @property
    def session_id(self) -> str | None:
        """The session as the server knows it; None where there are no sessions."""
        handshake = None if self._transport is None else self._transport.handshake
        return None if handshake is None else handshake.session or None

    def pending(self) -> list[PendingCall]:
        """The calls that an earlier process has left running and whose results were not taken yet."""
        return [] if self._transport is None else self._transport.pending

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
        """As the SDK's; a call whose outcome is unknown raises `OutcomeUnknown`."""
        if progress_callback is not None:
            progress_callback = self._callback_limit.counted(progress_callback)

        async def once() -> types.CallToolResult:
            with naming(name, arguments):
                return await super(Client, self).call_tool(
                    name,
                    arguments,
                    read_timeout_seconds,
                    progress_callback,
                    input_responses=input_responses,
                    request_state=request_state,
                    meta=meta,
                )

        try:
            return await once()
        except OutcomeUnknown as unknown:
            if not await self._may_be_called_again(name, unknown):
                raise
            log_event(logging.INFO, "client.call_again", "a tool that may run twice is called again", tool=name)
            try:
                return await once()
            except Unreachable:
                raise unknown from None  # the first one may have run, whatever became of the second

    async def _may_be_called_again(self, tool: str, unknown: OutcomeUnknown) -> bool:
        """Whether the caller allows it, and the server marks the tool as read-only or idempotent."""
        # What the server calls unknown it has run again already, where it could (docs/protocol.md, Settling).
        told_by_client = isinstance(unknown.data, dict) and unknown.data.get("told_by") == "client"
        if not self._rerun_safe_tools or not told_by_client:
            return False
        cursor: str | None = None
        with contextlib.suppress(MCPError):  # then it cannot be found out
            for _ in range(TOOL_PAGES):
                page = await self.list_tools(cursor=cursor)
                hints = next((found.annotations for found in page.tools if found.name == tool), None)
                if hints is not None:
                    return hints.read_only_hint is True or hints.idempotent_hint is True
                if (cursor := page.next_cursor) is None:
                    break
        return False


def _named(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """A method of the SDK's client whose errors have the names that ours have."""

    @functools.wraps(method)
    async def call(*args: Any, **kwargs: Any) -> Any:
        with naming():
            return await method(*args, **kwargs)

    return call


for _name, _method in inspect.getmembers(mcp.Client, inspect.isfunction):
    # Behind a mark of deprecation stands the function itself.
    if not _name.startswith("_") and _name != "call_tool" and inspect.iscoroutinefunction(inspect.unwrap(_method)):
        setattr(Client, _name, _named(_method))
