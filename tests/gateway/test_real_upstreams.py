"""Stock clients of both eras in front of servers that others publish, whose processes are killed."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
from mcp import Client
from mcp.client.session import ClientRequestContext
from mcp.shared.exceptions import MCPError
from mcp_types import ElicitRequestParams, ElicitResult, ListRootsResult, Root
from pydantic import FileUrl

from tests.gateway.gateways import OUTCOME_UNKNOWN
from tests.gateway.real_upstreams import (
    REAL_SERVERS,
    RealGateway,
    everything_over_http,
    gateway_to,
    text_of,
)
from tests.support.processes.serving import serving
from tests.support.servers.in_process import until
from tests.support.stores.postgres import free_port

pytestmark = pytest.mark.anyio

#: `legacy` is a session of 2025-11-25.
MODES = ("legacy", "2026-07-28")


async def answer_rye(context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:
    return ElicitResult(action="accept", content={"answer": "rye"})


@pytest.mark.long
@pytest.mark.parametrize("name", REAL_SERVERS)
async def test_a_process_that_is_killed_between_calls_is_replaced(name: str, tmp_path: Path) -> None:
    """The client notices nothing: neither a session nor a client without one."""
    server = REAL_SERVERS[name]
    async with gateway_to(server, tmp_path) as gateway:
        for mode in MODES:
            async with Client(gateway.url, mode=mode, elicitation_callback=answer_rye) as client:
                assert server.tool in {tool.name for tool in (await client.list_tools()).tools}
                for is_last in (False, True):
                    assert server.says in text_of(await client.call_tool(server.tool, server.arguments(tmp_path)))
                    if not is_last:
                        await gateway.kill_children()


@pytest.mark.long
async def test_roots_asked_before_any_call(tmp_path: Path) -> None:
    """server-filesystem asks for its client's directories as soon as there is a session, again after a restart. G20."""
    own, roots = tmp_path / "own", tmp_path / "roots"
    own.mkdir()
    roots.mkdir()
    asked = 0

    async def give_roots(context: ClientRequestContext) -> ListRootsResult:
        nonlocal asked
        asked += 1
        return ListRootsResult(roots=[Root(uri=FileUrl(roots.as_uri()))])

    async with (
        gateway_to(REAL_SERVERS["filesystem"], own) as gateway,
        Client(gateway.url, mode="legacy", list_roots_callback=give_roots) as client,
    ):

        async def are_taken() -> bool:
            allowed = text_of(await client.call_tool("list_allowed_directories", {}))
            return str(roots) in allowed and str(own) not in allowed

        await until(lambda: asked == 1)
        await until(are_taken)
        await gateway.kill_children()
        await until(are_taken)
        assert asked == 2


@pytest.mark.parametrize("mode", ["legacy", pytest.param("2026-07-28", marks=pytest.mark.long)])
async def test_a_process_that_is_killed_while_its_tool_asks(mode: str, tmp_path: Path) -> None:
    """FastMCP: the tool has no hint, so its call gets -31001, and the next call works."""
    async with gateway_to(REAL_SERVERS["fastmcp"], tmp_path) as gateway:
        asked: list[str] = []

        async def kill_once(context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:
            asked.append(params.message)
            if len(asked) == 1:
                await gateway.kill_children()
            return await answer_rye(context, params)

        async with Client(gateway.url, mode=mode, elicitation_callback=kill_once) as client:
            with pytest.raises(MCPError) as failed:
                await client.call_tool("ask_each", {"questions": ["first?"]})
            assert failed.value.code == OUTCOME_UNKNOWN
            assert text_of(await client.call_tool("ask_each", {"questions": ["second?"]})) == "rye"
        assert asked == ["first?", "second?"]


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
async def test_a_process_that_is_killed_in_a_call_that_may_run_again(mode: str, tmp_path: Path) -> None:
    """server-everything: all progress comes once, and the result."""
    async with gateway_to(REAL_SERVERS["everything"], tmp_path) as gateway, Client(gateway.url, mode=mode) as client:
        reported: list[float] = []

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            reported.append(progress)
            if progress == 2:
                await gateway.kill_children()

        result = await client.call_tool(
            "trigger-long-running-operation", {"duration": 1, "steps": 5}, progress_callback=on_progress
        )
        assert text_of(result).startswith("Long running operation completed")
        assert reported == [1, 2, 3, 4, 5]


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
async def test_a_process_that_is_killed_while_it_fetches(mode: str, tmp_path: Path) -> None:
    """mcp-server-fetch, whose tool may run again: the page is asked for twice."""
    requests = 0

    async def answer_second(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        requests += 1
        if requests > 1:
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\nconnection: close\r\ncontent-length: 3\r\n\r\nrye"
            )
        else:
            await reader.read()
        writer.close()

    page = await asyncio.start_server(answer_second, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{page.sockets[0].getsockname()[1]}/"
    async with (
        page,
        gateway_to(REAL_SERVERS["fetch"], tmp_path) as gateway,
        Client(gateway.url, mode=mode) as client,
        asyncio.TaskGroup() as tasks,
    ):
        call = tasks.create_task(client.call_tool("fetch", {"url": url}))
        await until(lambda: requests == 1)
        await gateway.kill_children()
        assert "rye" in text_of(await call)
        assert requests == 2


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
async def test_a_process_that_is_killed_in_a_query(mode: str, tmp_path: Path) -> None:
    """mcp-server-sqlite on version 1 of the SDK: its tools have no hints, and it answers nothing while it computes."""
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"
    async with gateway_to(REAL_SERVERS["sqlite"], tmp_path) as gateway, Client(gateway.url, mode=mode) as client:
        assert "[]" in text_of(await client.call_tool("list_tables", {}))
        before = seconds_of(gateway)
        call = asyncio.create_task(client.call_tool("read_query", {"query": f"SELECT * FROM ({endless})"}))
        await until(lambda: seconds_of(gateway) > before + 0.3)
        await gateway.kill_children()
        with pytest.raises(MCPError) as failed:
            await call
        assert failed.value.code == OUTCOME_UNKNOWN
        assert "[]" in text_of(await client.call_tool("list_tables", {}))


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
async def test_a_server_at_an_address_that_is_killed(mode: str) -> None:
    """server-everything over HTTP, between calls and in one that may run again."""
    port = free_port()
    async with AsyncExitStack() as stack:
        kill = await stack.enter_async_context(everything_over_http(port))
        served = await stack.enter_async_context(serving(f"http://127.0.0.1:{port}/mcp"))
        client = await stack.enter_async_context(Client(served.url, mode=mode))
        reported: list[float] = []

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            reported.append(progress)
            if progress == 2:
                await kill()
                await stack.enter_async_context(everything_over_http(port))

        assert "echo" in {tool.name for tool in (await client.list_tools()).tools}
        slow = ("trigger-long-running-operation", {"duration": 1, "steps": 5})
        assert text_of(await client.call_tool(*slow, progress_callback=on_progress)).startswith("Long running")
        assert reported == [1, 2, 3, 4, 5]
        assert text_of(await client.call_tool("echo", {"message": "rye"})) == "Echo: rye"


def seconds_of(gateway: RealGateway) -> float:
    """The time that the upstream's processes have computed."""
    return float(sum(psutil.Process(pid).cpu_times().user for pid in gateway.children))
