"""What tools say of themselves decides how calls of 2026-07-28 are served."""

from __future__ import annotations

import asyncio
from typing import Any

import mcp_types as types
import pytest
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel.server import Server
from mcp_types import MISSING_REQUIRED_CLIENT_CAPABILITY
from mcp_types.methods import serialize_server_result

from perdure.runtime import own_requests
from perdure.runtime.own_requests import LISTED_AS
from tests.support.clients.modern_requests import MODERN, TASKS, modern
from tests.support.clients.wire_client import answer_of
from tests.support.servers.in_process import Site, serve, until

pytestmark = pytest.mark.anyio

WITH_TASKS: dict[str, Any] = {"extensions": {TASKS: {}}}


class Shop:
    """A server with one tool on each page of its list. Its tools work until they are let go."""

    def __init__(self) -> None:
        self.let_go = asyncio.Event()
        self.hangs = False
        self.runs: list[str] = []
        self.listed: list[str | None] = []
        self.server = Server[Any]("shop", on_list_tools=self._list, on_call_tool=self._call)

    async def _list(
        self, ctx: ServerRequestContext[Any, Any], params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        cursor = None if params is None else params.cursor
        self.listed.append(cursor)
        if self.hangs:
            await asyncio.Event().wait()
        if cursor is None:
            return types.ListToolsResult(tools=[tool("always", "required")], next_cursor="second page")
        return types.ListToolsResult(tools=[tool("never", "forbidden"), tool("silent", None)])

    async def _call(
        self, ctx: ServerRequestContext[Any, Any], params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        self.runs.append(params.name)
        await self.let_go.wait()
        return types.CallToolResult(content=[types.TextContent(type="text", text="done")])


def tool(name: str, support: Any) -> types.Tool:
    execution = None if support is None else types.ToolExecution(task_support=support)
    return types.Tool(name=name, input_schema={"type": "object"}, execution=execution)


async def call(site: Site, name: str, capabilities: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    body, headers = modern("tools/call", {"name": name, "arguments": {}}, capabilities=capabilities)
    accepts = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
    response = await site.request("POST", headers=[*accepts.items(), *headers.items()], body=body)
    return response.status_code, answer_of(response)


async def test_a_tool_that_says_it_is_always_a_task_refuses_clients_without_tasks() -> None:
    shop = Shop()
    async with serve(shop.server) as site:
        status, answer = await call(site, "always", {})
        assert (status, answer["error"]["code"]) == (400, MISSING_REQUIRED_CLIENT_CAPABILITY)
        assert answer["error"]["data"] == {"requiredCapabilities": WITH_TASKS}
        assert shop.runs == []


async def test_a_tool_that_says_it_is_always_a_task_gives_a_handle() -> None:
    """Much sooner than a tool that leaves it open."""
    shop = Shop()
    async with serve(shop.server, task_after=3600.0) as site:
        _, answer = await call(site, "always", WITH_TASKS)
        assert answer["result"]["resultType"] == "task"
        shop.let_go.set()


async def test_a_tool_that_says_it_is_never_a_task_answers_itself() -> None:
    """It stands on the second page of the list; a tool beside it that says nothing gives a handle at once."""
    shop = Shop()
    async with serve(shop.server, task_after=0) as site:
        _, answer = await call(site, "silent", WITH_TASKS)
        assert answer["result"]["resultType"] == "task"
        answering = asyncio.create_task(call(site, "never", WITH_TASKS))
        await until(lambda: shop.runs == ["silent", "never"])
        shop.let_go.set()
        _, answer = await answering
        assert answer["result"]["content"] == [{"type": "text", "text": "done"}]
        assert shop.listed == [None, "second page"], "the list is read once"


@pytest.mark.parametrize("wrong", [{"roots": 5}, {"elicitation": {"form": 5}}])
async def test_a_client_that_describes_itself_wrongly_takes_the_list_from_no_other(wrong: dict[str, Any]) -> None:
    """Callers that do not authenticate share one list, which is read for the first of them."""
    shop = Shop()
    shop.let_go.set()
    async with serve(shop.server) as site:
        await call(site, "silent", wrong)
        status, answer = await call(site, "always", {})
        assert (status, answer["error"]["code"]) == (400, MISSING_REQUIRED_CLIENT_CAPABILITY)
        assert "always" not in shop.runs
        assert shop.listed == [None, "second page"]


async def test_what_the_operator_says_of_a_tool_goes_first() -> None:
    shop = Shop()
    shop.let_go.set()
    async with serve(shop.server, tasks=("always=never",)) as site:
        _, answer = await call(site, "always", {})
        assert answer["result"]["content"] == [{"type": "text", "text": "done"}]


def test_the_sdk_leaves_out_of_newer_lists_what_tools_say_of_tasks() -> None:
    """The seam: if a newer list had it, tools could be listed as the client lists them."""
    said = types.ListToolsResult(tools=[tool("always", "required")], ttl_ms=0, cache_scope="private")
    dumped = said.model_dump(by_alias=True, mode="json", exclude_none=True)
    [listed] = serialize_server_result("tools/list", LISTED_AS, dumped)["tools"]
    assert listed["execution"] == {"taskSupport": "required"}
    [listed] = serialize_server_result("tools/list", MODERN, dumped)["tools"]
    assert "execution" not in listed


@pytest.mark.parametrize("capabilities", [{}, WITH_TASKS], ids=["plain", "with tasks"])
async def test_no_call_waits_for_a_list_that_hangs(
    capabilities: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise 6: its tool is one that says nothing of itself then."""
    monkeypatch.setattr(own_requests, "WAIT_SECONDS", 0.05)
    shop = Shop()
    shop.hangs = True
    shop.let_go.set()
    async with serve(shop.server) as site:
        status, answer = await call(site, "silent", capabilities)
        assert (status, answer["result"]["content"][0]["text"]) == (200, "done")


@pytest.mark.parametrize(
    ("rule", "capabilities"),
    [("optional", {}), ("never", {}), ("never", WITH_TASKS)],
    ids=["optional", "never", "tasks"],
)
async def test_a_call_that_depends_on_no_list_does_not_wait_for_it(
    rule: str, capabilities: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator has said how its tool is served, and nothing of it is kept."""
    monkeypatch.setattr(own_requests, "WAIT_SECONDS", 3_600.0)
    shop = Shop()
    shop.hangs = True
    shop.let_go.set()
    async with serve(shop.server, tasks=(f"*={rule}",)) as site:
        status, answer = await call(site, "silent", capabilities)
        assert (status, answer["result"]["content"][0]["text"]) == (200, "done")
