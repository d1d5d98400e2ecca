"""A store that does not keep its time is limited from outside: its callers get an answer, or a failure with a name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import pytest

from perdure._core.ids import NodeId, SessionId
from perdure._core.states import ClaimState
from perdure.errors import StoreTooNew, StoreUnavailable
from perdure.store.interface import Liveness, Store
from perdure.store.memory import MemoryStore
from perdure.store.records import Event, SessionRecord
from perdure.store.steps import PutSession, Refusals, Step
from perdure.store.time_limit import CALLS, within_time
from perdure.testing import check_store
from perdure.testing._values import NODE, SESSION, STREAM, a_session, dead_nodes, put
from tests.support.stores.faulty_store import Fault, FaultyStore

pytestmark = pytest.mark.anyio

LIMIT = 0.1
STUCK = "did not answer within 0.1 s"


async def test_a_store_within_its_time_is_the_store_that_it_was() -> None:
    """Every promise holds through the limit, and the last of them because of it."""
    stores: dict[str, FaultyStore] = {}

    def make(name: str) -> Store:
        stores[name] = FaultyStore(MemoryStore())
        return within_time(stores[name], 1.0)

    @contextmanager
    def hang(name: str) -> Iterator[None]:
        stores[name].writes = stores[name].reads = Fault.HANGS
        yield
        stores[name].works()

    await check_store(make, durable=False, hang=hang)


def test_the_interfaces_say_what_is_limited() -> None:
    assert {"commit", "read", "session", "claim", "sweep", "mail"} <= CALLS
    assert {name for name in CALLS if hasattr(Liveness, name)} == {"beat", "holders", "overview"}
    assert CALLS.isdisjoint({"commit_now", "hint", "stamp", "clock", "subscribe", "liveness", "holds", "hold", "ages"})


async def test_calls_that_hang_fail_by_name_and_the_next_ones_are_answered() -> None:
    faulty = FaultyStore(MemoryStore())
    store = within_time(faulty, LIMIT)
    await store.join(NODE)
    faulty.writes = faulty.reads = Fault.HANGS
    for call in (
        store.commit([PutSession(record=a_session())]),
        store.read(STREAM, after=0, limit=1),
        store.join(NodeId("another")),
        store.session(SESSION),
    ):
        with pytest.raises(StoreUnavailable, match=STUCK):
            await call
    faulty.works()
    assert list(await put(store, PutSession(record=a_session()))) == [None]
    assert await store.session(SESSION) == a_session()


async def test_a_nodes_view_of_the_others_is_limited_as_well() -> None:
    faulty = FaultyStore(MemoryStore())
    store = within_time(faulty, LIMIT)
    await store.join(NODE)
    view = store.liveness(NODE, lease=15.0, monotonic=lambda: 0.0)
    faulty.writes = faulty.reads = Fault.HANGS
    for call in (view.beat(b"{}"), dead_nodes(view)):
        with pytest.raises(StoreUnavailable, match=STUCK):
            await call
    faulty.works()
    await view.beat(b"{}")
    assert await dead_nodes(view) == []
    claims = [view.own_claim]
    await store.leave(NODE)
    assert [*claims, view.own_claim] == [ClaimState.HOLDING, ClaimState.BURIED], "a property is asked each time"


async def test_what_is_not_a_call_is_looked_at_again_each_time() -> None:
    inner = FaultyStore(MemoryStore())
    store = within_time(inner, LIMIT)
    assert not store.shared
    inner.shared = True
    assert store.shared
    assert store.keeps_time, "it does now"
    assert store.clock() <= store.clock()


async def test_a_store_that_breaks_is_a_store_in_trouble() -> None:
    faulty = FaultyStore(MemoryStore())
    store = within_time(faulty, LIMIT)
    faulty.reads = Fault.BREAKS
    with pytest.raises(StoreUnavailable, match=r"the store broke: ZeroDivisionError\('a store with a bug'\)") as broke:
        await store.session(SESSION)
    assert isinstance(broke.value.__cause__, ZeroDivisionError)
    faulty.reads = Fault.RAISES
    with pytest.raises(StoreUnavailable, match="the switch is off"):
        await store.session(SESSION)


class Odd(MemoryStore):
    """Writes its calls as plain functions, as decorators and wrappers do."""

    def session(self, session: SessionId) -> asyncio.Future[SessionRecord | None]:  # type: ignore[override]
        if session != SESSION:
            raise KeyError(session)
        return asyncio.get_running_loop().create_future()

    async def reattach(self, session: SessionId) -> SessionRecord | None:
        raise StoreTooNew("a newer release has been here")


async def test_calls_are_limited_however_the_store_writes_them() -> None:
    store = within_time(cast("Store", Odd()), LIMIT)
    with pytest.raises(StoreUnavailable, match=STUCK):
        await store.session(SESSION)
    with pytest.raises(StoreUnavailable, match="KeyError"):
        await store.session(SessionId("unknown"))
    with pytest.raises(StoreTooNew, match="a newer release"):
        await store.reattach(SESSION)


class KeepsTime(MemoryStore):
    """Knows by itself what is stuck, and takes its time."""

    keeps_time = True

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()
        self.asked = asyncio.Event()

    async def read(self, stream: str, *, after: int, limit: int) -> Sequence[Event]:
        self.asked.set()
        await self.answers.wait()
        return ()

    async def commit(self, steps: Sequence[Step]) -> Refusals:
        raise ZeroDivisionError


async def test_a_store_that_keeps_its_time_is_not_limited_again() -> None:
    inner = KeepsTime()
    store = within_time(inner, 0.001)
    reading = asyncio.create_task(store.read(STREAM, after=0, limit=1))
    await inner.asked.wait()
    await asyncio.sleep(0.05)  # many times the limit that another store would have
    assert not reading.done()
    inner.answers.set()
    assert list(await reading) == []
    with pytest.raises(StoreUnavailable, match="the store broke"):
        await store.commit([])


async def test_a_caller_that_leaves_is_no_failure_of_the_store() -> None:
    faulty = FaultyStore(MemoryStore())
    store = within_time(faulty, 60.0)
    faulty.reads = Fault.HANGS
    reading = asyncio.create_task(store.session(SESSION))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_a_store_opens_and_closes_through_the_limit() -> None:
    class Counted(MemoryStore):
        opened = closed = 0

        async def open(self) -> None:
            self.opened += 1

        async def aclose(self) -> None:
            self.closed += 1

    inner = Counted()
    async with within_time(inner, LIMIT) as store:
        await store.join(NODE)
        assert [node.id for node in await inner.nodes()] == [NODE]
    assert (inner.opened, inner.closed) == (1, 1)
