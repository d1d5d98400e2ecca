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
MAIN = "perdure-sqlite"  # goals are for this one
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
    Row(key="latency_full.p50", label="send to arrival, full load, p50 ms", digits=2),
    Row(key="latency_full.p99", label="send to arrival, full load, p99 ms", digits=2),
    Row(key="latency_tenth.p50", label="send to arrival, a tenth, p50 ms", digits=2),
    Row(key="latency_tenth.p99", label="send to arrival, a tenth, p99 ms", digits=2),
    Row(key="replay_100.ms", label="100 missed events, ms", digits=2, ratio=True),
    Row(key="replay_10000.per_second", label="10,000 missed events, events/s", ratio=True),
    Row(key="memory_loaded.kib", label="idle session, runtime loaded, KiB", digits=1, ratio=True),
    Row(key="memory_idle.kib", label="idle session, runtime dropped, KiB", digits=1),
    Row(key="events_1_both.per_second", label="events/s, one call, server on both cores", ratio=True),
    Row(key="events_4_both.per_second", label="events/s, 4 calls, server on both cores", ratio=True),
    Row(key="calls_new_both.per_second", label="calls/s, new connection, server on both cores", ratio=True),
)


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A figure of `MAIN` and its bound."""

    name: str
    key: str
    bound: float
    of: str = "median"
    at_least: bool = True


GOALS = (
    Goal(name="events/s against SDK + memory store", key="events_1.per_second", of="ratio", bound=4.0),
    Goal(name="events/s", key="events_1.per_second", bound=60_000),
    Goal(name="calls/s against SDK + memory store", key="calls_new.per_second", of="ratio", bound=1.5),
    Goal(name="calls/s, new connection each", key="calls_new.per_second", bound=1_200),
    Goal(name="idle session, KiB", key="memory_idle.kib", bound=16, at_least=False),
    Goal(name="idle session with loaded runtime, KiB", key="memory_loaded.kib", bound=28, at_least=False),
    Goal(name="100 missed events, ms", key="replay_100.ms", bound=5, at_least=False),
    Goal(name="10,000 missed events, events/s", key="replay_10000.per_second", bound=100_000),
    Goal(name="resume in the largest log / in the smallest", key="growth.ratio", bound=1.5, at_least=False),
    Goal(name="append p99 at full load, ms", key="latency_full.p99", bound=8, at_least=False),
    Goal(name="append p99 at a tenth, ms", key="latency_tenth.p99", bound=2, at_least=False),
)


def collect(
    found: Found, unavailable: dict[str, str], failed: list[str], machine: dict[str, Any], plan: dict[str, Any]
) -> Results:
    summary = {row.key: _summary(row, found) for row in ROWS}
    growth = found.get("growth", {}).get(MAIN, {}).get(0, {})
    if growth:
        summary["growth.ratio"] = {MAIN: {"median": _growth_ratio(growth)}}
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "plan": plan,
        "unavailable": unavailable,
        "failed": failed,
        "goals": [_judged(goal, summary) for goal in GOALS],
        "summary": summary,
        "growth": growth,
        "rounds": found,
    }


def _summary(row: Row, found: Found) -> dict[str, dict[str, float]]:
    by_kind = {
        kind: {number: figures[row.figure] for number, figures in taken.items()}
        for kind, taken in found.get(row.measure, {}).items()
    }
    return {kind: _spread(values) | _ratio(row, values, by_kind.get(BASE, {})) for kind, values in by_kind.items()}


def _spread(by_round: dict[int, float]) -> dict[str, float]:
    values = by_round.values()
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def _ratio(row: Row, values: dict[int, float], base: dict[int, float]) -> dict[str, float]:
    """Ratios within the rounds that have both."""
    ratios = [values[number] / base[number] for number in values.keys() & base.keys()]
    if not row.ratio or not ratios:
        return {}
    return {"ratio": statistics.median(ratios), "ratio_low": min(ratios), "ratio_high": max(ratios)}


def _growth_ratio(growth: dict[int, dict[str, float]]) -> float:
    first, last = growth[min(growth)], growth[max(growth)]
    return max(last[which] / first[which] for which in ("old_ms", "new_ms"))


def _judged(goal: Goal, summary: dict[str, Any]) -> dict[str, Any]:
    value = summary.get(goal.key, {}).get(MAIN, {}).get(goal.of)
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
    for size, figures in results["growth"].items():
        print(
            f"resume of 100 missed events with {int(size):>9,} stored ({figures['counted']:,.0f} rows, "
            f"{figures['file_mib']:.0f} MiB): "
            f"oldest stream {figures['old_ms']:.2f} ms, newest {figures['new_ms']:.2f} ms"
        )
    print(f"the client used at most {_busiest_client(results['rounds']):.0%} of its core")
    print(f"other processes used {machine['others']:.0%} of the machine meanwhile{_doubt(machine['others'])}")
    for kind, why in results["unavailable"].items():
        print(f"{kind}: not available ({why})")
    for told in results["failed"]:
        print(f"failed: {told}")
    print(f"\nGoals, {MAIN}:")
    for goal in results["goals"]:
        value = "" if goal["value"] is None else f"{goal['value']:,.2f}"
        sign = "≥" if goal["at_least"] else "≤"
        print(f"  {goal['verdict']:<12} {goal['name']:<46} {value:>12}   goal {sign} {goal['bound']:,g}")


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


def save(results: Results) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "latest.json").write_text(json.dumps(results, indent=1) + "\n")
