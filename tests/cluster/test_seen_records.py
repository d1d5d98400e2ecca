"""A call costs no read of its session's record: the store refuses it where the record has changed (promise 21)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from perdure._core.ids import SessionId
from perdure.store import SqliteStore
from perdure.store.records import SessionRecord
from tests.cluster.conftest import Node, Pair, Start

pytestmark = pytest.mark.anyio


class WithoutStamps(SqliteStore):
    """Cannot tell at once whether another process has written, as a store on the network; counts reads of records."""

    reads = 0

    def stamp(self) -> object:
        return object()

    async def session(self, session: SessionId) -> SessionRecord | None:
        self.reads += 1
        return await super().session(session)


@pytest.fixture
async def unstamped(tmp_path: Path) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        yield await Start(stack, tmp_path, WithoutStamps)()


def reads(node: Node) -> int:
    store = node.site.store
    assert isinstance(store, WithoutStamps)
    return store.reads


async def test_a_call_reads_no_record_where_its_session_is_in_memory(unstamped: Pair) -> None:
    at_a, _ = await unstamped.join()
    await at_a.result("count", n=1)
    before = reads(unstamped.a)
    for n in (1, 2, 3):
        await at_a.result("count", n=n)
    assert reads(unstamped.a) == before


async def test_a_call_after_a_change_elsewhere_reads_it_once(unstamped: Pair) -> None:
    """The client has begun again elsewhere, and the word of it is late: its call belongs to the new incarnation."""
    at_a, _ = await unstamped.join()
    await at_a.result("count", n=1)
    assert await unstamped.b.site.store.reattach(SessionId(at_a.session)) is not None
    before = reads(unstamped.a)
    await at_a.result("count", n=2)
    await at_a.result("count", n=3)
    assert reads(unstamped.a) == before + 1
    calls = await unstamped.a.site.store.calls(SessionId(at_a.session))
    assert [call.incarnation for call in calls if call.method == "tools/call"] == [1, 2, 2]


async def test_a_call_of_a_session_that_has_ended_elsewhere_is_not_taken(unstamped: Pair) -> None:
    at_a, at_b = await unstamped.join()
    await at_a.result("count", n=1)
    await at_b.result("count", n=1)
    await at_b.delete()
    response = await at_a.send(at_a.tool("count", n=2))
    assert response.status_code == 404
