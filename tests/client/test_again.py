"""Tools that may run twice are called again, if the caller allows it; no others ever (H8, B12)."""

from __future__ import annotations

from pathlib import Path

import pytest

import perdure
from tests.client.conftest import text
from tests.support.processes.cluster import GATE_FILE_TOOLS
from tests.support.processes.serving import serving
from tests.support.proxies.cutting_proxy import CuttingProxy, cutting_proxy
from tests.support.servers.gate_file_tools import diary
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio

ANSWER_BEGINS = b"HTTP/1.1 200 OK\r\n"


#: A tool, whether the caller allows it, and how often it then runs.
CASES = [("count", True, 2), ("put", True, 2), ("pay", True, 1), ("count", False, 1), ("put", False, 1)]


async def test_a_call_whose_answer_was_lost(tmp_path: Path) -> None:
    async with (
        serving(GATE_FILE_TOOLS, "--store", "memory:", "--retry", "0.05") as served,
        cutting_proxy(served.port) as proxy,
    ):
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
    await client.call_tool("where")
    assert len(diary(log)) == runs, tool


async def test_it_is_called_again_once(tmp_path: Path) -> None:
    log = tmp_path / "diary"
    async with (
        serving(GATE_FILE_TOOLS, "--store", "memory:", "--retry", "0.05") as served,
        cutting_proxy(served.port) as proxy,
        perdure.connect(proxy.url, rerun_safe_tools=True) as client,
    ):
        await client.list_tools()
        proxy.cut_after(ANSWER_BEGINS, only="POST")
        proxy.passing(ANSWER_BEGINS, only="POST")  # tools/list, which tells whether it may
        proxy.cut_after(ANSWER_BEGINS, only="POST")
        with pytest.raises(perdure.OutcomeUnknown):
            await client.call_tool("count", {"n": 1, "log": str(log)})
        await until(lambda: len(diary(log)) >= 2)
        await client.call_tool("where")
        assert len(diary(log)) == 2
