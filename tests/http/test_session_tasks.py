"""Tasks of 2025-11-25 in sessions: one story for each rule of that revision, named after it in the docstring."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import mcp_types as types
import pytest
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel.server import Server

from perdure._core.ids import new_stream_id
from tests.support.clients.wire_client import Message, Peer, Wire, answer_of
from tests.support.servers.in_process import Site, serve, until
from tests.support.servers.tool_server import Guests, ToolServer

pytestmark = pytest.mark.anyio

RELATED = "io.modelcontextprotocol/related-task"
IMMEDIATE = "io.modelcontextprotocol/model-immediate-response"
NOBODYS = new_stream_id(lambda n: b"1" * n)
RULES = ("wait=optional", "ask=optional", "quiz=optional", "boom=optional", "count=optional", "whoami=required")


@pytest.fixture
async def tasked(shop: ToolServer) -> AsyncIterator[Site]:
    async with serve(shop.server, tasks=RULES) as site:
        yield site


def task_call(peer: Peer, name: str, /, *, token: Any = None, task: Any = None, **arguments: Any) -> Message:
    message = peer.tool(name, token=token, **arguments)
    message["params"]["task"] = {} if task is None else task
    return message


async def begin(peer: Peer, name: str, /, **arguments: Any) -> Message:
    """Begin a task; its first view."""
    created = answer_of(await peer.send(task_call(peer, name, **arguments)))
    task: Message = created["result"]["task"]
    return task


async def ask(peer: Peer, method: str, **params: Any) -> Message:
    return answer_of(await peer.send(peer.request(method, params, id="asks")))


async def state(peer: Peer, task: str) -> Message:
    view: Message = (await ask(peer, "tasks/get", taskId=task))["result"]
    return view


async def ended(peer: Peer, task: str) -> Message:
    view: Message = {"status": "working"}
    while view["status"] in ("working", "input_required"):
        view = await state(peer, task)
    return view


async def result(peer: Peer, task: str) -> Message:
    return await ask(peer, "tasks/result", taskId=task)


async def until_heard(wire: Wire, method: str) -> Message:
    while (message := await wire.message()).get("method") != method:
        pass
    return message


class TellingServer:
    """A low-level server whose tools say themselves whether they run as tasks."""

    def __init__(self, **support: str | None) -> None:
        self.support = support
        self.given: list[Any] = []
        self.server: Server[Any] = Server("telling", version="1")
        self.server.add_request_handler("tools/list", types.PaginatedRequestParams, self._list)
        self.server.add_request_handler("tools/call", types.CallToolRequestParams, self._call)

    async def _list(self, ctx: ServerRequestContext[Any], params: Any) -> types.ListToolsResult:
        tools = [
            types.Tool(
                name=name,
                input_schema={"type": "object"},
                execution=None if said is None else types.ToolExecution.model_validate({"taskSupport": said}),
            )
            for name, said in self.support.items()
        ]
        return types.ListToolsResult(tools=tools)

    async def _call(self, ctx: ServerRequestContext[Any], params: types.CallToolRequestParams) -> types.CallToolResult:
        self.given.append(params.model_dump(by_alias=True, exclude_none=True))
        return types.CallToolResult(content=[types.TextContent(type="text", text=f"{params.name} ran")])


async def test_a_server_with_such_tools_announces_tasks(shop: ToolServer, tasked: Site) -> None:
    """K1, K2: the list is for clients that are known."""
    wanted: Message = {"cancel": {}, "requests": {"tools": {"call": {}}}}
    assert (await tasked.join()).welcome["result"]["capabilities"]["tasks"] == wanted
    assert "tasks" not in (await tasked.join("2025-06-18")).welcome["result"]["capabilities"]
    async with serve(shop.server, auth=Guests(), tasks=RULES) as site:
        known = await site.join(token="ann-1")
        assert known.welcome["result"]["capabilities"]["tasks"] == {"list": {}, **wanted}
    async with serve(shop.server) as site:
        assert "tasks" not in (await site.join()).welcome["result"]["capabilities"]


async def test_a_call_with_a_task_is_answered_at_once_and_its_result_is_fetched(shop: ToolServer, tasked: Site) -> None:
    """K6, K8, K12, K13."""
    peer = await tasked.join()
    created = answer_of(await peer.send(task_call(peer, "wait", gate="g")))["result"]
    task = created["task"]["taskId"]
    assert created["_meta"] == {IMMEDIATE: '"wait" has begun, and goes on as a task. Its result comes later.'}
    assert (created["task"]["status"], (await state(peer, task))["status"]) == ("working", "working")
    waiting = await peer.post(peer.request("tasks/result", {"taskId": task}, id="r"))
    shop.open("g")
    [last] = await waiting.rest()
    plain = (await (await peer.call("wait", gate="g")).rest())[-1]
    assert last == {**plain, "id": "r", "result": {**plain["result"], "_meta": {RELATED: {"taskId": task}}}}
    assert (await result(peer, task))["result"] == last["result"]
    for view in (created["task"], over := await ended(peer, task)):
        assert "_meta" not in view
    assert over["status"] == "completed"
    assert (await state(peer, task))["status"] == "completed"


async def test_a_cancelled_task_is_cancelled_before_the_answer(shop: ToolServer, tasked: Site) -> None:
    """K19, K20: a task that has ended is not cancelled, and `notifications/cancelled` is not for tasks."""
    peer = await tasked.join()
    message = task_call(peer, "wait", gate="g")
    task = answer_of(await peer.send(message))["result"]["task"]["taskId"]
    await until(lambda: shop.seen == ["waiting at g"])
    await peer.cancel(message["id"])
    assert (await state(peer, task))["status"] == "working"
    cancelled = (await ask(peer, "tasks/cancel", taskId=task))["result"]
    assert (cancelled["status"], cancelled["taskId"]) == ("cancelled", task)
    assert (await result(peer, task))["error"]["code"] == -32800
    again = (await ask(peer, "tasks/cancel", taskId=task))["error"]
    assert (again["code"], again["message"]) == (-32602, "This task has ended, and cannot be cancelled")
    await until(lambda: shop.seen == ["waiting at g", "cancelled at g"])
