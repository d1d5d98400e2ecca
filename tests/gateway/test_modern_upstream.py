"""Stock clients of both eras in front of the official TypeScript server, which speaks 2026-07-28 only here."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from mcp import Client
from mcp.client.session import ClientRequestContext
from mcp_types import ElicitRequestFormParams, ElicitRequestParams, ElicitResult, TextContent

from perdure import Settings
from perdure.gateway.host import host_upstream
from perdure.gateway.upstream import HttpUpstream, Program, Upstream
from tests.gateway.typescript_upstreams import typescript_program, typescript_server
from tests.support.servers.in_process import serve

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("transport", ["stdio", "http"])
@pytest.mark.parametrize(("mode", "version"), [("legacy", "2025-11-25"), ("2026-07-28", "2026-07-28")])
async def test_a_stock_client_has_tools_progress_and_questions(mode: str, version: str, transport: str) -> None:
    async with AsyncExitStack() as stack:
        if transport == "http":
            url = await stack.enter_async_context(typescript_server())
            upstream = Upstream(name="bakery", address=HttpUpstream(url=url))
        else:
            upstream = Upstream(name="bakery", program=Program(argv=typescript_program(), cwd=Path.cwd()))
        await bakes_and_asks(upstream, mode, version)


async def bakes_and_asks(upstream: Upstream, mode: str, version: str) -> None:
    asked: list[str] = []
    reported: list[float] = []

    async def choose(context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:
        assert isinstance(params, ElicitRequestFormParams)
        asked.append(params.message)
        return ElicitResult(action="accept", content={"loaf": "rye"})

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        reported.append(progress)

    async with (
        serve(host_upstream(upstream, Settings())) as site,
        Client(site.url, mode=mode, elicitation_callback=choose) as client,
    ):
        assert client.protocol_version == version
        assert "bake" in {tool.name for tool in (await client.list_tools()).tools}
        baked = await client.call_tool("bake", {"loaves": 3}, progress_callback=on_progress)
        ordered = await client.call_tool("order", {})
    texts = [
        content.text for result in (baked, ordered) for content in result.content if isinstance(content, TextContent)
    ]
    assert texts == ["3 loaves", "a rye loaf"]
    assert (asked, reported) == (["Which loaf?"], [1, 2, 3])
