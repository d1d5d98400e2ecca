"""A client that does not read (design: Slow readers; P3, P10, promise 6)."""

from __future__ import annotations

import pytest

from tests.support.clients.wire_client import Message, Peer, gaps_of, notices_of, progress_of, text_of
from tests.support.servers.in_process import Site, serve, until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio

LIMIT = 300
SIZE = 2_000


async def stands_still(shop: ToolServer, peer: Peer) -> int:
    """Wait until the flood makes no step while a neighbour makes twenty calls; how far it got."""
    while True:
        before = shop.sent
        for _ in range(20):
            await peer.result("count", n=1)
        if before and shop.sent == before:
            return before


async def test_the_call_of_a_client_that_does_not_read_waits_and_nobody_else(shop: ToolServer) -> None:
    """It waits once its reader lags by `max_stream_events`; when the client reads again, nothing is missing."""
    async with serve(shop.server, small_buffers=True, max_stream_events=LIMIT) as site:
        peer = await site.join()
        unread = await peer.call("flood", n=1500, size=SIZE, token=1)
        reached = await stands_still(shop, peer)
        assert LIMIT <= reached < 1500
        other = await site.join()
        assert await other.result("count", n=3) == "counted to 3"
        messages = await unread.rest()
        assert progress_of(messages) == list(range(1, 1501))
        assert gaps_of(messages) == []
        assert text_of(messages[-1]) == "flooded 1500"


async def test_a_client_that_does_not_read_is_ended_and_may_come_back(shop: ToolServer) -> None:
    """After `stream_timeout` its stream is detached: the call goes on, its oldest events go, the answer stays."""
    async with serve(shop.server, small_buffers=True, max_stream_events=LIMIT, stream_timeout=1.0) as site:
        peer = await site.join()
        unread = await peer.call("flood", n=1500, size=SIZE, token=1)
        [first] = await unread.messages(1)
        await until(lambda: site.app.counters.slow_readers_ended == 1)
        await until(lambda: "flooded" in shop.seen)
        resumed = await peer.get(unread.last_id)
        messages = await resumed.rest()
        kept = list(range(1500 - LIMIT + 1, 1501))
        assert progress_of([first, *messages]) == [1, *kept]
        assert gaps_of(messages) == [(2, 1500 - LIMIT)]
        assert text_of(messages[-1]) == "flooded 1500"


async def test_a_client_that_reads_slowly_is_not_ended(shop: ToolServer) -> None:
    """Progress counts, not speed: it takes a while, many times longer than the timeout would allow in one go."""
    async with serve(shop.server, small_buffers=True, max_stream_events=LIMIT, stream_timeout=5.0) as site:
        peer = await site.join()
        wire = await peer.call("flood", n=1000, size=SIZE, token=1)
        seen = []
        async for message in wire:
            seen.append(message)
            if len(seen) % 50 == 0:
                await peer.result("count", n=1)
        assert progress_of(seen) == list(range(1, 1001))
        assert site.app.counters.slow_readers_ended == 0


async def test_an_idle_connection_is_not_a_slow_one(shop: ToolServer) -> None:
    """There is nothing to read: neither a waiting call nor the standalone stream is ended."""
    async with serve(shop.server, small_buffers=True, stream_timeout=0.5, keepalive_interval=0.8) as site:
        peer = await site.join()
        standalone = await peer.get()
        call = await peer.call("wait", gate="g")
        await standalone.comment("keep-alive")
        await call.comment("keep-alive")
        shop.open("g")
        assert text_of((await call.rest())[-1]) == "went through g"
        await peer.result("announce", n=1)
        assert notices_of([await standalone.message()]) == [1]
        assert site.app.counters.slow_readers_ended == 0


async def test_a_detached_call_never_waits(shop: ToolServer, site: Site, peer: Peer) -> None:
    """Nobody reads at all: it runs to its end, and exactly the newest events are kept."""
    wire = await peer.call("count", n=2000, gate="g", pauses=[1], token=1)
    await wire.messages(1)
    await wire.drop()
    shop.open("g/1")
    await until(lambda: "counted 2000" in shop.seen)
    messages = await (await peer.get(wire.last_id)).rest()
    assert gaps_of(messages) == [(2, 1500)]
    assert progress_of(messages) == list(range(1501, 2001))


async def test_the_standalone_stream_makes_nobody_wait_and_stays_within_its_limit(shop: ToolServer) -> None:
    """Its oldest events go instead, also when a reader is attached that does not read; the gap is told."""
    async with serve(shop.server, small_buffers=True, max_stream_events=LIMIT) as site:
        peer = await site.join()
        unread = await peer.get()
        await unread.event()
        for start in range(1, 20_001, 1000):
            await peer.result("announce", n=1000, start=start)
        stream = site.app.session_info(peer.session).streams[0]  # type: ignore[union-attr]
        assert stream.last == 20_000
        kept = await site.store.read(stream.id, after=0, limit=30_000)  # type: ignore[arg-type]
        assert len(kept) == LIMIT
        messages: list[Message] = []
        while notices_of(messages[-1:]) != [20_000]:
            messages.append(await unread.message())
        missing = [number for first, last in gaps_of(messages) for number in range(first, last + 1)]
        assert missing
        assert sorted(notices_of(messages) + missing) == list(range(1, 20_001))
