"""Requests with one key are one call, at whatever node they come and whichever node dies.

Three real processes on one store; requests are written byte by byte.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients.modern_peer import TAKES_TASKS, CallPeer, message_of, result_of, said
from tests.support.processes.cluster import Cluster, cluster
from tests.support.servers.gate_file_tools import diary, open_gate
from tests.support.servers.in_process import until
from tests.support.stores.postgres import store_url

pytestmark = pytest.mark.anyio

#: How many come with one key at once.
REQUESTS = 100


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path / "log.db", "--task-after", "0.1s", processes=3) as servers:
        yield servers


def peers(servers: Cluster) -> list[CallPeer]:
    return [CallPeer(port=served.port) for served in servers.servers if served.process.returncode is None]


def without_id(message: dict[str, Any]) -> str:
    return json.dumps({**message, "id": None}, sort_keys=True)


# All at once


@pytest.mark.parametrize("store", ["sqlite", pytest.param("postgres", marks=pytest.mark.long)])
async def test_a_hundred_requests_over_three_nodes_are_one_run_and_have_equal_answers(
    store: str, tmp_path: Path
) -> None:
    place = tmp_path / "log.db" if store == "sqlite" else store_url()
    async with cluster(place, processes=3) as servers:
        there = peers(servers)
        arguments = {"n": 2, "gate": str(tmp_path / "gate"), "pauses": [1], "log": str(tmp_path / "log")}
        asked = [
            asyncio.create_task(there[number % 3].call("pay", arguments, key="order-7", id=f"r{number}"))
            for number in range(REQUESTS)
        ]
        await until(lambda: diary(tmp_path / "log"))
        open_gate(tmp_path / "gate.1")
        answers = [message_of(await answer) for answer in asked]
        assert [answer["id"] for answer in answers] == [f"r{number}" for number in range(REQUESTS)]
        assert {said(answer["result"]) for answer in answers} == {"counted to 2"}
        assert len({without_id(answer) for answer in answers}) == 1
        assert len(diary(tmp_path / "log")) == 1


@pytest.mark.parametrize(("tool", "most_runs"), [("pay", 1), pytest.param("put", 2, marks=pytest.mark.long)])
async def test_a_hundred_requests_whose_runner_is_killed_at_any_moment_have_one_outcome(
    nodes: Cluster, tmp_path: Path, tool: str, most_runs: int
) -> None:
    """A client whose connection breaks asks again elsewhere, as the revision tells it to, with its key."""
    chance = random.Random(tool)
    for key in ("order-7", "order-8", "order-9"):
        log = tmp_path / key
        there = peers(nodes)
        arguments = {"n": 4, "interval": 0.03, "log": str(log)}
        asked = [asyncio.create_task(insist(there, number, tool, arguments, key)) for number in range(REQUESTS)]
        await until(partial(diary, log))
        await asyncio.sleep(chance.uniform(0, 0.15))
        [(_, runner), *_] = diary(log)
        await next(served for served in nodes.servers if served.pid == runner).kill()
        answers = [await answer for answer in asked]
        assert {without_id(answer) for answer in answers} == {without_id(answers[0])}
        if "error" in answers[0]:
            assert (tool, answers[0]["error"]["code"]) == ("pay", -31001)
        else:
            assert said(answers[0]["result"]) == "counted to 4"
        assert len(diary(log)) <= most_runs
        await nodes.start()


async def insist(there: list[CallPeer], first: int, tool: str, arguments: dict[str, Any], key: str) -> dict[str, Any]:
    """Ask until a node answers, each time the next one."""
    for place in itertools.count(first):
        try:
            answer = await there[place % 3].call(tool, arguments, key=key)
        except OSError:
            await asyncio.sleep(0.01)  # it is dead
            continue
        if answer.body and answer.status != 503:
            return message_of(answer)
    raise AssertionError("not reached")


# One key, other arguments


async def test_a_key_with_other_arguments_is_refused_before_and_after_the_end_at_all_nodes(
    nodes: Cluster, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    first = {"n": 2, "gate": str(gate), "pauses": [1], "log": str(tmp_path / "log")}
    async with await peers(nodes)[0].begin_call("pay", first, key="order-7") as begun:
        await until(lambda: diary(tmp_path / "log"))
        await all_refuse(nodes, first)
        open_gate(f"{gate}.1")
        assert said(result_of(await begun.answer())) == "counted to 2"
    await all_refuse(nodes, first)
    for peer in peers(nodes):
        assert said(result_of(await peer.call("pay", first, key="order-7"))) == "counted to 2"
    assert len(diary(tmp_path / "log")) == 1


async def all_refuse(nodes: Cluster, first: dict[str, Any]) -> None:
    for peer in peers(nodes):
        for tool, arguments in (("pay", {**first, "n": 3}), ("put", first)):
            answer = await peer.call(tool, arguments, key="order-7")
            assert (answer.status, answer.error["code"]) == (400, -31009), answer


async def test_a_key_finds_a_lost_handle_at_any_node(nodes: Cluster, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    arguments = {"n": 2, "gate": str(gate), "pauses": [1], "log": str(tmp_path / "log")}
    tasks = set()
    for peer in peers(nodes):
        peer.capabilities = TAKES_TASKS
        tasks.add(result_of(await peer.call("pay", arguments, key="order-7"))["taskId"])
    [task] = tasks
    open_gate(f"{gate}.1")
    for peer in peers(nodes):
        peer.capabilities = TAKES_TASKS
        assert said((await peer.until_over(task))["result"]) == "counted to 2"
    assert len(diary(tmp_path / "log")) == 1
