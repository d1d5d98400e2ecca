"""A session from its first message to its end (A21–A26, H2, S6, S9)."""

from __future__ import annotations

import asyncio
import gc
import re
from typing import Any

import pytest

from perdure._core.ids import SessionId
from perdure._core.states import SessionState
from perdure.log.reader import Reader
from perdure.log.stream import Stream
from perdure.sessions.session import Session
from perdure.store import MemoryStore
from perdure.store.interface import Store
from tests.support.clients.wire_client import SESSION_VERSIONS, Peer, text_of
from tests.support.servers.in_process import Site, info_of, serve, until
from tests.support.servers.tool_server import ToolServer
from tests.support.stores.shared_store import SharedStore

pytestmark = pytest.mark.anyio

PING = {"jsonrpc": "2.0", "id": 1, "method": "ping"}


async def test_initialize_gives_an_unguessable_session_id(site: Site) -> None:
    """A21, A22, S11: visible ASCII, 256 random bits, another one each time."""
    ids = {(await site.join()).session for _ in range(3)}
    assert len(ids) == 3
    assert all(re.fullmatch(r"[!-~]{43}", session) for session in ids)


@pytest.mark.parametrize("version", ["2024-11-05", *SESSION_VERSIONS])
async def test_each_revision_is_negotiated(site: Site, version: str) -> None:
    """P8."""
    peer = await site.join(version)
    assert peer.version == version
    assert await peer.result("remember") == f"wire speaks {version}"


async def test_an_unknown_revision_is_answered_with_ours(site: Site) -> None:
    peer = await site.join("2030-01-01")
    assert peer.version == "2025-11-25"


async def test_every_answer_of_a_session_names_it(peer: Peer) -> None:
    responses = [
        await peer.send(PING),
        await peer.send({"jsonrpc": "2.0", "method": "notifications/roots/list_changed"}),
    ]
    assert [response.headers["mcp-session-id"] for response in responses] == [peer.session] * 2
    assert (await peer.get()).headers["mcp-session-id"] == peer.session


async def test_a_deleted_session_is_gone_in_every_method(peer: Peer) -> None:
    """A24, A25, H2."""
    done = await peer.call("count", n=1)
    await done.rest()
    assert (await peer.delete()).status_code == 200
    gone = [
        await peer.send(PING),
        await peer.send({"jsonrpc": "2.0", "method": "notifications/initialized"}),
        await peer.try_get(),
        await peer.try_get(done.last_id),
        await peer.delete(),
    ]
    assert [response.status_code for response in gone] == [404] * 5
    assert [response.json()["error"] for response in gone] == [gone[0].json()["error"]] * 5


async def test_delete_ends_readers_and_answers_running_calls(shop: ToolServer, peer: Peer) -> None:
    """A25, promise 3: the call that ran is told, the standalone stream ends, the tool is stopped."""
    standalone = await peer.get()
    running = await peer.call("wait", gate="never", id="r")
    await until(lambda: shop.seen)
    assert (await peer.delete()).status_code == 200
    [answer] = await running.rest()
    assert (answer["id"], answer["error"]["code"]) == ("r", -32800)
    assert await standalone.rest() == []
    await until(lambda: "cancelled at never" in shop.seen)


async def test_delete_does_not_wait_for_a_tool_that_cannot_be_stopped(shop: ToolServer, peer: Peer) -> None:
    """A thread cannot be cancelled; its session ends all the same, and so do others afterwards."""
    running = await peer.call("in_thread")
    await until(lambda: shop.seen)
    try:
        async with asyncio.timeout(10):
            assert (await peer.delete()).status_code == 200
            assert (await running.rest())[-1]["error"]["code"] == -32800
    finally:
        shop.thread_gate.set()


async def test_a_tool_that_cannot_be_stopped_does_not_keep_other_sessions_from_expiring(shop: ToolServer) -> None:
    """R8: sessions are tended one after the other; none may hold up the round."""
    async with serve(shop.server, session_grace=0.4, replay_window=0.8) as site:
        stuck = await site.join()
        running = await stuck.call("in_thread", id=5)
        await until(lambda: shop.seen)
        await stuck.cancel(5)
        await running.rest()
        await site.join()
        try:
            async with asyncio.timeout(10):
                await until(lambda: site.app.session_ids() == [])
        finally:
            shop.thread_gate.set()


async def test_a_tool_that_cannot_be_stopped_does_not_keep_the_server_from_stopping(shop: ToolServer) -> None:
    try:
        async with asyncio.timeout(10), serve(shop.server) as site:
            peer = await site.join()
            await peer.call("stubborn", gate="never")
            await until(lambda: shop.seen)
        # Leaving the block waits for the end of the lifespan; getting here is the proof.
    finally:
        shop.open("never")


