"""Counts and latencies, from what nodes tell with their beats."""

from __future__ import annotations

from typing import Any

import pytest

from perdure._core.histograms import CALL_BUCKETS
from perdure._core.ids import NodeId
from perdure.console.node_watch import Seen
from perdure.console.pulse import WINDOW, Meter, quantile
from perdure.store.records import NodeRecord
from perdure.telemetry.prometheus import Snapshot


def a_node(name: str, *, events: int, calls: list[int] | None = None, **more: Any) -> Seen:
    node = NodeId(name)
    seconds = {} if calls is None else {"call": (calls, 0.0)}
    counters = {"events_appended": events, "calls_accepted": events}
    numbers = Snapshot(node=node, counters=counters, seconds=seconds, **more)
    return Seen(record=NodeRecord(id=node, record=3, beat=events, facts=b""), numbers=numbers, alive=True)


def timed(bound: float, count: int) -> list[int]:
    return [count if limit == bound else 0 for limit in (*CALL_BUCKETS, None)]


def test_counts_begin_when_the_console_looks_and_rise_evenly_until_the_next_beat() -> None:
    meter = Meter()
    meter.see([a_node("a", events=100)], now=0.0)
    assert meter.totals(now=0.0)["events"] == 0
    meter.see([a_node("a", events=130)], now=3.0)
    assert [meter.totals(now=at)["events"] for at in (3.0, 4.0, 5.0, 6.0, 9.0)] == [0, 10, 20, 30, 30]


def test_a_node_that_came_later_counts_from_its_beginning_and_one_that_is_gone_still_counts() -> None:
    meter = Meter()
    meter.see([a_node("a", events=100)], now=0.0)
    meter.see([a_node("a", events=100), a_node("b", events=7)], now=1.0)
    meter.see([a_node("a", events=100)], now=2.0)
    meter.see([a_node("a", events=100)], now=9.0)
    assert meter.totals(now=9.0) == {"events": 7, "calls_begun": 7, "calls_ended": 0}


def test_latencies_are_of_what_was_timed_lately_and_not_before_the_console_looked() -> None:
    meter = Meter()
    meter.see([a_node("a", events=1, calls=timed(0.001, 50))], now=0.0)
    assert meter.latency() is None
    slow = [before + more for before, more in zip(timed(0.001, 149), timed(60.0, 1), strict=True)]
    meter.see([a_node("a", events=2, calls=slow)], now=1.0)
    told = meter.latency()
    assert told is not None
    assert (told["of"], 0 < told["p50"] < told["p99"] <= 0.001) == ("call", True)
    meter.see([a_node("a", events=2, calls=slow)], now=1.0 + WINDOW + 0.1)
    assert meter.latency() is None


def test_a_quantile_lies_within_its_bucket() -> None:
    bounds = (1.0, 2.0, 4.0)
    assert quantile([0, 4, 0, 0], bounds, 0.5) == pytest.approx(1.5)
    assert quantile([99, 0, 1, 0], bounds, 0.99) == pytest.approx(1.0)
    assert quantile([98, 0, 2, 0], bounds, 0.99) == pytest.approx(3.0)
    assert quantile([0, 0, 0, 3], bounds, 0.5) == 4.0, "longer than the last bound"


def test_what_another_release_tells_is_left_out_where_it_is_not_understood() -> None:
    meter = Meter()
    odd = a_node("a", events=1, calls=[1, 2])
    broken = Seen(
        record=odd.record,
        numbers=Snapshot(node=NodeId("b"), counters="many", seconds=[1], sessions=7),  # type: ignore[arg-type]
        alive=True,
    )
    meter.see([odd, broken], now=0.0)
    assert (meter.totals(now=0.0)["events"], meter.latency()) == (0, None)
