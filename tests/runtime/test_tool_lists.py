"""What a server says of its tools, read from the real SDK server: by caller, in pages, kept for a while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import mcp_types as types
import pytest
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel.server import Server
from mcp.server.mcpserver import MCPServer
from starlette.requests import Request as HttpRequest

from perdure._core import pages
from perdure._core.durable_calls import CallClient
from perdure._core.jsonrpc import JsonObject
from perdure.runtime import own_requests
from perdure.runtime.base import Tools
from perdure.runtime.server import host
from perdure.settings import Settings
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio

CLIENT = CallClient(version="2026-07-28", info={"name": "c", "version": "1"}, capabilities={})


class Shop:
    """A low-level server whose list of tools depends on a header of its caller, in pages."""

    def __init__(self, *pages: list[str]) -> None:
        self.pages = list(pages)
        self.listed = 0
        self.fails = False
        self.hangs = False
        self.open = asyncio.Event()
        self.server: Server[Any] = Server("shop", version="1")
        self.server.add_request_handler("tools/list", types.PaginatedRequestParams, self._list)

    async def _list(
        self, ctx: ServerRequestContext[Any], params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        self.listed += 1
        if self.hangs:
            await self.open.wait()
        if self.fails:
            raise RuntimeError("closed")
        page = int(params.cursor) if params is not None and params.cursor else 0
        assert isinstance(ctx.request, HttpRequest)
        mine = ctx.request.headers.get("x-caller", "")
        tools = [types.Tool(name=mine + name, input_schema={"type": "object"}) for name in self.pages[page]]
        following = str(page + 1) if page + 1 < len(self.pages) else None
        return types.ListToolsResult(tools=tools, next_cursor=following)


@asynccontextmanager
async def catalog(server: object) -> AsyncIterator[Tools]:
    async with host(server, Settings(), path="/mcp").start() as started:
        assert started.tools is not None
        yield started.tools


def request(caller: str = "") -> HttpRequest:
    headers = [(b"x-caller", caller.encode())]
    return HttpRequest({"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": headers})


async def look(tools: Tools, name: str, owner: str = "") -> JsonObject | None:
    return await tools.tool(name, owner, CLIENT, request(owner))


async def test_a_tool_is_found_on_any_page_and_the_list_is_read_once() -> None:
    shop = Shop(["bread"], ["cake"], ["pie"])
    async with catalog(shop.server) as tools:
        found = await asyncio.gather(*(look(tools, name) for name in ("pie", "bread", "cake", "pie")))
        assert [tool and tool["name"] for tool in found] == ["pie", "bread", "cake", "pie"]
        assert shop.listed == 3


async def test_each_caller_has_the_list_that_it_is_shown() -> None:
    shop = Shop(["bread"])
    async with catalog(shop.server) as tools:
        assert await look(tools, "alice-bread", "alice-") is not None
        assert await look(tools, "alice-bread", "bob-") is None
        assert await look(tools, "bob-bread", "bob-") is not None


async def test_a_list_is_read_again_when_its_time_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    shop = Shop(["bread"])
    async with catalog(shop.server) as tools:
        assert await look(tools, "bread") is not None
        assert await look(tools, "bread") is not None
        assert shop.listed == 1
        monkeypatch.setattr(own_requests, "KEEP_SECONDS", 0.0)
        assert await look(tools, "bread") is not None
        await until(lambda: shop.listed == 2)


async def test_a_list_that_is_old_counts_while_it_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise 6: a call does not wait for the server's own list."""
    shop = Shop(["bread"])
    async with catalog(shop.server) as tools:
        assert await look(tools, "bread") is not None
        monkeypatch.setattr(own_requests, "KEEP_SECONDS", 0.0)
        monkeypatch.setattr(own_requests, "WAIT_SECONDS", 3_600.0)
        shop.hangs = True
        for _ in range(3):
            assert await look(tools, "bread") is not None
            await asyncio.sleep(0)
        await until(lambda: shop.listed == 2)
        shop.pages[0][0] = "cake"
        shop.open.set()
        assert await look(tools, "cake") is not None


