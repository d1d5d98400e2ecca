"""Requests that wait for a durable call are woken by what happens to it, and by nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from perdure._core.ids import NodeId, StreamId
from perdure.sessions.context import CallWaiters
from tests.support.clients.modern_peer import ALL_ASKS, REPEATS, CallPeer, accept, result_of, said
from tests.support.servers.asking_tools import server
from tests.support.servers.gate_file_tools import open_gate
from tests.support.servers.gated_server import live

pytestmark = pytest.mark.anyio

BREAD, CAKE = StreamId("bread"), StreamId("cake")


async def test_what_changes_wakes_all_that_wait_for_it_and_no_other() -> None:
    told: list[tuple[NodeId, Sequence[StreamId]]] = []
    nodes = NodeId("a"), NodeId("b")
    waiters = CallWaiters(lambda node, streams: told.append((node, streams)), lambda: nodes)
    with waiters.watch(BREAD) as one, waiters.watch(CAKE) as third:
        with waiters.watch(BREAD) as other:
            waiters.wake([BREAD, StreamId("unknown")])
            assert [watch.changed.is_set() for watch in (one, other, third)] == [True, True, False]
            one.changed.clear()
            other.changed.clear()
        waiters.tell(BREAD)
        assert [one.changed.is_set(), other.changed.is_set(), third.changed.is_set()] == [True, False, False], (
            "one has left"
        )
    assert told == [(node, (BREAD,)) for node in nodes]
    with waiters.watch(BREAD) as again:
        assert not again.changed.is_set()


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_poll_that_is_held_is_answered_when_the_tool_asks_and_when_it_ends(
    elsewhere: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the node of the tool, and at another one: nothing looks again by itself here."""
    monkeypatch.setattr("perdure.sessions.context.READ_AGAIN", 3_600.0)
    store, gate = f"sqlite:{tmp_path / 'log.db'}", tmp_path / "gate"
    settings: dict[str, Any] = {"server": server, "store": store, "task_after": 0.05, "task_hold": 60.0}
    async with live(**settings) as b, live(**settings) as a:  # one that starts later knows the others at once
        begins = CallPeer(port=a.port, capabilities={**ALL_ASKS, **REPEATS})
        polls = begins.through(b.port if elsewhere else a.port)
        task = result_of(await begins.call("wait_and_ask", {"gate": str(gate)}))["taskId"]
        held = asyncio.create_task(polls.get(task))
        await asyncio.sleep(0.1)  # so that it is held; whether it is decides nothing
        open_gate(f"{gate}.1")
        asked = (await held)["inputRequests"]
        await begins.update(task, {name: accept(answer="yes") for name in asked})
        held = asyncio.create_task(polls.until_over(task))
        await asyncio.sleep(0.1)
        open_gate(f"{gate}.2")
        assert said((await held)["result"]) == "yes"
