"""Which tools run as tasks: what the operator says, what the client declares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.clients.modern_peer import ALL_ASKS, TAKES_TASKS, CallPeer, result_of, said
from tests.support.servers.asking_tools import server
from tests.support.servers.gate_file_tools import open_gate
from tests.support.servers.gated_server import live

pytestmark = pytest.mark.anyio


async def test_a_tool_that_always_runs_as_a_task_is_refused_to_a_client_without_them(tmp_path: Path) -> None:
    gate = {"gate": str(tmp_path / "gate")}
    async with live(server=server, tasks=("wait=required",), task_after=3_600.0) as served:
        for capabilities in ({}, ALL_ASKS):
            peer = CallPeer(port=served.port, capabilities=capabilities)
            for key in (None, "mine"):
                answer = await peer.call("wait", gate, key=key)
                assert (answer.status, answer.error["code"]) == (400, -32021)
                assert answer.error["data"] == {"requiredCapabilities": TAKES_TASKS}
        peer = CallPeer(port=served.port, capabilities=TAKES_TASKS)
        handle = result_of(await peer.call("wait", gate))
        assert (handle["resultType"], handle["status"]) == ("task", "working")
        open_gate(gate["gate"])
        assert said((await peer.until_over(handle["taskId"]))["result"]) == "went through"


async def test_a_tool_that_never_runs_as_a_task_is_waited_for(tmp_path: Path) -> None:
    """Also where it asks: its client answers by rounds."""
    async with live(server=server, tasks=("*=never",), task_after=0.0) as served:
        peer = CallPeer(port=served.port, capabilities={**ALL_ASKS, **TAKES_TASKS})
        open_gate(tmp_path / "gate")
        assert said(result_of(await peer.call("wait", {"gate": str(tmp_path / "gate")}))) == "went through"
        asked = result_of(await peer.call("ask", {"question": "Well?"}))
        assert asked["resultType"] == "input_required"


@pytest.mark.parametrize("capabilities", [{}, ALL_ASKS])
async def test_a_client_without_tasks_never_gets_a_handle(capabilities: dict[str, Any], tmp_path: Path) -> None:
    async with live(server=server, task_after=0.0) as served:
        peer = CallPeer(port=served.port, capabilities=capabilities)
        async with await peer.begin_call("wait", {"gate": str(tmp_path / "gate")}, key="mine") as call:
            open_gate(tmp_path / "gate")
            assert result_of(await call.answer())["resultType"] == "complete"


async def test_a_result_that_comes_in_time_is_the_answer_itself() -> None:
    async with live(server=server, task_after=3_600.0) as served:
        peer = CallPeer(port=served.port, capabilities=TAKES_TASKS)
        result = result_of(await peer.call("fill", {"size": 3}))
        assert (result["resultType"], said(result)) == ("complete", "xxx")


async def test_a_large_result_is_the_same_by_key_by_handle_and_at_any_node(tmp_path: Path) -> None:
    size, store = 3_000_000, f"sqlite:{tmp_path / 'log.db'}"
    async with live(server=server, store=store, task_after=0.0) as a, live(server=server, store=store) as b:
        here, there = (CallPeer(port=served.port, capabilities=TAKES_TASKS) for served in (a, b))
        task = result_of(await here.call("fill", {"size": size}, key="mine"))["taskId"]
        results = [(await peer.until_over(task))["result"] for peer in (here, there)]
        results += [
            result_of(await peer.call("fill", {"size": size}, key="mine", capabilities={})) for peer in (here, there)
        ]
        assert {len(said(result)) for result in results} == {size}
        assert all(result == results[0] for result in results)
