"""A million keys: measures how a server grows with the calls that it keeps under a key.

    python -m tests.many_keys --keys 1000000
    python -m tests.many_keys --keys 1000000 --store postgres

One real server, one caller. A first call with a key is made by HTTP; copies of what the server has stored of it are
written by the store's own steps, each under a key of its own, until there are 1,000, 10,000, 100,000 and 1,000,000.
At each size real requests are made by HTTP: calls with new keys, repeats of keys that are kept (each has to give its
answer, and to run nothing), repeats with other arguments (refused by name), and polls by the id of their task. So are
a page of the list that operators see, a look for an id by its beginning, a scrape of the metrics, a sweep that finds
nothing and one that removes a thousand calls whose time has passed. Memory, file and CPU time of requests are told.

Ends with status 1 if an answer was wrong, or if something takes more than three times as long at the last size as at
the first, by the fastest of its times: what other programs do to the machine is in the others.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from perdure._core.durable_calls import call_digest, key_names
from perdure._core.envelope import KEY
from perdure._core.ids import SessionId
from perdure._core.retention import Cutoffs
from perdure._core.states import CallState
from perdure.admin.queries import find
from perdure.assembly import CALL_KEYS
from perdure.store import Inspect, existing_store
from perdure.store.interface import streams_by_id
from perdure.store.records import CallSnapshot, StreamRecord
from perdure.store.steps import Append, CallEnd, OpenStream, PutSession, Step
from tests.support.clients.modern_peer import TAKES_TASKS, CallPeer, result_of, said
from tests.support.processes.cluster import GATE_FILE_TOOLS
from tests.support.processes.serving import Served, serving
from tests.support.stores.postgres import Server

SIZES = (10**3, 10**4, 10**5, 10**6)
SAMPLES = 300
"""Requests of each kind, at each size."""
AT_ONCE = 500
"""Calls that are written in one commit."""
EXPIRED = 1_000
"""Calls whose time has passed, which one sweep removes."""
PATIENCE = 20.0
"""Seconds that the store may take: a busy machine is not a failing store."""
PAGE = 100
"""Rows of the list that an operator looks at."""
TIMES_SLOWER = 3.0
"""More than noise, and far less than what grows with the calls: that is a thousand times as long with a million."""
FLAT_MS = 1.0
"""Figures below this are within the noise, whatever their ratio."""

TOOL, ARGUMENTS = "count", {"n": 0}
ANSWER = "counted to 0"
MISMATCH = -31009


@dataclass(kw_only=True)
class Figures:
    """What was measured at one size: milliseconds, and server CPU microseconds for each request, by what was done."""

    keys: int
    milliseconds: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    memory: int = 0
    size: int = 0

    def lines(self) -> Sequence[str]:
        told = [f"{self.keys:,} keys: memory {self.memory / 2**20:.1f} MiB, store {self.size / 2**20:,.0f} MiB"]
        for what, median in self.milliseconds.items():
            cpu = f", {self.cpu[what]:,.0f} us of the server's CPU each" if what in self.cpu else ""
            times = f"{self.best[what]:9.2f} to {self.worst[what]:9.2f} ms, median {median:9.2f} ms"
            told.append(f"    {what:<26} {times}{cpu}")
        return told


class Keys:
    """The keys that are kept: made calls and their copies."""

    def __init__(self, store: Inspect, secret: bytes, template: CallSnapshot, stream: StreamRecord) -> None:
        self._store = store
        self._secret = secret
        self._template = template
        self._stream = stream
        self.count = 0

    @staticmethod
    def name(number: int) -> str:
        return f"order-{number}"

    def task(self, number: int) -> SessionId:
        """The id of the task that a key stands for."""
        return key_names(self._secret, "", self.name(number), None)[0]

    async def fill(self, size: int) -> float:
        """Write copies until there are so many; gives keys a second."""
        first, began = self.count, time.monotonic()
        while self.count < size:
            numbers = range(self.count, min(self.count + AT_ONCE, size))
            await self._commit([self.name(number) for number in numbers])
            self.count = numbers.stop
        return (self.count - first) / max(time.monotonic() - began, 1e-9)

    async def fill_expired(self, count: int, *, active: float) -> None:
        for start in range(0, count, AT_ONCE):
            numbers = range(start, min(start + AT_ONCE, count))
            await self._commit([f"expired-{self.count}-{number}" for number in numbers], active=active)

    async def _commit(self, keys: Sequence[str], *, active: float | None = None) -> None:
        """What a server commits when calls begin, and when they end, for many at once."""
        for step in (self._begins, self._ends):
            steps = [made for key in keys for made in step(key, active)]
            await self._store.commit(steps)

    def _begins(self, key: str, active: float | None) -> Sequence[Step]:
        session, stream = key_names(self._secret, "", key, None)
        record, call = self._template.record, self._template.call
        assert call is not None
        when = record.active if active is None else active
        record = replace(record, id=session, created=min(record.created, when), active=when, revision=0)
        row = replace(call, session=session, stream=stream, state=CallState.RUNNING, request=b"{}")
        opened = replace(self._stream, id=stream, session=session, last=0, sealed=False, opened=record.created)
        return [PutSession(record=record), OpenStream(record=opened, calls=(row,), unique=True)]

    def _ends(self, key: str, active: float | None) -> Sequence[Step]:
        _, stream = key_names(self._secret, "", key, None)
        call = self._template.call
        assert call is not None
        end = CallEnd(incarnation=call.incarnation, request_id=call.request_id, state=CallState.ANSWERED)
        [answer] = self._template.recent
        event = answer if active is None else answer._replace(time=active)
        return [Append(stream=stream, fence=self._stream.fence, events=(event,), ends=(end,), seal=True)]


class Measuring:
    """Requests to one server, timed."""

    def __init__(self, served: Served, store: Inspect, keys: Keys, choice: random.Random) -> None:
        self._served = served
        self._store = store
        self._keys = keys
        self._choice = choice
        self._peer = CallPeer(port=served.port)
        self._fresh = 0

    def _any(self) -> int:
        return self._choice.randrange(self._keys.count)

    async def measure(self, place: Callable[[], int]) -> Figures:
        found = Figures(keys=self._keys.count)
        asked: dict[str, Callable[[], Awaitable[None]]] = {
            "call with a new key": self._new_key,
            "repeat of a key": self._repeat,
            "key with other arguments": self._mismatch,
            "tasks/get": self._poll,
        }
        for what, ask in asked.items():
            cpu = self._cpu()
            await self._time(found, what, ask, SAMPLES)
            found.cpu[what] = (self._cpu() - cpu) / SAMPLES * 1e6
        await self._time(found, "page of the list", self._list, 20)
        await self._time(found, "id by its beginning", self._find, 20)
        await self._time(found, "scrape of the metrics", self._scrape, 20)
        await self._time(found, "sweep that finds nothing", self._sweep_nothing, 3)
        await self._keys.fill_expired(EXPIRED, active=1.0)
        await self._time(found, f"sweep of {EXPIRED:,} calls", self._sweep_expired, 1)
        found.memory, found.size = resident(self._served.pid), place()
        return found

    async def _time(self, found: Figures, what: str, ask: Callable[[], Awaitable[None]], times: int) -> None:
        took: list[float] = []
        for _ in range(times):
            began = time.monotonic()
            await ask()
            took.append((time.monotonic() - began) * 1000)
        found.milliseconds[what] = statistics.median(took)
        found.best[what], found.worst[what] = min(took), max(took)

    def _cpu(self) -> float:
        """Seconds of CPU time that the server has used."""
        told = Path(f"/proc/{self._served.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(told[11]) + int(told[12])) * TICK

    # What is done

    async def _new_key(self) -> None:
        self._fresh += 1
        result = result_of(await self._peer.call(TOOL, ARGUMENTS, key=f"fresh-{self._keys.count}-{self._fresh}"))
        assert said(result) == ANSWER, result

    async def _repeat(self) -> None:
        result = result_of(await self._peer.call(TOOL, ARGUMENTS, key=self._keys.name(self._any())))
        assert said(result) == ANSWER, result

    async def _mismatch(self) -> None:
        answer = await self._peer.call(TOOL, {"n": 1}, key=self._keys.name(self._any()))
        assert answer.error["code"] == MISMATCH, answer

    async def _poll(self) -> None:
        params = {"taskId": self._keys.task(self._any())}
        view = result_of(await self._peer.rpc("tasks/get", params, capabilities=TAKES_TASKS))
        assert view["status"] == "completed", view
        assert said(view["result"]) == ANSWER, view

    async def _list(self) -> None:
        assert await self._store.newest(limit=PAGE, prefix=self._keys.task(self._any())[:2])

    async def _find(self) -> None:
        task = self._keys.task(self._any())
        assert (await find(self._store, task[:12])).id == task

    async def _scrape(self) -> None:
        answer = await self._peer.ask("GET", path="/metrics")
        assert answer.status == 200, answer

    async def _sweep_nothing(self) -> None:
        assert await self._store.sweep(Cutoffs(events=0.5, answers=0.5, calls=0.5)) == 0

    async def _sweep_expired(self) -> None:
        assert await self._store.sweep(Cutoffs(events=2.0, answers=2.0, calls=2.0)) >= EXPIRED


TICK = 1 / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> int:
    """Bytes of memory that a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def size_of_files(folder: Path) -> int:
    """Bytes of all files in a folder. Those of a running server come and go."""
    sizes = subprocess.run(["du", "-sb", folder], capture_output=True, text=True, check=False)
    return int(sizes.stdout.split()[0])


