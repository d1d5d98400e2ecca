"""Medians, spreads, ratios and goals: from what was found to a table and a file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
BASE = "sdk-memory"  # ratios are against the official SDK with an in-memory store
MAIN = "perdure-sqlite"  # goals are for this one, and for the same on PostgreSQL
POSTGRES = "perdure-postgres"
LATEST = "latest"  # the file of the last complete run
STDIO, HTTP, WARM = "gateway-stdio", "gateway-http", "gateway-warm"
QUIET = 0.05  # of the machine: rounds on a machine without other work differ by about as much

Found = dict[str, dict[str, dict[int, Any]]]  # measure, candidate, round
Results = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    key: str
    label: str
    digits: int = 0
    ratio: bool = False

    @property
    def measure(self) -> str:
        return self.key.split(".")[0]

    @property
    def figure(self) -> str:
        return self.key.split(".")[1]


ROWS = (
    Row(key="events_1.per_second", label="events/s, one call", ratio=True),
    Row(key="events_4.per_second", label="events/s, 4 calls at once", ratio=True),
    Row(key="calls_new.per_second", label="calls/s, new connection each, 8 at once", ratio=True),
    Row(key="calls_new_1.per_second", label="calls/s, new connection each, 1 at a time", ratio=True),
    Row(key="calls_kept.per_second", label="calls/s, kept connections, 8 at once", ratio=True),
    Row(key="events_1.per_cpu_second", label="events per second of the server's CPU", ratio=True),
    Row(key="calls_new.per_cpu_second", label="calls per second of the server's CPU", ratio=True),
    Row(key="calls_kept.per_cpu_second", label="calls per second of the server's CPU, kept", ratio=True),
    Row(key="events_4.database_us", label="CPU of the database for an event, 4 calls, µs", digits=1),
    Row(key="calls_kept.database_us", label="CPU of the database for a call, µs"),
    Row(key="latency_full.p50", label="send to arrival, full load, p50 ms", digits=2),
    Row(key="latency_full.p99", label="send to arrival, full load, p99 ms", digits=2),
    Row(key="latency_tenth.p50", label="send to arrival, a tenth, p50 ms", digits=2),
    Row(key="latency_tenth.p99", label="send to arrival, a tenth, p99 ms", digits=2),
    Row(key="replay_100.ms", label="100 missed events, ms", digits=2, ratio=True),
    Row(key="replay_10000.per_second", label="10,000 missed events, events/s", ratio=True),
    Row(key="memory_loaded.kib", label="idle session, runtime loaded, KiB", digits=1, ratio=True),
    Row(key="memory_idle.kib", label="idle session, runtime dropped, KiB", digits=1),
    Row(key="other_node.p50", label="event at another node, p50 ms", digits=2),
    Row(key="other_node.p99", label="event at another node, p99 ms", digits=2),
    Row(key="idle_node.statements", label="idle node, statements/s", digits=2),
    Row(key="idle_node.core_percent", label="idle node, % of a core", digits=2),
    Row(key="idle_node.database_percent", label="idle node, % of a core of the database", digits=2),
    Row(key="calls_single.per_second", label="2026-07-28: calls/s, not on the log", ratio=True),
    Row(key="calls_durable.per_second", label="2026-07-28: calls/s of a client with tasks"),
    Row(key="calls_keyed.per_second", label="2026-07-28: calls/s with a key"),
    Row(key="calls_session.per_cpu_second", label="calls of a session per second of the server's CPU", ratio=True),
    Row(key="calls_single.per_cpu_second", label="2026-07-28: the same, not on the log", ratio=True),
    Row(key="calls_durable.per_cpu_second", label="2026-07-28: the same, of a client with tasks"),
    Row(key="calls_keyed.per_cpu_second", label="2026-07-28: the same, with a key"),
    Row(key="polls_ended.per_cpu_second", label="tasks/get per CPU second, a task that ended"),
    Row(key="polls_running.per_cpu_second", label="tasks/get per CPU second, a task that runs"),
    Row(key="task_end.p50", label="end of a task until a poller sees it, p50 ms", digits=1),
    Row(key="events_1_both.per_second", label="events/s, one call, server on both cores", ratio=True),
    Row(key="events_4_both.per_second", label="events/s, 4 calls, server on both cores", ratio=True),
    Row(key="calls_new_both.per_second", label="calls/s, new connection, server on both cores", ratio=True),
    Row(key="front_calls.cpu_us", label="gateways: CPU for a call, µs"),
    Row(key="front_calls.per_second", label="gateways: calls/s, 8 sessions"),
    Row(key="front_call.p50", label="gateways: a call, p50 ms", digits=2),
    Row(key="front_events.cpu_us", label="gateways: CPU for an event, µs", digits=1),
    Row(key="front_events.per_second", label="gateways: events/s"),
    Row(key="front_replay.ms", label="gateways: 100 missed events, ms", digits=2),
    Row(key="front_memory.kib", label="gateways: idle session, KiB", digits=1),
    Row(key="front_deaths.unknown_ms", label="gateways: -31001 after a program's death, ms", digits=1),
    Row(key="front_deaths.next_ms", label="gateways: next call after a death, ms", digits=1),
    Row(key="front_deaths.beyond_ms", label="gateways: the same, beyond the start, ms", digits=1),
    Row(key="front_deaths.start_ms", label="gateways: start of the program alone, ms", digits=1),
)


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A figure of a candidate and its bound. `times`: of the ratio to this one, within each round. `over`: of the ratio
    to another figure of the same one. `beyond`: of the difference to this one."""

    name: str
    key: str
    bound: float
    kind: str = MAIN
    times: str = ""
    over: str = ""
    beyond: str = ""
    at_least: bool = True


