"""What durable calls and tasks may make a process keep and do is bounded, and each bound has a name (promise 6)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from perdure._core.envelope import KEY
from perdure._core.ids import RecordKind, StreamId
from perdure._core.limits import Caller
from perdure.sessions import call_quota, durable_calls, housekeeping, keyed_calls
from perdure.store import MemoryStore
from perdure.store.interface import Inspect
from perdure.store.records import Followed, SessionRecord
from tests.http.test_bounds import LIMIT, Names, refused
from tests.support.clients.modern_peer import (
    ALL_ASKS,
    REPEATS,
    TAKES_TASKS,
    CallPeer,
    accept,
    message_of,
    result_of,
    said,
)
from tests.support.clients.raw_http import Answer, bearer
from tests.support.servers import gate_file_tools
from tests.support.servers.asking_tools import server
from tests.support.servers.gate_file_tools import open_gate
from tests.support.servers.gated_server import Live, live
from tests.support.servers.in_process import until
from tests.support.stores.postgres import store_url

pytestmark = pytest.mark.anyio

GIVEN_UP = -31011
BOTH = {**ALL_ASKS, **TAKES_TASKS}
WELL = {"question": "Well?"}


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.long)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return store_url() if request.param == "postgres" else f"sqlite:{tmp_path / 'log.db'}"


def store_of(served: Live) -> Inspect:
    assert served.app._process is not None
    return cast("Inspect", served.app._process.context.store)


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
        words = "You have 2 running tasks, your limit (max_principal_tasks)"
        refused(await alice.call("ask", WELL), 429, LIMIT, words)
        await park(bob)
        await finish(alice, first)
        third = await park(alice)  # in the place of the one that has ended
        assert (await alice.rpc("tasks/get", {"taskId": first})).error["code"] == GIVEN_UP
        assert (await bob.rpc("tasks/get", {"taskId": first})).error["code"] == -32602
        assert len(await alice.until_asked(second)) == len(await alice.until_asked(third)) == 1
        refused(await alice.call("ask", WELL), 429, LIMIT, words)


async def test_tasks_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key finds its call also where there is no room for another one."""
    monkeypatch.setattr(call_quota, "FULL_SECONDS", 0.0)
    async with live(server=server, auth=Names(), max_tasks=3) as served:
        peers = [CallPeer(port=served.port, headers=bearer(name), capabilities=BOTH) for name in ("a", "b", "c")]
        tasks = [await park(peer, key="mine") for peer in peers]
        words = "This server has 3 tasks, its limit (max_tasks), and none of yours has ended"
        refused(await peers[0].call("ask", WELL), 503, LIMIT, words)
        refused(await peers[0].call("ask", WELL, key="other"), 503, LIMIT, words)
        assert [await park(peer, key="mine") for peer in peers] == tasks
        await finish(peers[2], tasks[2])
        refused(await peers[0].call("ask", WELL, key="other"), 503, LIMIT, words)  # it is another's
        assert (await peers[2].get(tasks[2]))["status"] == "completed"
        await park(peers[2])
        assert (await peers[2].rpc("tasks/get", {"taskId": tasks[2]})).error["code"] == GIVEN_UP
        refused(await peers[2].call("ask", WELL), 503, LIMIT, words)


# What a key means when its answer is given up


async def fill(peer: CallPeer, key: str, *, size: int = 1, **options: Any) -> Any:
    return await peer.call("fill", {"size": size}, key=key, **options)


async def test_a_key_whose_answer_was_given_up_is_not_free(tmp_path: Path, store: str, caplog: Any) -> None:
    """Promise 4: for as long as `keptMs` says, at every node, and over a restart."""
    arguments = {"n": 1, "log": str(tmp_path / "log")}
    settings: dict[str, Any] = {"server": gate_file_tools.server, "store": store, "max_principal_tasks": 3}
    async with live(**settings) as a:
        peer = CallPeer(port=a.port)
        for number in range(8):
            assert said(result_of(await peer.call("pay", arguments, key=f"key-{number}"))) == "counted to 1"
        assert (await peer.call("pay", {"n": 1}, key="key-0")).error["code"] == -31009
        async with live(**settings) as b:
            for served in (a, b):
                again = await peer.through(served.port).call("pay", arguments, key="key-0")
                refused(again, 400, GIVEN_UP, "This call has ended, and does not run again")
        assert a.app.counters.answers_given_up == 5
        assert a.app.counters.keys_given_up == 1
        assert any(record.__dict__.get("action") == "call.given_up" for record in caplog.records)
        cancelled = await peer.rpc("dev.perdure/cancel", {"key": "key-0"})
        assert result_of(cancelled)["resultType"] == "complete"
        assert (await peer.rpc("dev.perdure/cancel", {"key": "never"})).error["code"] == -32602
    async with live(**settings) as c:
        refused(await CallPeer(port=c.port).call("pay", arguments, key="key-0"), 400, GIVEN_UP, "does not run again")
        newest = await CallPeer(port=c.port).call("pay", arguments, key="key-7")
        assert said(result_of(newest)) == "counted to 1"
    assert len(gate_file_tools.diary(tmp_path / "log")) == 8


