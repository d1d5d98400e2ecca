"""The scene of the demo in which a stock client of 2026-07-28 calls a tool as a task, and the server is killed.

The client is the SDK's own `Client`. The extension below declares tasks and polls; that is all that a client needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

from examples.desktop import Teller
from mcp import Client
from mcp.client.extension import ClaimContext, ClientExtension, ResultClaim
from mcp.shared.exceptions import MCPError
from mcp_types import CallToolResult, Request, RequestParams, Result, TextContent
from pydantic import ConfigDict, Field

LOAVES = 5
RESULT = f"{LOAVES} loaves, still warm."


class TaskParams(RequestParams):
    task_id: str = Field(alias="taskId")


class GetTask(Request[TaskParams, Literal["tasks/get"]]):
    name_param = "taskId"
    method: Literal["tasks/get"] = "tasks/get"


class Task(Result):
    """A handle, or what `tasks/get` says of it."""

    model_config = ConfigDict(extra="allow")

    task_id: str = Field(alias="taskId")
    status: str
    status_message: str | None = Field(default=None, alias="statusMessage")
    poll_interval_ms: int = Field(default=1000, alias="pollIntervalMs")
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


class Handle(Task):
    result_type: Literal["task"] = Field(default="task", alias="resultType")


class Tasks(ClientExtension):
    """Declares tasks, and polls each one until it has ended. `on_handle` and `on_poll` get what was seen."""

    identifier = "io.modelcontextprotocol/tasks"

    def __init__(self, on_handle: Callable[[Task], Awaitable[None]], on_poll: Callable[[Task], None]) -> None:
        self._on_handle = on_handle
        self._on_poll = on_poll

    def claims(self) -> Sequence[ResultClaim[Any]]:
        return [ResultClaim(result_type="task", model=Handle, resolve=self._resolve)]

    async def _resolve(self, handle: Handle, ctx: ClaimContext) -> CallToolResult:
        await self._on_handle(handle)
        poll = GetTask(params=TaskParams(taskId=handle.task_id))
        while (task := await ctx.session.send_request(poll, Task)).status == "working":
            self._on_poll(task)
            await asyncio.sleep(task.poll_interval_ms / 1000)
        self._on_poll(task)
        if task.result is None:
            error = task.error or {"code": -32800, "message": f"the task is {task.status}"}
            raise MCPError(code=error["code"], message=error["message"])
        return CallToolResult.model_validate(task.result, by_name=False)


def run_a_task(url: str, kill: Callable[[], None], teller: Teller) -> list[str]:
    """Play the scene; return what was lost. `kill` kills the process that runs the call; another one must be there
    after that."""
    return asyncio.run(_run_a_task(url, kill, teller))


async def _run_a_task(url: str, kill: Callable[[], None], teller: Teller) -> list[str]:
    async def on_handle(task: Task) -> None:
        teller.line(f"the answer is a handle: task {task.task_id[:8]}…, {task.status}, {task.status_message}", mark="•")
        teller.step("The process that runs the task is killed: kill -9")
        await asyncio.to_thread(kill)
        teller.step("The client polls: tasks/get")

    def on_poll(task: Task) -> None:
        teller.line(f"{task.status:<9}  {task.status_message or ''}".rstrip(), mark="•")

    teller.step(f"A stock client, mcp.Client(url), calls bake(loaves={LOAVES}); it has no session and declares tasks")
    async with Client(url, extensions=[Tasks(on_handle, on_poll)]) as client:
        teller.line(f"it speaks {client.protocol_version}")
        try:
            [content] = (await client.call_tool("bake", {"loaves": LOAVES})).content
            text = content.text if isinstance(content, TextContent) else str(content)
        except MCPError as error:
            text = f"{error} ({error.code})"
    teller.line(f"call_tool returns: {text}", mark="•")
    if text != RESULT:
        teller.line("the call was lost", mark="✗")
        return ["the task was lost"]
    teller.line("the tool knows nothing of tasks, and the client's program sees one ordinary call", mark="✓")
    return []