async def test_session_info_tells_what_there_is_to_know(shop: ToolServer, site: Site) -> None:
    """S6: id, owner, state, streams with their last number, connected since, running calls."""
    peer = await site.join()
    assert site.app.session_info("A" * 43) is None
    standalone = await peer.get()
    call = await peer.call("count", n=5, gate="g", pauses=[3], token=1)
    await call.messages(3)
    info = info_of(site.app, peer.session)
    assert (info.id, info.owner, info.state, info.version) == (peer.session, "", "active", "2025-11-25")
    assert info.running_calls == ("tools/call",)
    first, second = info.streams
    assert (first.kind, first.state, first.last) == ("standalone", "live", 0)
    assert (second.kind, second.state, second.last) == ("call", "live", 3)
    assert first.connected_since is not None
    assert first.connected_since >= info.created
    await standalone.drop()
    shop.open("g/3")
    await call.rest()
    await until(lambda: _streams(site, peer) == [("standalone", "detached", None)])


def _streams(site: Site, peer: Peer) -> list[Any]:
    return [(stream.kind, stream.state, stream.connected_since) for stream in info_of(site.app, peer.session).streams]


async def test_an_unused_session_turns_dormant_and_comes_back(shop: ToolServer) -> None:
    """R8: the runtime goes, record and answers stay; the next message brings it back."""
    async with serve(shop.server, session_grace=0.4) as site:
        peer = await site.join()
        done = await peer.call("count", n=2, token=1)
        await done.rest()

        async def is_in(state: SessionState) -> bool:
            record = await site.store.session(SessionId(peer.session))
            return record is not None and record.state is state

        await until(lambda: is_in(SessionState.DORMANT))
        await until(lambda: site.app.session_info(peer.session) is None)  # once it knows that this is written
        again = await peer.get(done.seen[1].id)
        assert text_of((await again.rest())[-1]) == "counted to 2"
        await peer.get()  # which keeps it awake, however slow this machine is
        await until(lambda: is_in(SessionState.ACTIVE))
        assert await peer.result("remember") == "wire speaks 2025-11-25"


async def test_a_reader_keeps_its_session_awake(shop: ToolServer) -> None:
    """R8: only a session without connection and without running call gets older."""
    async with serve(shop.server, session_grace=0.4, replay_window=0.8) as site:
        reading, idle = await site.join(), await site.join()
        standalone = await reading.get()
        await until(lambda: site.app.session_info(idle.session) is None)
        assert site.app.session_ids() == [reading.session]
        await standalone.drop()
        await until(lambda: site.app.session_ids() == [])
        await asyncio.sleep(0.8)  # the window is a time
        assert (await reading.send(PING)).status_code == 404


async def rows(store: Store, session: str) -> int:
    """What a store keeps of a session beside its record."""
    key = SessionId(session)
    streams = await store.streams(key)
    events = [event for stream in streams for event in await store.read(stream.id, after=0, limit=1000)]
    return len(streams) + len(events) + len(await store.calls(key)) + len(await store.asks(key))


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_after_a_session_has_ended_memory_and_rows_go_back(shop: ToolServer, kind: str, tmp_path: Any) -> None:
    """S9: no leak, whatever state the session was in."""
    store: Store = MemoryStore() if kind == "memory" else SharedStore(tmp_path / "log.db")
    before = _alive()
    async with serve(shop.server, store=store, replay_window=3600.0) as site:
        peers = [await site.join() for _ in range(5)]
        for peer in peers:
            await peer.get()
            await peer.call("wait", gate="never")
            dropped = await peer.call("count", n=5, gate="never", pauses=[3], token=1)
            await dropped.messages(3)
            await dropped.drop()
            await (await peer.call("announce", n=3)).rest()
            await peer.call("ask", question="?")
        assert all([await rows(store, peer.session) > 10 for peer in peers])
        for peer in peers:
            await peer.delete()

        async def gone() -> bool:
            return not any([await rows(store, peer.session) for peer in peers])

        await until(gone)
        await until(lambda: _alive() <= before)
        assert site.app.session_ids() == []


def _alive() -> int:
    gc.collect()
    return sum(isinstance(thing, Session | Stream | Reader) for thing in gc.get_objects())


async def test_a_finished_call_leaves_nothing_in_memory_but_its_count(site: Site, peer: Peer) -> None:
    """S9: a stream that is over and unread is known to the store alone, also after somebody asked for it again."""
    for _ in range(5):
        done = await peer.call("count", n=2, token=1)
        await done.rest()
        await (await peer.get(done.seen[1].id)).rest()
        assert (await peer.try_get(done.last_id)).status_code == 405
    await until(lambda: len(_streams(site, peer)) == 1)
