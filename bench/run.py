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
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import asyncpg
import uvloop

from bench import gateways, machine, measures, modern_calls, plot, postgres, report
from bench.launch import Log, SqliteFile, Target, UnavailableError, files, last_line, running
from bench.received import BrokenAnswerError

Measure = Callable[[Target], Awaitable[Any]]
MeasureOfNodes = Callable[[Sequence[Target]], Awaitable[Any]]

POSTGRES = "perdure-postgres"
SHARED = ("perdure-sqlite", POSTGRES)  # several processes may serve from one log
OURS = (*SHARED, "perdure-memory", "perdure-sqlite-full")
PEERS = ("sdk", "sdk-memory", "mcp-persist")
KINDS = (*OURS, *PEERS)
TIMEOUT = 180.0  # of one measure; none should come near
SLOWEST = 5_000  # events a second with which a log grows at least, on a busy machine

# The defaults serve everything but what asks for more than they keep.
KEEP_MORE = {"max_stream_events": 20_000, "max_session_events": 10_000_000, "max_streams": 10_000}
MANY_SESSIONS = {"max_address_sessions": 10_000}
DROP_AT_ONCE = {"runtime_idle": 0.2}
NO_HOLD = {"task_hold": 0.0, "task_after": 0.1, "max_principal_tasks": 1_000_000}
SOON = {"task_after": 0.1}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured."""

    rounds: int
    seconds: float
    resumes: int
    long_resumes: int
    sessions: int
    sizes: tuple[int, ...]
    idle_seconds: float
    both_cores: bool


FULL = Plan(
    rounds=5,
    seconds=1.0,
    resumes=30,
    long_resumes=3,
    sessions=2_000,
    sizes=(10**3, 10**4, 10**5, 10**6),
    idle_seconds=20.0,
    both_cores=True,
)
QUICK = Plan(
    rounds=2,
    seconds=0.4,
    resumes=10,
    long_resumes=1,
    sessions=1_000,
    sizes=(10**3, 10**4, 10**5, 10**6),
    idle_seconds=10.0,
    both_cores=False,
)


@dataclass(kw_only=True)
class Run:
    """What was found so far."""

    plan: Plan
    kinds: tuple[str, ...]
    server_cores: str
    postgres: postgres.Server | None = None
    round: int = 0
    found: report.Found = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def with_server(
        self,
        kind: str,
        wanted: dict[str, Measure],
        *,
        settings: dict[str, Any],
        cores: str = "",
        patience: float = TIMEOUT,
    ) -> None:
        """Start a fresh server of this kind and take these measures of it, one after the other."""
        with self.servers(kind, 1, settings=settings, cores=cores) as started:
            for target in started:
                for name, measure in wanted.items():
                    self.take(target, name, measure, patience)

    def with_nodes(self, kind: str, wanted: dict[str, MeasureOfNodes]) -> None:
        """The same with two servers on one log, each of which may use every core."""
        with self.servers(kind, 2, settings={}, cores=every_core(self)) as nodes:
            for name, measure in wanted.items() if nodes else ():
                self.take(nodes[0], name, lambda _, measure=measure: measure(nodes))

    @contextmanager
    def servers(self, kind: str, count: int, *, settings: dict[str, Any], cores: str = "") -> Iterator[list[Target]]:
        """Fresh servers of one kind on one log; none, if it is not wanted or not available."""
        started: list[Target] = []
        with ExitStack() as stack:
            if kind in self.kinds and kind not in self.unavailable:
                try:
                    folder = stack.enter_context(files())
                    log = stack.enter_context(self.log(kind, folder))
                    begin = gateways.running if kind in gateways.GATEWAYS else running
                    for _ in range(count):
                        candidate = begin(kind, folder, log, cores=cores or self.server_cores, settings=settings)
                        started.append(stack.enter_context(candidate))
                except UnavailableError as why:
                    started.clear()
                    self.unavailable[kind] = str(why)
                    print(f"{kind}: not available ({why})", file=sys.stderr)
            yield started

    @contextmanager
    def log(self, kind: str, folder: Path) -> Iterator[Log]:
        if kind != POSTGRES:
            yield SqliteFile(folder / "bench.db")
        elif self.postgres is None:
            raise UnavailableError("there is no PostgreSQL server")
        else:
            with self.postgres.database() as database:
                yield database

    def latest(self, kind: str, name: str, figure: str) -> float:
        return float(self.found[name][kind][self.round][figure])

    def take(self, target: Target, name: str, measure: Measure, patience: float = TIMEOUT) -> None:
        progress(f"round {self.round + 1}: {target.kind} {name}")
        try:
            figures = uvloop.run(asyncio.wait_for(measure(target), patience))
        except (BrokenAnswerError, OSError, TimeoutError, LookupError, sqlite3.Error, asyncpg.PostgresError) as why:
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
    for number in range(3):
        run.round = number
        for kind in (*SHARED, "sdk-memory", "mcp-persist"):
            run.with_server(kind, throughput(run, kind, "_both"), settings={}, cores=every_core(run))


def every_core(run: Run) -> str:
    return ",".join(str(core) for core in sorted(os.sched_getaffinity(0) | {int(run.server_cores.split(",")[0])}))


def nodes(run: Run) -> None:
    """Two servers on one log: an event at the other one, and what they do when nothing happens."""
    for number in range(run.plan.rounds):
        run.round = number
        for kind in SHARED:
            run.with_nodes(kind, {"other_node": lambda nodes: measures.event_at_other_node(nodes, events=200)})
    run.round = 0
    for kind in SHARED:
        run.with_nodes(kind, {"idle_node": lambda nodes: idle(run, nodes)})


async def idle(run: Run, nodes: Sequence[Target]) -> measures.Figures:
    with ExitStack() as stack:
        server = run.postgres if nodes[0].kind == POSTGRES else None
        count = None if server is None else stack.enter_context(server.logging_statements())
        return await measures.idle_node(nodes, sessions=8, seconds=run.plan.idle_seconds, count=count)


def calls_of_2026(run: Run) -> None:
    """Calls of 2026-07-28: as the SDK's own handler serves them, with the same call of a session in the same round; and
    on the log, where a candidate has that."""
    s, eight = run.plan.seconds, measures.CONNECTIONS
    for number in range(run.plan.rounds):
        run.round = number
        for kind in (*SHARED, "sdk-memory"):
            plain: dict[str, Measure] = {
                "calls_session": lambda t: measures.calls_per_second(t, connections=eight, seconds=s, keep_alive=True),
                "calls_single": lambda t: modern_calls.calls_per_second(t, connections=eight, seconds=s),
            }
            on_log: dict[str, Measure] = {
                "calls_durable": lambda t: modern_calls.calls_per_second(t, connections=eight, seconds=s, tasks=True),
                "calls_keyed": lambda t: modern_calls.calls_per_second(t, connections=eight, seconds=s, keyed=True),
                "polls_ended": lambda t: modern_calls.polls_per_second(t, connections=eight, seconds=s, running=False),
                "polls_running": lambda t: modern_calls.polls_per_second(t, connections=eight, seconds=s, running=True),
            }
            wanted, settings = (plain | on_log, NO_HOLD) if kind in SHARED else (plain, {})
            run.with_server(kind, wanted, settings=settings)
        for kind in SHARED:
            run.with_server(kind, {"task_end": lambda t: modern_calls.end_seen(t, times=20)}, settings=SOON)


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
    patience = TIMEOUT + max(run.plan.sizes) / SLOWEST
    for kind in SHARED:
        run.with_server(kind, grow, settings=KEEP_MORE | MANY_SESSIONS, patience=patience)


def in_front(run: Run) -> None:
    """Gateways in front of one program, and in front of one HTTP server, beside these themselves."""
    s, cores = run.plan.seconds, every_core(run)
    for number in range(run.plan.rounds):
        run.round = number
        for kind in (*gateways.BASES, *gateways.OURS, *gateways.PEERS):
            wanted: dict[str, Measure] = {
                "front_calls": lambda t: measures.calls_per_second(
                    t, connections=measures.CONNECTIONS, seconds=s, keep_alive=True
                ),
                "front_call": lambda t: gateways.call_latency(t, times=int(200 * s)),
            }
            if kind not in gateways.WITHOUT_EVENTS:
                wanted["front_events"] = lambda t: measures.events_per_second(t, calls=1, seconds=s)
            if kind in ("perdure-sqlite", *gateways.OURS):
                wanted["front_replay"] = lambda t: measures.replay(t, missed=100, times=run.plan.resumes)
            run.with_server(kind, wanted, settings={}, cores=cores)
    run.round = 0
    for kind in (gateways.STDIO, gateways.WARM):
        run.with_server(kind, {"front_deaths": lambda t: gateways.deaths(t, times=5)}, settings={}, cores=cores)
    for kind, sessions in ((gateways.STDIO, run.plan.sessions // 10), (gateways.HTTP, run.plan.sessions)):
        memory: dict[str, Measure] = {
            "front_memory": lambda t, n=sessions: measures.memory_per_session(t, sessions=n, settle=1.0)
        }
        run.with_server(kind, memory, settings=MANY_SESSIONS, cores=cores)


PARTS: dict[str, Callable[[Run], None]] = {
    "rounds": rounds,
    "both": both_cores,
    "memory": memory,
    "nodes": nodes,
    "single": calls_of_2026,
    "growth": growth,
    "gateways": in_front,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure Perdure beside the official SDK and mcp-persist.")
    parser.add_argument("--quick", action="store_true", help="a few minutes in place of many; rougher")
    every = (*KINDS, *gateways.GATEWAYS)
    parser.add_argument("--only", nargs="+", choices=every, default=every, help="candidates to measure")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=tuple(PARTS), help="what to measure")
    parser.add_argument("--server-cores", choices=("one", "both"), default="one", help="cores the servers may use")
    parser.add_argument("--name", default=report.LATEST, help="name of the file in bench/results")
    parser.add_argument("--largest", type=int, help="events stored in the largest log of the part `growth`")
    given = parser.parse_args()
    plan = QUICK if given.quick else FULL
    if given.largest:
        plan = replace(plan, sizes=tuple(10**power for power in range(3, 9) if 10**power <= given.largest))
    cores = sorted(os.sched_getaffinity(0))
    here, bystanders = machine.describe(), machine.Bystanders()
    with ExitStack() as stack:
        server_cores = cores[:1] if given.server_cores == "one" else cores
        run = Run(plan=plan, kinds=tuple(given.only), server_cores=",".join(str(core) for core in server_cores))
        if POSTGRES in run.kinds:
            try:
                run.postgres = stack.enter_context(postgres.serving(set(cores)))
                here["postgres"] = run.postgres.version
            except postgres.NoServerError as why:
                run.unavailable[POSTGRES] = str(why)
        os.sched_setaffinity(0, {cores[-1]})
        for name in given.parts:
            if name != "both" or plan.both_cores:
                PARTS[name](run)
        here["others"] = bystanders.share(less=0.0 if run.postgres is None else run.postgres.cpu_seconds())
    progress("")
    results = report.collect(run.found, run.unavailable, run.failed, here, asdict(plan))
    report.show(results)
    report.save(results, given.name)
    if given.name == report.LATEST:
        plot.draw(results)


if __name__ == "__main__":
    main()
