"""The journal on its own: groups, order, a store's time, and steps that no store could take."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from perdure._core.ids import Fence, Kind, NodeId, SessionId, StreamId
from perdure._core.leases import Claim
from perdure.errors import StaleFence, StoreError, StoreUnavailable
from perdure.log.journal import GROUP_BYTES, GROUP_STEPS, Journal, Steps
from perdure.settings import Settings
from perdure.store import MemoryStore, SqliteStore
from perdure.store.interface import stream_by_id
from perdure.store.records import Event, StreamRecord
from perdure.store.steps import Append, OpenStream, PutSession, Refusals, SessionLimits, Step
from perdure.telemetry.counters import Counters
from perdure.testing._values import a_call, a_session, count_open, existing
from tests.support.servers.in_process import until
from tests.support.stores.faulty_store import Fault, FaultyStore

pytestmark = pytest.mark.anyio


def opening(name: str, *, fence: Fence, opened: float = 1.0) -> OpenStream:
    node, session = NodeId("n"), SessionId("s")
    record = StreamRecord(id=StreamId(name), session=session, kind=Kind.CALL, node=node, fence=fence, opened=opened)
    return OpenStream(record=record)


def message(stream: str, *, fence: Fence, seq: int, size: int = 2) -> Append:
    return Append(stream=StreamId(stream), fence=fence, events=(Event(seq, 1.0, b"x" * size),))


class Recorded(FaultyStore):
    """A store in memory that tells how many messages each commit held; nothing is committed at once."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.groups: list[int] = []
        self.pause = 0.0
        """Seconds that each commit takes."""

    async def prepare(self) -> Fence:
        fence = await self.join(NodeId("n"))
        await super().commit([PutSession(record=a_session("s")), opening("a", fence=fence)])
        return fence

    def commit_now(self, steps: Sequence[Step]) -> Refusals | None:
        return None

    async def commit(self, steps: Sequence[Step]) -> Refusals:
        await asyncio.sleep(self.pause)
        refusals = await super().commit(steps)
        self.groups.append(len(steps))
        return refusals

    async def numbers(self) -> list[int]:
        found: list[int] = []
        while events := await self.read(StreamId("a"), after=len(found), limit=1_000):
            found += [event.seq for event in events]
        return found


HELD = 1 << 20
"""Bytes that may be held in these tests."""