async def test_a_key_is_free_when_its_time_has_passed(tmp_path: Path, store: str) -> None:
    arguments = {"n": 1, "log": str(tmp_path / "log")}
    short: dict[str, Any] = {"task_ttl": 1.0, "cleanup_interval": 0.05}
    async with live(server=gate_file_tools.server, store=store, max_principal_tasks=1, **short) as served:
        peer = CallPeer(port=served.port)
        for key in ("first", "second"):
            await peer.call("pay", arguments, key=key)
        assert (await peer.call("pay", arguments, key="first")).error["code"] == GIVEN_UP

        async def is_free() -> bool:
            return (await peer.call("pay", arguments, key="first")).status == 200

        await until(is_free)
    assert len(gate_file_tools.diary(tmp_path / "log")) == 3


async def test_many_requests_with_a_key_whose_answer_is_given_up_meanwhile_run_once(tmp_path: Path, store: str) -> None:
    """Two nodes give up and repeat at the same time; each key runs once."""
    settings: dict[str, Any] = {"server": gate_file_tools.server, "store": store, "max_principal_tasks": 1}
    async with live(**settings) as a, live(**settings) as b:
        peers = [CallPeer(port=served.port) for served in (a, b)]
        for number in range(6):
            arguments = {"n": 1, "key": f"k{number}", "log": str(tmp_path / "log")}
            calls = [peer.call("pay", arguments, key=f"k{number}") for peer in peers for _ in range(4)]
            await asyncio.gather(*calls, peers[number % 2].call("pay", {"n": 1}, key=f"other-{number}"))
    runs = [key for key, _ in gate_file_tools.diary(tmp_path / "log")]
    assert sorted(set(runs)) == sorted(runs)


class Crowded(MemoryStore):
    """Another process gives up the same calls in the same moments."""

    def __init__(self) -> None:
        super().__init__()
        self.stale: SessionRecord | None = None
        self.chosen: SessionRecord | None = None
        self.between: Callable[[], Awaitable[object]] | None = None

    async def longest_dormant(self, *caller: Any, **options: Any) -> SessionRecord | None:
        found, self.stale = self.stale or await super().longest_dormant(*caller, **options), None
        self.chosen = found or self.chosen
        return found

    async def follow(self, after: Mapping[StreamId, int], *, limit: int) -> Mapping[StreamId, Followed]:
        if (between := self.between) is not None:
            self.between = None
            await between()
        return await super().follow(after, limit=limit)


async def test_a_call_that_two_processes_give_up_at_once_keeps_what_its_key_means() -> None:
    store = Crowded()
    async with live(server=server, store=store, max_principal_tasks=1) as served:
        peer = CallPeer(port=served.port)
        await fill(peer, "a")
        await fill(peer, "b")
        store.stale = store.chosen  # that of a, as seen by another process before it was given up
        await fill(peer, "c")
        assert (await peer.call("fill", {"size": 1}, key="a")).error["code"] == GIVEN_UP
        assert (await peer.call("fill", {"size": 2}, key="a")).error["code"] == -31009


async def test_a_repeat_in_the_moment_of_giving_up_is_told_so() -> None:
    """Not a task, which its client does not know, that failed."""
    store = Crowded()
    async with live(server=server, store=store, max_principal_tasks=1) as served:
        peer = CallPeer(port=served.port)
        await fill(peer, "a")
        store.between = lambda: fill(CallPeer(port=served.port), "b")
        again = await peer.call("fill", {"size": 1}, key="a")
        assert store.between is None
        assert again.error["code"] == GIVEN_UP, again


