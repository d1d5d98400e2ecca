"""Moments between two nodes, or between a node and its own settling, in which something could slip through."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perdure._core.codes import STORE_UNAVAILABLE
from perdure._core.ids import Kind, NodeId, Position, SessionId, parse_position
from perdure.log.stream import RUN_AHEAD
from perdure.serve.token_file import FileTokens
from perdure.store import SqliteStore
from perdure.store.interface import stream_by_id
from perdure.store.records import Event
from perdure.store.steps import Append
from perdure.testing._values import dead_nodes
from tests.cluster.conftest import Pair
from tests.cluster.held_reads import HeldReads
from tests.support.clients.wire_client import Message, Peer, notices_of
from tests.support.servers.in_process import serve, until
from tests.support.servers.tool_server import ToolServer
from tests.support.stores.dead_node import DeadNode, Left, Library, life_of
from tests.support.stores.faulty_store import Fault, FaultyStore
from tests.support.stores.shared_store import ON_POSTGRES, SharedStore, held_up

pytestmark = pytest.mark.anyio


async def test_events_of_a_generation_that_is_not_known_yet_are_not_shown(pair: Pair) -> None:
    """Promises 2 and 4: under the old generation's name they would be lost, and come again, at the next resume."""
    at_a, _ = await pair.join()
    record = await pair.a.site.store.session(SessionId(at_a.session))
    assert record is not None
    held = life_of(pair.a.site).sessions.held(record.id)
    assert held is not None
    await at_a.result("announce", n=2)
    stream = await stream_by_id(pair.b.site.store, record.standalone)
    assert stream is not None
    claimed = await pair.b.site.store.claim(stream.id, node=NodeId("other"), held=stream.fence)
    assert claimed is not None
    later = tuple(Event(seq, 1.0, b"{}") for seq in (3, 4))
    await pair.b.site.store.commit([Append(stream=stream.id, fence=claimed.fence, events=later)])
    assert [event.seq for event in await held.standalone.read(after=0, limit=10)] == [1, 2]


async def taken(pair: Pair, seen: str) -> Position:
    """Another node claims the stream of a position that A gave, and appends events 3 and 4. Gives the position of 3."""
    first, store = parse_position(seen), pair.b.site.store
    assert first is not None
    stream = await stream_by_id(store, first.stream)
    assert stream is not None
    claimed = await store.claim(stream.id, node=NodeId("other"), held=stream.fence)
    assert claimed is not None
    said = tuple(Event(seq, 1.0, b'{"said": %d}' % seq) for seq in (3, 4))
    await store.commit([Append(stream=stream.id, fence=claimed.fence, events=said)])
    return replace(first, generation=claimed.generation, seq=3)


@pytest.mark.parametrize("kind", Kind)
async def test_a_position_of_the_node_that_took_a_stream_is_not_lost_to_the_one_that_does_not_know(
    pair: Pair, kind: Kind
) -> None:
    """Promises 2 and 4: a process that stood still goes on, and a client comes to it with what others have shown."""
    at_a, _ = await pair.join()
    if kind is Kind.CALL:
        wire = await at_a.call("count", n=2, gate="never", pauses=[2], token=1)
    else:
        await at_a.result("announce", n=2)
        wire = await at_a.get()
    await wire.messages(2)
    await wire.drop()
    third = await taken(pair, wire.last_id)
    reader = await at_a.get(str(third))
    assert await reader.messages(1) == [{"said": 4}]
    store = pair.b.site.store
    stream = await stream_by_id(store, third.stream)
    assert stream is not None
    await store.commit([Append(stream=stream.id, fence=stream.fence, events=(Event(5, 1.0, b'{"said": 5}'),))])
    assert await reader.messages(1) == [{"said": 5}]
    assert [event.id for event in reader.seen if event.data] == [str(replace(third, seq=seq)) for seq in (4, 5)]


async def test_a_node_that_still_writes_what_another_has_taken_sends_its_readers_away(
    pair: Pair, tmp_path: Path
) -> None:
    """Promises 2 and 4: what it writes will be refused; until then it cannot tell where a position is."""
    at_a, _ = await pair.join()
    call = await at_a.call("count", n=3, gate="g", pauses=[2], token=1)
    await call.messages(2)
    third = await taken(pair, call.last_id)
    [stream] = life_of(pair.a.site).sessions.streams
    async with held_up(tmp_path / "log.db"):
        pair.a.shop.open("g/2")
        await until(lambda: stream.tail.last > 2)
        refused = await at_a.try_get(str(third))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, STORE_UNAVAILABLE)
    await until(lambda: stream.writer is None)
    reader = await at_a.get(str(third))
    assert await reader.messages(1) == [{"said": 4}]


