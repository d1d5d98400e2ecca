"""The process that runs a task is killed: the task has its result, or it is told that its outcome is unknown.

Real processes on one store, killed with SIGKILL; each request of the client goes to another process. A tool runs twice
only where it says that it may.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients.recording_client import assert_answered_once, assert_sound
from tests.support.clients.task_client import CAN_BE_ASKED, OUTCOME_UNKNOWN, Balancer, Message, TaskClient, said
from tests.support.processes.cluster import GATE_FILE_TOOLS, cluster
from tests.support.processes.crash_points import at
from tests.support.processes.serving import serving
from tests.support.servers.gate_file_tools import diary, open_gate
from tests.support.servers.in_process import until
from tests.support.stores.postgres import store_url
from tests.support.stores.shared_store import shared_address

pytestmark = pytest.mark.anyio

AT_ONCE = ("--task-after", "0s")
#: Each tool, and what comes of its task when its process is killed: the result of its second run, or nothing known.
TOOLS: dict[str, str | int] = {"count": "counted to 4", "put": "counted to 4", "pay": OUTCOME_UNKNOWN}


def runs(log: Path, key: str) -> int:
    return sum(noted == key for noted, _ in diary(log))


async def ended(client: TaskClient, tasks: dict[str, str]) -> tuple[dict[str, Message], float]:
    """What came of each task, and the time until the last of them had ended."""
    since = time.monotonic()
    views = await asyncio.gather(*(client.outcome(task) for task in tasks.values()))
    return dict(zip(tasks, views, strict=True)), time.monotonic() - since


@pytest.mark.parametrize("pause", [0, 2], ids=["just begun", "mid-way"])
async def test_a_task_whose_process_is_killed(tmp_path: Path, pause: int) -> None:
    await kill_in_tasks(shared_address(tmp_path / "log.db"), tmp_path, pause)


@pytest.mark.long
async def test_a_task_whose_process_is_killed_on_postgres(tmp_path: Path) -> None:
    await kill_in_tasks(store_url(), tmp_path, 2)


async def kill_in_tasks(address: str, tmp_path: Path, pause: int) -> None:
    """One task of each kind, all in the process that is killed."""
    log, gate = tmp_path / "diary", tmp_path / "gate"
    async with cluster(address, *AT_ONCE, processes=2) as nodes:
        doomed, other = nodes.servers
        there = TaskClient(balancer=Balancer(ports=[doomed.port]))
        client = TaskClient(balancer=Balancer(ports=[doomed.port, other.port]))
        story: dict[str, Any] = {"n": 4, "gate": str(gate), "pauses": [pause], "log": str(log)}
        tasks = {tool: await there.task(tool, key=tool, **story) for tool in TOOLS}
        await until(lambda: len(diary(log)) == len(TOOLS))
        await doomed.kill()
        open_gate(f"{gate}.{pause}")
        views, seconds = await ended(client, tasks)
        print(f"settled after {seconds:.2f} s")
        assert {tool: said(view) for tool, view in views.items()} == TOOLS
        assert {tool: runs(log, tool) for tool in TOOLS} == {"count": 2, "put": 2, "pay": 1}
        assert views["pay"]["error"]["data"]["outcome"] == "unknown"
    assert_answered_once(address)
    assert_sound(address)


@pytest.mark.parametrize("tool", TOOLS)
async def test_a_task_whose_process_is_killed_with_the_answer_in_the_log(tmp_path: Path, tool: str) -> None:
    """The answer is written, and no client, no poll and no other node knows of it."""
    address, log, gate = shared_address(tmp_path / "log.db"), tmp_path / "diary", tmp_path / "gate"
    told = at("perdure.sessions.context", "CallWaiters.tell", "enter")
    options = ("--store", address, *AT_ONCE)
    async with serving(GATE_FILE_TOOLS, *options, point=told) as doomed, serving(GATE_FILE_TOOLS, *options) as other:
        there = TaskClient(balancer=Balancer(ports=[doomed.port]))
        task = await there.task(tool, n=4, gate=str(gate), pauses=[2], log=str(log), key=tool)
        await doomed.arm()
        client = TaskClient(balancer=Balancer(ports=[other.port, doomed.port]))
        polling = asyncio.create_task(client.outcome(task))
        open_gate(f"{gate}.2")
        assert await doomed.has_died(), "the point was not reached"
        assert said(await polling) == "counted to 4"
        assert runs(log, tool) == 1
    assert_answered_once(address)


async def test_every_handle_resolves_after_all_processes_were_killed(tmp_path: Path) -> None:
    """Whatever the tasks were doing. Those that may run again are killed once more in their second run."""
    address, log, gate = shared_address(tmp_path / "log.db"), tmp_path / "diary", tmp_path / "gate"
    async with cluster(address, *AT_ONCE, processes=2) as nodes:
        balancer = Balancer(ports=[served.port for served in nodes.servers])
        client = TaskClient(balancer=balancer, capabilities=CAN_BE_ASKED)
        story: dict[str, Any] = {"n": 4, "gate": str(gate), "log": str(log)}
        running = {
            f"{tool}-{pause}-{number}": await client.task(tool, pauses=[pause], key=f"{tool}-{pause}-{number}", **story)
            for tool in TOOLS
            for pause in (0, 2)
            for number in (1, 2)  # at each node
        }
        keyed = await client.task("pay", under="mine", pauses=[2], key="keyed", **story)
        early = {**story, "gate": f"{gate}-early", "pauses": [0], "key": "done"}
        done = [await client.task("pay", **early) for _ in range(2)]
        open_gate(f"{gate}-early.0")
        asking = [await client.task("ask", question="Why?", log=str(log), key="asking") for _ in range(2)]
        cancelled = [await client.task("pay", pauses=[2], key="cancelled", **story) for _ in range(2)]
        for task in done:
            assert said(await client.outcome(task)) == "counted to 4"
        for task in asking:
            assert (await client.get(task))["status"] == "input_required"
        for task in cancelled:
            await client.insist("tasks/cancel", {"taskId": task})
            assert (await client.outcome(task))["status"] == "cancelled"
        await until(lambda: len(diary(log)) == len(running) + 7)

        await asyncio.gather(*(served.kill() for served in nodes.servers))
        open_gate(f"{gate}.0")  # not the other one: what waits there is in its second run when it is killed again
        fresh = [await nodes.start(), await nodes.start()]
        balancer.ports = [served.port for served in fresh]
        again = [name for name in running if not name.startswith("pay") and "-2-" in name]
        await until(lambda: all(runs(log, name) == 2 for name in again))
        await asyncio.gather(*(served.kill() for served in fresh))
        open_gate(f"{gate}.2")
        balancer.ports = [served.port for served in (await nodes.start(), await nodes.start())]

        views, _ = await ended(client, running)
        for name, view in views.items():
            assert runs(log, name) <= (1 if name.startswith("pay") else 2), name
            if name.startswith("pay") or name in again:
                assert said(view) == OUTCOME_UNKNOWN, name
            elif said(view) != "counted to 4":
                assert (said(view), runs(log, name)) == (OUTCOME_UNKNOWN, 2), name  # killed before its gate was seen
        assert said(await client.outcome(keyed)) == OUTCOME_UNKNOWN
        assert said(await client.call("pay", under="mine", pauses=[2], key="keyed", **story)) == OUTCOME_UNKNOWN
        for task in asking:
            assert said(await client.outcome(task)) == OUTCOME_UNKNOWN
        for task in cancelled:
            assert (await client.get(task))["status"] == "cancelled"
        for task in done:
            assert said(await client.get(task)) == "counted to 4"
        assert (runs(log, "keyed"), runs(log, "done"), runs(log, "asking"), runs(log, "cancelled")) == (1, 2, 2, 2)
    assert_answered_once(address)
    assert_sound(address)