async def test_what_another_principal_calls_gives_up_nobody_elses_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither at the limit of all nor at its own."""
    monkeypatch.setattr(call_quota, "FULL_SECONDS", 0.0)
    async with live(server=server, auth=Names(), max_tasks=4, max_principal_tasks=3) as served:
        alice, bob = (CallPeer(port=served.port, headers=bearer(name)) for name in ("alice", "bob"))
        mine = [result_of(await fill(alice, f"mine-{number}")) for number in range(2)]
        for number in range(6):
            assert (await fill(bob, f"his-{number}")).status == 200
        assert [result_of(await fill(alice, f"mine-{number}")) for number in range(2)] == mine
        assert served.app.counters.calls_joined == 2
        assert served.app.counters.keys_given_up == 0
        assert (await fill(bob, "his-0")).error["code"] == GIVEN_UP


async def test_what_was_delivered_whole_is_given_up_first(tmp_path: Path, store: str) -> None:
    gate = tmp_path / "gate"
    async with live(server=server, store=store, max_principal_tasks=3) as served:
        peer = CallPeer(port=served.port)
        async with await peer.begin_call("wait", {"gate": str(gate)}, key="cut") as cut:
            await until(lambda: served.app.counters.calls_accepted)
            cut.cut()
        open_gate(gate)
        await until(lambda: served.app.counters.calls_answered)

        kept = store_of(served)

        async def is_unread() -> bool:
            return bool([s for r in await kept.newest(limit=100) for s in await kept.streams(r.id, only_unread=True)])

        await until(is_unread)
        for number in range(6):
            assert (await fill(peer, f"whole-{number}")).status == 200
        assert said(result_of(await peer.call("wait", {"gate": str(gate)}, key="cut"))) == "went through"
        assert (await fill(peer, "whole-0")).error["code"] == GIVEN_UP


async def test_where_no_more_keys_may_be_kept_calls_are_refused_and_none_runs_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keyed_calls, "MAX_KEYS", 30)
    store = MemoryStore()
    async with live(server=server, store=store, auth=Names(), max_principal_tasks=2) as served:
        alice, bob = (CallPeer(port=served.port, headers=bearer(name)) for name in ("alice", "bob"))
        for number in range(5):
            assert (await fill(alice, f"key-{number}")).status == 200
        words = "The keys of 3 calls of yours are kept, your limit; try again later"
        refused(await fill(alice, "key-5"), 429, LIMIT, words)
        assert (await fill(alice, "key-4")).status == 200
        assert (await fill(alice, "key-0")).error["code"] == GIVEN_UP
        assert (await fill(bob, "key-0")).status == 200
        assert sum((await store.count_states(RecordKind.KEY)).values()) == 3


# Questions that nobody answers


async def asked_by_round(peer: CallPeer, **options: Any) -> Any:
    view = result_of(await peer.call("ask", WELL, **options))
    assert view["resultType"] == "input_required", view
    return view


async def answered(peer: CallPeer, view: Any) -> Answer:
    return await peer.round(
        "ask", view, {name: accept(answer="done") for name in view["inputRequests"]}, arguments=WELL
    )


@pytest.mark.parametrize("limit", ["max_principal_tasks", "max_principal_calls"])
async def test_the_oldest_question_that_nobody_answers_makes_room(limit: str, caplog: Any) -> None:
    """Promise 6: it filled the room of its address for a day."""
    settings: dict[str, Any] = {limit: 2}
    async with live(server=server, **settings) as served:
        peer = CallPeer(port=served.port, capabilities=ALL_ASKS)
        first, second = await asked_by_round(peer), await asked_by_round(peer)
        assert said(result_of(await peer.call("fill", {"size": 1}))) == "x"
        third = await asked_by_round(peer)
        assert said(result_of(await answered(peer, third))) == "done"
        assert "error" in message_of(await answered(peer, first))
        assert any(record.__dict__.get("action") == "round.given_up" for record in caplog.records)
        assert said(result_of(await answered(peer, second))) == "done"


async def test_a_call_of_which_nothing_need_be_kept_is_served_where_there_is_no_room(tmp_path: Path) -> None:
    """A client that merely declares that it can be asked gets its answer; a key is refused."""
    gate = tmp_path / "gate"
    async with live(server=server, max_principal_tasks=2) as served:
        peer = CallPeer(port=served.port, capabilities=ALL_ASKS)
        async with AsyncExitStack() as stack:
            for key in ("one", "two"):
                await stack.enter_async_context(await peer.begin_call("wait", {"gate": str(gate)}, key=key))
            await until(lambda: served.app.counters.calls_accepted == 2)
            assert said(result_of(await peer.call("fill", {"size": 1}))) == "x"
            refused(await fill(peer, "three"), 429, LIMIT, "(max_principal_tasks)")
            open_gate(gate)


async def test_a_question_by_a_round_is_given_up_sooner_than_one_of_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "ROUND_SECONDS", 0.3)
    async with live(server=server, cleanup_interval=0.1) as served:
        task = await park(CallPeer(port=served.port, capabilities=BOTH))
        peer = CallPeer(port=served.port, capabilities=ALL_ASKS)
        view = await asked_by_round(peer)
        await until(lambda: served.app.counters.calls_answered)
        again = message_of(await peer.call("ask", WELL, params={"requestState": view["requestState"]}))
        assert "away for too long" in str(again), again
        await finish(CallPeer(port=served.port, capabilities=BOTH), task)


# How many bytes are kept


@pytest.mark.parametrize("size", [100_000, 1_000])
async def test_the_bytes_of_answers_that_are_kept_of_a_principal(
    store: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise 6."""
    monkeypatch.setattr(durable_calls, "MAX_ANSWER_BYTES", 1_000_000)
    async with live(server=server, store=store, auth=Names()) as served:
        alice, bob = (CallPeer(port=served.port, headers=bearer(name)) for name in ("alice", "bob"))
        assert (await fill(bob, "his")).status == 200
        for number in range(20):
            assert (await fill(alice, f"key-{number}", size=size)).status == 200
        given_up = (await fill(alice, "key-0", size=size)).status == 400
        assert given_up is (size == 100_000)
        owner = (await store_of(served).newest(limit=1))[0].owner if given_up else ""
        assert await store_of(served).bytes_of(Caller(owner)) < 1_000_000 + 11 * size
        assert (await fill(bob, "his")).status == 200


