"""Reading through a node what another one writes: whole and in order (promise 2), whoever dies or loses a hint."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from perdure._core.ids import (
    NodeId,
    SessionId,
    StreamId,
    is_only_listed,
    parse_position,
    reader_name,
    reader_since,
)
from perdure.errors import StoreUnavailable
from perdure.log.nodes import OtherNodes
from perdure.store import MemoryStore
from perdure.store.interface import reader_of, streams_by_id
from perdure.store.records import ReaderRecord
from perdure.store.steps import PutReader
from tests.cluster.conftest import Pair, Start
from tests.support.clients.wire_client import Web, notices_of, progress_of, text_of
from tests.support.processes.serving import BASIC_TOOLS, serving
from tests.support.servers.in_process import serve, until
from tests.support.stores.dead_node import DeadNode, Library, life_of, remote_readers_of
from tests.support.stores.faulty_store import Fault, FaultyStore
from tests.support.stores.shared_store import SharedStore, shared_address

pytestmark = pytest.mark.anyio

READERS = 20
EVENTS = 1_000


class Forgetful(SharedStore):
    """Loses half of the hints that are to be sent."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.lost = 0
        self._dice = random.Random(1)

    def hint(self, node: NodeId, streams: Sequence[StreamId]) -> None:
        if self._dice.random() < 0.5:
            self.lost += 1
        else:
            super().hint(node, streams)


async def test_lost_hints_cost_time_and_nothing_else(tmp_path: Path) -> None:
    """Each of many readers sees each event once, in order; back-pressure comes and goes by hints as well."""
    path = str(tmp_path / "log.db")
    stores = [Forgetful(path), Forgetful(path)]
    shop = Library()
    async with AsyncExitStack() as stack:
        a = await stack.enter_async_context(serve(shop.server, store=stores[0]))
        b = await stack.enter_async_context(serve(Library().server, store=stores[1]))
        await until(lambda: a.app.other_nodes() and b.app.other_nodes())
        peer = await a.join()
        wires = [await peer.call("flood", n=EVENTS, size=1, gate="g", token=n) for n in range(READERS)]
        first = [await wire.messages(1) for wire in wires]
        readers = [await peer.through(b).get(wire.last_id) for wire in wires]
        # A call waits only for readers that its node knows of. It has ended its own for them.
        assert [await wire.rest() for wire in wires] == [[]] * READERS
        shop.open("g")
        rest = await asyncio.gather(*(reader.rest() for reader in readers))
        for messages in (one + more for one, more in zip(first, rest, strict=True)):
            assert progress_of(messages) == list(range(1, EVENTS + 1))
            assert text_of(messages[-1]) == f"flooded {EVENTS}"
        assert all(store.lost for store in stores)


async def test_what_is_read_elsewhere_is_forgotten_when_it_is_over(pair: Pair) -> None:
    """Promise 6: nothing of a call stays in memory, on either side."""
    at_a, at_b = await pair.join()
    for _ in range(3):
        wire = await at_a.call("count", n=2, gate="g", pauses=[1], token=1)
        await wire.message()
        reader = await at_b.get(wire.last_id)
        pair.a.shop.open("g/1")
        await reader.rest()
    for node in (pair.a, pair.b):
        readers, context = remote_readers_of(node.site), life_of(node.site).context
        context.store.hint(context.node, [])  # so that it looks at everything
        await until(lambda it=readers: not (it._lent or it._followed or it._unsure))  # type: ignore[misc]


async def test_the_reader_of_a_dead_node_holds_nobody_back(start: Start, tmp_path: Path) -> None:
    """Slow readers: one that is gone makes no call wait."""
    pair = await start(max_stream_events=50)
    at_a, _ = await pair.join()
    wire = await at_a.call("flood", n=500, size=1, gate="g", token=1)
    await wire.message()
    position = parse_position(wire.last_id)
    assert position is not None
    dead_node = await DeadNode.on(tmp_path / "log.db")
    row = ReaderRecord(stream=position.stream, reader=f"{dead_node.node}.1", node=dead_node.node, seq=1)
    await dead_node.store.commit([PutReader(record=row)])
    session = life_of(pair.a.site).sessions.held(SessionId(at_a.session))
    assert session is not None
    await remote_readers_of(pair.a.site).read_reader(session.streams[position.stream])
    assert await wire.rest() == []  # overtaken
    pair.a.shop.open("g")
    await until(lambda: pair.a.shop.sent >= 50)
    assert pair.a.shop.sent < 500
    await dead_node.die()
    await until(lambda: pair.a.shop.seen == ["flooded"])


async def row_of(pair: Pair, stream: StreamId) -> tuple[NodeId, bool] | None:
    """The node of the reader that the store has of a stream, and whether it is only listed."""
    row = await reader_of(life_of(pair.a.site).context.store, stream)
    return None if row is None else (row.node, is_only_listed(row.reader))


async def test_a_reader_is_in_the_store_wherever_it_is_and_no_longer_than_it_is_there(pair: Pair) -> None:
    at_a, at_b = await pair.join()
    a, b = (life_of(node.site).context.node for node in (pair.a, pair.b))
    session = life_of(pair.a.site).sessions.held(SessionId(at_a.session))
    assert session is not None
    stream = session.standalone.id
    here = await at_a.get()
    await until_row(pair, stream, (a, True))
    row = await reader_of(life_of(pair.b.site).context.store, stream)
    assert row is not None
    assert reader_since(row.reader) == pytest.approx(life_of(pair.a.site).context.clock(), abs=60)
    there = await at_b.get()
    await until_row(pair, stream, (b, False))
    assert await here.rest() == []
    back = await at_a.get()
    await until_row(pair, stream, (a, True))
    assert await there.rest() == []
    await back.drop()
    await until_row(pair, stream, None)


