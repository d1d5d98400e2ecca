"""The newest reader of a stream wins, at once; every event is on exactly one connection (R4, A17)."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.clients.wire_client import SESSION_VERSIONS, Peer, notices_of, progress_of, text_of
from tests.support.servers.in_process import Site, serve, until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("version", SESSION_VERSIONS)
async def test_a_resume_takes_a_call_over_from_the_open_connection(shop: ToolServer, site: Site, version: str) -> None:
    """The old connection ends without another event; what comes is on the new one only."""
    peer = await site.join(version)
    old = await peer.call("count", n=4, gate="g", pauses=[2], token=1)
    await old.messages(2)
    new = await peer.get(old.last_id)
    assert await old.rest() == []
    shop.open("g/2")
    messages = await new.rest()
    assert progress_of(messages) == [3, 4]
    assert text_of(messages[-1]) == "counted to 4"
    assert site.app.counters.take_overs == 1


async def test_a_second_standalone_get_takes_over(site: Site, peer: Peer) -> None:
    """Without a position as well: it goes on where the first one was. With one, it begins there."""
    old = await peer.get()
    await peer.result("announce", n=2)
    await old.messages(2)
    new = await peer.get()
    assert await old.rest() == []
    await peer.result("announce", n=2, start=3)
    assert notices_of(await new.messages(2)) == [3, 4]
    resumed = await peer.get(old.seen[1].id)
    assert await new.rest() == []
    assert notices_of(await resumed.messages(3)) == [2, 3, 4]


async def test_a_chain_of_take_overs_leaves_one_reader(shop: ToolServer, site: Site, peer: Peer) -> None:
    """Each event arrives on exactly one connection after the first, however many there were."""
    first = await peer.call("count", n=6, gate="g", pauses=[1, 3], token=1)
    await first.messages(1)
    wires = [first] + [await peer.get(first.last_id) for _ in range(5)]
    shop.open("g/1")
    assert progress_of(await wires[-1].messages(2)) == [2, 3]
    last = await peer.get(wires[-1].last_id)
    shop.open("g/3")
    assert progress_of(await last.rest()) == [4, 5, 6]
    for wire in wires:
        assert await wire.rest() == []


async def test_resumes_that_come_at_the_same_time_end_all_but_one(shop: ToolServer, peer: Peer) -> None:
    """A17: one of them gets everything, the others end; no one hangs."""
    first = await peer.call("count", n=3, gate="g", pauses=[1], token=1)
    await first.messages(1)
    await first.drop()
    wires = await asyncio.gather(*(peer.get(first.last_id) for _ in range(8)))
    shop.open("g/1")
    seen = await asyncio.gather(*(wire.rest() for wire in wires))
    assert sorted(progress_of(messages) for messages in seen) == [[]] * 7 + [[2, 3]]


async def test_a_connection_that_does_not_read_is_taken_over_at_once(shop: ToolServer) -> None:
    """A dead socket is often not known to be dead: its buffers are full, and nobody will ever read them."""
    async with serve(shop.server, small_buffers=True, max_stream_events=2000) as site:
        peer = await site.join()
        unread = await peer.call("flood", n=1500, size=1000, token=1)
        assert progress_of(await unread.messages(1)) == [1]
        await until(lambda: "flooded" in shop.seen)
        resumed = await peer.get(unread.last_id)
        messages = await resumed.rest()
        assert progress_of(messages) == list(range(2, 1501))
        assert text_of(messages[-1]) == "flooded 1500"
