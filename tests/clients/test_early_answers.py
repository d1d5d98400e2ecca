"""Stock clients under a rule of `answer_within` take the early answer of a tool with a schema, and then its result."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from mcp import Client
from mcp.server.mcpserver import MCPServer
from mcp_types import TextContent

from tests.clients.node_clients import HERE
from tests.support.processes.node_programs import node_modules, program
from tests.support.processes.python_environments import programs_of
from tests.support.servers.in_process import Site, serve

pytestmark = pytest.mark.anyio

SDK_1 = "mcp==1.30.0"

#: As `early.mjs`, with names that the SDK of the tests does not have.
PYTHON_1 = """
import asyncio
import json
import sys

from mcp import ClientSession
from mcp.client.streamable_http import streamablehttp_client


async def main(url: str) -> None:
    async with streamablehttp_client(url) as streams, ClientSession(*streams[:2]) as client:
        await client.initialize()
        await client.list_tools()
        result = await client.call_tool("slow", {"seconds": 3})
        first = result.content[0].text
        while call := ((result.meta or {}).get("dev.perdure/call") or {}).get("id"):
            result = await client.call_tool("perdure_wait_for_result", {"call": call})
        print(json.dumps({"first": first, "last": result.structuredContent}))


asyncio.run(main(sys.argv[1]))
"""


def slow_server() -> MCPServer:
    server = MCPServer("slow", log_level="WARNING")

    @server.tool()
    async def slow(seconds: float) -> dict[str, float]:
        await asyncio.sleep(seconds)
        return {"took": seconds}

    return server


@pytest.fixture
async def early() -> AsyncIterator[Site]:
    async with serve(slow_server(), answer_within=("*=1s",)) as site:
        yield site


def early_mjs() -> tuple[str, str]:
    node_modules(HERE)
    return str(program("node")), str(HERE / "early.mjs")


async def said_by(*command: str) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert process.returncode == 0
    said: dict[str, Any] = json.loads(out)
    return said


async def test_typescript_1_32_with_a_timeout_of_two_seconds(early: Site) -> None:
    """The call takes longer than its client waits, and each of its requests is answered in time."""
    said = await said_by(*early_mjs(), early.url)
    assert '"slow" is still running after 1 s' in said["first"]
    assert said["last"] == {"took": 3}


async def test_python_1_30(early: Site) -> None:
    python = programs_of("sdk-1-client", SDK_1) / "python"
    said = await said_by(str(python), "-c", PYTHON_1, early.url)
    assert '"slow" is still running after 1 s' in said["first"]
    assert said["last"] == {"took": 3}


@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
async def test_python_2_3(early: Site, mode: str) -> None:
    async with Client(early.url, mode=mode) as client:
        await client.list_tools()
        result = await client.call_tool("slow", {"seconds": 3})
        assert isinstance(result.content[0], TextContent)
        assert '"slow" is still running after 1 s' in result.content[0].text
        while call := ((result.meta or {}).get("dev.perdure/call") or {}).get("id"):
            result = await client.call_tool("perdure_wait_for_result", {"call": call})
        assert result.structured_content == {"took": 3}


async def test_typescript_1_32_that_resets_on_progress_outlives_its_timeout() -> None:
    """Heartbeats alone, without a rule: the tool says nothing for twice the timeout."""
    async with serve(slow_server(), heartbeat=0.5) as site:
        said = await said_by(*early_mjs(), site.url, "reset")
    assert said["last"] == {"took": 4}
