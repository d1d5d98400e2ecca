"""Calls whose answers are lost: a server that knows keys runs them once; elsewhere tools that may run twice are called
again, if the caller allows it, and no others ever (H8, B12)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.tools import Tool
from mcp.shared.exceptions import MCPError

import perdure
from perdure._core.envelope import KEY
from tests.client.client_process import client_process
from tests.client.conftest import text
from tests.support.processes.cluster import GATE_FILE_TOOLS, cluster
from tests.support.processes.serving import serving
from tests.support.proxies.cutting_proxy import CuttingProxy, cutting_proxy
from tests.support.servers.gate_file_tools import IDEMPOTENT, READ_ONLY, count, diary, open_gate
from tests.support.servers.in_process import under_uvicorn, until

pytestmark = pytest.mark.anyio

ANSWER_BEGINS = b"HTTP/1.1 200 OK\r\n"


#: A tool, whether the caller allows it, and how often it then runs.
CASES = [("count", True, 2), ("put", True, 2), ("pay", True, 1), ("count", False, 1), ("put", False, 1)]


@asynccontextmanager
async def without_keys() -> AsyncIterator[CuttingProxy]:
    """The SDK's own server, which knows no keys, behind a proxy."""
    kinds = {"count": READ_ONLY, "put": IDEMPOTENT, "pay": None}
    tools = [Tool.from_function(count, name=name, annotations=kind) for name, kind in kinds.items()]
    server = MCPServer("again", version="1", log_level="WARNING", tools=tools)
    async with under_uvicorn(server.streamable_http_app(), complaint=".*") as port, cutting_proxy(port) as proxy:
        yield proxy


async def test_a_call_whose_answer_was_lost(tmp_path: Path) -> None:
    async with without_keys() as proxy:
        for number, (tool, allowed, runs) in enumerate(CASES):
            log = tmp_path / f"diary {number}"
            async with perdure.connect(proxy.url, rerun_safe_tools=allowed) as client:
                await _lose_the_answer(proxy, client, tool, log, runs)


async def _lose_the_answer(proxy: CuttingProxy, client: perdure.Client, tool: str, log: Path, runs: int) -> None:
    await proxy.answered("GET")
    proxy.cut_after(ANSWER_BEGINS, only="POST")
    if runs == 2:
        assert text(await client.call_tool(tool, {"n": 1, "log": str(log)})) == "counted to 1"
    else:
        with pytest.raises(perdure.OutcomeUnknown):
            await client.call_tool(tool, {"n": 1, "log": str(log)})
    # The answer had begun before the tool ran.
    await until(lambda: len(diary(log)) >= runs)
    await client.call_tool("count", {"n": 1})
    assert len(diary(log)) == runs, tool


async def test_it_is_called_again_once(tmp_path: Path) -> None:
    log = tmp_path / "diary"
    async with without_keys() as proxy, perdure.connect(proxy.url, rerun_safe_tools=True) as client:
        await client.list_tools()
        proxy.cut_after(ANSWER_BEGINS, only="POST")
        proxy.passing(ANSWER_BEGINS, only="POST")  # tools/list, which declares whether it may
        proxy.cut_after(ANSWER_BEGINS, only="POST")
        with pytest.raises(perdure.OutcomeUnknown):
            await client.call_tool("count", {"n": 1, "log": str(log)})
        await until(lambda: len(diary(log)) >= 2)
        await client.call_tool("count", {"n": 1})
        assert len(diary(log)) == 2


async def test_a_server_that_knows_keys_runs_a_call_once_however_often_its_answer_is_lost(tmp_path: Path) -> None:
    """The client sends each call with a key, and again under the same."""
    log = tmp_path / "diary"
    async with (
        serving(GATE_FILE_TOOLS, "--store", "memory:", "--retry", "0.05") as served,
        cutting_proxy(served.port) as proxy,
        perdure.connect(proxy.url) as client,
    ):
        await proxy.answered("GET")
        for tool in ("pay", "count"):
            for _ in range(2):
                proxy.cut_after(ANSWER_BEGINS, only="POST")
            seen: list[float] = []

            async def on_progress(progress: float, total: float | None, message: str | None, seen: Any = seen) -> None:
                seen.append(progress)

            call = {"n": 1, "log": str(log), "key": tool}
            assert text(await client.call_tool(tool, call, None, on_progress)) == "counted to 1"
            assert seen == sorted(set(seen))
        mine: Any = {KEY: "mine"}
        await client.call_tool("count", {"n": 1}, meta=mine)
        with pytest.raises(MCPError, match="another call of yours"):
            await client.call_tool("count", {"n": 2}, meta=mine)
    assert [key for key, _ in diary(log)] == ["pay", "count"]


