"""Nodes on a store without locks: leases tell who is dead, and no wall clock decides anything."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from perdure._core.ids import Fence, NodeId, SessionId, StreamId
from perdure._core.states import ClaimState
from perdure.store import MemoryStore
from perdure.store.interface import Liveness, Store
from perdure.store.records import SessionRecord, StreamRecord
from perdure.store.steps import Append, Refusals, Step
from tests.support.clients.wire_client import Ended, Peer, progress_of, text_of
from tests.support.servers.in_process import Site, serve, until
from tests.support.stores.dead_node import DeadNode, Library
from tests.support.stores.faulty_store import Fault, FaultyStore

pytestmark = pytest.mark.anyio

#: Long enough for a busy machine to beat in time, short enough to wait for.
LEASE = 2.0
#: The errors of an outage that is longer than a lease, and of a node that was buried in one.
EXPECTED = "lease has lapsed|took this node for dead|store fails|buried|steps are lost"
ANSWERS_NOT = {"code": -31005, "message": "The log of this server has not answered for too long; try again"}


class Shared(MemoryStore):
    """One store for several applications: it is closed by nobody."""

    async def aclose(self) -> None:
        pass


@dataclass(kw_only=True)
class Node:
    site: Site
    shop: Library
    store: FaultyStore

    def cut_off(self, fault: Fault = Fault.RAISES) -> None:
        """From now on the store does not answer this node."""
        self.store.reads = self.store.writes = fault

    async def is_frozen(self) -> bool:
        return await self.health() == (503, "degraded")

    async def is_well(self) -> bool:
        return await self.health() == (200, "ok")

    async def health(self) -> tuple[int, str]:
        response = await self.site.http.get(self.site.url.removesuffix("/mcp") + "/healthz")
        return response.status_code, response.json()["status"]


class ProxiedNodes:
    def __init__(self, stack: AsyncExitStack) -> None:
        self.shared = Shared()
        self._stack = stack

    async def node(self, store: FaultyStore | None = None, **options: Any) -> Node:
        shop, store = Library(), store or FaultyStore(self.shared)
        site = await self._stack.enter_async_context(
            serve(
                shop.server,
                store=store,
                lease=options.pop("lease", LEASE),
                store_timeout=1.0,
                complaint=EXPECTED,
                **options,
            )
        )
        return Node(site=site, shop=shop, store=store)


@pytest.fixture
async def town() -> AsyncIterator[ProxiedNodes]:
    async with AsyncExitStack() as stack:
        yield ProxiedNodes(stack)


async def test_a_node_that_fell_silent_is_settled_after_its_lease_and_not_before(town: ProxiedNodes) -> None:
    node = await town.node()
    peer, dead_node = await node.site.join(), await DeadNode.joining(town.shared)
    liveness = town.shared.liveness(dead_node.node, lease=LEASE, monotonic=time.monotonic)
    left = await dead_node.take(peer.session, peer.tool("put", key="k"))
    await liveness.beat(b"{}")
    beaten = time.monotonic()
    reader = await peer.get(left.position())
    assert text_of((await reader.rest())[-1]) == "put k"
    assert time.monotonic() - beaten >= LEASE
    assert liveness.node_claim.at(time.monotonic()) is ClaimState.BURIED


@pytest.mark.parametrize(("seconds", "fault"), [(14.0, Fault.RAISES), (60.0, Fault.HANGS)])
async def test_an_outage_beyond_the_lease_freezes_every_node_and_loses_nothing(
    town: ProxiedNodes, seconds: float, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    """Promises 3 and 7: no node could have acted meanwhile, because none could write. Time passes on the clock for
    leases only; the outage itself is short."""
    nodes = [await town.node(lease=15.0), await town.node(lease=15.0)]
    peers = [await node.site.join() for node in nodes]
    wires = [await peer.call("count", n=4, gate="g", pauses=[1, 2], token=1) for peer in peers]
    for wire in wires:
        assert progress_of(await wire.messages(1)) == [1]
    for node in nodes:
        node.cut_off(fault)
        node.shop.open("g/1")  # shown from memory: the lease still runs
    for wire in wires:
        assert progress_of(await wire.messages(1)) == [2]
    for node in nodes:
        node.store.ahead += seconds
        node.shop.open("g/2")
        await until(node.is_frozen)
    for peer, node in zip(peers, nodes, strict=True):
        refusals = [
            await peer.send(peer.tool("look_up", n=1)),
            await peer.try_get(),
            await peer.delete(),
            await Peer(node.site).send(peer.handshake()),
        ]
        assert [(refused.status_code, refused.headers["retry-after"]) for refused in refusals] == [(503, "1")] * 4
        assert [refused.json()["error"] for refused in refusals] == [ANSWERS_NOT] * 4
    for node in nodes:
        node.store.works()
        await until(node.is_well)
    for wire in wires:
        rest = await wire.rest()
        assert progress_of(rest) == [3, 4], "nothing was shown while frozen, and all of it afterwards"
        assert text_of(rest[-1]) == "counted to 4"
    for peer in peers:
        assert await peer.result("look_up", n=1) == "looked up 1"
    assert await _finals(town) == {"counted to 4": 2, "looked up 1": 2}
    assert [node.site.app.counters.nodes_settled for node in nodes] == [0, 0]
    said = [record.getMessage() for record in caplog.records if getattr(record, "action", "") == "store.recovered"]
    assert said == ["the store is back; all held steps are written"] * 2
    await until(lambda: _actions(caplog).count("node.resumed") == 2)
    assert [_actions(caplog).count(action) for action in ("node.lapsed", "node.buried")] == [2, 0]


async def test_a_frozen_node_shows_nothing_more_and_keeps_its_connections(town: ProxiedNodes) -> None:
    """What was accepted before the lease ran out and is not sent yet rests as well; comments keep the way open."""
    node, _ = await town.node(lease=15.0, keepalive_interval=0.2), await town.node(lease=15.0)
    peer = await node.site.join()
    standalone = await peer.get()
    wire = await peer.call("count", n=3, gate="g", pauses=[1], token=1)
    await wire.messages(1)
    node.cut_off()
    node.store.ahead += 20
    await until(node.is_frozen)
    node.shop.open("g/1")
    await until(lambda: "counted 3" in node.shop.seen)
    wire.raw = b""
    await wire.comment("keep-alive")
    await standalone.comment("keep-alive")
    assert b"data" not in wire.raw
    node.store.works()
    rest = await wire.rest()
    assert (progress_of(rest), text_of(rest[-1])) == ([2, 3], "counted to 3")


class LapsesBehindACommit(FaultyStore):
    """The lease runs out between the commit of an event and its delivery, and the store is away from then on."""

    armed = False

    def commit_now(self, steps: Sequence[Step]) -> Refusals | None:
        refusals = super().commit_now(steps)
        if self.armed and any(isinstance(step, Append) for step in steps):
            self.armed = False
            self.ahead += 20
            self.writes = Fault.RAISES
        return refusals


async def test_what_was_written_just_before_the_lease_ran_out_is_shown_when_the_node_goes_on(
    town: ProxiedNodes,
) -> None:
    """No other event comes that would wake its reader."""
    store = LapsesBehindACommit(town.shared)
    node, _ = await town.node(store=store, lease=15.0, keepalive_interval=0.2), await town.node(lease=15.0)
    peer = await node.site.join()
    wire = await peer.call("count", n=2, gate="g", pauses=[1, 2], token=1)
    await wire.messages(1)
    store.armed = True
    node.shop.open("g/1")
    await until(node.is_frozen)
    for _ in range(3):  # the first may be from before
        wire.raw = b""
        await wire.comment("keep-alive")
        assert b"data" not in wire.raw
    store.works()
    assert progress_of(await wire.messages(1)) == [2]
    node.shop.open("g/2")
    assert text_of((await wire.rest())[-1]) == "counted to 2"


async def test_a_node_that_was_cut_off_and_buried_ends_and_its_calls_go_on_elsewhere(
    town: ProxiedNodes, caplog: pytest.LogCaptureFixture
) -> None:
    """Promise 3: its calls are answered by the heir, none twice. It learns of it when the store is back."""
    cut, living = await town.node(), await town.node()
    peer = await cut.site.join()
    wire = await peer.call("look_up", n=2, gate="g", token=1)
    await wire.messages(2)
    await until(lambda: "waiting at g" in cut.shop.seen)
    cut.cut_off()
    await until(cut.is_frozen)
    await until(lambda: living.site.app.counters.nodes_settled == 1)
    assert await cut.is_frozen(), "it cannot know yet"
    living.shop.open("g")
    messages = await (await peer.through(living.site).get(wire.last_id)).rest()
    assert text_of(messages[-1]) == "looked up 2"
    assert len(messages) == 1
    cut.shop.open("g")  # its tool goes on, and is not heard
    cut.store.works()

    async def is_stopping() -> bool:
        return await cut.health() == (503, "stopping")

    await until(is_stopping)
    with pytest.raises(Ended):
        await wire.message()
    events = await town.shared.read((await town.shared.streams(_id(peer.session)))[-1].id, after=0, limit=100)
    assert [event.final for event in events] == [False, False, True]
    assert (await peer.send({"jsonrpc": "2.0", "id": 1, "method": "ping"})).status_code == 503
    assert [_actions(caplog).count(action) for action in ("node.buried", "node.resumed")] == [1, 0]
    assert not any("all held steps are written" in record.getMessage() for record in caplog.records)


async def test_what_a_buried_node_held_is_told_as_lost(town: ProxiedNodes, caplog: pytest.LogCaptureFixture) -> None:
    """The log never says that it was written."""
    cut, living = await town.node(), await town.node()
    peer = await cut.site.join()
    wire = await peer.call("count", n=3, gate="g", pauses=[1, 3], token=1)
    await wire.messages(1)
    cut.cut_off()
    cut.shop.open("g/1")
    assert progress_of(await wire.messages(2)) == [2, 3]  # from memory
    await until(lambda: living.site.app.counters.nodes_settled == 1)
    cut.store.works()
    await until(lambda: "journal.lost" in _actions(caplog))
    assert not any("held steps are written" in record.getMessage() for record in caplog.records)
    events = await town.shared.read((await town.shared.streams(_id(peer.session)))[-1].id, after=0, limit=100)
    assert [event.final for event in events] == [False, True]


class StandsStill(FaultyStore):
    """A process that stands still while it settles a dead node, for longer than its own lease."""

    armed = False
    view: Liveness | None = None

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.claims: list[ClaimState] = []
        """The node's own claim at each claim of a stream."""

    def liveness(self, node: NodeId, *, lease: float, monotonic: Callable[[], float]) -> Liveness:
        self.view = super().liveness(node, lease=lease, monotonic=monotonic)
        return self.view

    async def session(self, session: SessionId) -> SessionRecord | None:
        if self.armed:
            self.armed = False
            self.ahead += 20
        return await super().session(session)

    async def claim(self, stream: StreamId, *, node: NodeId, held: Fence, known: int = 0) -> StreamRecord | None:
        assert self.view is not None
        self.claims.append(self.view.node_claim.at(time.monotonic()))
        return await super().claim(stream, node=node, held=held, known=known)


