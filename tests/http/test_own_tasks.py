"""A server that brings tasks of its own keeps them: Perdure steps aside, and still runs calls with a key once."""

from __future__ import annotations

from typing import Any

import mcp_types as types
import pytest
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.lowlevel.server import Server

from perdure._core.envelope import CALLS, KEPT
from tests.support.clients.modern_peer import FORM, TAKES_TASKS, CallPeer, result_of, said
from tests.support.clients.modern_requests import TASKS
from tests.support.servers.gated_server import live

pytestmark = pytest.mark.anyio


class TaskParams(types.RequestParams):
    task_id: str


class OwnTasks:
    """A low-level server with a handler for `tasks/get`, which names the extension itself."""

    def __init__(self) -> None:
        self.runs = 0
        self.server: Server[Any] = Server("own", version="1")
        self.server.add_request_handler("tools/list", types.PaginatedRequestParams, self._list)
        self.server.add_request_handler("tools/call", types.CallToolRequestParams, self._call)
        self.server.add_request_handler("tasks/get", TaskParams, self._get)
        self.server.middleware = [self._announce, *self.server.middleware]

    async def _list(self, ctx: ServerRequestContext[Any], params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[types.Tool(name="pay", input_schema={"type": "object"})])

    async def _call(self, ctx: ServerRequestContext[Any], params: types.CallToolRequestParams) -> types.CallToolResult:
        self.runs += 1
        return types.CallToolResult(content=[types.TextContent(type="text", text=f"run {self.runs}")])

    async def _get(self, ctx: ServerRequestContext[Any], params: TaskParams) -> types.EmptyResult:
        return types.EmptyResult(_meta={"own": params.task_id})

    async def _announce(self, ctx: ServerRequestContext[Any, Any], call_next: CallNext) -> HandlerResult:
        result = await call_next(ctx)
        if ctx.method == "server/discover" and isinstance(result, dict):
            return {**result, "capabilities": {**result["capabilities"], "extensions": {TASKS: {"mine": True}}}}
        return result


async def test_tasks_of_a_server_are_answered_by_the_server_and_announced_in_its_words() -> None:
    own = OwnTasks()
    async with live(server=own.server, task_after=0.0) as served:
        peer = CallPeer(port=served.port, capabilities={**TAKES_TASKS, **FORM})
        found = result_of(await peer.rpc("server/discover", {}))
        assert found["capabilities"]["extensions"] == {TASKS: {"mine": True}, CALLS: {KEPT: 86_400_000}}
        got = result_of(await peer.rpc("tasks/get", {"taskId": "theirs"}))
        assert got["_meta"]["own"] == "theirs"
        for number in (1, 2):  # no handle of ours, however soon one would be given
            assert said(result_of(await peer.call("pay"))) == f"run {number}"


async def test_a_key_counts_there_as_well() -> None:
    own = OwnTasks()
    async with live(server=own.server, task_after=0.0) as served:
        peer = CallPeer(port=served.port, capabilities=TAKES_TASKS)
        answers = [result_of(await peer.call("pay", key="order-7")) for _ in range(3)]
        assert {said(answer) for answer in answers} == {"run 1"}
        assert own.runs == 1
