"""Counts and latencies, from the numbers that nodes write with their beats; and nodes that are gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perdure._core.histograms import CALL_BUCKETS
from perdure._core.ids import NodeId
from perdure.console.overview import GONE_SECONDS, MAX_GONE, NODES_PAUSE, WINDOW, NodeState, NodeWatch, Totals, quantile
from perdure.console.sessions import SessionList, StoreView
from perdure.store import SqliteStore
from perdure.store.records import NodeRecord
from perdure.telemetry.prometheus import Snapshot


def a_node(name: str, *, events: int, calls: list[int] | None = None, **more: Any) -> NodeState:
    node = NodeId(name)
    seconds = {} if calls is None else {"call": (calls, 0.0)}
    counters = {"events_appended": events, "calls_accepted": events}
    numbers = Snapshot(node=node, counters=counters, seconds=seconds, **more)
    return NodeState(record=NodeRecord(id=node, beat=events, facts=b""), numbers=numbers, alive=True)


def timed(bound: float, count: int) -> list[int]:
    return [count if limit == bound else 0 for limit in (*CALL_BUCKETS, None)]


def test_counts_begin_with_the_first_read_also_of_nodes_that_come_later_or_are_gone() -> None:
    totals = Totals()
    totals.add([a_node("a", events=100)], now=0.0)
    assert totals.counts["events"] == 0
    totals.add([a_node("a", events=130)], now=3.0)
    totals.add([a_node("a", events=130), a_node("b", events=7)], now=4.0)
    totals.add([a_node("a", events=131)], now=5.0)
    assert totals.counts == {"events": 38, "calls_begun": 38, "calls_ended": 0}


def test_latencies_are_of_what_was_timed_lately_and_not_before_the_console_looked() -> None:
    totals = Totals()
    totals.add([a_node("a", events=1, calls=timed(0.001, 50))], now=0.0)
    assert totals.latency() is None
    slow = [before + more for before, more in zip(timed(0.001, 149), timed(60.0, 1), strict=True)]
    totals.add([a_node("a", events=2, calls=slow)], now=1.0)
    told = totals.latency()
    assert told is not None
    assert (told["of"], 0 < told["p50"] < told["p99"] <= 0.001) == ("call", True)
    totals.add([a_node("a", events=2, calls=slow)], now=1.0 + WINDOW + 0.1)
    assert totals.latency() is None


def test_a_quantile_lies_within_its_bucket() -> None:
    bounds = (1.0, 2.0, 4.0)
    assert quantile([0, 4, 0, 0], bounds, 0.5) == pytest.approx(1.5)
    assert quantile([99, 0, 1, 0], bounds, 0.99) == pytest.approx(1.0)
    assert quantile([98, 0, 2, 0], bounds, 0.99) == pytest.approx(3.0)
    assert quantile([0, 0, 0, 3], bounds, 0.5) == 4.0, "longer than the last bound"


def test_latencies_of_a_node_with_other_bounds_are_left_out() -> None:
    totals = Totals()
    totals.add([], now=0.0)
    totals.add([a_node("a", events=1, calls=[1, 2])], now=1.0)
    assert (totals.counts["events"], totals.latency()) == (1, None)


@pytest.mark.anyio
async def test_nodes_that_are_gone_are_shown_for_a_while_and_the_last_ones_of_many(tmp_path: Path) -> None:
    path = tmp_path / "perdure.db"
    now = 0.0
    async with SqliteStore(str(path)) as store:
        view = StoreView(f"sqlite:{path}")
        sessions = SessionList(view)
        watch = NodeWatch(view, sessions, monotonic=lambda: now)

        async def shown() -> list[tuple[str, str]]:
            nonlocal now
            now += NODES_PAUSE + 10  # too old: it is read again
            return [(node["id"], node["state"]) for node in await watch.objects()]

        names = [NodeId(f"n{number}") for number in range(MAX_GONE + 1)]
        for name in names:
            await store.join(name)
        assert await shown() == [(name, "alive") for name in names]
        for name in names[1:]:
            await store.leave(name)
        gone = [(name, "gone") for name in reversed(names[1:])]
        assert [await shown(), len(gone)] == [[("n0", "alive"), *gone], MAX_GONE]
        await store.leave(names[0])
        assert await shown() == [("n0", "gone"), *gone[:-1]], "the one that is gone for longest makes room"
        now += GONE_SECONDS - NODES_PAUSE - 10.1
        assert await shown() == [("n0", "gone")]
        assert await shown() == []
        await view.aclose()
