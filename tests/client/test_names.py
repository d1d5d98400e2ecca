"""Every ending has its name, whatever was asked for; and a request that cannot be made fails at once."""

from __future__ import annotations

import asyncio
import inspect
from contextlib import AsyncExitStack
from pathlib import Path

import httpx2
import mcp
import pytest
from mcp.shared.exceptions import MCPError
from mcp_types import PromptReference

import perdure
from perdure._core.codes import OUTCOME_UNKNOWN
from perdure._core.unknown_outcome import unknown_message
from perdure.client.connect import address
from tests.client.conftest import text
from tests.client.odd_server import BRIEF
from tests.support.proxies.cutting_proxy import CuttingProxy, cutting_proxy
from tests.support.servers.in_process import Site
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio

#: Each method of the SDK's client that asks the server for something, and arguments for it.
ASKS: dict[str, tuple[object, ...]] = {
    "list_tools": (),
    "list_prompts": (),
    "list_resources": (),
    "list_resource_templates": (),
    "read_resource": ("notice://1",),
    "get_prompt": ("p",),
    "complete": (PromptReference(name="p"), {"name": "n", "value": "v"}),
    "call_tool": ("count",),
    "send_ping": (),
    "set_logging_level": ("error",),
    "subscribe_resource": ("notice://1",),
    "unsubscribe_resource": ("notice://1",),
}
#: They are notifications, not requests.
TELLS = {"send_progress_notification", "send_roots_list_changed"}


def test_no_method_of_the_sdks_client_is_forgotten() -> None:
    methods = inspect.getmembers(mcp.Client, inspect.isfunction)
    found = {name for name, method in methods if inspect.iscoroutinefunction(inspect.unwrap(method)) and name[0] != "_"}
    assert found == set(ASKS) | TELLS


@pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning")
async def test_a_server_that_is_away_is_unreachable_for_whatever_is_asked(site: Site) -> None:
    async with AsyncExitStack() as stack, AsyncExitStack() as before:
        proxy = await before.enter_async_context(cutting_proxy(site.port))
        client = await stack.enter_async_context(perdure.connect(proxy.url, patience=BRIEF))
        await proxy.answered("GET")
        await before.aclose()
        for name, arguments in ASKS.items():
            with pytest.raises(perdure.Unreachable):
                await getattr(client, name)(*arguments)


def test_an_unknown_outcome_has_the_code_that_servers_give_it() -> None:
    assert perdure.OutcomeUnknown.CODE == OUTCOME_UNKNOWN
    unknown = perdure.OutcomeUnknown("pay", {"n": 1}, "why")
    assert isinstance(unknown, MCPError)
    assert (unknown.code, unknown.message) == (OUTCOME_UNKNOWN, unknown_message("pay"))
    assert str(unknown) == unknown_message("pay") + " Reason: why"


async def test_other_errors_are_as_the_server_made_them(shop: ToolServer, proxy: CuttingProxy) -> None:
    async with perdure.connect(proxy.url) as client:
        with pytest.raises(MCPError, match="boom") as raised:
            await client.call_tool("boom", {"code": -32050})
        assert (type(raised.value), raised.value.__cause__) == (MCPError, None)


async def test_a_call_that_cannot_be_made_again_stays_unknown(shop: ToolServer, proxy: CuttingProxy) -> None:
    """`Unreachable` would say that it did not run; the server is gone when its marks are asked for."""
    async with perdure.connect(proxy.url, patience=BRIEF, rerun_safe_tools=True) as client:
        mark = proxy.cut_after(b"HTTP/1.1 200 OK\r\n", only="POST")
        call = asyncio.create_task(client.call_tool("count", {"n": 1}))
        await mark.passed()
        proxy.refuse()
        with pytest.raises(perdure.OutcomeUnknown):
            await call


async def test_headers_beside_a_client_of_the_users_own_are_refused(site: Site) -> None:
    async with httpx2.AsyncClient() as http:
        url = f"http://127.0.0.1:{site.port}/mcp"
        for options in ({"headers": {"a": "b"}}, {"auth": lambda: "token"}):
            with pytest.raises(perdure.Misuse, match="http_client"):
                async with perdure.connect(url, http_client=http, **options):
                    raise AssertionError("they would not be sent")
        async with perdure.connect(url, http_client=http) as client:
            assert text(await client.call_tool("count", {"n": 1})) == "counted to 1"
        assert not http.is_closed


async def test_a_key_in_the_address_is_not_written_and_another_key_is_another_server(
    site: Site, tmp_path: Path
) -> None:
    path, url = tmp_path / "agent.json", f"http://u:secret-1@127.0.0.1:{site.port}/mcp?key=secret-2"
    async with perdure.connect(url, state=path) as client:
        await client.call_tool("count", {"n": 1})
    assert b"secret" not in path.read_bytes()
    with pytest.raises(perdure.StateUnusable) as refused:
        async with perdure.connect(url.replace("secret-2", "secret-3"), state=path):
            raise AssertionError("another key")
    assert "secret" not in str(refused.value)


def test_an_address_without_a_query_stands_there_as_it_is() -> None:
    assert address("http://ann:pw@a.example/mcp#x") == "http://a.example/mcp"
