"""What others get wrong, as cases of ours: each test quotes the defect that was seen elsewhere.

Rows about restarts, several nodes, stdio and clients have their tests beside those parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from perdure._core.ids import StreamId
from perdure.store import MemoryStore
from perdure.store.interface import Store
from perdure.store.records import Event
from perdure.testing._values import count_open
from tests.support.clients.raw_http import Peer as RawPeer
from tests.support.clients.wire_client import Peer, notices_of, progress_of, text_of
from tests.support.servers.in_process import serve, until
from tests.support.servers.tool_server import ToolServer
from tests.support.stores.faulty_store import Fault, FaultyStore
from tests.support.stores.outages import recovered

pytestmark = pytest.mark.anyio


@pytest.fixture
def shop() -> ToolServer:
    return ToolServer()


async def test_two_sessions_with_the_same_request_id_do_not_mix(shop: ToolServer) -> None:
    """“Stream id = bare request id … two sessions using request id 1 mix streams.”"""
    async with serve(shop.server) as site:
        first, second = await site.join(), await site.join()
        one = await first.call("count", n=3, gate="one", pauses=[1], id=1, token=1)
        two = await second.call("count", n=3, gate="two", pauses=[1], id=1, token=1)
        await one.messages(1)
        await two.messages(1)
        await one.drop()
        await two.drop()
        shop.open("two/1")
        messages = await (await second.get(two.last_id)).rest()
        assert progress_of(messages) == [2, 3]
        resumed = await first.get(one.last_id)
        shop.open("one/1")
        messages = await resumed.rest()
        assert progress_of(messages) == [2, 3]
        assert messages[-1]["id"] == 1


async def test_a_session_cannot_read_at_anothers_position(shop: ToolServer) -> None:
    """“Session B, sending A's event id, receives A's results.” Nothing of A is in B's answer (promise 5)."""
    async with serve(shop.server) as site:
        alice, bob = await site.join(), await site.join()
        call = await alice.call("log", text="alice's secret", id=1)
        await call.rest()
        standalone = await alice.get()
        await alice.result("announce", n=2)
        await standalone.messages(2)
        running = await alice.call("count", n=2, gate="g", pauses=[1], token="alice")
        await running.messages(1)

        for wire in (call, running):
            for event in wire.seen:
                response = await bob.try_get(event.id)
                assert response.status_code == 400
                assert response.json()["error"]["code"] == -31002
                assert "alice" not in response.text
        nobodys = await bob.try_get(call.last_id.replace(call.last_id[1:23], "B" * 22))
        assert nobodys.text == (await bob.try_get(call.last_id)).text, "foreign and unknown cannot be told apart"

        foreign = await bob.get(standalone.last_id)
        await bob.result("announce", n=1, start=77)
        messages = [await foreign.message(), await foreign.message()]
        assert notices_of(messages) == [77]
        shop.open("g/1")
        assert text_of((await running.rest())[-1]) == "counted to 2"


