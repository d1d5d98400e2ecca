"""The benchmark's driver: `python -m bench.run [--quick]`.

The driver is also the client. It takes the last core and gives the first to the server. Rounds go over all candidates
in turn, so that a slow minute of the machine falls on all of them, and ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sqlite3
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import uvloop

from bench import machine, measures, plot, report
from bench.launch import Target, UnavailableError, files, last_line, running
from bench.received import BrokenAnswerError

Measure = Callable[[Target], Awaitable[Any]]

OURS = ("perdure-sqlite", "perdure-memory", "perdure-sqlite-full")
PEERS = ("sdk", "sdk-memory", "mcp-persist")
KINDS = (*OURS, *PEERS)
TIMEOUT = 180.0  # of one measure; none should come near

# The defaults serve everything but what asks for more than they keep.
KEEP_MORE = {"max_stream_events": 20_000, "max_session_events": 10_000_000, "max_streams": 10_000}
MANY_SESSIONS = {"max_address_sessions": 10_000}
DROP_AT_ONCE = {"runtime_idle": 0.2}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured."""

    rounds: int
    seconds: float
    resumes: int
    long_resumes: int
    sessions: int
    sizes: tuple[int, ...]
    both_cores: bool


FULL = Plan(
    rounds=5,
    seconds=1.0,
    resumes=30,
    long_resumes=3,
    sessions=2_000,
    sizes=(10**3, 10**4, 10**5, 10**6),
    both_cores=True,
)
QUICK = Plan(
    rounds=2,
    seconds=0.4,
    resumes=10,
    long_resumes=1,
    sessions=1_000,
    sizes=(10**3, 10**4, 10**5),
    both_cores=False,
)


@dataclass(kw_only=True)
class Run:
    """What was found so far."""

    plan: Plan
    kinds: tuple[str, ...]
    server_cores: str
    round: int = 0
    found: report.Found = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def with_server(self, kind: str, wanted: dict[str, Measure], *, settings: dict[str, Any], cores: str = "") -> None:
        """Start a fresh server of this kind and take these measures of it, one after the other."""
        if kind in self.unavailable or kind not in self.kinds:
            return
        try:
            with (
                files() as folder,
                running(kind, folder, cores=cores or self.server_cores, settings=settings) as target,
            ):
                for name, measure in wanted.items():
                    self.take(target, name, measure)
        except UnavailableError as why:
            self.unavailable[kind] = str(why)
            print(f"{kind}: not available ({why})", file=sys.stderr)

    def latest(self, kind: str, name: str, figure: str) -> float:
        return float(self.found[name][kind][self.round][figure])

    def take(self, target: Target, name: str, measure: Measure) -> None:
        progress(f"round {self.round + 1}: {target.kind} {name}")
        try:
            figures = uvloop.run(asyncio.wait_for(measure(target), TIMEOUT))
        except (BrokenAnswerError, OSError, TimeoutError, LookupError, sqlite3.Error) as why:
            told = f"{target.kind} {name}: {type(why).__name__}: {why}; server: {last_line(target.errors)}"
            self.failed.append(told)
            print(told, file=sys.stderr)
            return
        self.found.setdefault(name, {}).setdefault(target.kind, {})[self.round] = figures


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def throughput(run: Run, kind: str, suffix: str = "") -> dict[str, Measure]:
    """Events and calls per second."""
    s = run.plan.seconds
    return {
        f"events_1{suffix}": lambda t: measures.events_per_second(t, calls=1, seconds=s),
        f"events_4{suffix}": lambda t: measures.events_per_second(t, calls=4, seconds=s),
        f"calls_new{suffix}": lambda t: measures.calls_per_second(
            t, connections=measures.CONNECTIONS, seconds=s, keep_alive=False
        ),
        f"calls_new_1{suffix}": lambda t: measures.calls_per_second(t, connections=1, seconds=s, keep_alive=False),
        f"calls_kept{suffix}": lambda t: measures.calls_per_second(
            t, connections=measures.CONNECTIONS, seconds=s, keep_alive=True
        ),
    }