async def test_a_list_that_fails_leaves_the_one_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    shop = Shop(["bread"])
    async with catalog(shop.server) as tools:
        assert await look(tools, "bread") is not None
        shop.fails = True
        monkeypatch.setattr(own_requests, "READ_AGAIN_SECONDS", 0.0)
        assert await look(tools, "cake") is None
        assert shop.listed == 2
        assert await look(tools, "bread") is not None


async def test_a_list_that_hangs_is_waited_for_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tools say nothing then, until it comes."""
    monkeypatch.setattr(own_requests, "WAIT_SECONDS", 0.05)
    shop = Shop(["bread"])
    shop.hangs = True
    async with catalog(shop.server) as tools:
        assert await look(tools, "bread") is None
        assert await look(tools, "bread") is None
        assert shop.listed == 1
        shop.open.set()
        monkeypatch.setattr(own_requests, "WAIT_SECONDS", 3_600.0)
        assert await look(tools, "bread") is not None
        assert shop.listed == 1


async def test_a_list_that_never_comes_is_given_up_and_read_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(own_requests, "READ_SECONDS", 0.05)
    monkeypatch.setattr(own_requests, "READ_AGAIN_SECONDS", 0.0)
    shop = Shop(["bread"])
    shop.hangs = True
    async with catalog(shop.server) as tools:
        assert await look(tools, "bread") is None
        assert [entry.levelname for entry in caplog.records if getattr(entry, "action", "") == "tools.unlisted"]
        shop.hangs = False
        assert await look(tools, "bread") is not None


async def test_names_that_are_made_up_do_not_cause_a_list_each(monkeypatch: pytest.MonkeyPatch) -> None:
    shop = Shop(["bread"])
    async with catalog(shop.server) as tools:
        for number in range(50):
            assert await look(tools, f"made-up-{number}") is None
        assert shop.listed == 1
        shop.pages[0].append("cake")
        monkeypatch.setattr(own_requests, "READ_AGAIN_SECONDS", 0.0)
        assert await look(tools, "cake") is not None  # it is new
        assert shop.listed == 2


async def test_the_lists_of_callers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_requests, "MAX_OWNERS", 2)
    shop = Shop(["bread"])
    async with catalog(shop.server) as tools:
        for owner in ("a-", "b-", "c-", "c-", "b-"):
            assert await look(tools, f"{owner}bread", owner) is not None
        assert shop.listed == 3
        assert await look(tools, "a-bread", "a-") is not None
        assert shop.listed == 4


async def test_pages_that_never_end_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAX_PAGES", 3)
    shop = Shop(*(["bread"] for _ in range(9)))
    async with catalog(shop.server) as tools:
        assert await look(tools, "bread") is not None
        assert shop.listed == 3


async def test_a_server_that_fails_shows_no_tools(caplog: pytest.LogCaptureFixture) -> None:
    shop = Shop(["bread"])
    shop.fails = True
    async with catalog(shop.server) as tools:
        assert await look(tools, "bread") is None
    [entry] = [entry for entry in caplog.records if getattr(entry, "action", "") == "tools.unlisted"]
    assert entry.getMessage() == "the server did not list its tools"


async def test_a_caller_that_leaves_does_not_take_the_list_from_the_others() -> None:
    shop = Shop(["bread"])
    async with catalog(shop.server) as tools:
        leaving, staying = (asyncio.create_task(look(tools, "bread")) for _ in range(2))
        await asyncio.sleep(0)
        leaving.cancel()
        assert await staying is not None
        assert shop.listed == 1


async def test_a_server_without_tools_has_none() -> None:
    async with catalog(Server("empty", version="1")) as tools:
        assert await look(tools, "bread") is None


async def test_a_server_with_tasks_of_its_own_is_known_by_their_handler() -> None:
    own: Server[Any] = Server("own", version="1")

    async def get(ctx: ServerRequestContext[Any], params: Any) -> types.EmptyResult:
        return types.EmptyResult()

    async with catalog(own) as tools:
        assert not tools.serves_tasks
        own.add_request_handler("tasks/get", types.RequestParams, get)
    async with catalog(own) as tools:
        assert tools.serves_tasks
    async with catalog(MCPServer("plain", version="7")) as tools:
        assert not tools.serves_tasks
        assert tools.server_info["io.modelcontextprotocol/serverInfo"] == {"name": "plain", "version": "7"}
