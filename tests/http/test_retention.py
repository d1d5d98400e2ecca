"""What is forgotten, when, and how it is told (R7, P9, S3; promise 4)."""

from __future__ import annotations

import pytest

from perdure._core.ids import SessionId, StreamId
from perdure.store import MemoryStore
from perdure.store.interface import stream_by_id
from perdure.store.records import Event
from tests.support.clients.wire_client import Peer, Wire, gaps_of, notices_of, progress_of, text_of
from tests.support.servers.in_process import Site, info_of, serve, until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio


async def kept_of(site: Site, wire: Wire) -> list[Event]:
    """What the store keeps of the stream that a wire read."""
    return list(await site.store.read(StreamId(wire.last_id[1:23]), after=0, limit=100_000))


async def keeps(site: Site, wire: Wire, events: int) -> bool:
    return len(await kept_of(site, wire)) <= events


async def forgotten(site: Site, wire: Wire) -> bool:
    return await stream_by_id(site.store, StreamId(wire.last_id[1:23])) is None


async def detached(shop: ToolServer, peer: Peer, n: int, gate: str) -> Wire:
    """A call of which one event was seen and then nothing more, run to its end."""
    wire = await peer.call("count", n=n, gate=gate, pauses=[1], token=1)
    await wire.messages(1)
    await wire.drop()
    before = shop.seen.count(f"counted {n}")
    shop.open(f"{gate}/1")
    await until(lambda: shop.seen.count(f"counted {n}") > before)
    return wire


@pytest.mark.parametrize("n", [9, 10, 11, 50])
async def test_a_detached_stream_keeps_exactly_its_newest_events_and_the_answer(shop: ToolServer, n: int) -> None:
    """max_stream_events: the gap is told with its ends, on the stream, then what is retained follows."""
    async with serve(shop.server, max_stream_events=10) as site:
        peer = await site.join()
        wire = await detached(shop, peer, n, "g")
        await until(lambda: _streams(site, peer) == 1)
        kept = await kept_of(site, wire)
        assert len([event for event in kept if not event.final]) == min(n, 10)
        assert len([event for event in kept if event.final]) == 1
        resumed = await peer.get(wire.last_id)
        messages = await resumed.rest()
        assert gaps_of(messages) == ([(2, n - 10)] if n > 11 else [])
        assert progress_of(messages) == list(range(max(2, n - 9), n + 1))
        assert text_of(messages[-1]) == f"counted to {n}"
        if n > 11:
            assert b": gap: events 2 to 40 " in resumed.raw
            assert site.app.counters.gaps == 1


def _streams(site: Site, peer: Peer) -> int:
    return len(info_of(site.app, peer.session).streams)


async def test_ids_in_and_behind_a_gap_are_places_to_come_back_to(shop: ToolServer) -> None:
    """A12: the id of the gap means the place behind it; resuming there tells no gap again."""
    async with serve(shop.server, max_stream_events=5) as site:
        peer = await site.join()
        wire = await detached(shop, peer, 20, "g")
        resumed = await peer.get(wire.last_id)
        await resumed.rest()
        gap = next(event for event in resumed.seen if "perdure/gap" in event.data)
        again = await (await peer.get(gap.id)).rest()
        assert gaps_of(again) == []
        assert progress_of(again) == [16, 17, 18, 19, 20]


async def test_an_attached_reader_is_never_trimmed_past(shop: ToolServer) -> None:
    """A reader that keeps up sees everything, however small the limit."""
    async with serve(shop.server, max_stream_events=5) as site:
        peer = await site.join()
        messages = await (await peer.call("count", n=500, token=1)).rest()
        assert progress_of(messages) == list(range(1, 501))
        assert gaps_of(messages) == []