async def test_a_node_that_stood_still_while_it_settles_claims_nothing_before_it_goes_on(town: ProxiedNodes) -> None:
    """It may have been buried meanwhile: what it claimed then would have no writer for ever."""
    store = StandsStill(town.shared)
    node = await town.node(store=store)
    peer, dead_node = await node.site.join(), await DeadNode.joining(town.shared)
    left = await dead_node.take(peer.session, peer.tool("put", key="k"))
    store.claims.clear()
    store.armed = True
    await until(lambda: node.site.app.counters.nodes_settled == 1)
    assert not store.armed
    assert store.claims == [ClaimState.HOLDING]
    assert text_of((await (await peer.get(left.position())).rest())[-1]) == "put k"


async def test_a_node_whose_beats_pause_for_less_than_a_lease_goes_on_by_itself(town: ProxiedNodes) -> None:
    """As a process does that stood still: behind the pause it first finds its lease run out, then beats."""
    paused, other = await town.node(lease=15.0), await town.node(lease=15.0)
    peer = await paused.site.join()
    wire = await peer.call("look_up", n=2, gate="g", token=1)
    await wire.messages(2)
    paused.cut_off(Fault.HANGS)
    paused.store.ahead += 13
    await until(paused.is_frozen)
    paused.store.works()
    await until(paused.is_well)
    paused.shop.open("g")
    assert text_of((await wire.rest())[-1]) == "looked up 2"
    assert [node.site.app.counters.nodes_settled for node in (paused, other)] == [0, 0]