async def first_call(served: Served, store: Inspect) -> tuple[bytes, CallSnapshot, StreamRecord]:
    """Make a call with a key, and give what the server has stored of it."""
    answer = await CallPeer(port=served.port).call(TOOL, ARGUMENTS, key="first")
    assert said(result_of(answer)) == ANSWER, answer
    secret = (await store.notes(CALL_KEYS))[CALL_KEYS]
    session, stream = key_names(secret, "", "first", None)
    kept = await store.durable_call(session, recent=1)
    assert kept is not None
    digest = call_digest("tools/call", {"name": TOOL, "arguments": ARGUMENTS, "_meta": {KEY: "first"}})
    assert kept.call is not None
    assert kept.call.digest == digest
    return secret, kept, (await streams_by_id(store, [stream]))[stream]


async def run(address: str, sizes: Sequence[int], size_of: Callable[[], int]) -> Sequence[Figures]:
    most = str(sizes[-1] + 10 * (SAMPLES + EXPIRED))  # nothing is given up
    limits = ("--max-tasks", most, "--max-principal-tasks", most, "--store-timeout", f"{PATIENCE:g}s")
    options = ("--store", address, "--cleanup-interval", "1h", *limits)
    found: list[Figures] = []
    async with (
        serving(GATE_FILE_TOOLS, *options) as served,
        existing_store(address, writes=True, busy_timeout=PATIENCE) as store,
    ):
        keys = Keys(store, *await first_call(served, store))
        measuring = Measuring(served, store, keys, random.Random(7))
        for size in sizes:
            print(f"{await keys.fill(size):,.0f} keys a second were written", flush=True)
            found.append(await measuring.measure(size_of))
            print("\n".join(found[-1].lines()), flush=True)
    return found


