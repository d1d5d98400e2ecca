"""The journal on its own: groups, order, and steps that no store could take."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from perdure._core.ids import Fence, Kind, NodeId, SessionId, StreamId
from perdure._core.states import LogState
from perdure.errors import StoreError
from perdure.journal import Journal, Steps
from perdure.observe import Counters
from perdure.settings import Settings
from perdure.store import MemoryStore, SqliteStore
from perdure.store.base import Append, Event, OpenStream, PutSession, SessionLimits, StreamRecord
from perdure.testing._values import a_call, a_session
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.site import until

pytestmark = pytest.mark.anyio


def opening(name: str, *, fence: Fence, opened: float = 1.0) -> OpenStream:
    node, session = NodeId("n"), SessionId("s")
    record = StreamRecord(id=StreamId(name), session=session, kind=Kind.CALL, node=node, fence=fence, opened=opened)
    return OpenStream(record=record)


def message(stream: str, *, fence: Fence, seq: int) -> Append:
    return Append(stream=StreamId(stream), fence=fence, events=(Event(seq, 1.0, b"{}"),))


async def test_what_is_queued_in_one_turn_is_written_as_one_group_in_order() -> None:
    store = MemoryStore()
    journal = Journal(store, Settings(), Counters())
    fence = await store.join(NodeId("n"))
    await store.commit([PutSession(record=a_session("s"))])
    for step in (opening("a", fence=fence), message("a", fence=fence, seq=1), message("a", fence=fence, seq=2)):
        journal.put(Steps([step]))
    assert await store.stream(StreamId("a")) is None
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
    assert journal.state is LogState.DEGRADED
    store.works()
    await until(lambda: journal.state is LogState.HEALTHY)
    assert await inner.count_sessions() == 2
    assert len(await inner.calls(SessionId("s"))) == 2
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
        assert [await store.stream(StreamId(n)) is not None for n in ("before", "impossible", "after")] == [
            True,
            False,
            True,
        ]
        assert journal.state is LogState.HEALTHY
        await journal.aclose()
