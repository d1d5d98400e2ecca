"""What one session keeps is bounded in bytes: events go first, then the oldest answers (promise 6, R7)."""

from __future__ import annotations

from typing import Any

import pytest

from perdure._core.ids import SessionId, StreamId
from perdure.store import MemoryStore
from tests.support.clients.raw_http import SessionPeer, progress
from tests.support.servers.gated_server import Live, live
from tests.support.servers.in_process import info_of, until

pytestmark = pytest.mark.anyio

LIMIT = 100_000


async def kept_bytes(store: MemoryStore, peer: SessionPeer) -> int:
    """Bytes of all events and answers that the store keeps of a session."""
    size = 0
    for stream in await store.streams(SessionId(peer.id)):
        size += sum(len(event.payload) for event in await store.read(stream.id, after=0, limit=100_000))
    return size


async def answers(store: MemoryStore, positions: list[str]) -> list[bool]:
    """Of which calls the answer is kept."""
    streams = [StreamId(position[1:23]) for position in positions]
    return [any(e.final for e in await store.read(stream, after=0, limit=100_000)) for stream in streams]


async def call(served: Live, peer: SessionPeer, tool: str, **arguments: Any) -> str:
    """A position on the stream of a call that is over."""
    async with await peer.begin_call(tool, **arguments) as exchange:
        await exchange.answer()
        position = exchange.position
    await until(lambda: _open_streams(served, peer) == 1)
    return position


def _open_streams(served: Live, peer: SessionPeer) -> int:
    return len(info_of(served.app, peer.id).streams)


async def test_the_oldest_answers_go_when_they_are_too_many_bytes() -> None:
    store = MemoryStore()
    async with live(store=store, max_session_bytes=LIMIT) as served:
        peer = await served.session()
        positions = [await call(served, peer, "babble", size=10_000) for _ in range(8)]
        # An answer has its text twice, as content and as structured content; the newest is kept beside the limit.
        assert await answers(store, positions) == [False] * 3 + [True] * 5
        assert await kept_bytes(store, peer) <= LIMIT + 21_000
        resumed = await peer.resume(positions[0])
        assert await resumed.head() == 400
        await resumed.aclose()


async def test_the_newest_answer_is_kept_whatever_its_size() -> None:
    store = MemoryStore()
    async with live(store=store, max_session_bytes=LIMIT) as served:
        peer = await served.session()
        large = await call(served, peer, "babble", size=3 * LIMIT)
        assert await answers(store, [large]) == [True]
        small = await call(served, peer, "babble", size=10)
        assert await answers(store, [large, small]) == [False, True]


async def test_events_go_before_answers() -> None:
    store = MemoryStore()
    async with live(store=store, max_session_bytes=LIMIT) as served:
        peer = await served.session()
        positions = [await call(served, peer, "shout", text="x" * 1_000, times=40) for _ in range(4)]
        assert await answers(store, positions) == [True] * 4
        assert await kept_bytes(store, peer) <= LIMIT
        newest = await store.read(StreamId(positions[-1][1:23]), after=0, limit=100)
        assert len(newest) == 41  # of the newest call nothing is gone


async def test_what_a_process_before_has_kept_is_counted() -> None:
    store = MemoryStore()
    async with live(store=store, max_session_bytes=LIMIT) as served:
        peer = await served.session()
        before = [await call(served, peer, "shout", text="x" * 1_000, times=40) for _ in range(2)]
    async with live(store=store, max_session_bytes=LIMIT) as served:
        again = SessionPeer(port=served.port, headers=peer.headers, id=peer.id, calls=2)
        await call(served, again, "shout", text="x" * 1_000, times=40)
        assert await kept_bytes(store, again) <= LIMIT
        assert len(await store.read(StreamId(before[0][1:23]), after=0, limit=100)) == 1


async def test_a_reader_gets_what_it_has_not_seen_whatever_the_bytes() -> None:
    """The limit is for what is kept: an attached reader gets all of a call, and the call waits for it."""
    async with live(max_session_bytes=LIMIT) as served:
        peer = await served.session()
        answer = await peer.call("shout", text="x" * 2_000, times=200)
        assert progress(answer.messages) == list(range(1, 201))
