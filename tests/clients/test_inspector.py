"""The MCP Inspector's command line, as a user types it: `mcp-inspector --cli URL --method …` (H7, P1)."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.node_clients import HERE
from tests.support.node import node_modules, program
from tests.support.serving import TOOLBOX, Served, serving

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="session")
def inspector() -> Path:
    return node_modules(HERE) / ".bin" / "mcp-inspector"


@pytest.fixture
async def server() -> AsyncIterator[Served]:
    async with serving(TOOLBOX, "--retry", "100ms") as it:
        yield it


async def inspect(inspector: Path, home: Path, url: str, *options: str) -> Any:
    """What the Inspector prints; its own files go to `home` and not to the user's."""
    process = await asyncio.create_subprocess_exec(
        program("node"),
        inspector,
        "--cli",
        url,
        "--transport=http",
        "--format=json",
        *options,
        env={**os.environ, "HOME": str(home)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return json.loads(output)["result"]


async def test_it_lists_the_tools(server: Served, inspector: Path, tmp_path: Path) -> None:
    listed = await inspect(inspector, tmp_path, server.url, "--method", "tools/list")
    assert {"count", "ask", "announce"} <= {tool["name"] for tool in listed["tools"]}


@pytest.mark.parametrize("era", ["legacy", "modern"])
async def test_it_calls_a_tool(server: Served, inspector: Path, tmp_path: Path, era: str) -> None:
    call = ("--method", "tools/call", "--tool-name", "count", "--tool-arg", "n=3", "--protocol-era", era)
    result = await inspect(inspector, tmp_path, server.url, *call)
    assert result["content"] == [{"type": "text", "text": "counted to 3"}]
