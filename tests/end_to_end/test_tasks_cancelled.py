"""A task is cancelled while it ends, while it is answered, and while its process dies: it ends once, and stays ended.

Three processes on one store; each request goes to another one.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients.recording_client import assert_answered_once, assert_sound
from tests.support.clients.task_client import CAN_BE_ASKED, OUTCOME_UNKNOWN, OVER, Balancer, Message, TaskClient, said
from tests.support.processes.cluster import cluster
from tests.support.processes.serving import Served
from tests.support.servers.gate_file_tools import diary, open_gate
from tests.support.servers.in_process import until
from tests.support.stores.shared_store import shared_address

pytestmark = pytest.mark.anyio

ROUNDS = 2
EACH = 6
"""Tasks of each kind in a round."""


async def test_a_task_that_is_cancelled_in_a_race_ends_once_and_stays_so(tmp_path: Path) -> None:
    """Cancel, completion, update and crash at the same moment, each from or at any node."""
    address, chance = shared_address(tmp_path / "log.db"), random.Random(14)
    async with cluster(address, "--task-after", "0s", processes=3) as nodes:
        balancer = Balancer(ports=[served.port for served in nodes.servers])
        client = TaskClient(balancer=balancer, capabilities=CAN_BE_ASKED)
        for number in range(ROUNDS):
            (folder := tmp_path / str(number)).mkdir()
            await race(client, nodes.servers[number], folder, chance)
    assert_answered_once(address)
    assert_sound(address)


async def race(client: TaskClient, doomed: Served, folder: Path, chance: random.Random) -> None:
    log, gate = folder / "diary", folder / "gate"
    story: dict[str, Any] = {"n": 2, "gate": str(gate), "pauses": [1], "log": str(log)}
    names = [f"{tool}-{number}" for tool in ("count", "pay") for number in range(EACH)]
    waiting = {name: await client.task(name.partition("-")[0], key=name, **story) for name in names}
    names = [f"ask-{number}" for number in range(EACH)]
    asking = {name: await client.task("ask", question="Why?", log=str(log), key=name) for name in names}
    asks = {task: next(iter((await client.get(task))["inputRequests"])) for task in asking.values()}
    tasks = waiting | asking
    await until(lambda: len(diary(log)) == len(tasks))

    async def cancel(task: str) -> None:
        await asyncio.sleep(chance.random() / 20)
        assert "result" in await client.insist("tasks/cancel", {"taskId": task})

    async def update(task: str) -> None:
        await asyncio.sleep(chance.random() / 20)
        answer = {"action": "accept", "content": {"answer": "Because"}}
        given = {"taskId": task, "inputResponses": {asks[task]: answer}}
        assert "result" in await client.insist("tasks/update", given)

    async def crash() -> None:
        await asyncio.sleep(chance.random() / 20)
        await doomed.kill()

    racing = [cancel(task) for task in [*[*waiting.values()][::2], *asking.values()]]
    racing += [*(update(task) for task in asking.values()), crash()]
    chance.shuffle(racing)
    open_gate(f"{gate}.1")
    await asyncio.gather(*racing)
    first = await asyncio.gather(*(client.outcome(task) for task in tasks.values()))
    for _ in range(3):  # at each node
        again = await asyncio.gather(*(client.get(task) for task in tasks.values()))
        assert [ending(view) for view in again] == [ending(view) for view in first]
    for name, view in zip(tasks, first, strict=True):
        judge(name, view, [noted for noted, _ in diary(log)].count(name))


def ending(view: Message) -> tuple[str, object]:
    assert view["status"] in OVER
    return view["status"], view.get("result") or view.get("error")


def judge(name: str, view: Message, runs: int) -> None:
    """Each outcome is one that the race allows."""
    tool = name.partition("-")[0]
    assert runs <= (2 if tool == "count" else 1), name
    match view["status"]:
        case "completed":
            assert said(view) == ("Because" if tool == "ask" else "counted to 2")
        case "failed":
            assert (said(view), tool != "count") == (OUTCOME_UNKNOWN, True), (name, view)
