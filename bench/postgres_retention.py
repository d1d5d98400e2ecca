"""Fills a PostgreSQL store with a day of events and sweeps it while traffic goes on; by hand.

    python bench/postgres_retention.py postgresql://user@host/empty_database [--events 10000000] [--writers 3]

The schema `retention` is made in that database and dropped at the end. A million events take about 0.4 GB. The time of
the events is simulated: the day passes as fast as they are written. Printed are, for each phase, the bytes of the slots
and of the other tables, what sweeps took, the WAL that was written, and how long commits of one event and reads took
meanwhile. All runs in one process, which is busy while it writes: the phases with light traffic tell the most.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import asyncpg

from perdure._core.ids import Fence, Kind, NodeId, SessionId, StreamId
from perdure._core.retention import Cutoffs
from perdure._core.states import CallState, SessionState
from perdure.store.interface import streams_by_id
from perdure.store.postgres import layout
from perdure.store.postgres.address import parse_address
from perdure.store.postgres.connections import Connections, Connector
from perdure.store.postgres.store import PostgresStore
from perdure.store.postgres.sweep import MARGIN, Sweeper
from perdure.store.records import CallRecord, Event, SessionRecord, StreamRecord
from perdure.store.steps import Append, CallEnd, OpenStream, PutSession
from perdure.store.time_limit import TimeLimit

DAY = 86_400.0
BEGIN = 1.7e9
PER_CALL, CALLS_AT_ONCE = 50, 10
PAYLOAD = b'{"jsonrpc":"2.0","method":"notifications/progress","params":{"message":"' + b"x" * 175 + b'"}}'
SESSIONS = 100

SIZES = """
SELECT c.relname ~ '^(event|answer)_', sum(pg_total_relation_size(c.oid))::bigint
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = 'retention' AND c.relkind = 'r' GROUP BY 1
"""


@dataclass
class Times:
    commits: list[float] = field(default_factory=list)
    reads: list[float] = field(default_factory=list)
    old: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        each = (("commit", self.commits), ("read of the last 100", self.reads), ("read of any call", self.old))
        return "".join(f"\n    {what}: {_percentiles(seconds)}" for what, seconds in each)


def _percentiles(seconds: list[float]) -> str:
    if len(seconds) < 10:
        return "(too few)"
    cut = statistics.quantiles(seconds, n=100)
    return f"p50 {cut[49] * 1e3:.2f} p99 {cut[98] * 1e3:.2f} max {max(seconds) * 1e3:.1f} ms ({len(seconds)})"


class Day:
    """A store, and the simulated time of what is written to it."""

    def __init__(self, url: str, events: int, observer: asyncpg.Connection[asyncpg.Record]) -> None:
        self.url = f"{url}{'&' if '?' in url else '?'}schema=retention"
        self.observer = observer
        self.step = DAY / events
        self.now = BEGIN
        self.calls = 0
        self.times = Times()
        address = parse_address(self.url)
        self.sweeper = Connections(Connector(address.dsn, address.shown, timeout=10), TimeLimit(60.0), size=1)
        self.sweeps = Sweeper(self.sweeper, layout.queries(address.schema))

    async def sweep(self, kept: float = DAY) -> tuple[float, int]:
        cutoffs = Cutoffs(events=self.now - kept, answers=self.now - kept)
        began = time.perf_counter()
        gone = await self.sweeps.sweep(cutoffs, now=self.now)
        return time.perf_counter() - began, gone

    async def write(self, store: PostgresStore, fence: Fence, node: NodeId) -> None:
        """Commit some calls that are over."""
        steps = []
        for _ in range(CALLS_AT_ONCE):
            self.calls += 1
            name, session = _name(self.calls), SessionId(f"session-{self.calls % SESSIONS}")
            row = _call(session, name, self.calls)
            record = StreamRecord(id=name, session=session, kind=Kind.CALL, node=node, fence=fence, opened=self.now)
            events = [Event(seq, self.now + seq * self.step, PAYLOAD) for seq in range(1, PER_CALL)]
            self.now += PER_CALL * self.step
            events.append(Event(PER_CALL, self.now, PAYLOAD, True))
            end = CallEnd(incarnation=1, request_id=self.calls, state=CallState.ANSWERED)
            steps += [
                OpenStream(record=record, calls=(row,)),
                Append(stream=name, fence=fence, events=tuple(events), ends=(end,), seal=True),
            ]
        assert not any(await store.commit(steps))

    async def fill(self, until: float, writers: list[tuple[PostgresStore, Fence, NodeId]]) -> None:
        async def write(writer: tuple[PostgresStore, Fence, NodeId]) -> None:
            while self.now < until:
                await self.write(*writer)

        await asyncio.gather(*map(write, writers))

    async def probe(self, store: PostgresStore, fence: Fence) -> None:
        """Commit one event and read 100, again and again."""
        name = StreamId("probe")
        first = (await streams_by_id(store, [name]))[name].last + 1
        for seq in range(first, 1_000_000):
            began = time.perf_counter()
            event = Event(seq, self.now, PAYLOAD)
            assert not any(await store.commit([Append(stream=name, fence=fence, events=(event,))]))
            self.times.commits.append(time.perf_counter() - began)
            began = time.perf_counter()
            await store.read(name, after=max(0, seq - 100), limit=100)
            self.times.reads.append(time.perf_counter() - began)
            began = time.perf_counter()
            await store.read(_name(random.randint(1, self.calls or 1)), after=0, limit=100)
            self.times.old.append(time.perf_counter() - began)
            await asyncio.sleep(0.005)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        self.times, began = Times(), time.perf_counter()
        yield
        print(f"{phase}: {time.perf_counter() - began:.1f} s; {self.times}", flush=True)

    async def show(self, what: str) -> None:
        sizes = {row[0]: row[1] / 1e6 for row in await self.observer.fetch(SIZES)}
        wal = await self.observer.fetchval("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")
        tables = "stream", "call"
        each = [await self.observer.fetchval(f"SELECT pg_total_relation_size('retention.{name}')") for name in tables]
        others = ", ".join(f"{name} {size / 1e6:.1f}" for name, size in zip(tables, each, strict=True))
        print(
            f"  {what}: slots {sizes[True]:,.1f} MB, other tables {sizes[False]:,.1f} MB ({others}),"
            f" WAL so far {float(wal) / 1e6:,.0f} MB, slots emptied {self.sweeps.emptied}",
            flush=True,
        )


def _name(number: int) -> StreamId:
    return StreamId(f"call-{number:017d}")


def _call(session: SessionId, stream: StreamId, number: int) -> CallRecord:
    return CallRecord(
        session=session,
        incarnation=1,
        request_id=number,
        stream=stream,
        method="tools/call",
        request=PAYLOAD,
        principal="",
    )


def _session(number: int) -> SessionRecord:
    return SessionRecord(
        id=SessionId(f"session-{number}"),
        owner="",
        state=SessionState.ACTIVE,
        version="2025-11-25",
        client_params=b"{}",
        result=b"{}",
        initialized=True,
        sticky=(),
        incarnation=1,
        standalone=StreamId(f"standalone-{number}"),
        created=BEGIN,
        active=BEGIN * 2,
    )


@asynccontextmanager
async def opened(day: Day, name: str) -> AsyncIterator[tuple[PostgresStore, Fence, NodeId]]:
    node = NodeId(name)
    async with PostgresStore(day.url, timeout=60.0) as store:
        yield store, await store.join(node), node
        await store.leave(node)


async def measure(url: str, events: int, count: int) -> None:
    observer = await asyncpg.connect(url)
    await observer.execute("DROP SCHEMA IF EXISTS retention CASCADE")
    day = Day(url, events, observer)
    async with opened(day, "probing") as prober:
        store, fence, node = prober
        await store.commit([PutSession(record=_session(number)) for number in range(SESSIONS)])
        probe = StreamRecord(
            id=StreamId("probe"), session=SessionId("session-0"), kind=Kind.CALL, node=node, fence=fence, opened=BEGIN
        )
        await store.commit([OpenStream(record=probe)])
        day.sweeper.open()
        await day.sweep()
        await day.show("empty")
        async with asyncio.TaskGroup() as tasks:
            probing = tasks.create_task(day.probe(store, fence))
            writers = [opened(day, f"writer-{number}") for number in range(count)]
            entered = [await writer.__aenter__() for writer in writers]
            await phases(day, entered)
            for writer in writers:
                await writer.__aexit__(None, None, None)
            probing.cancel()
        await day.sweeper.aclose()
    await observer.execute("DROP SCHEMA retention CASCADE")
    await observer.close()


async def phases(day: Day, writers: list[tuple[PostgresStore, Fence, NodeId]]) -> None:
    await day.fill(BEGIN + 1_000 * day.step, writers)
    with day.timed("quiet, 1,000 events stored"):
        await asyncio.sleep(10)
    with day.timed("filling a day"):
        for part in range(1, 25):
            await day.fill(BEGIN + DAY * part / 24, writers)
            await day.sweep()
    await day.show("a day is stored")
    with day.timed("quiet, a day stored"):
        await asyncio.sleep(10)
    with day.timed("half a day of traffic, swept 24 times"):
        took = []
        for part in range(1, 25):
            filling = asyncio.create_task(day.fill(BEGIN + DAY * (1 + part / 48), writers))
            took.append(await day.sweep())
            await filling
            if part % 6 == 0:
                await day.show(f"after {part} sweeps")
    show_sweeps(took)
    with day.timed("12 more sweeps, with light traffic"):
        took = []
        for _ in range(12):
            day.now += DAY / 48
            took.append(await day.sweep())
    show_sweeps(took)
    day.now += DAY + MARGIN + 1  # all has expired
    with day.timed("one sweep of a whole day, with light traffic"):
        seconds_, gone = await day.sweep()
    await day.show(f"after one sweep of {seconds_:.1f} s ({gone:,} rows)")
    day.now += DAY + MARGIN + 1
    with day.timed("the slot that was written goes"):
        await day.sweep()
    await day.observer.execute("VACUUM retention.stream, retention.call")
    await day.show("after all has expired, vacuumed")


def show_sweeps(took: list[tuple[float, int]]) -> None:
    seconds = [sweep[0] for sweep in took]
    print(
        f"  a sweep: {statistics.median(seconds):.2f} s, {max(seconds):.2f} at most, of {took[-1][1]:,} rows",
        flush=True,
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    arguments.add_argument("url", help="an empty database")
    arguments.add_argument("--events", type=int, default=10_000_000)
    arguments.add_argument("--writers", type=int, default=3)
    given = arguments.parse_args()
    asyncio.run(measure(given.url, given.events, given.writers))


if __name__ == "__main__":
    main()
