"""What one tool says on the standalone stream arrives in its order, once, however the session's home moves."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from perdure._core.ids import SessionId, StreamId
from perdure.cluster.node import Watcher
from perdure.log.stream import RUN_AHEAD
from perdure.store.interface import stream_by_id
from perdure.store.records import MAX_FORWARDED, Forwarded
from perdure.store.steps import Forward
from tests.cluster.conftest import Pair, Start
from tests.support.clients.wire_client import Peer, Web, notices_of, progress_of
from tests.support.processes.cluster import Cluster, cluster
from tests.support.servers.in_process import serve, until
from tests.support.servers.tool_server import ToolServer
from tests.support.stores.dead_node import DeadNode, Library, life_of, progress_of_call
from tests.support.stores.faulty_store import Fault, FaultyStore
from tests.support.stores.shared_store import SharedStore

pytestmark = pytest.mark.anyio

EACH = 100_000
"""The first numbers of two tools lie so far apart: a number tells its tool."""

SAID = "SELECT count(*) FROM event WHERE stream = (SELECT key FROM stream WHERE kind = 's')"
MUCH = ("--max-stream-events", "100000", "--max-session-events", "100000")
"""Nothing is trimmed, so the log tells everything."""


def subscribing() -> ToolServer:
    return ToolServer(subscribes=True)


async def log_of(pair: Pair, peer: Peer) -> list[int]:
    """The notices on the standalone stream, as the store has them."""
    store = pair.a.site.store
    record = await store.session(SessionId(peer.session))
    assert record is not None
    found: list[int] = []
    after = 0
    while events := await store.read(record.standalone, after=after, limit=1_000):
        found += notices_of(json.loads(event.payload) for event in events)
        after = events[-1].seq
    return found


def by_tool(numbers: Iterable[int]) -> dict[int, list[int]]:
    tools: dict[int, list[int]] = {}
    for number in numbers:
        tools.setdefault(number // EACH, []).append(number % EACH)
    return tools


def speak(peer: Peer, each: int, count: int) -> list[asyncio.Task[str]]:
    """Let some tools say so many notices each."""
    return [asyncio.create_task(peer.result("announce", n=each, start=tool * EACH + 1)) for tool in range(count)]


async def all_said(servers: Cluster, each: int, count: int) -> None:
    """The log has what each tool said, once and in its order."""
    await until(lambda: servers.rows(SAID) == [(each * count,)])
    log = servers.rows(SAID.replace("count(*)", "payload") + " ORDER BY seq")
    found = notices_of(json.loads(payload) for (payload,) in log if isinstance(payload, bytes))
    assert by_tool(found) == {tool: list(range(1, each + 1)) for tool in range(count)}


async def subscribe(peer: Peer, number: int) -> None:
    """Whoever is told to subscribe becomes the home."""
    wire = await peer.post(peer.request("resources/subscribe", {"uri": f"x://{number}"}))
    await wire.rest()


async def test_a_home_that_moves_while_tools_speak_changes_nothing_in_their_order(start: Start) -> None:
    """Promise 2: no crash is needed for a home to move."""
    pair = await start(subscribing, max_stream_events=100_000)
    peers = await pair.join()
    tools, each = 4, 400
    calls = [
        asyncio.create_task(peers[tool % 2].result("announce", n=each, start=tool * EACH + 1)) for tool in range(tools)
    ]
    moves = 0
    while not all(call.done() for call in calls):
        await subscribe(peers[moves % 2], moves % 10)
        moves += 1
    await asyncio.gather(*calls)
    assert moves > 1

    async def said() -> bool:
        return len(await log_of(pair, peers[0])) >= tools * each

    await until(said)
    assert by_tool(await log_of(pair, peers[0])) == {tool: list(range(1, each + 1)) for tool in range(tools)}


def _has_moved(servers: Cluster, before: object, calls: Sequence[asyncio.Task[str]]) -> bool:
    """More was said, or all is."""
    return servers.rows(SAID) != [(before,)] or all(call.done() for call in calls)


async def test_a_home_that_dies_while_tools_speak_changes_nothing_in_their_order(tmp_path: Path) -> None:
    """Promises 2 and 3, with real processes and SIGKILL: one home after the other is killed, and the tools live."""
    async with cluster(tmp_path / "log.db", *MUCH, processes=2) as servers, contextlib.AsyncExitStack() as stack:
        first, tools = (Web(served.url) for served in servers.servers)
        stack.push_async_callback(tools.aclose)
        stack.push_async_callback(first.aclose)
        peer = await first.join()
        calls = speak(peer.through(tools), each := 2_000, count := 2)
        home = servers.servers[0]
        deaths = 0
        while not all(call.done() for call in calls):
            ((before,),) = servers.rows(SAID)
            await until(functools.partial(_has_moved, servers, before, calls))
            await home.kill()
            deaths += 1
            home = await servers.start()
            web = Web(home.url)
            stack.push_async_callback(web.aclose)
            await subscribe(peer.through(web), deaths)  # refused by the server, but the home is there now
        await asyncio.gather(*calls)
        await until(lambda: servers.rows("SELECT count(*) FROM forward") == [(0,)])
        assert deaths  # on a busy machine a new home may take longer than the tools
        await all_said(servers, each, count)


async def test_a_home_that_stands_still_makes_the_tools_wait_and_nothing_changes_its_order(tmp_path: Path) -> None:
    """Promise 6: no more than the limit waits for one stream, whoever sends; what is refused comes in its turn."""
    each, count = 2_000, 2
    async with cluster(tmp_path / "log.db", *MUCH, processes=2) as servers, contextlib.AsyncExitStack() as stack:
        home, tools = (Web(served.url) for served in servers.servers)
        for web in (home, tools):
            stack.push_async_callback(web.aclose)
        peer = await home.join()
        speaker = peer.through(tools)
        assert await speaker.result("announce", n=0) == "announced 0"  # it holds the session
        servers.servers[0].send(signal.SIGSTOP)
        calls = speak(speaker, each, count)
        most = 0

        def waiting() -> int:
            nonlocal most
            ((now,),) = servers.rows("SELECT count(*) FROM forward")
            assert isinstance(now, int)
            most = max(most, now)
            return now

        try:
            await until(lambda: waiting() > MAX_FORWARDED - RUN_AHEAD)
        finally:
            servers.servers[0].send(signal.SIGCONT)
        await until(lambda: waiting() == 0)
        await asyncio.gather(*calls)
        assert most <= MAX_FORWARDED
        await all_said(servers, each, count)


class SlowToDraw(SharedStore):
    """Does not tell what was forwarded before the gate is open."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.gate = asyncio.Event()
        self.gate.set()

    async def forwarded(self, stream: StreamId, *, after: int = 0) -> Sequence[Forwarded]:
        await self.gate.wait()
        return await super().forwarded(stream, after=after)


