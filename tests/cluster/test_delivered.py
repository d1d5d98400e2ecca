"""A GET without `Last-Event-ID` goes on where the readers before had got to, whatever became of their process (S2)."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from perdure._core.ids import SessionId
from perdure.store.interface import Store, stream_by_id
from tests.cluster.conftest import Pair, Start
from tests.support.clients.wire_client import Peer, Web, Wire, notices_of
from tests.support.processes.cluster import cluster
from tests.support.servers.in_process import serve, until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio


async def told(store: Store, peer: Peer) -> int:
    """How far the readers of a session's standalone stream have got, as the store has it."""
    record = await store.session(SessionId(peer.session))
    assert record is not None
    stream = await stream_by_id(store, record.standalone)
    assert stream is not None
    return stream.delivered


async def reading(peer: Peer, n: int) -> Wire:
    """A reader of the standalone stream that has read so many notices."""
    wire = await peer.get()
    await wire.event()
    assert await peer.result("announce", n=n) == f"announced {n}"
    assert notices_of(await wire.messages(n)) == list(range(1, n + 1))
    return wire


async def goes_on(peer: Peer, start: int) -> None:
    """Whoever reads now gets what is announced now, and nothing from before."""
    wire = await peer.get()
    await wire.event()
    await peer.result("announce", n=1, start=start)
    assert notices_of([await wire.message()]) == [start]


async def test_after_a_restart(tmp_path: Path) -> None:
    """S2: a process that is killed, or stops, leaves in the store how far its readers had got."""
    async with cluster(tmp_path / "log.db") as servers, AsyncExitStack() as stack:

        async def restarted() -> Peer:
            await servers.start()
            web = Web(servers.server.url)
            stack.push_async_callback(web.aclose)
            return peer.through(web)

        stack.push_async_callback((web := Web(servers.server.url)).aclose)
        await reading(peer := await web.join(), 3)
        query = "SELECT delivered FROM stream WHERE kind = 's'"
        await until(lambda: servers.rows(query) == [(3,)])
        await servers.server.kill()
        await goes_on(await restarted(), 4)
        await servers.server.stop()
        await goes_on(await restarted(), 5)


@pytest.mark.parametrize("reads", ["a", "b"])
async def test_on_another_worker(pair: Pair, reads: str) -> None:
    """S2: a reader leaves one node, whether that writes the stream or follows it; the next one comes to the other."""
    at_a, at_b = await pair.join()
    here, there = (at_a, at_b) if reads == "a" else (at_b, at_a)
    assert await there.result("announce", n=0) == "announced 0"  # so both nodes hold the session
    wire = await reading(here, 3)
    await wire.drop()
    await until(lambda: _has(pair.a.site.store, at_a, 3))
    await goes_on(there, 4)
    await until(lambda: _has(pair.a.site.store, at_a, 4))
    await goes_on(here, 5)


@pytest.mark.parametrize("reads", ["a", "b"])
async def test_while_the_reader_before_is_still_believed_in(pair: Pair, reads: str) -> None:
    """S2: the store is told while a reader stays, too; a take-over by the other node repeats nothing."""
    at_a, at_b = await pair.join()
    here, there = (at_a, at_b) if reads == "a" else (at_b, at_a)
    await reading(here, 3)
    await until(lambda: _has(pair.a.site.store, at_a, 3))
    await goes_on(there, 4)


async def _has(store: Store, peer: Peer, delivered: int) -> bool:
    return await told(store, peer) == delivered


async def test_after_dormancy() -> None:
    """S2, R8"""
    async with serve(ToolServer().server, session_grace=0.3) as site:
        peer = await site.join()
        await (await reading(peer, 3)).drop()
        await until(lambda: site.app.session_info(peer.session) is None)
        await goes_on(peer, 4)


async def test_after_dormancy_on_another_worker(start: Start) -> None:
    """S2, R8: where the session rested is not where it wakes."""
    pair = await start(session_grace=0.3)
    at_a, at_b = await pair.join()
    await (await reading(at_a, 3)).drop()
    await until(lambda: pair.a.site.app.session_info(at_a.session) is None)
    await goes_on(at_b, 4)


async def test_what_came_while_no_reader_was_there_is_not_lost() -> None:
    """S2: it is written how far a reader had got, not how far the stream has."""
    async with serve(ToolServer().server, session_grace=0.3) as site:
        peer = await site.join()
        await (await reading(peer, 2)).drop()
        await peer.result("announce", n=2, start=3)
        await until(lambda: site.app.session_info(peer.session) is None)
        assert await told(site.store, peer) == 2
        assert notices_of(await (await peer.get()).messages(2)) == [3, 4]
