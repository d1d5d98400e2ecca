"""Several nodes share one store in memory: leases decide which nodes are dead, hints pass through the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from perdure._core.ids import NodeId, StreamId
from perdure._core.states import ClaimState
from perdure.store.memory import MemoryStore
from perdure.store.steps import OpenStream, PutSession
from perdure.testing._values import a_session, a_stream, count_open, dead_nodes, put

pytestmark = pytest.mark.anyio

A, B = NodeId("a"), NodeId("b")
LEASE = 20.0
HOLDING, FROZEN = ClaimState.HOLDING, ClaimState.FROZEN


class Clock:
    now = 500.0

    def __call__(self) -> float:
        return self.now


async def test_a_silent_node_lapses_by_its_own_clock_and_then_is_dead_for_the_other() -> None:
    store, clock = MemoryStore(), Clock()
    await store.join(A)
    fence = await store.join(B)
    alive, silent = (store.liveness(node, lease=LEASE, monotonic=clock) for node in (A, B))
    await put(store, PutSession(record=a_session()), OpenStream(record=a_stream(fence, node=B)))
    seen = []
    for _ in range(int(LEASE) + 1):
        await alive.beat(b"{}")
        seen.append((silent.node_claim.at(clock.now), await dead_nodes(alive)))
        clock.now += 1
    assert seen == [(HOLDING, [])] * 15 + [(FROZEN, [])] * 5 + [(FROZEN, [B])]
    assert alive.node_claim.at(clock.now) is HOLDING
    assert alive.ages() == {A: 1.0, B: LEASE + 1}


async def test_a_node_that_lapsed_goes_on_with_its_next_beat() -> None:
    store, clock = MemoryStore(), Clock()
    await store.join(A)
    view = store.liveness(A, lease=LEASE, monotonic=clock)
    await store.join(B)
    clock.now += LEASE
    assert view.node_claim.at(clock.now) is FROZEN
    await view.beat(b'{"alive":true}')
    assert view.node_claim.at(clock.now) is HOLDING
    assert (await store.nodes())[0].facts == b'{"alive":true}'


async def test_a_node_that_is_alone_holds_its_claims_however_long_it_was_silent() -> None:
    """A tool that blocks the event loop for a minute must not stop the only server for good."""
    store, clock = MemoryStore(), Clock()
    await store.join(A)
    view = store.liveness(A, lease=LEASE, monotonic=clock)
    clock.now += 10 * LEASE
    assert view.node_claim.at(clock.now) is HOLDING
    await store.join(B)
    clock.now += 0.7 * LEASE
    assert view.node_claim.at(clock.now) is HOLDING
    clock.now += 0.1 * LEASE
    assert view.node_claim.at(clock.now) is FROZEN


async def test_a_node_that_was_buried_holds_nothing_more() -> None:
    store, clock = MemoryStore(), Clock()
    await store.join(A)
    await store.join(B)
    view = store.liveness(B, lease=LEASE, monotonic=clock)
    assert view.node_claim.at(clock.now) is HOLDING
    await store.bury(B, heir=A)
    await view.beat(b"{}")
    assert view.node_claim.at(clock.now) is ClaimState.BURIED
    assert [node.id for node in await store.nodes()] == [A]


async def test_a_hint_comes_in_a_later_turn_of_the_loop_and_never_after_the_end() -> None:
    """The node that hints is not interrupted by what the other node does."""
    store = MemoryStore()
    await store.join(A)
    told: list[Sequence[StreamId]] = []
    stop = store.subscribe(A, lambda streams: told.append(streams))
    store.hint(A, [StreamId("x")])
    assert told == []
    await asyncio.sleep(0)
    assert told == [(StreamId("x"),)]
    store.hint(A, [StreamId("y")])
    stop()
    await asyncio.sleep(0)
    assert told == [(StreamId("x"),)]


async def test_one_node_closes_the_store_and_the_other_goes_on() -> None:
    store = MemoryStore()
    async with store:
        async with store:
            await put(store, PutSession(record=a_session()))
        assert await count_open(store) == 1
