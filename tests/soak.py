"""A soak: two servers on one SQLite file, clients that lose connections, and somebody who kills servers.

    python -m tests.soak --minutes 10 --seed 7

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
from contextlib import AsyncExitStack
from pathlib import Path

from tests.support.cluster import CRASHBOX
from tests.support.crashbox import diary
from tests.support.serving import Served, serving
from tests.support.soaked_call import Report
from tests.support.soaking import Ports, Visitor
from tests.support.witness import assert_answered_once, assert_sound, settled

SERVERS = 2
CLIENTS = 10
#: Seconds from one kill to the next.
BETWEEN_KILLS = (0.5, 4.0)
#: One death in so many is a SIGTERM, which lets calls finish first.
GENTLE = 4
#: One time in so many nobody is left to settle what the dead leave, until one of them is started again.
ALL_AT_ONCE = 5
OPTIONS = ("--retry", "100ms", "--drain-timeout", "3s", "--max-sessions", "100000")
#: Tools that may be run a second time.
MAY_RUN_AGAIN = ("count", "put")
#: After the time is up: until every call has its answer.
TO_FINISH = 90.0

COUNTED = (
    "sessions", "calls made", "calls accepted", "unheard of", "turned away", "answers", "events", "cuts", "resumes",
    "asks answered", "cancelled", "orphans", "unknown outcomes told", "kills", "stops", "runs again",
)  # fmt: skip
FAULTS = ("lost", "twice", "out of order", "without answer", "refused", "ran twice", "file")


class Soak:
    def __init__(
        self,
        folder: Path,
        *,
        seconds: float,
        seed: int,
        clients: int,
        between: tuple[float, float] = BETWEEN_KILLS,
    ) -> None:
        self.report = Report()
        self._folder = folder
        self._seed = seed
        self._clients = clients
        self._between = between
        self._choice = random.Random(f"{seed}/killer")
        self._ports = Ports([0] * SERVERS)
        self._deadline = time.monotonic() + seconds

    @property
    def _path(self) -> Path:
        return self._folder / "log.db"

    @property
    def _diary(self) -> Path:
        return self._folder / "diary"

    def _over(self) -> bool:
        return time.monotonic() >= self._deadline

    async def run(self) -> Report:
        async with AsyncExitStack() as stack:
            servers = [await self._start(stack, place) for place in range(SERVERS)]
            visitors = [
                Visitor(number, self._seed, self._ports, str(self._diary), self.report)
                for number in range(self._clients)
            ]
            killing = asyncio.create_task(self._kill(stack, servers))
            visits = [asyncio.create_task(visitor.live(self._over)) for visitor in visitors]
            left = self._deadline - time.monotonic() + TO_FINISH
            _, late = await asyncio.wait([killing, *visits], timeout=left, return_when=asyncio.FIRST_EXCEPTION)
            hung = [key for visitor in visitors for key in visitor.open]
            for key in hung:
                self.report.fault("without answer", f"{key} still waits")
            for task in late:
                task.cancel()
            for outcome in await asyncio.gather(killing, *visits, return_exceptions=True):
                if isinstance(outcome, Exception):
                    raise outcome
            await self._judge_the_file()
        self._judge_the_diary()
        return self.report

    async def _start(self, stack: AsyncExitStack, place: int) -> Served:
        served = await stack.enter_async_context(serving(CRASHBOX, *OPTIONS, "--store", f"sqlite:{self._path}"))
        self._ports.all[place] = served.port
        return served

    async def _kill(self, stack: AsyncExitStack, servers: list[Served]) -> None:
        """Kill one server after the other, and start each again."""
        while not self._over():
            await asyncio.sleep(self._choice.uniform(*self._between))
            place = self._choice.randrange(SERVERS)
            places = [place] if self._choice.randrange(ALL_AT_ONCE) else list(range(SERVERS))
            gentle = not self._choice.randrange(GENTLE)
            await asyncio.gather(*(self._end(servers[place], gentle=gentle) for place in places))
            for place in places:
                servers[place] = await self._start(stack, place)

    async def _end(self, server: Served, *, gentle: bool) -> None:
        self.report.counts["stops" if gentle else "kills"] += 1
        status = await (server.stop() if gentle else server.kill())
        if gentle and status != 0:
            self.report.fault("refused", f"a server asked to stop ended with {status}")

    async def _judge_the_file(self) -> None:
        try:
            await settled(self._path)
            assert_answered_once(self._path)
            assert_sound(self._path)
        except (AssertionError, TimeoutError) as failure:
            self.report.fault("file", repr(failure))

    def _judge_the_diary(self) -> None:
        for key, runs in Counter(key for key, _ in diary(self._diary)).items():
            self.report.counts["runs again"] += runs - 1
            if runs > (2 if key.startswith(MAY_RUN_AGAIN) else 1):
                self.report.fault("ran twice", f"{key} ran {runs} times")


def tell(report: Report, seed: int) -> str:
    lines = [f"seed {seed}"]
    lines += [f"{name:>24}  {report.counts[name]}" for name in (*COUNTED, *FAULTS)]
    return "\n".join([*lines, *report.faults[:20]])


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill servers under load, and count what their clients lose.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--clients", type=int, default=CLIENTS)
    given = parser.parse_args()
    print(f"seed {given.seed}, {given.minutes:g} minutes", flush=True)
    with tempfile.TemporaryDirectory(prefix="perdure-soak-") as folder:
        soak = Soak(Path(folder), seconds=given.minutes * 60, seed=given.seed, clients=given.clients)
        report = asyncio.run(soak.run())
    print(tell(report, given.seed))
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