def latencies(run: Run, kind: str) -> dict[str, Measure]:
    """How late events arrive: in a tight loop, and at a tenth of what this candidate just reached."""
    s = run.plan.seconds

    def full_rate() -> float:
        return run.latest(kind, "events_1", "per_second")

    return {
        "latency_full": lambda t: measures.latency(t, seconds=s, events_per_second=full_rate()),
        "latency_tenth": lambda t: measures.latency(t, seconds=2 * s, rate=full_rate() / 10, events_per_second=0),
    }


def replays(run: Run) -> dict[str, Measure]:
    """Resumes after 100 and after 10,000 missed events."""
    return {
        "replay_100": lambda t: measures.replay(t, missed=100, times=run.plan.resumes),
        "replay_10000": lambda t: measures.replay(t, missed=10_000, times=run.plan.long_resumes),
    }


def in_turn(number: int) -> tuple[str, ...]:
    """Each round begins with another candidate."""
    first = number % len(KINDS)
    return KINDS[first:] + KINDS[:first]


def rounds(run: Run) -> None:
    for number in range(run.plan.rounds):
        run.round = number
        for kind in in_turn(run.round):
            run.with_server(kind, throughput(run, kind) | latencies(run, kind), settings={})
            if kind != "sdk":  # without a store there is nothing to replay
                run.with_server(kind, replays(run), settings=KEEP_MORE)


def both_cores(run: Run) -> None:
    """The same with a server that may use the client's core too, as a writer thread would like."""
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0) | {int(run.server_cores.split(",")[0])}))
    for number in range(3):
        run.round = number
        for kind in ("perdure-sqlite", "sdk-memory", "mcp-persist"):
            run.with_server(kind, throughput(run, kind, "_both"), settings={}, cores=cores)


def memory(run: Run) -> None:
    """Idle sessions: with their runtime in memory, and for Perdure also without it."""
    n, run.round = run.plan.sessions, 0
    for kind in KINDS:
        loaded: dict[str, Measure] = {"memory_loaded": lambda t: measures.memory_per_session(t, sessions=n, settle=1.0)}
        run.with_server(kind, loaded, settings=MANY_SESSIONS)
    for kind in OURS:
        dropped: dict[str, Measure] = {"memory_idle": lambda t: measures.memory_per_session(t, sessions=n, settle=3.0)}
        run.with_server(kind, dropped, settings=MANY_SESSIONS | DROP_AT_ONCE)


def growth(run: Run) -> None:
    """Resumes while the log grows."""
    run.round = 0
    grow: dict[str, Measure] = {
        "growth": lambda t: measures.resume_while_growing(
            t, sizes=list(run.plan.sizes), missed=100, times=run.plan.resumes
        )
    }
    run.with_server("perdure-sqlite", grow, settings=KEEP_MORE)


PARTS: dict[str, Callable[[Run], None]] = {
    "rounds": rounds,
    "both": both_cores,
    "memory": memory,
    "growth": growth,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure Perdure beside the official SDK and mcp-persist.")
    parser.add_argument("--quick", action="store_true", help="a few minutes in place of many; rougher")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, help="candidates to measure")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=tuple(PARTS), help="what to measure")
    parser.add_argument("--server-cores", choices=("one", "both"), default="one", help="cores the servers may use")
    given = parser.parse_args()
    plan = QUICK if given.quick else FULL
    cores = sorted(os.sched_getaffinity(0))
    here, bystanders = machine.describe(), machine.Bystanders()
    os.sched_setaffinity(0, {cores[-1]})
    server_cores = cores[:1] if given.server_cores == "one" else cores
    run = Run(plan=plan, kinds=tuple(given.only), server_cores=",".join(str(core) for core in server_cores))
    for name in given.parts:
        if name != "both" or plan.both_cores:
            PARTS[name](run)
    progress("")
    here["others"] = bystanders.share()
    results = report.collect(run.found, run.unavailable, run.failed, here, asdict(plan))
    report.show(results)
    report.save(results)
    plot.draw(results)


if __name__ == "__main__":
    main()