GOALS = (
    Goal(name="events/s", key="events_1.per_second", times=BASE, bound=4.0),
    Goal(name="events/s", key="events_1.per_second", bound=60_000),
    Goal(name="calls/s", key="calls_new.per_second", times=BASE, bound=1.5),
    Goal(name="calls/s, new connection each", key="calls_new.per_second", bound=1_200),
    Goal(name="idle session, KiB", key="memory_idle.kib", bound=16, at_least=False),
    Goal(name="idle session with loaded runtime, KiB", key="memory_loaded.kib", bound=28, at_least=False),
    Goal(name="100 missed events, ms", key="replay_100.ms", bound=5, at_least=False),
    Goal(name="10,000 missed events, events/s", key="replay_10000.per_second", bound=100_000),
    Goal(name="resume in the largest log / in the smallest", key="growth.ratio", bound=1.5, at_least=False),
    Goal(name="append p99 at full load, ms", key="latency_full.p99", bound=8, at_least=False),
    Goal(name="append p99 at a tenth, ms", key="latency_tenth.p99", bound=2, at_least=False),
    *(
        goal
        for kind in (MAIN, POSTGRES)
        for goal in (
            Goal(
                name="durable calls per CPU second",
                key="calls_durable.per_cpu_second",
                kind=kind,
                over="calls_session.per_cpu_second",
                bound=0.67,
            ),
            Goal(name="tasks/get per CPU second", key="polls_ended.per_cpu_second", kind=kind, bound=2_000),
            Goal(name="end of a task seen, ms", key="task_end.p50", kind=kind, bound=100, at_least=False),
        )
    ),
    Goal(name="events/s, 4 calls", key="events_4.per_second", kind=POSTGRES, times=MAIN, bound=0.9),
    Goal(name="events/s, 4 calls", key="events_4.per_second", kind=POSTGRES, times=BASE, bound=4.5),
    Goal(name="events/s, one call", key="events_1.per_second", kind=POSTGRES, times=MAIN, bound=0.6),
    Goal(name="calls/s, new connections", key="calls_new.per_second", kind=POSTGRES, times=MAIN, bound=0.8),
    Goal(name="calls/s, kept connections", key="calls_kept.per_second", kind=POSTGRES, times=MAIN, bound=0.8),
    Goal(name="calls/s, new connections", key="calls_new.per_second", kind=POSTGRES, times=BASE, bound=1.3),
    Goal(name="calls/s, kept connections", key="calls_kept.per_second", kind=POSTGRES, times=BASE, bound=1.3),
    Goal(name="calls per CPU second", key="calls_new.per_cpu_second", kind=POSTGRES, times=MAIN, bound=1.0),
    Goal(name="calls per CPU second, kept", key="calls_kept.per_cpu_second", kind=POSTGRES, times=MAIN, bound=1.0),
    Goal(name="100 missed events", key="replay_100.ms", kind=POSTGRES, times=MAIN, bound=1.2, at_least=False),
    Goal(name="largest log / smallest", key="growth.ratio", kind=POSTGRES, bound=1.5, at_least=False),
    Goal(name="event at another node", key="other_node.p50", kind=POSTGRES, times=MAIN, bound=1.8, at_least=False),
    Goal(name="idle node, statements/s", key="idle_node.statements", kind=POSTGRES, bound=2, at_least=False),
    Goal(name="CPU for a call, µs", key="front_calls.cpu_us", kind=STDIO, bound=600, at_least=False),
    Goal(name="CPU for a call, µs", key="front_calls.cpu_us", kind=HTTP, bound=900, at_least=False),
    Goal(name="a call, p50 ms", key="front_call.p50", kind=STDIO, beyond="sdk", bound=1.0, at_least=False),
    Goal(name="a call, p50 ms", key="front_call.p50", kind=HTTP, beyond="sdk", bound=2.0, at_least=False),
    Goal(name="CPU for an event, µs", key="front_events.cpu_us", kind=STDIO, bound=15, at_least=False),
    Goal(name="CPU for an event, µs", key="front_events.cpu_us", kind=HTTP, bound=30, at_least=False),
    Goal(name="events/s", key="front_events.per_second", kind=STDIO, bound=40_000),
    Goal(name="events/s", key="front_events.per_second", kind=STDIO, times="supergateway", bound=8),
    Goal(name="calls/s", key="front_calls.per_second", kind=STDIO, times=MAIN, bound=0.9),
    Goal(name="calls/s", key="front_calls.per_second", kind=STDIO, times="supergateway", bound=1.8),
    Goal(name="calls/s", key="front_calls.per_second", kind=STDIO, times="fastmcp-stdio", bound=3),
    Goal(name="calls/s", key="front_calls.per_second", kind=HTTP, times="sdk", bound=0.6),
    Goal(name="events/s", key="front_events.per_second", kind=HTTP, times="sdk", bound=1.0),
    Goal(name="idle session, KiB", key="front_memory.kib", kind=STDIO, bound=20, at_least=False),
    Goal(name="idle session, KiB", key="front_memory.kib", kind=HTTP, bound=30, at_least=False),
    Goal(name="-31001 after a death, ms", key="front_deaths.unknown_ms", kind=STDIO, bound=100, at_least=False),
    Goal(name="next call, beyond the start, ms", key="front_deaths.beyond_ms", kind=STDIO, bound=50, at_least=False),
    Goal(name="next call, ms", key="front_deaths.next_ms", kind=WARM, bound=300, at_least=False),
    Goal(name="100 missed events, ms", key="front_replay.ms", kind=STDIO, bound=2, at_least=False),
    Goal(name="100 missed events, ms", key="front_replay.ms", kind=HTTP, bound=2, at_least=False),
)


