"""The official Python SDK's clients, in the test's process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import fastmcp
import mcp_types as types
from mcp import Client, ClientSession
from mcp.client.session import ClientRequestContext, IncomingMessage
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

from tests.clients.stock_client import MODEL_SAYS, USER_SAYS, Call, StockClient


class PythonClient(StockClient):
    """What a Python client sees, whichever it is."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        super().__init__()
        self.session: ClientSession | Client | fastmcp.Client[Any] | None = None
        self._tasks = tasks
        self._calls: list[asyncio.Task[None]] = []

    async def knows(self, call: Call, positions: int) -> None:
        """Nothing to wait for: what reached its socket is read before a reset is."""

    async def call(self, tool: str, /, **arguments: Any) -> Call:
        call = Call()
        self._calls.append(self._tasks.create_task(self._call(call, tool, arguments)))
        return call

    def hang_up(self) -> None:
        """Give up the calls that still run, so that a story that failed can end."""
        for call in self._calls:
            call.cancel()

    async def _call(self, call: Call, tool: str, arguments: dict[str, Any]) -> None:
        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            call.progress.append(int(progress))
            self.changed()

        assert self.session is not None
        try:
            if isinstance(self.session, fastmcp.Client):
                result = await self.session.call_tool_mcp(tool, arguments, progress_handler=on_progress)
            else:
                result = await self.session.call_tool(tool, arguments, progress_callback=on_progress)
            call.answer = _text(result)
        except MCPError as error:
            call.code, call.data, call.answer = error.code, error.data, f"error: {error}"
        except Exception as error:  # whatever the client raises is what the story sees
            call.answer = f"error: {error}"
        self.changed()

    async def on_message(self, message: IncomingMessage) -> None:
        if isinstance(message, types.ResourceUpdatedNotification):
            self.notices.append(str(message.params.uri))
            self.changed()

    async def on_elicit(self, context: ClientRequestContext, params: types.ElicitRequestParams) -> types.ElicitResult:
        self.asked.append(params.message)
        self.changed()
        return types.ElicitResult(action="accept", content={"answer": USER_SAYS})

    async def on_sample(
        self, context: ClientRequestContext, params: types.CreateMessageRequestParams
    ) -> types.CreateMessageResult:
        content = params.messages[0].content
        assert isinstance(content, types.TextContent)
        self.asked.append(content.text)
        self.changed()
        text = types.TextContent(type="text", text=MODEL_SAYS)
        return types.CreateMessageResult(role="assistant", content=text, model="none")


def _text(result: types.CallToolResult) -> str:
    content = result.content[0]
    assert isinstance(content, types.TextContent)
    return f"error: {content.text}" if result.is_error else content.text


@asynccontextmanager
async def python_client(url: str, *, mode: str = "legacy") -> AsyncIterator[StockClient]:
    """`mcp.Client`, the high-level one."""
    async with asyncio.TaskGroup() as tasks:
        seen = PythonClient(tasks)
        async with Client(
            url,
            mode=mode,
            message_handler=seen.on_message,
            elicitation_callback=seen.on_elicit,
            sampling_callback=seen.on_sample,
        ) as client:
            seen.session, seen.protocol = client, client.protocol_version
            try:
                yield seen
            finally:
                seen.hang_up()


@asynccontextmanager
async def python_session(url: str) -> AsyncIterator[StockClient]:
    """`ClientSession` on `streamable_http_client`, the low-level one."""
    async with asyncio.TaskGroup() as tasks:
        seen = PythonClient(tasks)
        async with (
            streamable_http_client(url) as (read, write),
            ClientSession(
                read,
                write,
                message_handler=seen.on_message,
                elicitation_callback=seen.on_elicit,
                sampling_callback=seen.on_sample,
            ) as session,
        ):
            seen.protocol = str((await session.initialize()).protocol_version)
            seen.session = session
            try:
                yield seen
            finally:
                seen.hang_up()


@asynccontextmanager
async def fastmcp_client(url: str) -> AsyncIterator[StockClient]:
    """FastMCP's client, as it is by default: without tasks, unless this process has imported `fastmcp_tasks`."""
    assert "fastmcp_tasks" not in sys.modules
    async with asyncio.TaskGroup() as tasks:
        seen = PythonClient(tasks)
        async with fastmcp.Client(url) as client:
            seen.session, seen.protocol = client, str(client.protocol_version)
            try:
                yield seen
            finally:
                seen.hang_up()