@pytest.mark.parametrize("tool", ["put", "pay"])
async def test_a_server_killed_before_the_first_event_is_asked_again_by_the_key(tmp_path: Path, tool: str) -> None:
    """The client has no position. The server settles the call as any other, and its answer is fetched by the key."""
    log, gate = tmp_path / "diary", tmp_path / "gate"
    arguments = {"n": 1, "gate": str(gate), "pauses": [1], "log": str(log)}
    async with cluster(tmp_path / "log.db", "--retry", "0.05") as site, perdure.connect(site.proxy.url) as client:
        await site.proxy.answered("GET")
        site.proxy.cut_after(ANSWER_BEGINS, only="POST")
        site.proxy.cut_after(ANSWER_BEGINS, only="POST")
        call = asyncio.create_task(client.call_tool(tool, arguments))
        await until(lambda: diary(log))
        await site.crash()
        open_gate(f"{gate}.1")
        if tool == "put":
            assert text(await call) == "counted to 1"
        else:
            with pytest.raises(perdure.OutcomeUnknown):
                await call
    assert len(diary(log)) == (2 if tool == "put" else 1)


@pytest.mark.parametrize("has_ended", [True, False])
async def test_the_next_process_asks_by_the_key_for_a_call_without_a_position(tmp_path: Path, has_ended: bool) -> None:
    """A program that is killed after its request has left, and before it has written its first position."""
    log, gate, state = tmp_path / "diary", tmp_path / "gate", tmp_path / "agent.json"
    arguments = {"n": 2, "gate": str(gate), "pauses": [1], "log": str(log)}
    async with serving(GATE_FILE_TOOLS, "--store", "memory:") as served:
        async with client_process(served.url, state, "pay", **arguments) as first:
            await first.until(progress=1.0)
            await first.kill()
        kept = json.loads(state.read_bytes())
        for running in kept["calls"].values():
            running["position"] = None
        state.write_text(json.dumps(kept))
        if has_ended:
            open_gate(f"{gate}.1")
        async with client_process(served.url, state) as second:
            await second.line()
            open_gate(f"{gate}.1")
            await second.rest()
        assert second.said[0] == {"session": first.said[0]["session"], "pending": [["pay", arguments]]}
        assert second.told("result") == ["counted to 2"]
        async with client_process(served.url, state) as third:
            assert await third.rest() == [{"session": first.said[0]["session"], "pending": []}]
    assert len(diary(log)) == 1


async def test_a_key_that_the_server_may_have_forgotten_is_not_sent(tmp_path: Path) -> None:
    state = tmp_path / "agent.json"
    async with serving(GATE_FILE_TOOLS, "--store", "memory:", "--task-ttl", "1h") as served:
        arguments = {"n": 2, "gate": str(tmp_path / "gate"), "pauses": [1]}
        async with client_process(served.url, state, "pay", **arguments) as first:
            await first.until(progress=1.0)
            await first.kill()
        kept = json.loads(state.read_bytes())
        for running in kept["calls"].values():
            running |= {"position": None, "began": running["began"] - 3_601}
        state.write_text(json.dumps(kept))
        async with client_process(served.url, state) as second:
            await second.rest()
        assert second.told("unknown") == ["pay"]


async def test_a_call_is_not_sent_by_its_key_in_another_session(tmp_path: Path) -> None:
    """A server that has lost its sessions has lost its keys, and would run the call again."""
    log = tmp_path / "diary"
    arguments = {"n": 1, "gate": str(tmp_path / "gate"), "pauses": [1], "log": str(log)}
    async with cluster("memory:", "--retry", "0.05") as site, perdure.connect(site.proxy.url) as client:
        await site.proxy.answered("GET")
        site.proxy.cut_after(ANSWER_BEGINS, only="POST")
        site.proxy.cut_after(ANSWER_BEGINS, only="POST")
        call = asyncio.create_task(client.call_tool("put", arguments))
        await until(lambda: diary(log))
        await site.crash()
        with pytest.raises(perdure.OutcomeUnknown, check=lambda error: "its session is gone" in error.reason):
            await call
    assert len(diary(log)) == 1
