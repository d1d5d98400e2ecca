"""What single calls and tasks may make a process keep and do is bounded, and each bound has a name (promise 6)."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from perdure._core.ids import RecordKind
from perdure.sessions import task_count
from perdure.store import MemoryStore
from tests.http.test_bounds import LIMIT, Names, bearer, refused
from tests.support.askbox import server
from tests.support.call_peer import ALL_ASKS, TAKES_TASKS, CallPeer, accept, result_of, said
from tests.support.crashbox import open_gate
from tests.support.live import live
from tests.support.site import until

pytestmark = pytest.mark.anyio

BOTH = {**ALL_ASKS, **TAKES_TASKS}
WELL = {"question": "Well?"}


async def park(peer: CallPeer, **options: Any) -> str:
    """A task that waits for its client."""
    task: str = result_of(await peer.call("ask", WELL, **options))["taskId"]
    return task


async def finish(peer: CallPeer, task: str) -> None:
    asked = await peer.until_asked(task)
    await peer.update(task, {name: accept(answer="done") for name in asked})
    assert said((await peer.until_over(task))["result"]) == "done"


# How many there may be


async def test_tasks_of_one_principal() -> None:
    async with live(server=server, auth=Names(), max_principal_tasks=2) as served:
        alice, bob = (CallPeer(port=served.port, headers=bearer(name), capabilities=BOTH) for name in ("alice", "bob"))
        first, second = await park(alice), await park(alice)
        words = "You have 2 tasks running, as many as you may (max_principal_tasks)"
        refused(await alice.call("ask", WELL), 429, LIMIT, words)
        await park(bob)
        await finish(alice, first)
        third = await park(alice)  # in the place of the one that has ended
        assert (await alice.rpc("tasks/get", {"taskId": first})).error["code"] == -32602
        assert len(await alice.until_asked(second)) == len(await alice.until_asked(third)) == 1
        refused(await alice.call("ask", WELL), 429, LIMIT, words)


async def test_tasks_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key finds its call also where there is no room for another one."""
    monkeypatch.setattr(task_count, "FULL_SECONDS", 0.0)
    async with live(server=server, auth=Names(), max_tasks=3) as served:
        peers = [CallPeer(port=served.port, headers=bearer(name), capabilities=BOTH) for name in ("a", "b", "c")]
        tasks = [await park(peer, key="mine") for peer in peers]
        words = "This server has 3 tasks running, as many as it may (max_tasks)"
        refused(await peers[0].call("ask", WELL), 503, LIMIT, words)
        refused(await peers[0].call("ask", WELL, key="other"), 503, LIMIT, words)
        assert [await park(peer, key="mine") for peer in peers] == tasks
        await finish(peers[2], tasks[2])
        await park(peers[0])
        assert (await peers[2].rpc("tasks/get", {"taskId": tasks[2]})).error["code"] == -32602
        refused(await peers[2].call("ask", WELL), 503, LIMIT, words)


async def test_calls_that_leave_nothing_take_no_room() -> None:
    """Those whose answer came at once, to a client without a key."""
    async with live(server=server, max_tasks=2) as served:
        peer = CallPeer(port=served.port, capabilities=BOTH)
        for _ in range(10):
            assert said(result_of(await peer.call("fill", {"size": 1}))) == "x"
        await park(peer)
        assert said(result_of(await peer.call("fill", {"size": 1}))) == "x"
        await park(peer)
        assert (await peer.call("fill", {"size": 1})).status == 503


async def test_tasks_of_other_processes_count(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'log.db'}"
    async with live(server=server, store=store, max_tasks=2) as a, live(server=server, store=store, max_tasks=2) as b:
        here, there = (CallPeer(port=served.port, capabilities=BOTH) for served in (a, b))
        tasks = [await park(here, key=key) for key in ("one", "two")]
        refused(await there.call("ask", WELL), 503, LIMIT, "max_tasks")
        assert await park(there, key="one") == tasks[0]