async def until_row(pair: Pair, stream: StreamId, row: tuple[NodeId, bool] | None) -> None:
    while await row_of(pair, stream) != row:
        pass


async def test_a_reader_that_a_dead_node_has_listed_takes_the_place_of_no_other_one(
    start: Start, tmp_path: Path
) -> None:
    """As after a crash: the client is back at the node that writes the stream now, and the old row is still there."""
    pair = await start()
    at_a, _ = await pair.join()
    wire = await at_a.call("count", n=2, gate="g", pauses=[1], token=1)
    await wire.message()
    position = parse_position(wire.last_id)
    session = life_of(pair.a.site).sessions.held(SessionId(at_a.session))
    assert position is not None
    assert session is not None
    dead_node = await DeadNode.on(tmp_path / "log.db")
    name = reader_name(dead_node.node, 1, 1.0, only_listed=True)
    row = ReaderRecord(stream=position.stream, reader=name, node=dead_node.node, seq=1)
    await dead_node.store.commit([PutReader(record=row)])
    await remote_readers_of(pair.a.site).read_reader(session.streams[position.stream])
    pair.a.shop.open("g/1")
    assert text_of((await wire.rest())[-1]) == "counted to 2"
    await dead_node.die()


async def test_a_reader_whose_row_was_taken_by_one_that_has_left_is_ended_so_that_its_client_comes_again(
    pair: Pair,
) -> None:
    """Both came in one moment, and the row of the one that is gone was written last."""
    at_a, at_b = await pair.join()
    a, b = (life_of(node.site).context.node for node in (pair.a, pair.b))
    session = life_of(pair.a.site).sessions.held(SessionId(at_a.session))
    assert session is not None
    stream = session.standalone
    there = await at_b.get()
    await until_row(pair, stream.id, (b, False))
    late = ReaderRecord(stream=stream.id, reader=reader_name(a, 1, 1.0, only_listed=True), node=a, seq=0)
    await session.context.journal.write(PutReader(record=late))
    await remote_readers_of(pair.a.site).read_reader(stream)
    assert await there.rest() == []
    await at_b.get()
    await until_row(pair, stream.id, (b, False))


async def test_a_killed_process_is_settled_live_to_a_reader_at_the_other(address: str) -> None:
    """Promise 11: two processes, kill -9: results and unknown outcomes come long before the lease ends, without another
    request; the session's notices go on at the one that lives."""
    options = ("--store", address, "--lease", "10m")
    async with serving(BASIC_TOOLS, *options) as doomed, serving(BASIC_TOOLS, *options) as living:
        first, second = Web(doomed.url), Web(living.url)
        peer = await first.join()
        again = await peer.call("count", n=4, gate="g", pauses=[2], token=1)
        never = await peer.call("gate", name="never", id=8)
        seen = await again.messages(2)
        await never.event()
        there = peer.through(second)
        assert await there.result("open_gate", name="g/2") == "opened g/2"
        reader, waiting, standalone = await there.get(again.last_id), await there.get(never.last_id), await there.get()
        await doomed.kill()
        async with asyncio.timeout(60):
            seen += await reader.rest()
            [unknown] = await waiting.rest()
        assert progress_of(seen) == [1, 2, 3, 4]
        assert text_of(seen[-1]) == "counted to 4"
        assert (unknown["id"], unknown["error"]["code"]) == (8, -31001)
        assert await there.result("announce", n=2) == "announced 2"
        assert notices_of(await standalone.messages(2)) == [1, 2]
        await first.aclose()
        await second.aclose()


async def test_three_processes_of_which_one_is_killed_settle_each_call_once(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    options = ("--store", shared_address(path))
    async with (
        serving(BASIC_TOOLS, *options) as doomed,
        serving(BASIC_TOOLS, *options) as one,
        serving(BASIC_TOOLS, *options),
    ):
        first, second = Web(doomed.url), Web(one.url)
        peer = await first.join()
        wires = [await peer.call("gate", name="never") for _ in range(20)]
        wires += [await peer.call("count", n=1, gate="g", pauses=[1], token=n) for n in range(20)]
        for wire in wires:
            await wire.event()
        streams = [position.stream for wire in wires if (position := parse_position(wire.last_id))]
        await doomed.kill()
        store = SharedStore(path)
        async with store:

            async def ended() -> bool:
                found = await streams_by_id(store, streams)
                return all(record.sealed or record.generation == 2 for record in found.values())

            await until(ended)
            await until(lambda: _count_finals(store, streams[:20]))
        await first.aclose()
        await second.aclose()


async def _count_finals(store: SharedStore, streams: Sequence[StreamId]) -> bool:
    """Each has its one answer."""
    finals = [[event for event in await store.read(s, after=0, limit=100) if event.final] for s in streams]
    assert all(len(events) <= 1 for events in finals)
    return all(len(events) == 1 for events in finals)


async def test_a_herd_from_a_dead_node_asks_once_whether_it_is_dead() -> None:
    """Each of its sessions looks for a home (H1); that a node is dead does not change any more."""
    store = FaultyStore(MemoryStore())
    await store.join(NodeId("here"))
    await store.join(NodeId("left"))
    await store.leave(NodeId("left"))
    liveness = store.liveness(NodeId("here"), lease=15.0, monotonic=time.monotonic)
    nodes = OtherNodes(node=NodeId("here"), liveness=liveness)
    assert await nodes.is_dead(NodeId("left"))
    store.reads = Fault.RAISES
    assert await nodes.is_dead(NodeId("left"))
    with pytest.raises(StoreUnavailable):
        await nodes.is_dead(NodeId("unknown"))
