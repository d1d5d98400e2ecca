"""Peers that do not read, do not finish, or come in crowds hold up themselves and nobody else (promise 6, P3, P10)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest

from perdure.log.stream import RUN_AHEAD
from perdure.serve.connection import Connection
from perdure.store import MemoryStore
from tests.support.clients.raw_http import flood, message, progress, text_of
from tests.support.servers.gated_server import Live, live, readers
from tests.support.servers.gated_tools import open_gate
from tests.support.servers.in_process import until
from tests.support.stores.faulty_store import Fault, FaultyStore

pytestmark = pytest.mark.anyio


@pytest.fixture
async def served() -> AsyncIterator[Live]:
    async with live() as running:
        yield running


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


# How far a call runs ahead


async def test_a_call_runs_ahead_of_the_store_by_so_much_and_no_further() -> None:
    store = FaultyStore(MemoryStore())
    async with live(store=store, store_timeout=0.1, on_store_failure="refuse", complaint="the store fails") as served:
        peer = await served.session()
        async with await peer.begin_call("count", n=1_000, gate="store", first=1) as call:
            await call.until_messages(1)
            store.writes = Fault.RAISES
            before = served.app.counters.events_appended
            open_gate("store")
            await until(lambda: store.asked > 1)
            await _settled(served)
            assert served.app.counters.events_appended - before == RUN_AHEAD
            store.works()
            assert progress((await call.answer()).messages) == list(range(1, 1_001))


async def _settled(served: Live) -> None:
    """Wait until nothing is appended any more."""
    before = -1
    while served.app.counters.events_appended != before:
        before = served.app.counters.events_appended
        await asyncio.sleep(0.1)


# Floods


async def test_bodies_and_heads_that_never_come_block_nobody(served: Live) -> None:
    peer = await served.session()
    half = peer.request("POST", peer.call_body("count", n=1))[:-10]
    async with flood(peer, 150, half), flood(peer, 150, b"POST /mcp HTTP/1.1\r\nhost: "):
        for _ in range(20):
            assert (await peer.call("count", n=1)).status == 200
        other = await served.session()
        assert (await other.delete()).status == 200


async def test_requests_that_share_an_id_are_each_answered(served: Live) -> None:
    peer = await served.session()
    async with flood(peer, 50, peer.request("POST", peer.call_body("wait", id=7, gate="shared id"))) as exchanges:
        statuses = [await exchange.head() for exchange in exchanges]
        assert sorted(statuses) == [200] + [400] * 49
        open_gate("shared id")
        first = exchanges[statuses.index(200)]
        assert text_of((await first.answer()).messages[-1]) == "went through shared id"


@pytest.mark.parametrize("fate", ["keep-alive", "close"])
async def test_an_answer_that_nobody_takes_is_let_go(monkeypatch: pytest.MonkeyPatch, fate: str) -> None:
    """Also when the connection is closing: that alone would wait for the peer for ever."""
    monkeypatch.setattr(Connection, "unread_seconds", 0.1)
    async with live(json_response=True) as served:
        before = open_files()
        peer = await served.session()
        await until(lambda: open_files() == before)
        # More than the system takes on the way: several megabytes in each of its two buffers.
        body = peer.call_body("babble", size=10_000_000)
        unread = await peer.open(peer.request("POST", body, headers={"connection": fate}))
        assert await unread.head() == 200
        unread.stop_reading()
        await until(lambda: open_files() == before + 1)  # our end of it
        unread.cut()
        await unread.aclose()


async def test_a_stream_with_another_request_behind_it_ends_with_its_connection() -> None:
    """The server is told of the end of a connection, also when requests wait on it (pipelining)."""
    async with live(keepalive_interval=0.05) as served:
        peer = await served.session()
        pipelined = peer.request("GET") + peer.request("POST", message("ping", id=1)) * 2
        exchange = await peer.open(pipelined)
        assert await exchange.head() == 200
        assert readers(served, peer) == 1
        exchange.cut()
        await until(lambda: readers(served, peer) == 0)
        await exchange.aclose()