# How many requests wait


async def test_polls_that_are_held_and_requests_that_join_a_call_count_as_requests(tmp_path: Path) -> None:
    gate = str(tmp_path / "gate")
    async with live(server=server, max_sessionless=5, max_share=100, task_after=0.05, task_hold=60.0) as served:
        tasks, plain = (CallPeer(port=served.port, capabilities=declared) for declared in (TAKES_TASKS, {}))
        task = result_of(await tasks.call("wait", {"gate": gate}, key="mine"))["taskId"]
        async with AsyncExitStack() as stack:
            waiting = [await stack.enter_async_context(await tasks.send("tasks/get", {"taskId": task}))]
            waiting += [await stack.enter_async_context(await tasks.send("tasks/get", {"taskId": task}))]
            for _ in range(3):
                joined = await plain.begin_call("wait", {"gate": gate}, key="mine")
                waiting.append(await stack.enter_async_context(joined))

            async def is_full() -> bool:
                return (await plain.rpc("tools/list", {})).status == 503

            await until(is_full)
            words = "This server handles 5 requests without a session, as many as it may (max_sessionless)"
            refused(await tasks.rpc("tasks/get", {"taskId": task}), 503, LIMIT, words)
            open_gate(gate)
            answers = [result_of(await exchange.answer()) for exchange in waiting]
            assert {said(answer.get("result", answer)) for answer in answers} == {"went through"}
        assert (await plain.rpc("tools/list", {})).status == 200


async def test_what_waiting_requests_take_in_memory_is_bounded(tmp_path: Path) -> None:
    gate = str(tmp_path / "gate")
    async with live(server=server, task_after=0.05, task_hold=60.0, max_work=200_000, max_share=100) as served:
        peer = CallPeer(port=served.port, capabilities=TAKES_TASKS)
        task = result_of(await peer.call("wait", {"gate": gate}))["taskId"]
        large = {"taskId": task, "_meta": {"padding": "x" * 60_000}}
        async with await peer.send("tasks/get", large) as held:

            async def is_refused() -> bool:
                return (await peer.rpc("tasks/get", {**large, "taskId": "none"})).status == 503

            await until(is_refused)
            open_gate(gate)
            assert said(result_of(await held.answer())["result"]) == "went through"
        assert (await peer.rpc("tasks/get", large)).status == 200


# What is kept


async def test_a_caller_that_makes_up_keys_keeps_no_more_calls_than_it_may() -> None:
    store = MemoryStore()
    async with live(server=server, store=store, max_principal_tasks=10) as served:
        peer = CallPeer(port=served.port)
        for start in range(0, 200, 20):
            calls = (peer.call("fill", {"size": 1}, key=f"key-{number}") for number in range(start, start + 20))
            for answer in await asyncio.gather(*calls):
                assert answer.status in (200, 429), answer
        assert sum((await store.count_states(RecordKind.CALL)).values()) <= 10


async def test_a_poll_that_is_held_is_answered_when_its_server_stops(tmp_path: Path) -> None:
    """The task runs elsewhere, and goes on."""
    store, gate = f"sqlite:{tmp_path / 'log.db'}", tmp_path / "gate"
    settings: dict[str, Any] = {"server": server, "store": store, "task_after": 0.05, "task_hold": 60.0}
    async with live(**settings) as a, live(**settings) as b:
        here, there = (CallPeer(port=served.port, capabilities=TAKES_TASKS) for served in (a, b))
        task = result_of(await here.call("wait", {"gate": str(gate)}))["taskId"]
        async with await there.send("tasks/get", {"taskId": task}) as held:
            await asyncio.sleep(0.1)  # so that it is held; whether it is decides nothing
            b.app.begin_stop()
            assert result_of(await held.answer())["status"] == "working"
        open_gate(gate)
        assert said((await here.until_over(task))["result"]) == "went through"
