"""Retention without bloat: slots are emptied as a whole, and stand in the way of nothing."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from perdure._core.ids import Fence, SessionId, StreamId
from perdure._core.retention import Cutoffs
from perdure.store.postgres import layout
from perdure.store.postgres.address import parse_address
from perdure.store.postgres.connections import Connections, Connector
from perdure.store.postgres.store import PostgresStore
from perdure.store.postgres.sweep import MARGIN, SHORTEST, SLOTS, SPANS, Sweeper, spans
from perdure.store.records import Event
from perdure.store.steps import DropStream, EndSession, OpenStream, PutSession, Step, Trim
from perdure.store.time_limit import TimeLimit
from perdure.testing._values import (
    NODE,
    OTHER,
    SESSION,
    STREAM,
    a_call,
    a_session,
    a_stream,
    all_events,
    an_append,
    an_end,
    numbers,
    some_events,
)
from tests.support.servers.in_process import until
from tests.support.stores.postgres import store_url
from tests.support.stores.postgres_roles import Operator

pytestmark = pytest.mark.anyio

BEGIN = 1_000_000.0
TTL, WINDOW, STEP = 3_600.0, 7_200.0, 800.0
"""For how long events and answers are kept, and the time between two sweeps, by the clock of these stories. Sweeps and
slots do not keep step, so there are always slots that have expired in part."""

LARGE = 10_000
"""Bytes that PostgreSQL keeps outside the row."""


class Retained:
    """A store whose time the test sets."""

    def __init__(self, url: str, store: PostgresStore, sweeper: Connections, fence: Fence) -> None:
        self.schema = parse_address(url).schema
        self.store = store
        self.sweeps = Sweeper(sweeper, layout.queries(self.schema))
        self.fence = fence
        self.now = BEGIN

    async def sweep(self) -> int:
        cutoffs = Cutoffs(events=self.now - TTL, answers=self.now - WINDOW)
        return await self.sweeps.sweep(cutoffs, now=self.now)

    async def put(self, *steps: Step) -> None:
        assert not any(await self.store.commit(steps))

    def call(self, stream: str, *, session: str = SESSION) -> list[Step]:
        """A call that was answered just now, with small and large payloads."""
        events = [Event(seq, self.now, bytes([65 + seq]) * (LARGE if seq == 3 else 100)) for seq in range(1, 6)]
        answer = Event(6, self.now, b"a" * LARGE, final=True)
        return [
            OpenStream(
                record=a_stream(self.fence, stream, session=session, opened=self.now),
                calls=(a_call(stream, stream=stream, session=session),),
            ),
            an_append(self.fence, events, stream=stream),
            an_append(self.fence, [answer], stream=stream, ends=(an_end(stream),), seal=True),
        ]


@asynccontextmanager
async def retained() -> AsyncIterator[Retained]:
    url = store_url()
    address = parse_address(url)
    sweeper = Connections(Connector(address.dsn, address.shown, timeout=10), TimeLimit(20.0), size=1)
    sweeper.open()
    try:
        async with PostgresStore(url, timeout=20.0, wall=lambda: BEGIN) as store:
            fence = await store.join(NODE)
            await store.commit([PutSession(record=a_session(active=math.inf)), OpenStream(record=a_stream(fence))])
            yield Retained(url, store, sweeper, fence)
    finally:
        await sweeper.aclose()


SIZES = """
SELECT c.relname, pg_total_relation_size(c.oid)
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relkind = 'r'
"""


async def sizes(operator: Operator, schema: str) -> tuple[int, int]:
    """The bytes of all slots, with their indexes and what is outside the rows; and those of all other tables."""
    found: dict[str, int] = {row[0]: row[1] for row in await operator.fetch(SIZES, schema)}
    in_slots = sum(size for name, size in found.items() if name.startswith(("event_", "answer_")))
    return in_slots, sum(found.values()) - in_slots


# --- Steady traffic -------------------------------------------------------------------------------------------------


async def test_under_steady_traffic_the_store_does_not_grow_and_when_it_ends_all_room_is_free(
    operator: Operator,
) -> None:
    """Promises 4 and 7: what is retained is shown, and what has expired is not. No event or answer is ever deleted."""
    async with retained() as here:
        empty, _ = await sizes(operator, here.schema)
        opened: dict[str, float] = {}
        peaks: list[tuple[int, int]] = []
        turns = int(4 * WINDOW / STEP)
        for turn in range(turns):
            here.now += STEP
            calls = [f"{turn}-{place}" for place in range(3)]
            opened |= dict.fromkeys(calls, here.now)
            await here.put(*itertools.chain(*(here.call(name) for name in calls)))
            await here.sweep()
            if turn % 4 == 0:  # as autovacuum does
                await operator.execute(f"VACUUM {here.schema}.stream, {here.schema}.call")
            peaks.append(await sizes(operator, here.schema))
            if turn % 9 == 8:
                await _compare(here, opened)
        await _compare(here, opened)
        half = turns // 2
        for part in (0, 1):
            early, late = (max(peak[part] for peak in some) for some in (peaks[:half], peaks[half:]))
            assert late <= early * 1.1, f"it grew from {early} to {late} bytes"
        assert max(peak[0] for peak in peaks) > 2 * empty  # there was something to grow
        for _ in range(6):
            here.now += WINDOW / 2
            await here.sweep()
        in_slots, _ = await sizes(operator, here.schema)
        assert in_slots == empty
        assert [stream.id for stream in await here.store.streams(SESSION)] == [STREAM]
        assert here.sweeps.put_off == 0
        deleted = f"""SELECT sum(pg_stat_get_tuples_deleted(oid)) FROM pg_class
            WHERE relnamespace = '{here.schema}'::regnamespace AND relname ~ '^(event|answer)'"""
        assert await operator.fetchval(deleted) == 0


async def _compare(here: Retained, opened: dict[str, float]) -> None:
    """What the store shows of each call, and what it should."""
    there = {stream.id: stream for stream in await here.store.streams(SESSION)}
    kept = {name for name, time in opened.items() if time >= here.now - WINDOW}
    assert there.keys() - {STREAM} == kept
    for name in kept:
        events = [1, 2, 3, 4, 5] if opened[name] >= here.now - TTL else []
        shown = await all_events(here.store, name)
        assert [event.seq for event in shown] == [*events, 6]
        assert all(len(event.payload) == LARGE for event in shown if event.seq in (3, 6))
    figures = {record.stream: (record.events, record.answers) for record in await here.store.kept(SESSION)}
    assert figures == {name: (5 if opened[name] >= here.now - TTL else 0, 1) for name in kept}


async def test_an_expired_answer_of_a_stream_that_goes_on_is_not_shown() -> None:
    """Promise 7"""
    async with retained() as here:
        await here.put(an_append(here.fence, some_events(1, 3, time=here.now, final=True)))
        here.now += WINDOW - TTL
        await here.put(an_append(here.fence, some_events(4, 6, time=here.now, final=True)))
        here.now += TTL + 1
        assert await here.sweep() == 5
        assert await numbers(here.store) == [6]
        followed = await here.store.follow({STREAM: 0}, limit=9)
        assert [event.seq for event in followed[STREAM].events or ()] == [6]
        assert await here.sweep() == 0
        here.now += WINDOW - TTL
        assert await here.sweep() == 1
        assert await numbers(here.store) == []
        await here.put(an_append(here.fence, some_events(7, 8, time=here.now, final=True)))
        assert await numbers(here.store) == [7, 8]


# --- Locks ----------------------------------------------------------------------------------------------------------


async def close_first_slots(here: Retained) -> None:
    """Some calls, and then the second slot of events and of answers is written."""
    await here.sweep()
    await here.put(*here.call("old"), *here.call("dropped"))
    here.now += WINDOW / (SLOTS["answer"] - 2)
    await here.sweep()


async def test_no_commit_touches_a_slot_that_is_not_written(operator: Operator) -> None:
    """So none waits while such a slot is emptied, or is about to be, whatever it has to do."""
    async with retained() as here:
        await close_first_slots(here)
        async with operator.transaction():
            for slot in ("event_0", "answer_0"):
                await operator.execute(f"LOCK TABLE {here.schema}.{slot} IN ACCESS EXCLUSIVE MODE")
            async with asyncio.timeout(10):
                await here.put(*here.call("new"), Trim(stream=StreamId("old"), through=3))
                await here.put(DropStream(stream=StreamId("dropped")))
                await here.put(PutSession(record=a_session("ended")), *here.call("its", session="ended"))
                await here.put(EndSession(session=SessionId("ended"), time=here.now, reason="why"))
        assert await numbers(here.store, "new") == [1, 2, 3, 4, 5, 6]
        assert await numbers(here.store, "old") == [4, 5, 6]


async def test_a_transaction_that_always_reads_costs_room_and_nothing_else(
    operator: Operator,
) -> None:
    """The sweep does not wait for it. New slots are begun while there are some, and then the last one is written on."""
    async with retained() as here:
        opened: dict[str, float] = {}
        async with operator.transaction(isolation="repeatable_read"):
            await operator.fetch(f"SELECT 1 FROM {here.schema}.event, {here.schema}.answer LIMIT 1")
            for turn in range(10):
                here.now += TTL / 2
                opened[f"call-{turn}"] = here.now
                await here.put(*here.call(f"call-{turn}"))
                await here.sweep()
                await _compare(here, opened)
            assert here.sweeps.emptied == 0
            assert here.sweeps.put_off > 0
        written = f"SELECT part, count(DISTINCT slot) FROM (SELECT 'event' AS part, slot FROM {here.schema}.event" + (
            f" UNION ALL SELECT 'answer', slot FROM {here.schema}.answer) AS x GROUP BY part"
        )
        assert {row[0]: row[1] for row in await operator.fetch(written)} == SLOTS
        here.now += WINDOW + MARGIN
        await here.sweep()  # the transaction is over
        await _compare(here, opened)
        assert here.sweeps.emptied == SLOTS["event"] - 1 + SLOTS["answer"] - 1
        here.now += WINDOW + MARGIN + 1
        await here.sweep()  # the slots that were written meanwhile
        assert await operator.fetch(written) == []


async def test_a_reader_at_work_is_not_ended_and_waits_no_longer_than_the_sweep_does(
    operator: Operator,
) -> None:
    async with retained() as here:
        await close_first_slots(here)
        here.now += WINDOW + MARGIN + 1
        async with operator.transaction():
            await operator.fetch(f"SELECT 1 FROM {here.schema}.event_0")
            sweeping = asyncio.create_task(here.sweep())
            reads = 0
            while not sweeping.done():
                await here.store.read(STREAM, after=0, limit=10)
                reads += 1
            await sweeping
            assert (here.sweeps.put_off, here.sweeps.emptied) == (1, 1)
            assert reads
        await here.sweep()
        assert here.sweeps.emptied == 2


async def test_hiding_expired_events_locks_streams_in_the_order_of_commits(
    operator: Operator,
) -> None:
    """A commit that has the first of two streams gets the second, however long the sweep waits for the first."""
    async with retained() as here:
        for name in ("b", "a"):  # not in the order of their keys
            await here.put(OpenStream(record=a_stream(here.fence, name)))
            await here.put(an_append(here.fence, some_events(1, 2, time=here.now), stream=name))
        here.now += TTL + 1
        waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND $1 = ANY (pg_blocking_pids(pid))"
        lock = f"SELECT 1 FROM {here.schema}.stream WHERE id = $1 FOR UPDATE"
        async with asyncio.TaskGroup() as tasks, operator.transaction():
            await operator.fetch(lock, "a")
            tasks.create_task(here.sweep())
            own = await operator.fetchval("SELECT pg_backend_pid()")

            async def is_waiting() -> bool:
                return bool(await operator.fetchval(waits, own))

            await until(is_waiting)
            await operator.execute("SET LOCAL lock_timeout = '5s'")
            await operator.fetch(lock, "b")
        assert [await numbers(here.store, name) for name in ("a", "b")] == [[], []]


# --- Several processes ----------------------------------------------------------------------------------------------


async def test_of_processes_that_sweep_at_once_one_does_the_work(operator: Operator) -> None:
    url = store_url()
    schema = parse_address(url).schema
    cutoffs = Cutoffs(events=10.0, answers=0.0)
    async with PostgresStore(url, timeout=20.0) as there:
        await there.join(OTHER)
        async with PostgresStore(url, timeout=20.0) as here:
            fence = await here.join(NODE)
            await here.commit([PutSession(record=a_session()), OpenStream(record=a_stream(fence))])
            await here.commit([an_append(fence, some_events(1, 9, time=1.0))])
            async with operator.transaction():
                await operator.execute(f"SELECT 1 FROM {schema}.rotation FOR UPDATE")
                sweeping = asyncio.create_task(here.sweep(cutoffs))

                async def is_held() -> bool:
                    return bool(await operator.fetchval(f"SELECT swept > '-infinity' FROM {schema}.version"))

                await until(is_held)
                async with asyncio.timeout(10):
                    assert await there.sweep(cutoffs) == 0
                assert await numbers(there) == list(range(1, 10))  # it has not even looked
            assert await sweeping == 9
            assert await there.sweep(Cutoffs(events=5.0, answers=0.0)) == 0
            await here.commit([an_append(fence, some_events(10, 11, time=20.0))])
            assert await there.sweep(Cutoffs(events=30.0, answers=0.0)) == 2
            assert not await is_held()


# --- The spans of a sweep -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("swept", "kept"),
    [(-math.inf, 3_600.0), (BEGIN - 7_200.0, 3_600.0), (BEGIN - 3_900.0, 3_600.0), (-math.inf, 0.5), (-math.inf, 1e9)],
)
async def test_a_sweep_looks_at_all_times_once_in_a_bounded_number_of_spans(swept: float, kept: float) -> None:
    found = list(spans(swept, BEGIN - kept, now=BEGIN))
    assert (found[0][0], found[-1][1]) == (swept, BEGIN - kept)
    assert all(one[1] == other[0] for one, other in itertools.pairwise(found))
    assert len(found) <= SPANS / 2 + 2
    assert all(end - begin <= max(kept / SPANS, SHORTEST) + 1e-6 for begin, end in found[1:])


async def test_what_was_swept_already_is_not_looked_at_again() -> None:
    assert list(spans(BEGIN - 3_600.0, BEGIN - 3_600.0, now=BEGIN)) == []
    assert list(spans(BEGIN - 10.0, BEGIN - 3_600.0, now=BEGIN)) == []
