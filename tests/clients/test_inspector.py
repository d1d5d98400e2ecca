"""The MCP Inspector's command line, as a user types it: `mcp-inspector --cli URL --method …` (H7, P1).

It speaks both eras: 2025-11-25 unless it is told otherwise, and 2026-07-28 with `--protocol-era modern`.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.node_clients import HERE
from tests.support.clients.modern_requests import TASKS
from tests.support.processes.cluster import cluster
from tests.support.processes.node_programs import node_modules, program
from tests.support.processes.serving import BASIC_TOOLS, Served, serving
from tests.support.servers.gate_file_tools import diary, open_gate
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="session")
def inspector() -> Path:
    return node_modules(HERE) / ".bin" / "mcp-inspector"


@pytest.fixture
async def server() -> AsyncIterator[Served]:
    async with serving(BASIC_TOOLS, "--retry", "100ms") as it:
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


@pytest.mark.parametrize(("era", "revision"), [("legacy", "2025-11-25"), ("modern", "2026-07-28")])
async def test_it_connects_and_calls_a_tool(
    server: Served, inspector: Path, tmp_path: Path, era: str, revision: str
) -> None:
    call = ("--method", "tools/call", "--tool-name", "count", "--tool-arg", "n=3", "--protocol-era", era)
    result, told = await asyncio.gather(
        inspect(inspector, tmp_path, server.url, *call),
        inspect(inspector, tmp_path, server.url, "--method", "initialize", "--protocol-era", era),
    )
    assert result["content"] == [{"type": "text", "text": "counted to 3"}]
    assert told["protocolVersion"] == revision
    assert (TASKS in told["capabilities"].get("extensions", {})) == (era == "modern")


async def test_its_long_call_is_a_task_that_outlives_its_server(inspector: Path, tmp_path: Path) -> None:
    """It declares tasks, gets a handle and polls; the tool says that it may run again, and does. It gives up when an
    open poll breaks, so none of its polls is held, however long others are."""
    log, gate = tmp_path / "diary", tmp_path / "gate"
    async with cluster(tmp_path / "log.db", "--task-after", "50ms", "--task-hold", "60s") as nodes:
        arguments = {"n": 2, "pauses": [1], "gate": str(gate), "log": str(log)}
        call = ("--method", "tools/call", "--tool-name", "count", "--tool-args-json", json.dumps(arguments))
        polled = nodes.proxy.passing(rb'"status":"working"', times=2)
        asked = asyncio.create_task(inspect(inspector, tmp_path, nodes.proxy.url, *call, "--protocol-era", "modern"))
        await polled.passed()
        await nodes.crash()
        await until(lambda: len(diary(log)) == 2)
        open_gate(f"{gate}.1")
        assert (await asked)["content"] == [{"type": "text", "text": "counted to 2"}]
    assert len({process for _, process in diary(log)}) == 2