@pytest.mark.parametrize(("size", "has_room"), [(HELD - 1, True), (HELD, False)])
async def test_what_is_held_has_a_bound_in_bytes(size: int, has_room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise 6, on both sides of the bound: one event is far from the most that may be held, and its bytes are not."""
    monkeypatch.setattr("perdure.log.journal.MOST_HELD_BYTES", HELD)
    inner = MemoryStore()
    store = FaultyStore(inner)
    journal = Journal(store, Settings(), Counters())
    fence = await inner.join(NodeId("n"))
    await inner.commit([PutSession(record=a_session("s")), opening("a", fence=fence)])
    store.writes = Fault.RAISES
    event = Event(1, 1.0, b"x" * size)
    await journal.write(Append(stream=StreamId("a"), fence=fence, events=(event,)))
    assert (journal.is_degraded, journal.backlog.has_room, journal.refuses) == (True, has_room, not has_room)
    store.works()
    await journal.backlog.wait_for_room()
    await journal.aclose()
    assert list(await inner.read(StreamId("a"), after=0, limit=9)) == [event]


async def test_what_is_queued_in_one_turn_is_written_as_one_group_in_order() -> None:
    store = MemoryStore()
    journal = Journal(store, Settings(), Counters())
    fence = await store.join(NodeId("n"))
    await store.commit([PutSession(record=a_session("s"))])
    for step in (opening("a", fence=fence), message("a", fence=fence, seq=1), message("a", fence=fence, seq=2)):
        journal.put(Steps([step]))
    assert await stream_by_id(store, StreamId("a")) is None
    await journal.write(message("a", fence=fence, seq=3))
    assert [event.seq for event in await store.read(StreamId("a"), after=0, limit=9)] == [1, 2, 3]


async def test_what_was_accepted_while_the_store_failed_is_not_refused_for_a_limit_afterwards() -> None:
    """Its client has its answer, and nobody could count meanwhile."""
    inner = MemoryStore()
    store = FaultyStore(inner)
    journal = Journal(store, Settings(), Counters())
    fence = await store.join(NodeId("n"))
    await inner.commit([PutSession(record=a_session("s")), opening("a", fence=fence)])
    store.writes = Fault.RAISES
    limits = SessionLimits(total=1, caller=1)
    await journal.write(PutSession(record=a_session("one more"), limits=limits))
    calls = tuple(a_call(id_, stream="b", session="s") for id_ in (1, 2))
    await journal.write(replace(opening("b", fence=fence), calls=calls, most_calls=1))
    assert journal.is_degraded
    store.works()
    await until(lambda: not journal.is_degraded)
    assert await count_open(inner) == 2
    assert len(await inner.calls(SessionId("s"))) == 2
    await journal.aclose()


async def test_what_may_not_be_held_is_refused_while_the_store_fails_and_holds_up_nothing_else() -> None:
    """Both where the failure is met, and behind it."""
    inner = MemoryStore()
    store = FaultyStore(inner)
    journal = Journal(store, Settings(on_store_failure="hold"), Counters())
    store.writes = Fault.RAISES
    for name in ("first", "second"):
        with pytest.raises(StoreUnavailable):
            await journal.write(PutSession(record=a_session(name)), may_be_held=False)
        await journal.write(PutSession(record=a_session(f"held {name}")))
    store.works()
    await until(lambda: not journal.is_degraded)
    await journal.write(PutSession(record=a_session("third")), may_be_held=False)
    names = ("first", "second", "held first", "held second", "third")
    assert [record.id for record in await existing(inner, *names)] == ["held first", "held second", "third"]
    await journal.aclose()


async def test_a_step_that_asks_for_the_impossible_is_refused_alone_and_holds_nobody_up(tmp_path: Path) -> None:
    """A time that is no number cannot be written, however often it is tried; the others have done nothing wrong."""
    async with SqliteStore(str(tmp_path / "log.db")) as store:
        journal = Journal(store, Settings(), Counters())
        fence = await store.join(NodeId("n"))
        await store.commit([PutSession(record=a_session("s"))])
        failures: list[StoreError] = []

        async def write(step: OpenStream) -> None:
            try:
                await journal.write(step)
            except StoreError as failure:
                failures.append(failure)

        async with anyio.create_task_group() as tasks:
            for name, opened in (("before", 1.0), ("impossible", math.nan), ("after", 1.0)):
                tasks.start_soon(write, opening(name, fence=fence, opened=opened))
        assert len(failures) == 1
        assert [await stream_by_id(store, StreamId(n)) is not None for n in ("before", "impossible", "after")] == [
            True,
            False,
            True,
        ]
        assert not journal.is_degraded
        await journal.aclose()


# Bounds of a group


@pytest.mark.parametrize(
    ("size", "count", "groups"),
    [
        (GROUP_BYTES // 2, 6, [2, 2, 2]),
        (GROUP_BYTES // 2 - 1, 6, [3, 3]),
        (2 * GROUP_BYTES, 3, [1, 1, 1]),
        # A step and its event are two.
        (2, GROUP_STEPS // 2, [GROUP_STEPS // 2]),
        (2, GROUP_STEPS // 2 + 1, [GROUP_STEPS // 2, 1]),
    ],
    ids=["half the bytes each", "a byte less", "twice the bytes each", "all the steps", "one more"],
)
@pytest.mark.parametrize("held", [False, True], ids=["healthy", "after an outage"])
async def test_a_group_is_bounded_and_the_rest_follows_in_order(
    held: bool, size: int, count: int, groups: list[int]
) -> None:
    store = Recorded()
    fence = await store.prepare()
    journal = Journal(store, Settings(), Counters())
    store.writes = Fault.RAISES if held else Fault.NONE
    for seq in range(1, count + 1):
        journal.put(Steps([message("a", fence=fence, seq=seq, size=size)]))
    if held:
        await until(lambda: journal.is_degraded)
    store.works()
    await journal.aclose()
    assert store.groups == groups
    assert await store.numbers() == list(range(1, count + 1))


# The store's time


async def test_an_event_loop_that_stands_still_does_not_make_the_store_fail(tmp_path: Path) -> None:
    """Promise 7: what is accepted on a healthy disk is written, however busy the machine is."""
    counters = Counters()
    # full: all of it by its thread
    async with SqliteStore(str(tmp_path / "log.db"), sync="full", busy_timeout=0.2) as store:
        journal = Journal(store, Settings(store_timeout=0.2), counters)
        fence = await store.join(NodeId("n"))
        await store.commit([PutSession(record=a_session("s")), opening("a", fence=fence)])
        for seq in range(1, 4):
            writing = asyncio.create_task(journal.write(message("a", fence=fence, seq=seq)))
            reading = asyncio.create_task(journal.store.read(StreamId("a"), after=0, limit=9))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            time.sleep(0.5)  # noqa: ASYNC251 - the loop is late, the store is not
            await writing
            assert [event.seq for event in await reading] in (list(range(1, seq)), list(range(1, seq + 1)))
        assert counters.outages == 0
        assert [event.seq for event in await store.read(StreamId("a"), after=0, limit=9)] == [1, 2, 3]
        await journal.aclose()


async def test_what_is_queued_at_the_end_is_written_however_long_it_takes_as_long_as_the_store_works() -> None:
    store = Recorded()
    fence = await store.prepare()
    journal = Journal(store, Settings(store_timeout=0.1), Counters())
    store.pause = 0.05
    for seq in range(1, 11):
        journal.put(Steps([message("a", fence=fence, seq=seq, size=GROUP_BYTES)]))
    await journal.aclose()
    assert await store.numbers() == list(range(1, 11))
    assert store.groups == [1] * 10


@pytest.mark.parametrize("fault", [Fault.HANGS, Fault.LATE])
async def test_a_store_that_hangs_is_told_and_caught_up_with(fault: Fault) -> None:
    store = Recorded()
    fence = await store.prepare()
    counters = Counters()
    journal = Journal(store, Settings(store_timeout=0.1), counters)
    store.writes = fault
    await journal.write(message("a", fence=fence, seq=1))
    assert (journal.is_degraded, counters.outages) == (True, 1)
    store.works()
    await until(lambda: not journal.is_degraded)
    assert await store.numbers() == [1]
    await journal.aclose()


class FailsHalfWay(FaultyStore):
    """Refuses groups that ask for the impossible, and is away once the first part of such a group is written."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.parts = 0

    async def prepare(self, fence: Fence) -> None:
        await super().commit([PutSession(record=a_session("s")), opening("a", fence=fence)])

    def commit_now(self, steps: Sequence[Step]) -> Refusals | None:
        return None

    async def commit(self, steps: Sequence[Step]) -> Refusals:
        if any(isinstance(step, OpenStream) for step in steps):
            raise StoreError("impossible")
        self.parts += 1
        if self.parts == 2:
            raise StoreUnavailable("away")
        return await super().commit(steps)


async def test_no_source_is_told_twice_where_the_store_fails_in_the_middle_of_a_group() -> None:
    """The first was written and told; the others are held, and told when the store is back."""
    store, seen = FailsHalfWay(), list[str]()
    fence = await store.join(NodeId("n"))
    await store.prepare(fence)
    journal = Journal(store, Settings(), Counters())
    for seq in (1, 2):
        journal.put(Witness(message("a", fence=fence, seq=seq), seen))
    await journal.write(opening("b", fence=fence))  # it is held as well, and refused behind that
    await journal.aclose()
    assert seen == ["written", "held", "written"]
    assert [event.seq for event in await store.read(StreamId("a"), after=0, limit=9)] == [1, 2]


class Witness(Steps):
    """Writes down when its steps are held and written."""

    __slots__ = ("seen",)

    def __init__(self, step: Append, seen: list[str]) -> None:
        super().__init__((step,))
        self.seen = seen

    def held(self, steps: Sequence[Step]) -> None:
        self.seen.append("held")

    def written(self, steps: Sequence[Step]) -> None:
        self.seen.append("written")


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("hold", ["holds True", "held", "written", "holds False"]),
        ("refuse", ["written"]),
    ],
)
async def test_others_are_told_before_anything_is_shown_that_is_not_written(setting: Any, told: list[str]) -> None:
    """And that nothing is held only when all of it is written. Who refuses shows nothing, and has nothing to tell."""
    store, seen = FaultyStore(MemoryStore()), list[str]()
    settings = Settings(on_store_failure=setting, store_timeout=0.2)
    journal = Journal(store, settings, Counters(), on_holding=lambda holding: seen.append(f"holds {holding}"))
    fence = await store.join(NodeId("n"))
    await store.commit([PutSession(record=a_session("s")), opening("a", fence=fence)])
    store.writes = Fault.RAISES
    journal.put(Witness(message("a", fence=fence, seq=1), seen))
    await until(lambda: journal.is_degraded)
    store.works()
    await until(lambda: not journal.is_degraded)
    assert seen == told
    await journal.aclose()