async def test_what_a_client_says_of_itself_with_a_call_that_is_kept_is_bounded() -> None:
    """Promise 6: it was stored with every call, as large as a request may be."""
    async with live(server=server) as served:
        peer = CallPeer(port=served.port)
        info = "io.modelcontextprotocol/clientInfo"
        for size, status in ((60_000, 200), (66_000, 413)):
            meta = {info: {"name": "n" * size, "version": "1"}, KEY: f"key-{size}"}
            answer = await peer.call("fill", {"size": 1}, params={"_meta": meta})
            assert answer.status == status, answer
            answer = await peer.call("fill", {"size": 1}, params={"_meta": {info: meta[info]}})
            assert answer.status == 200, answer  # nothing of it is kept


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


async def test_only_the_poll_of_a_client_that_repeats_it_is_held(tmp_path: Path) -> None:
    """A poll that is open when its process dies breaks, and stock clients end with it."""
    gate = str(tmp_path / "gate")
    async with live(server=server, task_after=0.05, task_hold=60.0) as served:
        stock, own = (CallPeer(port=served.port, capabilities=declared) for declared in (TAKES_TASKS, REPEATS))
        task = result_of(await stock.call("wait", {"gate": gate}))["taskId"]
        assert (await stock.get(task))["status"] == "working"
        held = asyncio.create_task(own.get(task))
        await asyncio.sleep(0.1)  # so that it is held
        open_gate(gate)
        assert (await held)["status"] == "completed"


async def test_polls_that_are_held_and_requests_that_join_a_call_count_as_requests(tmp_path: Path) -> None:
    gate = str(tmp_path / "gate")
    async with live(server=server, max_sessionless=5, max_share=100, task_after=0.05, task_hold=60.0) as served:
        tasks, plain = (CallPeer(port=served.port, capabilities=declared) for declared in (REPEATS, {}))
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
            words = "This server has 5 running requests without a session, its limit (max_sessionless)"
            refused(await tasks.rpc("tasks/get", {"taskId": task}), 503, LIMIT, words)
            open_gate(gate)
            answers = [result_of(await exchange.answer()) for exchange in waiting]
            assert {said(answer.get("result", answer)) for answer in answers} == {"went through"}
        assert (await plain.rpc("tools/list", {})).status == 200


async def test_what_waiting_requests_take_in_memory_is_bounded(tmp_path: Path) -> None:
    gate = str(tmp_path / "gate")
    async with live(server=server, task_after=0.05, task_hold=60.0, max_work=200_000, max_share=100) as served:
        peer = CallPeer(port=served.port, capabilities=REPEATS)
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
        for start in range(0, 60, 20):
            calls = (peer.call("fill", {"size": 1}, key=f"key-{number}") for number in range(start, start + 20))
            for answer in await asyncio.gather(*calls):
                assert answer.status in (200, 429), answer
        assert sum((await store.count_states(RecordKind.CALL)).values()) <= 10


async def test_a_poll_that_is_held_is_answered_when_its_server_stops(tmp_path: Path) -> None:
    """The task runs elsewhere, and goes on."""
    store, gate = f"sqlite:{tmp_path / 'log.db'}", tmp_path / "gate"
    settings: dict[str, Any] = {"server": server, "store": store, "task_after": 0.05, "task_hold": 60.0}
    async with live(**settings) as a, live(**settings) as b:
        here, there = (CallPeer(port=served.port, capabilities=REPEATS) for served in (a, b))
        task = result_of(await here.call("wait", {"gate": str(gate)}))["taskId"]
        async with await there.send("tasks/get", {"taskId": task}) as held:
            await asyncio.sleep(0.1)  # so that it is held; whether it is decides nothing
            b.app.begin_stop()
            assert result_of(await held.answer())["status"] == "working"
        open_gate(gate)
        assert said((await here.until_over(task))["result"]) == "went through"