def grown(found: Sequence[Figures]) -> Sequence[str]:
    """What is not flat, told."""
    first, last = found[0], found[-1]
    return [
        f"{what} takes {took:.2f} ms at {last.keys:,} keys, and {first.best[what]:.2f} ms at {first.keys:,}"
        for what, took in last.best.items()
        if took > FLAT_MS and took > TIMES_SLOWER * first.best[what]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure how a server grows with the keys that it keeps.")
    parser.add_argument("--keys", type=int, default=SIZES[-1])
    parser.add_argument("--store", choices=["sqlite", "postgres"], default="sqlite")
    given = parser.parse_args()
    if given.keys < 1:
        parser.error(f"--keys is {given.keys}; give 1 or more")
    sizes = [size for size in SIZES if size < given.keys] + [given.keys]
    with tempfile.TemporaryDirectory(prefix="perdure-keys-") as folder:
        if given.store == "sqlite":
            path = Path(folder) / "log.db"
            found = asyncio.run(run(f"sqlite:{path}", sizes, lambda: path.stat().st_size))
        else:
            server = Server(Path(folder), synchronous_commit="on")
            server.make()
            server.start()
            try:
                found = asyncio.run(run(f"{server.url}?schema=keys", sizes, lambda: size_of_files(server.data)))
            finally:
                server.stop()
    slow = grown(found)
    print("\n".join(slow) or "all figures are flat")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