async def test_max_streams_leaves_old_calls_their_answers_only(shop: ToolServer) -> None:
    """P9: streams that keep events beside their answers; the oldest lose them first, and it is told."""
    async with serve(shop.server, max_streams=3) as site:
        peer = await site.join()
        wires = []
        for _ in range(6):
            wire = await peer.call("count", n=4, token=1)
            await wire.rest()
            wires.append(wire)
        await until(lambda: _streams(site, peer) == 1)
        kept = [len(await kept_of(site, wire)) for wire in wires]
        assert kept == [1, 1, 1, 5, 5, 5]
        oldest = await (await peer.get(wires[0].seen[1].id)).rest()
        assert gaps_of(oldest) == [(2, 4)]
        assert text_of(oldest[-1]) == "counted to 4"
        newest = await (await peer.get(wires[-1].seen[1].id)).rest()
        assert gaps_of(newest) == []
        assert progress_of(newest) == [2, 3, 4]


async def test_max_session_events_goes_over_all_streams(shop: ToolServer) -> None:
    """Answers aside, a session never keeps more; idle streams lose theirs before busy ones."""
    async with serve(shop.server, max_session_events=20) as site:
        peer = await site.join()
        running = await peer.call("count", n=8, gate="g", pauses=[7], token=1)
        await running.messages(7)
        await running.drop()
        wires = []
        for _ in range(5):
            wire = await peer.call("count", n=5, token=1)
            await wire.rest()
            wires.append(wire)
        await until(lambda: _streams(site, peer) == 2)
        kept = [len([e for e in await kept_of(site, wire) if not e.final]) for wire in (running, *wires)]
        assert sum(kept) <= 20
        assert kept[0] == 7
        assert kept[-1] == 5
        assert kept[1] == 0
        shop.open("g/7")
        messages = await (await peer.get(running.last_id)).rest()
        assert progress_of(messages) == [8]


async def test_max_answers_forgets_the_oldest_calls_altogether(shop: ToolServer) -> None:
    """Their positions are then answered as those of no stream: 400, -31002."""
    async with serve(shop.server, max_answers=3) as site:
        peer = await site.join()
        wires = []
        for number in range(6):
            wire = await peer.call("count", n=1, id=number, token=1)
            await wire.rest()
            wires.append(wire)

        await until(lambda: _streams(site, peer) == 1)
        for wire in wires[:2]:
            response = await peer.try_get(wire.seen[0].id)
            assert (response.status_code, response.json()["error"]["code"]) == (400, -31002)
        for number in (4, 5):
            answer = (await (await peer.get(wires[number].seen[0].id)).rest())[-1]
            assert answer["id"] == number
        assert len(await site.store.calls(SessionId(peer.session))) <= 4


async def test_a_stream_that_is_being_read_is_not_forgotten_under_its_reader(shop: ToolServer) -> None:
    """max_answers: somebody resumes an old call while new ones push it out."""
    async with serve(shop.server, max_answers=2, small_buffers=True) as site:
        peer = await site.join()
        wire = await peer.call("flood", n=400, size=4000, token=1)
        await wire.rest()
        resumed = await peer.get(wire.seen[0].id)
        await resumed.messages(1)
        for _ in range(5):
            await peer.result("count", n=1)
        messages = await resumed.rest()
        assert gaps_of(messages) == []
        assert text_of(messages[-1]) == "flooded 400"


async def test_expired_events_are_a_gap_and_the_answer_is_still_there(shop: ToolServer) -> None:
    """S3, expired events: `event_ttl` has passed, the sweep ran, `replay_window` has not passed."""
    async with serve(shop.server, event_ttl=0.1, cleanup_interval=0.05) as site:
        peer = await site.join()
        wire = await peer.call("count", n=5, token=1)
        await wire.rest()
        await until(lambda: keeps(site, wire, 1))
        messages = await (await peer.get(wire.seen[2].id)).rest()
        assert gaps_of(messages) == [(3, 5)]
        assert text_of(messages[-1]) == "counted to 5"


async def test_expired_standalone_events_are_a_gap(shop: ToolServer) -> None:
    async with serve(shop.server, event_ttl=0.1, cleanup_interval=0.05) as site:
        peer = await site.join()
        standalone = await peer.get()
        await peer.result("announce", n=4)
        await standalone.messages(2)
        await standalone.drop()
        await until(lambda: keeps(site, standalone, 0))
        resumed = await peer.get(standalone.last_id)
        assert gaps_of([await resumed.message()]) == [(3, 4)]
        await peer.result("announce", n=1, start=5)
        assert notices_of([await resumed.message()]) == [5]