async def test_a_call_that_runs_again_begins_behind_what_its_dead_node_had_forwarded(tmp_path: Path) -> None:
    """Progress never falls, also where it went to the standalone stream and still waits for the home (R5)."""
    path, shop = tmp_path / "log.db", Library()
    store = SlowToDraw(str(path))
    async with serve(shop.server, store=store) as site:
        peer = await site.join()
        assert await peer.result("count", n=1) == "counted to 1"
        record = await store.session(SessionId(peer.session))
        assert record is not None
        store.gate.clear()
        dead_node = await DeadNode.on(path)
        left = await dead_node.take(peer.session, peer.tool("look_up", n=9, token="t"))
        said = tuple(json.dumps(progress_of_call("t", number)).encode() for number in range(1, 7))
        forward = Forward(stream=record.standalone, node=dead_node.node, sender="s", first=1, payloads=said)
        assert not any(await dead_node.store.commit([forward]))
        await dead_node.die()

        async def is_claimed() -> bool:
            stream = await stream_by_id(store, left.stream)
            return stream is not None and stream.node != dead_node.node

        await until(is_claimed)
        for _ in range(5):
            assert await peer.result("count", n=1) == "counted to 1"
        assert "looking up" not in shop.seen
        store.gate.set()
        messages = await (await peer.get(left.position())).rest()
        assert progress_of(messages) == [7, 8, 9]
        events = await store.read(record.standalone, after=0, limit=100)
        assert progress_of(json.loads(event.payload) for event in events) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("fault", [Fault.LATE, Fault.HANGS])
async def test_what_is_forwarded_while_the_store_fails_arrives_once_and_in_order(tmp_path: Path, fault: Fault) -> None:
    """Promise 7; also where a commit was made whose answer never came: the home may have appended it by then."""
    path = str(tmp_path / "log.db")
    bad = FaultyStore(SharedStore(path))
    async with (
        serve(ToolServer().server, store=SharedStore(path), complaint=".*") as home,
        serve(ToolServer().server, store=bad, complaint=".*", store_timeout=1.0) as other,
    ):
        peer = await home.join()
        speaker = peer.through(other)
        await until(lambda: home.app.other_nodes() and other.app.other_nodes())
        standalone = await peer.get()
        await speaker.result("announce", n=1)
        bad.writes = fault
        call = asyncio.create_task(speaker.result("announce", n=300, start=2))
        await until(lambda: life_of(other).context.journal.is_degraded)
        bad.works()
        await call
        await speaker.result("announce", n=3, start=302)
        assert notices_of(await standalone.messages(304)) == list(range(1, 305))
        record = await home.store.session(SessionId(peer.session))
        assert record is not None
        log = await home.store.read(record.standalone, after=0, limit=1_000)
        assert notices_of(json.loads(event.payload) for event in log) == list(range(1, 305))


@pytest.mark.parametrize("known", [True, False])
async def test_what_a_call_said_at_another_node_comes_before_what_the_next_one_says(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """The call at B has ended and was answered; A, the home, has not looked yet at what was forwarded to it. It may not
    even know of B, which has just started."""

    async def later(self: Watcher) -> None: ...

    monkeypatch.setattr(Watcher, "_take_homes", later)
    at_a, at_b = await pair.join()
    if not known:
        monkeypatch.setattr(life_of(pair.a.site).context.nodes, "alone", True)
    standalone = await at_a.get()
    await standalone.event()
    for _ in range(5):
        await at_b.result("announce", n=2)
        await at_a.result("announce", n=1)
    assert notices_of(await standalone.messages(15)) == [1, 2, 1] * 5