def recoveries(caplog: pytest.LogCaptureFixture) -> list[str]:
    told = ("store.recovered", "journal.lost")
    return [record.getMessage() for record in caplog.records if getattr(record, "action", "") in told]


async def test_a_frozen_node_writes_and_shows_nothing_and_keeps_everything(caplog: pytest.LogCaptureFixture) -> None:
    """Also where the store would take it: another node may be the writer by now. Callers that wait are refused."""
    store, seen, claim = Recorded(), list[str](), Claim()
    fence = await store.prepare()
    journal = Journal(store, Settings(), Counters(), claim=claim)
    assert not journal.refuses
    claim.until = -math.inf
    assert journal.refuses
    for seq in (1, 2):
        journal.put(Witness(message("a", fence=fence, seq=seq), seen))
    with pytest.raises(StoreUnavailable):
        await journal.write(opening("b", fence=fence))
    assert (journal.is_degraded, seen, store.groups) == (True, [], [])
    claim.renew(math.inf, now=0.0)
    await until(lambda: not journal.is_degraded)
    assert await store.numbers() == [1, 2]
    assert seen == ["written", "written"]
    assert recoveries(caplog) == ["the store is back; all held steps are written"]
    assert not journal.refuses
    await journal.aclose()


async def test_what_was_held_when_a_node_froze_is_written_when_it_goes_on() -> None:
    store, seen, claim = Recorded(), list[str](), Claim()
    fence = await store.prepare()
    journal = Journal(store, Settings(), Counters(), claim=claim)
    store.writes = Fault.RAISES
    journal.put(Witness(message("a", fence=fence, seq=1), seen))
    await until(lambda: seen == ["held"])
    claim.until = -math.inf
    journal.put(Witness(message("a", fence=fence, seq=2), seen))
    store.works()
    asked = store.asked
    for _ in range(20):
        await asyncio.sleep(0.01)  # attempts come and go meanwhile
    assert (seen, store.asked - asked) == (["held"], 0)
    claim.renew(math.inf, now=0.0)
    await until(lambda: not journal.is_degraded)
    assert await store.numbers() == [1, 2]
    await journal.aclose()


