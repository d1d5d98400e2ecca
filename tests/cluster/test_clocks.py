"""Wall clocks decide nothing about what is in use: nodes agree on one clock, and use protects a session (promise 4)."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from perdure._core.ids import NodeId, SessionId
from perdure._core.retention import Cutoffs
from perdure._core.states import SessionState
from tests.support.clients.wire_client import Peer, Web, notices_of, progress_of, text_of
from tests.support.processes.cluster import GATE_FILE_TOOLS
from tests.support.processes.serving import serving
from tests.support.servers.in_process import Site, serve, until
from tests.support.servers.tool_server import ToolServer
from tests.support.stores.dead_node import life_of
from tests.support.stores.shared_store import SharedStore, shared_address

pytestmark = pytest.mark.anyio

DAY = 25 * 3600.0


@dataclass
class Watch:
    """Somebody's wall clock, which may be wrong."""

    ahead: float = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


class Swept(SharedStore):
    """Counts how often it was swept. `ahead`: as a store would be whose nodes do not agree on the time."""

    sweeps = 0
    ahead = 0.0

    def clock(self) -> float:
        return super().clock() + self.ahead

    async def sweep(self, cutoffs: Cutoffs) -> int:
        rows = await super().sweep(cutoffs)
        self.sweeps += 1
        return rows


@dataclass
class Nodes:
    path: Path
    stack: AsyncExitStack
    stores: list[Swept] = field(default_factory=list)

    async def start(self, watch: Watch, *, disagrees: float = 0.0, **options: Any) -> Site:
        store = Swept(str(self.path), wall=watch)
        store.ahead = disagrees
        self.stores.append(store)
        return await self.stack.enter_async_context(serve(ToolServer().server, store=store, **options))

    async def sweep_twice(self) -> None:
        """Wait until each node has swept, with what it sees now, at least once."""
        wanted = [store.sweeps + 2 for store in self.stores]
        await until(lambda: all(s.sweeps >= n for s, n in zip(self.stores, wanted, strict=True)))


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    async with AsyncExitStack() as stack:
        yield Nodes(tmp_path / "log.db", stack)


async def _state(site: Site, peer: Peer) -> SessionState | None:
    record = await site.store.session(SessionId(peer.session))
    return None if record is None else record.state


async def test_a_node_whose_wall_clock_is_a_day_ahead_deletes_nothing(nodes: Nodes) -> None:
    """Neither the session, nor its events and answers, in use or at rest; and it serves them."""
    a = await nodes.start(Watch(), cleanup_interval=0.05)
    used, rested = await a.join(), await a.join()
    call = await used.call("count", n=3, token=1)
    await call.rest()
    [session] = [session for session in life_of(a).sessions if session.id == rested.session]
    await life_of(a).sessions.rest(session)
    await nodes.start(Watch(ahead=DAY), cleanup_interval=0.05)
    b = await nodes.start(Watch(ahead=-DAY), cleanup_interval=0.05)
    await nodes.sweep_twice()
    for peer in (used, rested):
        assert await peer.through(b).result("count", n=1) == "counted to 1"
    again = await (await used.through(b).get(call.seen[1].id)).rest()
    assert (progress_of(again), text_of(again[-1])) == ([2, 3], "counted to 3")


async def test_a_wall_clock_that_jumps_ends_nothing(nodes: Nodes) -> None:
    watch = Watch()
    site = await nodes.start(watch, cleanup_interval=0.05)
    peer = await site.join()
    call = await peer.call("count", n=3, token=1)
    await call.rest()
    watch.ahead = DAY
    await nodes.sweep_twice()
    assert await peer.result("count", n=1) == "counted to 1"
    assert progress_of(await (await peer.get(call.seen[1].id)).rest()) == [2, 3]


async def test_a_session_in_use_elsewhere_is_not_ended_by_a_node_that_takes_it_for_old(nodes: Nodes) -> None:
    """Even where the nodes do not agree on the time: its home holds it, and the other node serves it as well."""
    a = await nodes.start(Watch(), cleanup_interval=3600)
    peer = await a.join()
    standalone = await peer.get()
    b = await nodes.start(Watch(), disagrees=DAY, cleanup_interval=0.05)
    nodes.stores = nodes.stores[1:]
    await nodes.sweep_twice()
    assert await _state(a, peer) is SessionState.ACTIVE
    assert await peer.through(b).result("count", n=1) == "counted to 1"
    await peer.result("announce", n=2)
    assert notices_of(await standalone.messages(2)) == [1, 2]


async def test_a_session_that_a_node_takes_for_old_is_served_if_its_home_lives_and_gone_if_not(nodes: Nodes) -> None:
    """The time has passed by the asking node's clock: use decides, and then time."""
    a = await nodes.start(Watch(), cleanup_interval=3600)
    held, rested = await a.join(), await a.join()
    [session] = [session for session in life_of(a).sessions if session.id == rested.session]
    await life_of(a).sessions.rest(session)
    b = await nodes.start(Watch(), disagrees=DAY, cleanup_interval=3600)
    assert await held.through(b).result("count", n=1) == "counted to 1"
    gone = await rested.through(b).send(rested.tool("count", n=1))
    assert gone.status_code == 404
    assert b.app.counters.sessions_ended == 1


async def test_nodes_agree_on_the_time_of_the_one_that_is_there(tmp_path: Path) -> None:
    """The first one's wall clock begins it; when no node is left, the next one's does."""
    path = str(tmp_path / "log.db")
    first, second = SharedStore(path, wall=Watch()), SharedStore(path, wall=Watch(ahead=DAY))
    async with first, second:
        await first.join(NodeId("first"))
        await second.join(NodeId("second"))
        assert abs(first.clock() - second.clock()) < 1
        await first.leave(NodeId("first"))
        async with SharedStore(path, wall=Watch(ahead=-DAY)) as third:
            await third.join(NodeId("third"))
            assert abs(third.clock() - second.clock()) < 1
    async with SharedStore(path, wall=Watch(ahead=DAY)) as alone:
        await alone.join(NodeId("alone"))
        assert abs(alone.clock() - time.time() - DAY) < 60


_AHEAD = (
    f"import time; real = time.time; time.time = lambda: real() + {DAY}; from perdure.cli import entry; entry.main()"
)


@asynccontextmanager
async def _two_processes(path: Path) -> AsyncIterator[tuple[Web, Web]]:
    options = ("--store", shared_address(path), "--cleanup-interval", "0.2")
    ahead = (sys.executable, "-c", _AHEAD, "serve")
    async with serving(GATE_FILE_TOOLS, *options) as a, serving(GATE_FILE_TOOLS, *options, argv=ahead) as b:
        webs = Web(a.url), Web(b.url)
        try:
            yield webs
        finally:
            for web in webs:
                await web.aclose()


@pytest.mark.long
async def test_a_process_whose_machine_told_it_another_day_serves_the_session_of_its_neighbour(tmp_path: Path) -> None:
    async with _two_processes(tmp_path / "log.db") as (a, b):
        peer = await a.join()
        for web in (b, a, b):
            response = await peer.through(web).send(peer.request("tools/list"))
            assert response.status_code == 200