async def test_outside_the_replay_window_the_call_is_gone(shop: ToolServer) -> None:
    """S3: the session lives (it is used), its old answers do not."""
    async with serve(shop.server, event_ttl=0.1, replay_window=0.8, cleanup_interval=0.05) as site:
        peer = await site.join()
        await peer.get()
        wire = await peer.call("count", n=2, token=1)
        await wire.rest()
        await until(lambda: forgotten(site, wire))
        response = await peer.try_get(wire.seen[1].id)
        assert (response.status_code, response.json()["error"]["code"]) == (400, -31002)
        assert await peer.result("count", n=1) == "counted to 1"


async def test_outside_the_replay_window_the_session_is_gone(shop: ToolServer) -> None:
    """H2: 404, and nothing of it is left in the store."""
    async with serve(shop.server, replay_window=0.8, cleanup_interval=0.05) as site:
        peer = await site.join()
        await peer.result("count", n=2, token=1)
        await until(lambda: site.app.session_ids() == [])
        assert (await peer.send(peer.request("ping"))).status_code == 404
        assert (await peer.try_get()).status_code == 404

        async def swept() -> bool:
            return await site.store.session(SessionId(peer.session)) is None

        await until(swept)
        assert list(await site.store.streams(SessionId(peer.session))) == []


async def test_a_long_call_outlives_the_replay_window(shop: ToolServer) -> None:
    """A running call holds its session and its stream, with or without a reader."""
    async with serve(shop.server, event_ttl=0.05, replay_window=0.8, cleanup_interval=0.05) as site:
        peer, idle = await site.join(), await site.join()
        wire = await peer.call("count", n=2, gate="g", pauses=[1], token=1)
        await wire.messages(1)
        await wire.drop()
        await until(lambda: site.app.session_info(idle.session) is None)
        shop.open("g/1")
        messages = await (await peer.get(wire.last_id)).rest()
        assert text_of(messages[-1]) == "counted to 2"


class Forgetful(MemoryStore):
    """A store that has lost the answers of some calls."""

    lost: frozenset[str] = frozenset()

    async def read(self, stream: StreamId, *, after: int, limit: int) -> list[Event]:
        events = await super().read(stream, after=after, limit=limit)
        return [event for event in events if not (event.final and stream in self.lost)]


async def test_a_lost_answer_is_told_under_its_own_id_and_the_stream_ends(shop: ToolServer) -> None:
    """Promise 3 and 4: -31002 in place of the answer, never silence."""
    store = Forgetful()
    async with serve(shop.server, store=store) as site:
        peer = await site.join()
        wire = await peer.call("count", n=2, id="mine", token=1)
        await wire.rest()
        await until(lambda: _streams(site, peer) == 1)
        store.lost = frozenset({wire.last_id[1:23]})
        resumed = await peer.get(wire.seen[1].id)
        messages = await resumed.rest()
        assert progress_of(messages) == [2]
        assert gaps_of(messages) == [(3, 3)]
        assert (messages[-1]["id"], messages[-1]["error"]["code"]) == ("mine", -31002)


async def test_of_a_batch_only_the_lost_answers_are_told_as_lost(shop: ToolServer) -> None:
    """A stream that owes several: those that are there come as they are."""
    store = Forgetful()
    async with serve(shop.server, store=store) as site:
        peer = await site.join("2025-03-26")
        wire = await peer.post([peer.tool("count", n=1, id=1, token=1), peer.request("ping", id="2")])
        await wire.rest()
        await until(lambda: _streams(site, peer) == 1)
        store.lost = frozenset({wire.last_id[1:23]})
        messages = await (await peer.get(wire.seen[0].id)).rest()
        errors = {m["id"]: m["error"]["code"] for m in messages if "error" in m}
        assert errors == {1: -31002, "2": -31002}