class SlowList(Library):
    """Takes its time to tell its tools."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go = asyncio.Event(), asyncio.Event()

        async def wait(ctx: Any, call_next: Any) -> Any:
            if ctx.method == "tools/list":
                self.asked.set()
                await self.go.wait()
            return await call_next(ctx)

        self.server.streamable_http_app()
        self.server.session_manager.app.middleware.append(wait)


async def leave_call(path: Path) -> tuple[Peer, Left]:
    """A client, and a call of it whose node has died while no other node lives."""
    async with serve(Library().server, store=SharedStore(path)) as one:
        peer, dead_node = await one.join(), await DeadNode.on(path)
        left = await dead_node.take(peer.session, peer.tool("wait", gate="g"))
    await dead_node.die()
    return peer, left


async def test_a_reader_that_comes_while_its_call_is_being_settled_gets_the_answer(tmp_path: Path) -> None:
    """Promise 3: also where no other node writes anything that would make it look again."""
    peer, left = await leave_call(path := tmp_path / "log.db")
    shop = SlowList()
    async with serve(shop.server, store=SharedStore(path)) as two:
        await shop.asked.wait()
        reader = await peer.through(two).get(left.position())
        shop.go.set()
        assert [message["error"]["code"] for message in await reader.rest()] == [-31001]


@pytest.mark.skipif(ON_POSTGRES, reason="its second node is on a SQLite file")
async def test_a_reader_that_knows_its_stream_from_before_it_was_settled_gets_the_answer(tmp_path: Path) -> None:
    """Promise 3: what it was told of the stream is no longer so when it attaches."""
    peer, left = await leave_call(path := tmp_path / "log.db")
    is_call = lambda found: any(one.record.kind is Kind.CALL for one in found.values())  # noqa: E731
    shop, store = SlowList(), HeldReads(path, "follow", is_call)
    async with serve(shop.server, store=store) as two:
        await shop.asked.wait()
        store.hold = True
        reading = asyncio.create_task(peer.through(two).get(left.position()))
        await store.reached.wait()
        shop.go.set()
        await until(lambda: two.app.counters.nodes_settled)
        store.go.set()
        assert [message["error"]["code"] for message in await (await reading).rest()] == [-31001]


async def test_a_forked_child_does_not_keep_a_dead_node_alive(tmp_path: Path) -> None:
    """Its lock is shared with children that were forked; they let go of it."""
    path = str(tmp_path / "log.db")
    ready, tell = os.pipe()
    parent = os.fork()
    if not parent:  # a node, and a child of it that outlives it
        try:

            async def live() -> None:
                store = SqliteStore(path)
                await store.open()
                await store.join(NodeId("parent"))
                child = os.fork()
                if not child:
                    signal.pause()
                os.write(tell, b"%d\n" % child)
                signal.pause()

            asyncio.run(live())
        finally:
            os._exit(0)
    with os.fdopen(ready) as told:
        child = int(told.readline())
    try:
        os.kill(parent, signal.SIGKILL)
        await asyncio.to_thread(os.waitpid, parent, 0)
        async with SqliteStore(path) as store:
            await store.join(NodeId("other"))
            view = store.liveness(NodeId("other"), lease=15.0, monotonic=lambda: 0.0)
            assert await dead_nodes(view) == [NodeId("parent")]
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(tell)


async def follow(peer: Peer, position: str, count: int) -> list[Message]:
    """What a client gets that comes back each time it is ended."""
    found: list[Message] = []
    while True:
        wire = await peer.get(position)
        async for message in wire:
            found.append(message)
            if len(found) == count:
                return found
        position = wire.last_id


async def test_a_home_keeps_its_place_in_an_outage_until_it_has_written_what_it_showed(tmp_path: Path) -> None:
    """Promises 2 and 4: what it showed from memory is where the log goes on."""
    path = str(tmp_path / "log.db")
    bad = FaultyStore(SharedStore(path))
    shops = [ToolServer(subscribes=True), ToolServer(subscribes=True)]
    async with (
        serve(shops[0].server, store=bad, complaint=".*", store_timeout=1.0) as a,
        serve(shops[1].server, store=SharedStore(path), complaint=".*") as b,
    ):
        peer = await a.join()
        other = peer.through(b)
        await until(lambda: a.app.other_nodes() and b.app.other_nodes())
        standalone = await peer.get()
        await peer.result("announce", n=1, start=1)
        seen = await standalone.messages(1)
        bad.writes = Fault.RAISES
        await peer.result("announce", n=3, start=2)
        seen += await standalone.messages(3)
        subscribe = other.request("resources/subscribe", {"uri": "x://1"})
        assert (await other.send(subscribe)).status_code == 503
        assert shops[1].subscribing == []
        bad.works()

        async def subscribed() -> bool:
            return (await other.send(subscribe)).status_code == 200

        await until(subscribed)
        await other.result("announce", n=2, start=100)
        assert notices_of(await follow(peer, standalone.last_id, 2)) == [100, 101]
        record = await b.store.session(SessionId(peer.session))
        assert record is not None
        log = [json.loads(event.payload) for event in await b.store.read(record.standalone, after=0, limit=100)]
        assert notices_of(log) == [1, 2, 3, 4, 100, 101]


async def test_what_goes_through_the_home_is_not_said_faster_than_it_is_accepted(pair: Pair) -> None:
    """Promise 6: a tool elsewhere waits as it would at the home."""
    at_a, at_b = await pair.join()
    standalone = await at_a.get()
    life = life_of(pair.b.site)
    most = 0

    def look() -> None:
        nonlocal most
        session = life.sessions.held(SessionId(at_a.session))
        most = max(most, 0 if session is None else session.home.waiting)
        asyncio.get_running_loop().call_soon(look) if looking else None

    looking = True
    look()
    call = asyncio.create_task(at_b.result("announce", n=2_000))
    assert notices_of(await standalone.messages(2_000)) == list(range(1, 2_001))
    await call
    looking = False
    assert 0 < most <= RUN_AHEAD


async def test_a_stranger_loads_nothing(tmp_path: Path) -> None:
    """Promise 5: to anybody else it does not exist, so nothing happens to it."""
    ann, bob = "ann-0123456789abcdef", "bob-0123456789abcdef"
    tokens = tmp_path / "tokens"
    tokens.write_text(f"ann:{ann}\nbob:{bob}\n")
    tokens.chmod(0o600)
    path, auth = str(tmp_path / "log.db"), FileTokens(tokens)
    async with serve(Library().server, store=SharedStore(path), auth=auth) as one:
        peer = await one.join(token=ann)
    async with serve(Library().server, store=SharedStore(path), auth=auth) as two:
        stranger = peer.through(two)
        stranger.token = bob
        assert (await stranger.try_get()).status_code == 404
        assert (two.app.session_ids(), two.app.counters.sessions_loaded) == ([], 0)
        assert (await peer.through(two).delete()).status_code == 200


async def test_a_record_from_before_a_change_of_ours_does_not_undo_it(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    store, shop = HeldReads(path, "session"), ToolServer(subscribes=True)
    async with serve(shop.server, store=store) as site:
        peer = await site.join()
        dead_node = await DeadNode.on(path)  # another process writes, so records are read again
        store.hold = True
        told = asyncio.create_task(peer.send({"jsonrpc": "2.0", "method": "notifications/roots/list_changed"}))
        await store.reached.wait()
        session = life_of(site).sessions.held(SessionId(peer.session))
        assert session is not None
        written = session.keeper.changes
        session.keeper.update(initialized=False)
        await until(lambda: session.keeper.changes > written)
        store.go.set()
        assert (await told).status_code == 202
        assert not session.record.initialized
        await dead_node.die()


async def test_ends_of_generations_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise 6: a home that moves to and fro leaves a row each time; the oldest go."""
    monkeypatch.setattr("perdure.store.records.KEPT_GENERATIONS", 3)
    path = tmp_path / "log.db"
    async with serve(ToolServer().server, store=SharedStore(path)) as site:
        peer = await site.join()
        record = await site.store.session(SessionId(peer.session))
        assert record is not None
        for _ in range(8):
            stream = await stream_by_id(site.store, record.standalone)
            assert stream is not None
            assert await site.store.claim(stream.id, node=NodeId("other"), held=stream.fence)
        assert [end.generation for end in await site.store.generations(record.standalone)] == [6, 7, 8]
        if not ON_POSTGRES:
            with closing(sqlite3.connect(path)) as connection:
                assert connection.execute("SELECT count(*) FROM generation").fetchone() == (3,)
