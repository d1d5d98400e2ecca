"""Nodes on a store without locks: leases tell who is dead, and no wall clock decides anything."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from perdure.store import MemoryStore
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.ghost import Ghost, Library
from tests.support.site import Site, serve, until
from tests.support.wire import Ended, text_of

pytestmark = pytest.mark.anyio

#: Long enough for a busy machine to beat in time, short enough to wait for.
LEASE = 2.0
LAPSED = "lease has lapsed"


class Shared(MemoryStore):
    """One store for several applications: it is closed by nobody."""

    async def aclose(self) -> None:
        pass


@dataclass(kw_only=True)
class Node:
    site: Site
    shop: Library
    store: FaultyStore

    def cut_off(self) -> None:
        """From now on the store does not answer this node."""
        self.store.reads = self.store.writes = Fault.RAISES

    async def health(self) -> tuple[int, str]:
        response = await self.site.http.get(self.site.url.removesuffix("/mcp") + "/healthz")
        return response.status_code, response.json()["status"]


class Town:
    def __init__(self, stack: AsyncExitStack) -> None:
        self.shared = Shared()
        self._stack = stack

    async def node(self, **options: Any) -> Node:
        shop, store = Library(), FaultyStore(self.shared)
        site = await self._stack.enter_async_context(
            serve(
                shop.server,
                store=store,
                lease=LEASE,
                store_timeout=1.0,
                complaint=f"{LAPSED}|store fails|lost",
                **options,
            )
        )
        return Node(site=site, shop=shop, store=store)


@pytest.fixture
async def town() -> AsyncIterator[Town]:
    async with AsyncExitStack() as stack:
        yield Town(stack)


async def test_a_node_that_fell_silent_is_settled_after_its_lease_and_not_before(town: Town) -> None:
    node = await town.node()
    peer, ghost = await node.site.join(), await Ghost.joining(town.shared)
    liveness = town.shared.liveness(ghost.node, lease=LEASE, monotonic=time.monotonic)
    left = await ghost.take(peer.session, peer.tool("put", key="k"))
    await liveness.beat(b"{}")
    beaten = time.monotonic()
    reader = await peer.get(left.position())
    assert text_of((await reader.rest())[-1]) == "put k"
    assert time.monotonic() - beaten >= LEASE
    assert not liveness.holds


async def test_a_node_that_was_cut_off_stops_by_itself_and_its_calls_go_on_elsewhere(town: Town) -> None:
    """Once its lease has lapsed it writes and sends nothing more, also when the store is back."""
    cut, living = await town.node(), await town.node()
    peer = await cut.site.join()
    wire = await peer.call("look_up", n=2, gate="g", token=1)
    await wire.messages(2)
    await until(lambda: "waiting at g" in cut.shop.seen)
    cut.cut_off()

    async def is_stopping() -> bool:
        return await cut.health() == (503, "stopping")

    await until(is_stopping)
    with pytest.raises(Ended):
        await wire.message()
    cut.store.works()
    cut.shop.open("g")  # its tool goes on, and nobody hears of it
    living.shop.open("g")
    messages = await (await peer.through(living.site).get(wire.last_id)).rest()
    assert text_of(messages[-1]) == "looked up 2"
    assert len(messages) == 1
    events = await town.shared.read((await town.shared.streams(_id(peer.session)))[-1].id, after=0, limit=100)
    assert [event.final for event in events] == [False, False, True]
    assert (await peer.send({"jsonrpc": "2.0", "id": 1, "method": "ping"})).status_code == 503


async def test_a_clock_on_the_wall_that_jumps_settles_nobody(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times serve retention only; no decision between processes depends on them."""
    one, other = await town.node(), await town.node()
    peer = await one.site.join()
    wire = await peer.call("look_up", n=1, gate="g", token=1)
    await wire.message()
    before = time.time
    monkeypatch.setattr(time, "time", lambda: before() + 10_000)
    beats = (await town.shared.nodes())[0].beat
    await until(lambda: _beats(town) >= beats + 6)
    monkeypatch.setattr(time, "time", lambda: before() - 10_000)
    await until(lambda: _beats(town) >= beats + 12)
    one.shop.open("g")
    assert text_of((await wire.rest())[-1]) == "looked up 1"
    assert [node.site.app.counters.nodes_settled for node in (one, other)] == [0, 0]
    assert other.shop.seen == []


def _beats(town: Town) -> int:
    return min(row.record.beat for row in town.shared._nodes.values())


def _id(session: str) -> Any:
    return session