class SlowReads(MemoryStore):
    """Each read takes a while; what is appended meanwhile is there when it returns to the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.during: list[Any] = []

    async def read(self, stream: StreamId, *, after: int, limit: int) -> Sequence[Event]:
        events = await super().read(stream, after=after, limit=limit)
        while self.during:
            await self.during.pop()()
        return events


async def test_no_event_falls_between_replay_and_live(shop: ToolServer) -> None:
    """“Events stored between replay and re-registration are never delivered (6 of 40 lost with a 50 ms store).”"""
    store = SlowReads()
    async with serve(shop.server, store=store) as site:
        peer = await site.join()
        wire = await peer.call("count", n=40, gate="g", pauses=[10, 20, 30], token=1)
        seen = await wire.messages(5)
        await wire.drop()

        async def go_on() -> None:
            """While the store is being read for the replay, the tool sends the next ten."""
            reached = _last(site, peer)
            shop.open(f"g/{reached}")
            await until(lambda: _last(site, peer) >= reached + 10)

        for _ in range(3):
            store.during = [go_on]
            wire = await peer.get(wire.last_id)
            seen += await wire.messages(7)
            await wire.drop()
        seen += await (await peer.get(wire.last_id)).rest()
        assert progress_of(seen) == list(range(1, 41))
        assert text_of(seen[-1]) == "counted to 40"


def _last(site: Any, peer: Peer) -> int:
    info = site.app.session_info(peer.session)
    calls = [stream.last for stream in info.streams if stream.kind == "call"]
    return max(calls, default=1000)


@pytest.mark.parametrize("fault", [Fault.RAISES, Fault.HANGS, Fault.BREAKS])
async def test_an_exception_from_the_store_hangs_nothing(shop: ToolServer, fault: Fault) -> None:
    """“One exception from the store ends the session's router: this call and all later ones hang.”"""
    store = FaultyStore(MemoryStore())
    async with serve(shop.server, store=store, store_timeout=0.1, complaint="the store fails") as site:
        peer = await site.join()
        wire = await peer.call("count", n=4, gate="g", pauses=[2], token=1)
        await wire.messages(2)
        store.writes = fault
        shop.open("g/2")
        messages = await wire.rest()
        assert progress_of(messages) == [3, 4]
        assert text_of(messages[-1]) == "counted to 4"
        assert await peer.result("count", n=1) == "counted to 1"
        store.works()
        assert await peer.result("count", n=2) == "counted to 2"
        assert site.app.counters.outages == 1
        await recovered(RawPeer(port=site.port))


async def test_a_detached_running_tool_is_not_idle(shop: ToolServer) -> None:
    """“Idle timeout counts HTTP requests, so a detached running tool is cancelled.”"""
    async with serve(shop.server, session_grace=0.4, replay_window=0.8, runtime_idle=0.05) as site:
        peer, idle = await site.join(), await site.join()
        wire = await peer.call("wait", gate="g")
        await wire.event()
        await wire.drop()
        await until(lambda: site.app.session_info(idle.session) is None)
        assert site.app.session_info(peer.session) is not None
        shop.open("g")
        [answer] = await (await peer.get(wire.last_id)).rest()
        assert text_of(answer) == "went through g"
        assert "cancelled at g" not in shop.seen


async def test_a_stop_in_the_middle_of_a_call_is_answered_and_stored(shop: ToolServer) -> None:
    """“SIGTERM mid-call truncates the body and stores nothing.”"""
    store: Store = MemoryStore()
    async with serve(shop.server, store=store) as site:
        peer = await site.join()
        wire = await peer.call("count", n=2, gate="never", pauses=[1], id="r", token=1)
        await wire.messages(1)
        site.app.begin_stop()
        [answer] = await wire.rest()
        assert (answer["id"], answer["error"]["code"]) == ("r", -31001)
        kept = await store.read(StreamId(wire.last_id[1:23]), after=0, limit=10)
        assert [event.final for event in kept] == [False, True]


async def test_positions_are_looked_up_and_not_split(shop: ToolServer) -> None:
    """“Example store parses ids at `_`, so GET replay is always empty” (TypeScript SDK #943). Stream ids are random
    and hold every character of their alphabet, `_` and `-` among them; each of them resumes."""
    async with serve(shop.server) as site:
        peer = await site.join()
        seen: set[str] = set()
        while not {"_", "-"} <= seen:
            wire = await peer.call("count", n=1, token=1)
            await wire.rest()
            stream = wire.last_id[1:23]
            if {"_", "-"} & set(stream):
                seen |= set(stream)
                assert progress_of(await (await peer.get(wire.seen[0].id)).rest()) == [1]


async def test_sessions_do_not_leak(shop: ToolServer) -> None:
    """“10,593 made, 108 deleted” (mcp-proxy #79). Those that nobody deletes end by themselves."""
    async with serve(shop.server, session_grace=2.0, replay_window=2.0, cleanup_interval=0.3) as site:
        await asyncio.gather(*(site.join() for _ in range(30)))
        assert await count_open(site.store) == 30

        async def all_gone() -> bool:
            return not await site.store.count_states()

        await until(all_gone)
        assert site.app.session_ids() == []