async def test_what_a_frozen_node_held_is_not_shown_before_the_store_has_it() -> None:
    """Promise 1: its claim holds again as soon as a beat goes through, but another node has taken the stream."""
    store, seen, claim = Recorded(), list[str](), Claim()
    fence = await store.prepare()
    journal = Journal(store, Settings(), Counters(), claim=claim)
    store.writes = Fault.RAISES
    journal.put(Witness(message("a", fence=fence, seq=1), seen))
    await until(lambda: seen == ["held"])
    claim.until = -math.inf
    asked = store.asked
    journal.put(Witness(message("a", fence=fence, seq=2), seen))
    await asyncio.sleep(0)
    claim.renew(math.inf, now=0.0)
    journal.put(Witness(message("a", fence=fence, seq=3), seen))
    await until(lambda: store.asked > asked + 1)
    assert (seen, journal.may_show, journal.refuses) == (["held"], False, True)
    store.writes = Fault.NONE
    assert await store.claim(StreamId("a"), node=NodeId("other"), held=fence) is not None
    await until(lambda: not journal.is_degraded)
    assert ("held" in seen[1:], journal.may_show, journal.refuses) == (False, True, False)
    assert await store.numbers() == []
    await journal.aclose()


async def test_a_node_that_is_buried_has_everything_refused_and_says_what_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, claim, told = Recorded(), Claim(), list[bool]()
    fence = await store.prepare()
    journal = Journal(store, Settings(), Counters(), claim=claim, on_holding=told.append)
    store.writes = Fault.RAISES
    await journal.write(message("a", fence=fence, seq=1))
    claim.until = -math.inf
    journal.put(Steps([message("a", fence=fence, seq=2)]))
    await asyncio.sleep(0)
    store.works()
    claim.bury()
    await until(lambda: not journal.backlog.parts)
    with pytest.raises(StaleFence, match="buried"):
        await journal.write(message("a", fence=fence, seq=3))
    await journal.aclose()
    assert (await store.numbers(), told) == ([], [True, False])
    assert recoveries(caplog) == ["this node was buried while the store did not answer it: 2 steps are lost"]


async def test_what_the_store_refuses_in_the_end_is_not_told_as_written(caplog: pytest.LogCaptureFixture) -> None:
    """Another node has become the writer of one stream meanwhile."""
    store = Recorded()
    fence = await store.prepare()
    await store.commit([opening("b", fence=fence)])
    journal = Journal(store, Settings(), Counters())
    store.writes = Fault.RAISES
    await journal.write(message("a", fence=fence, seq=1))
    await journal.write(message("b", fence=fence, seq=1))
    store.writes = Fault.NONE
    assert await store.claim(StreamId("b"), node=NodeId("other"), held=fence) is not None
    await until(lambda: not journal.is_degraded)
    assert recoveries(caplog) == ["the store is back; the held steps are written, but for 1 that it refused"]
    await journal.aclose()