def collect(
    found: Found, unavailable: dict[str, str], failed: list[str], machine: dict[str, Any], plan: dict[str, Any]
) -> Results:
    summary = {row.key: _summary(row, found) for row in ROWS}
    growth = {kind: taken[0] for kind, taken in found.get("growth", {}).items()}
    summary["growth.ratio"] = {kind: {"median": _growth_ratio(sizes)} for kind, sizes in growth.items()}
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "plan": plan,
        "unavailable": unavailable,
        "failed": failed,
        "goals": [_judged(goal, summary, found) for goal in GOALS],
        "summary": summary,
        "growth": growth,
        "rounds": found,
    }


def _summary(row: Row, found: Found) -> dict[str, dict[str, float]]:
    kinds = found.get(row.measure, {})
    by_kind = {kind: values for kind in kinds if (values := _values(row.key, kind, found))}
    return {
        kind: _spread(values) | (_ratio(values, by_kind.get(BASE, {})) if row.ratio else {})
        for kind, values in by_kind.items()
    }


def _values(key: str, kind: str, found: Found) -> dict[int, float]:
    """A figure of a candidate in each round."""
    measure, figure = key.split(".")
    rounds = found.get(measure, {}).get(kind, {})
    return {number: figures[figure] for number, figures in rounds.items() if figure in figures}


def _spread(by_round: dict[int, float]) -> dict[str, float]:
    values = by_round.values()
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def _ratio(values: dict[int, float], base: dict[int, float]) -> dict[str, float]:
    """Ratios within the rounds that have both."""
    ratios = [values[number] / base[number] for number in values.keys() & base.keys()]
    if not ratios:
        return {}
    return {"ratio": statistics.median(ratios), "ratio_low": min(ratios), "ratio_high": max(ratios)}


def _growth_ratio(growth: dict[int, dict[str, float]]) -> float:
    first, last = growth[min(growth)], growth[max(growth)]
    return max(last[which] / first[which] for which in ("old_ms", "new_ms"))


