"""Large events cost what they are long: sending, writing and replaying them, a bounded batch at a time (promise 6)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from perdure._core.ids import SessionId, StreamId
from perdure.log.stream import RUN_AHEAD_BYTES
from perdure.store import MemoryStore, SqliteStore
from perdure.store.records import READ_BYTES, Event, Followed, SessionRecord
from tests.support.clients.raw_http import SessionPeer, progress, text_of
from tests.support.clients.wire_client import progress_of
from tests.support.clients.wire_client import text_of as result_of
from tests.support.servers.gated_server import live
from tests.support.servers.in_process import serve, until
from tests.support.servers.tool_server import ToolServer
from tests.support.stores.faulty_store import Fault, FaultyStore
from tests.support.stores.outages import written

pytestmark = pytest.mark.anyio

TIMEOUT = 0.5
"""`store_timeout`: each of these stories takes longer than that, and none of them is an outage."""


class Counted(SqliteStore):
    """Tells how many bytes of events were read, in all and at once."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.bytes_read = 0
        self.most_at_once = 0

    async def read(self, stream: StreamId, *, after: int, limit: int) -> Sequence[Event]:
        events = await super().read(stream, after=after, limit=limit)
        size = sum(len(event.payload) for event in events)
        self.bytes_read += size
        self.most_at_once = max(self.most_at_once, size)
        return events


class Queued(FaultyStore):
    """Gets on with one read at a time, ten milliseconds each: slow, and well."""

    def __init__(self, path: Path) -> None:
        super().__init__(SqliteStore(str(path)))
        self.slow = False
        self._turn = asyncio.Lock()

    async def _queue(self) -> None:
        async with self._turn:
            await asyncio.sleep(0.01 if self.slow else 0)

    async def read(self, stream: StreamId, *, after: int, limit: int) -> Sequence[Event]:
        await self._queue()
        return await super().read(stream, after=after, limit=limit)

    async def follow(self, after: Mapping[StreamId, int], *, limit: int) -> Mapping[StreamId, Followed]:
        await self._queue()
        return await super().follow(after, limit=limit)

    async def session(self, session: SessionId) -> SessionRecord | None:
        await self._queue()
        return await super().session(session)


async def test_a_replay_reads_each_event_once_and_little_at_a_time(tmp_path: Path) -> None:
    shop = ToolServer()
    size, count = READ_BYTES * 3 // 2, 16
    store = Counted(tmp_path / "log.db")
    async with serve(shop.server, store=store) as site:
        peer = await site.join()
        call = await peer.call("flood", n=count, size=size, token=1)
        [first] = await call.messages(1)
        await call.drop()
        await until(lambda: "flooded" in shop.seen)
        store.bytes_read = store.most_at_once = 0
        resumed = await peer.get(call.last_id)
        messages = await resumed.rest()
        assert progress_of([first, *messages]) == list(range(1, count + 1))
        assert result_of(messages[-1]) == f"flooded {count}"
        assert (count - 1) * size < store.bytes_read < count * (size + 1_000)
        assert store.most_at_once < READ_BYTES + size + 1_000


async def test_many_calls_with_large_events_are_no_outage_and_all_is_written(tmp_path: Path) -> None:
    """Calls send 30 MB together; the store is well and must be said to be."""
    path = tmp_path / "log.db"
    async with live(store=f"sqlite:{path}", store_timeout=TIMEOUT) as served:
        peers = [await served.session() for _ in range(50)]
        answers = await asyncio.gather(*(peer.call("shout", text="x" * 10_000, times=60) for peer in peers))
        for answer in answers:
            assert progress(answer.messages) == list(range(1, 61))
            assert text_of(answer.messages[-1]) == "shouted 60 times"
        assert served.app.counters.outages == 0
    assert written(path) == [list(range(1, 61))] * 50


async def test_a_call_whose_events_are_larger_than_any_group_is_no_outage(tmp_path: Path) -> None:
    path, shop = tmp_path / "log.db", ToolServer()
    store = SqliteStore(str(path), busy_timeout=TIMEOUT)
    async with serve(shop.server, store=store, store_timeout=TIMEOUT, max_session_bytes=100 << 20) as site:
        peer = await site.join()
        call = await peer.call("flood", n=40, size=2_000_000, token=1, gate="left")
        await call.messages(1)
        await call.drop()
        shop.open("left")
        await until(lambda: "flooded" in shop.seen)
        assert site.app.counters.outages == 0
    assert written(path) == [list(range(1, 41))]


async def test_a_call_runs_ahead_of_the_store_by_so_many_bytes_and_no_further() -> None:
    """The event that reaches the bound is the last one that is sent before the store has taken any."""
    store = FaultyStore(MemoryStore())
    size = RUN_AHEAD_BYTES // 4
    async with live(store=store, store_timeout=0.1, on_store_failure="refuse", complaint="the store fails") as served:
        peer = await served.session()
        async with await peer.begin_call("shout", text="x" * size, times=1) as fits:
            assert progress((await fits.answer()).messages) == [1]
        before = served.app.counters.events_appended
        store.every, store.writes = 2, Fault.RAISES  # the call's own row goes through
        async with await peer.begin_call("shout", text="x" * size, times=40) as call:
            await until(lambda: served.app.counters.outages)
            for _ in range(20):
                assert (await served.ask("GET", path="/healthz")).status == 503
            assert served.app.counters.events_appended - before == 4
            store.works()
            assert progress((await call.answer()).messages) == list(range(1, 41))


async def test_a_herd_of_readers_behind_a_slow_store_is_served(tmp_path: Path) -> None:
    """Clients of a process that died come to the next one at once: nobody gets 503 because of the queue (H1)."""
    path = tmp_path / "log.db"
    async with live(store=SqliteStore(str(path))) as first:
        peers = [await first.session() for _ in range(40)]
        starts = [(await peer.call("count", n=3)).events[0].id for peer in peers]
    store = Queued(path)
    async with live(store=store, store_timeout=TIMEOUT) as survivor:
        store.slow = True
        answers = await asyncio.gather(
            *(_resumed(peer, start, survivor.port) for peer, start in zip(peers, starts, strict=True))
        )
        assert answers == [(200, [1, 2, 3])] * 40
        assert survivor.app.counters.outages == 0


async def _resumed(peer: SessionPeer, position: str, port: int) -> tuple[int, list[int]]:
    peer.port = port
    async with await peer.resume(position) as call:
        answer = await call.answer()
        return answer.status, progress(answer.messages)


async def test_a_tool_that_keeps_the_event_loop_is_no_outage(tmp_path: Path) -> None:
    """What is sent meanwhile is written, and nobody is told that the store fails."""
    path = tmp_path / "log.db"
    async with live(store=f"sqlite:{path}?sync=full", store_timeout=TIMEOUT, max_stream_events=2_000) as served:
        peer = await served.session()
        async with (
            await peer.begin_call("block", seconds=2 * TIMEOUT, times=3) as blocking,
            await peer.begin_call("count", n=2_000) as call,
        ):
            assert progress((await call.answer()).messages) == list(range(1, 2_001))
            assert text_of((await blocking.answer()).messages[-1]) == "blocked"
        assert served.app.counters.outages == 0
    assert written(path) == [list(range(1, 2_001))]
