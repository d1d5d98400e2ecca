"""A soak: servers on one store, clients that lose connections and move with each request, and what kills servers.

    python -m tests.soak --minutes 10 --seed 7
    python -m tests.soak --store postgres --minutes 10

`tests/gateway_soak.py` does the same to a gateway and to the servers behind it.

On a SQLite file two servers are killed and stopped. On a PostgreSQL server of its own there are three; they are paused,
too, for less and for more than their lease, and the PostgreSQL server is killed and restarted, also together with them.

Everything that is chosen is chosen from the seed. It stops by itself, prints what it has counted, and ends with status
1 if a promise was broken: events lost, twice or out of order, requests without an answer, tools that ran twice although
they must not.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Protocol

from perdure._core.settling import MOST_RUNS
from tests.support.clients.recording_client import assert_answered_once, assert_sound, settled
from tests.support.clients.soak_call import Report
from tests.support.clients.soak_client import Ports, Visitor
from tests.support.processes.soak_nodes import Nodes
from tests.support.servers.gate_file_tools import diary
from tests.support.stores.soak_store import PostgresServer, SoakedStore, SqliteFile, running

CLIENTS = 10
#: Seconds from one kill to the next.
BETWEEN_KILLS = (0.5, 4.0)
#: One death in so many is a SIGTERM, which lets calls finish first.
GENTLE = 4
#: One time in so many nobody is left to settle what the dead leave, until one of them is started again.
ALL_AT_ONCE = 5
#: What happens next, and how often in proportion, where the store is a server.
ACTS = {"nodes": 5, "kill of the store": 2, "restart of the store": 1, "kill of both": 1}
#: Leases for which a node is paused there, and from one pause to the next.
PAUSES = (0.3, 2.2)
BETWEEN_PAUSES = (1.0, 4.0)
#: Tools that may be run a second time.
MAY_RUN_AGAIN = ("count", "put", "inquire")
#: After the time is up: until every call has its answer.
TO_FINISH = 90.0

COUNTED = (
    "sessions", "calls made", "calls accepted", "unheard of", "turned away", "answers", "events", "cuts", "resumes",
    "asks answered", "cancelled", "orphans", "unknown outcomes told", "kills", "stops", "pauses", "buried",
    "kills of the store", "restarts of the store", "runs again",
)  # fmt: skip
FAULTS = ("lost", "twice", "out of order", "without answer", "refused", "ran twice", "log")


class HasOpenCalls(Protocol):
    @property
    def open(self) -> Collection[str]:
        """The keys of its calls that wait for their answers."""


class Soak:
    def __init__(
        self,
        folder: Path,
        store: SoakedStore,
        *,
        seconds: float,
        seed: int,
        clients: int,
        between: tuple[float, float] = BETWEEN_KILLS,
    ) -> None:
        self.report = Report()
        self._diary = folder / "diary"
        self._store = store
        self._seed = seed
        self._clients = clients
        self._between = between
        self._choice = random.Random(f"{seed}/killer")
        self._ports = Ports([0] * store.nodes)
        self._turn = asyncio.Lock()
        self._seconds = seconds
        self._deadline = 0.0

    def _over(self) -> bool:
        return time.monotonic() >= self._deadline

    async def run(self) -> Report:
        async with running(self._store), AsyncExitStack() as stack:
            nodes = Nodes(stack, self._store, self._ports, self.report)
            await nodes.start()
            self._deadline = time.monotonic() + self._seconds
            visitors = [
                Visitor(number, self._seed, self._ports, str(self._diary), self.report)
                for number in range(self._clients)
            ]
            tasks = [asyncio.create_task(visitor.live(self._over)) for visitor in visitors]
            tasks.append(asyncio.create_task(self._harm(nodes)))
            if self._store.lease:
                tasks.append(asyncio.create_task(self._pause_some(nodes)))
            await finish(tasks, visitors, self.report, seconds=self._seconds)
            await judge_the_log(self._store.address, self.report)
        judge_the_diary(self._diary, self.report)
        return self.report

    async def _harm(self, nodes: Nodes) -> None:
        """Do harm to one part after the other, and start again what has ended."""
        acts = ACTS if self._store.lease else {"nodes": 1}
        if self._store.holds:
            acts = {act: weight for act, weight in acts.items() if act != "kill of both"}
        while not self._over():
            await asyncio.sleep(self._choice.uniform(*self._between))
            [act] = self._choice.choices(list(acts), list(acts.values())) if len(acts) > 1 else acts
            async with self._alone(nodes):
                await self._do(act, nodes)
            await nodes.revive()

    async def _pause_some(self, nodes: Nodes) -> None:
        choice = random.Random(f"{self._seed}/pauses")
        while not self._over():
            await asyncio.sleep(choice.uniform(*BETWEEN_PAUSES) * self._store.lease)
            async with self._alone(nodes):
                await nodes.pause(choice.randrange(self._store.nodes), choice.uniform(*PAUSES) * self._store.lease)

    @asynccontextmanager
    async def _alone(self, nodes: Nodes) -> AsyncIterator[None]:
        """Where nodes show what they hold, and lose it when they die, as they say: do one harm at a time, when nothing
        is held. Otherwise all at once."""
        if not (self._store.holds and self._store.lease):
            yield
            return
        async with self._turn:
            await nodes.all_well()
            yield

    async def _do(self, act: str, nodes: Nodes) -> None:
        match act:
            case "nodes":
                await self._end_some(nodes, gentle=not self._choice.randrange(GENTLE))
            case "kill of the store":
                await self._kill_store()
            case "restart of the store":
                self.report.counts["restarts of the store"] += 1
                await asyncio.to_thread(self._store.restart)
            case "kill of both":
                await asyncio.gather(self._kill_store(), self._end_some(nodes, gentle=False))

    async def _kill_store(self) -> None:
        self.report.counts["kills of the store"] += 1
        await asyncio.to_thread(self._store.kill)

    async def _end_some(self, nodes: Nodes, *, gentle: bool) -> None:
        place = self._choice.randrange(self._store.nodes)
        places = [place] if self._choice.randrange(ALL_AT_ONCE) else range(self._store.nodes)
        await asyncio.gather(*(nodes.end(place, gentle=gentle) for place in places))


async def finish(
    tasks: Sequence[asyncio.Task[None]], clients: Iterable[HasOpenCalls], report: Report, *, seconds: float
) -> None:
    """Let tasks run for so long and to their end. What waits then for an answer will not get it."""
    _, late = await asyncio.wait(tasks, timeout=seconds + TO_FINISH, return_when=asyncio.FIRST_EXCEPTION)
    for key in [key for client in clients for key in client.open]:
        report.fault("without answer", f"{key} still waits")
    for task in late:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome


async def judge_the_log(address: str, report: Report) -> None:
    try:
        await settled(address)
        assert_answered_once(address)
        assert_sound(address)
    except (AssertionError, TimeoutError) as failure:
        report.fault("log", f"{address}: {failure!r}")


def judge_the_diary(path: Path, report: Report) -> None:
    for key, runs in Counter(key for key, _ in diary(path)).items():
        report.counts["runs again"] += runs - 1
        if runs > (MOST_RUNS if key.startswith(MAY_RUN_AGAIN) else 1):
            report.fault("ran twice", f"{key} ran {runs} times")


def tell(report: Report, seed: int, counted: Sequence[str] = (*COUNTED, *FAULTS)) -> str:
    lines = [f"seed {seed}"]
    lines += [f"{name:>24}  {report.counts[name]}" for name in counted]
    return "\n".join([*lines, *report.faults[:20]])


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill servers under load, and count what their clients lose.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--store", choices=["sqlite", "postgres"], default="sqlite")
    parser.add_argument("--hold", action="store_true", help="nodes show what they hold while PostgreSQL is away")
    given = parser.parse_args()
    print(f"seed {given.seed}, {given.minutes:g} minutes", flush=True)
    with tempfile.TemporaryDirectory(prefix="perdure-soak-") as folder:
        place = Path(folder)
        store: SoakedStore = SqliteFile(place) if given.store == "sqlite" else PostgresServer(place, holds=given.hold)
        soak = Soak(place, store, seconds=given.minutes * 60, seed=given.seed, clients=given.clients)
        report = asyncio.run(soak.run())
    print(tell(report, given.seed))
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