def _judged(goal: Goal, summary: dict[str, Any], found: Found) -> dict[str, Any]:
    if goal.over:
        own = _values(goal.over, goal.kind, found)
        value = _ratio(_values(goal.key, goal.kind, found), own).get("ratio")
    elif goal.times:
        value = _ratio(_values(goal.key, goal.kind, found), _values(goal.key, goal.times, found)).get("ratio")
    else:
        cells = summary.get(goal.key, {})
        value = cells.get(goal.kind, {}).get("median")
        if value is not None and goal.beyond:
            value = value - cells[goal.beyond]["median"] if goal.beyond in cells else None
    if value is None:
        verdict = "not measured"
    else:
        verdict = "met" if (value >= goal.bound if goal.at_least else value <= goal.bound) else "missed"
    return asdict(goal) | {"value": value, "verdict": verdict}


def show(results: Results) -> None:
    """The table, the ratios, the growth, the goals."""
    kinds = sorted({kind for cells in results["summary"].values() for kind in cells}, key=_order)
    machine = results["machine"]
    print(f"\nPerdure benchmark, {results['when']}; {machine['cpu']}, {machine['cores']} cores, load {machine['load']}")
    _table("median ± half the range", kinds, results["summary"], ROWS, _cell)
    _table(f"times {BASE}, within each round", kinds, results["summary"], [r for r in ROWS if r.ratio], _ratio_cell)
    for kind, sizes in results["growth"].items():
        for size, figures in sizes.items():
            print(
                f"{kind}: resume of 100 missed events with {int(size):>10,} stored ({figures['counted']:,.0f} rows, "
                f"{figures['file_mib']:.0f} MiB): "
                f"oldest stream {figures['old_ms']:.2f} ms, newest {figures['new_ms']:.2f} ms"
            )
    print(f"the client used at most {_busiest_client(results['rounds']):.0%} of its core")
    print(f"other processes used {machine['others']:.0%} of the machine meanwhile{_doubt(machine['others'])}")
    for kind, why in results["unavailable"].items():
        print(f"{kind}: not available ({why})")
    for told in results["failed"]:
        print(f"failed: {told}")
    _goals(results["goals"])


def _goals(goals: list[dict[str, Any]]) -> None:
    for kind in dict.fromkeys(goal["kind"] for goal in goals):
        print(f"\nGoals, {kind}:")
        for goal in (goal for goal in goals if goal["kind"] == kind):
            value = "" if goal["value"] is None else f"{goal['value']:,.2f}"
            sign = "≥" if goal["at_least"] else "≤"
            name = goal["name"] + (f", × {goal['times'] or goal['over']}" if goal["times"] or goal["over"] else "")
            name += f", beyond {goal['beyond']}" if goal["beyond"] else ""
            print(f"  {goal['verdict']:<12} {name:<52} {value:>12}   goal {sign} {goal['bound']:,g}")


def _doubt(others: float) -> str:
    return "" if others < QUIET else ": too much to believe figures by the clock; those per second of CPU suffer less"


def _busiest_client(found: Found) -> float:
    """How near the client came to being the limit."""
    taken = [figures for kinds in found.values() for rounds in kinds.values() for figures in rounds.values()]
    return max((figures.get("client_core", 0.0) for figures in taken), default=0.0)


def _order(kind: str) -> tuple[bool, str]:
    return (not kind.startswith("perdure"), kind)


Cell = Callable[[Row, dict[str, float]], str]


def _table(title: str, kinds: list[str], summary: dict[str, Any], rows: Any, cell: Cell) -> None:
    print(f"\n{title:<47}" + "".join(f"{kind:>20}" for kind in kinds))
    for row in rows:
        cells = summary[row.key]
        if cells:
            print(f"{row.label:<47}" + "".join(f"{cell(row, cells.get(kind, {})):>20}" for kind in kinds))
    print()


def _cell(row: Row, cell: dict[str, float]) -> str:
    if not cell:
        return "-"
    spread = (cell["high"] - cell["low"]) / 2 / cell["median"] if cell["median"] else 0.0
    return f"{cell['median']:,.{row.digits}f} ±{spread:.0%}"


def _ratio_cell(row: Row, cell: dict[str, float]) -> str:
    if "ratio" not in cell:
        return "-"
    return f"{cell['ratio']:.2f} ({cell['ratio_low']:.2f}-{cell['ratio_high']:.2f})"


def save(results: Results, name: str) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