async def test_a_node_that_is_back_before_it_is_buried_keeps_what_was_not_taken_from_it(
    town: ProxiedNodes, caplog: pytest.LogCaptureFixture
) -> None:
    """It was found dead and one of its calls is claimed; then its beat is back. The call has one answer, by its heir;
    the node goes on and takes new ones."""
    slow, living = await town.node(), await town.node()
    peer = await slow.site.join()
    wire = await peer.call("look_up", n=2, gate="g", token=1)
    await wire.messages(2)
    living.store.before_burial = asyncio.Event()
    slow.cut_off()
    await until(lambda: living.store.burials == 1)
    slow.store.works()
    await until(slow.is_well)
    assert await peer.result("look_up", n=1) == "looked up 1"
    living.store.before_burial.set()
    await until(lambda: "node.back" in _actions(caplog))
    for node in (slow, living):
        node.shop.open("g")
    messages = await (await peer.through(living.site).get(wire.last_id)).rest()
    assert text_of(messages[-1]) == "looked up 2"
    assert await peer.result("look_up", n=3) == "looked up 3"
    assert await _finals(town) == {"looked up 1": 1, "looked up 2": 1, "looked up 3": 1}
    assert living.site.app.counters.nodes_settled == 0


async def test_a_clock_on_the_wall_that_jumps_settles_nobody(
    town: ProxiedNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
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


async def _finals(town: ProxiedNodes) -> Counter[str]:
    """The answers of tools in the store, each as often as it is there."""
    answers = [
        json.loads(event.payload)["result"]
        for row in town.shared._streams.values()
        for event in row.events
        if event.final
    ]
    return Counter(result["content"][0]["text"] for result in answers if "content" in result)


def _actions(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [getattr(record, "action", "") for record in caplog.records]


def _beats(town: ProxiedNodes) -> int:
    return min(row.record.beat for row in town.shared._nodes.values())


def _id(session: str) -> Any:
    return session
