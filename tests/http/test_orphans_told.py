"""A client that came back without positions is told of the calls that it lost (R5, promise 4), and may cancel them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from perdure._core.ids import Kind, SessionId
from perdure._core.losses import MAX_TAKEN, ORPHAN
from perdure.sessions import orphans
from perdure.sessions.orphans import MOST_TOLD
from perdure.store import MemoryStore
from perdure.store.steps import Reached
from tests.support.clients.wire_client import Message, Peer, Wire, progress_of, text_of
from tests.support.servers.in_process import Site, lose, serve, until
from tests.support.servers.tool_server import ToolServer
from tests.support.stores.faulty_store import Fault, FaultyStore

pytestmark = pytest.mark.anyio

CANCELLED = -32800


@pytest.fixture(autouse=True)
def little_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans, "SLACK", 0.8)


@pytest.fixture
async def site(shop: ToolServer) -> AsyncIterator[Site]:
    """The tool server, whose clients are asked to come back soon: so they are not waited for long."""
    async with serve(shop.server, retry=0.1) as site:
        yield site


async def begin(shop: ToolServer, peer: Peer, n: int, *, seen: int, gate: str = "g", **more: Any) -> Wire:
    """A call that has told its client so many numbers of n, and waits before each further one."""
    wire = await peer.call("count", n=n, gate=gate, pauses=list(range(seen, n + 1)), token=gate, **more)
    assert progress_of(await wire.messages(seen)) == list(range(1, seen + 1))
    return wire


async def say(site: Site, shop: ToolServer, peer: Peer, gate: str, *numbers: int) -> None:
    """Let a call without a reader say numbers on its own stream."""
    for number in numbers:
        shop.open(f"{gate}/{number - 1}")
    await until(lambda: _has_said(site, peer, numbers[-1]))


async def _has_said(site: Site, peer: Peer, number: int) -> bool:
    streams = await site.store.streams(SessionId(peer.session))
    return any(stream.last == number for stream in streams if stream.kind is Kind.CALL and not stream.sealed)


def told(message: Message) -> Message:
    """What a client is told of a call; its stream's name, which is random, left out."""
    assert message["method"] == ORPHAN, message
    return {name: value for name, value in message["params"].items() if name != "position"}


async def test_a_client_that_begins_again_learns_what_its_call_said_and_that_it_has_ended(
    site: Site, shop: ToolServer, peer: Peer
) -> None:
    """R5, promise 4: 1 and 2 were seen, 3 to 5 said while no client was there, 6 to 8 come, and the end is told."""
    call = await begin(shop, peer, 8, seen=2, id=7)
    await lose(site, peer, call)
    await say(site, shop, peer, "g", 3, 4, 5)
    standalone = await (again := await peer.reattach()).get()
    running = await standalone.message()
    named = {"call": "1:7", "requestId": 7, "method": "tools/call"}
    assert told(running) == {**named, "name": "count", "state": "running", "from": 3, "to": 5}
    for number in (6, 7, 8):
        shop.open(f"g/{number - 1}")
    assert progress_of(await standalone.messages(3)) == [6, 7, 8]
    shop.open("g/8")
    ended = await standalone.message()
    assert told(ended) == {**named, "state": "ended", "from": 3, "to": 6}
    assert ended["params"]["position"] == running["params"]["position"]
    rest = await (await again.get(ended["params"]["position"])).rest()
    assert (progress_of(rest), text_of(rest[-1])) == ([3, 4, 5], "counted to 8")


async def test_a_call_that_ended_while_its_client_was_away_is_told_once(
    site: Site, shop: ToolServer, peer: Peer
) -> None:
    """R5, promise 4: with the position behind which its answer lies; the next time it is known."""
    call = await begin(shop, peer, 1, seen=1, id=7)
    await lose(site, peer, call)
    shop.open("g/1")
    await until(lambda: shop.seen)
    standalone = await (again := await peer.reattach()).get()
    ended = await standalone.message()
    assert told(ended) == {
        "call": "1:7", "requestId": 7, "method": "tools/call", "state": "ended", "from": 2, "to": 2
    }  # fmt: skip
    [answer] = await (await again.get(ended["params"]["position"])).rest()
    assert text_of(answer) == "counted to 1"
    third = await again.reattach()
    await _nothing_is_told(site, shop, third, await third.get())


async def _nothing_is_told(site: Site, shop: ToolServer, peer: Peer, standalone: Wire) -> None:
    """Of anything but the call that is lost here and now: by the time that it is told of, all others would be."""
    witness = await peer.call("wait", gate="witness", id="witness")
    await witness.event()
    await lose(site, peer, witness)
    await standalone.drop()
    again = await peer.get()
    message = await again.message()
    assert (message["params"]["requestId"], message["params"]["state"]) == ("witness", "running")
    shop.open("witness")
    assert (await again.message())["params"]["state"] == "ended"


@pytest.mark.parametrize("first", ["call", "standalone"])
async def test_a_client_that_kept_its_positions_is_told_nothing(
    site: Site, shop: ToolServer, peer: Peer, first: str
) -> None:
    """R12: whichever stream it resumes first; the calls' own streams carry everything."""
    call = await begin(shop, peer, 3, seen=1)
    lost = await peer.call("wait", gate="lost", id="lost")
    await lost.event()
    again = await peer.reattach()
    if first == "standalone":
        standalone, resumed = await again.get(), await again.get(call.last_id)
    else:
        resumed, standalone = await again.get(call.last_id), await again.get()
    assert told(await standalone.message())["call"] == "1:lost"
    for number in (1, 2, 3):
        shop.open(f"g/{number}")
    rest = await resumed.rest()
    assert (progress_of(rest), text_of(rest[-1])) == ([2, 3], "counted to 3")
    shop.open("lost")
    assert told(await standalone.message())["call"] == "1:lost"


async def test_a_client_that_kept_its_session_and_one_position_gets_what_its_lost_calls_say(
    site: Site, shop: ToolServer, peer: Peer
) -> None:
    """R5: no handshake, only a GET with the position of the standalone stream; its call goes on there."""
    before = await peer.get()
    start = await before.event()
    call = await begin(shop, peer, 5, seen=2, id=7)
    await before.drop()
    await lose(site, peer, call)
    standalone = await peer.get(start.id)
    await say(site, shop, peer, "g", 3)
    running = await standalone.message()
    assert told(running) == {
        "call": "1:7", "requestId": 7, "method": "tools/call", "name": "count", "state": "running", "from": 3, "to": 3
    }  # fmt: skip
    shop.open("g/3")
    shop.open("g/4")
    assert progress_of(await standalone.messages(2)) == [4, 5]
    shop.open("g/5")
    ended = await standalone.message()
    assert told(ended)["state"] == "ended"
    rest = await (await peer.get(ended["params"]["position"])).rest()
    assert (progress_of(rest), text_of(rest[-1])) == ([3], "counted to 5")


async def test_a_client_that_resumes_everything_in_time_gets_it_where_it_belongs(
    site: Site, shop: ToolServer, peer: Peer
) -> None:
    """R4: all connections were cut; the standalone stream is resumed, then the call. It is no orphan."""
    before = await peer.get()
    start = await before.event()
    call = await begin(shop, peer, 3, seen=1)
    await before.drop()
    await lose(site, peer, call)
    standalone = await peer.get(start.id)
    resumed = await peer.get(call.last_id)
    await resumed.event()
    await _nothing_is_told(site, shop, peer, standalone)
    for number in (1, 2, 3):
        shop.open(f"g/{number}")
    rest = await resumed.rest()
    assert (progress_of(rest), text_of(rest[-1])) == ([2, 3], "counted to 3")


async def test_a_client_learns_of_a_running_call_once_for_each_time_that_it_began_again(
    site: Site, shop: ToolServer, peer: Peer
) -> None:
    """Not whenever a connection is renewed: who resumes the standalone stream was told."""
    call = await begin(shop, peer, 1, seen=1, id=7)
    await lose(site, peer, call)
    standalone = await peer.get()
    assert told(await standalone.message())["call"] == "1:7"
    await standalone.drop()
    standalone = await peer.get(standalone.last_id)
    await standalone.event()
    other = await peer.call("wait", gate="other", id=8)
    await other.event()
    await lose(site, peer, other)
    await standalone.drop()
    standalone = await peer.get(standalone.last_id)
    assert told(await standalone.message())["call"] == "1:8"
    await standalone.drop()
    standalone = await peer.get()
    assert {told(message)["call"] for message in await standalone.messages(2)} == {"1:7", "1:8"}


async def test_a_log_message_tells_it_where_logging_is_declared() -> None:
    """Stock clients do not know Perdure's notifications, and show these."""
    shop = ToolServer(logs=True)
    async with serve(shop.server, retry=0.1) as site:
        peer = await site.join()
        await begin(shop, peer, 1, seen=1, id=7)
        standalone = await (await peer.reattach()).get()
        log, running = await standalone.messages(2)
        sentence = "call 1:7 (tools/call count) still runs (cancel it as '1:7')"
        assert log["params"] == {"level": "warning", "logger": "perdure", "data": sentence}
        assert told(running)["call"] == "1:7"
        shop.open("g/1")
        log, ended = await standalone.messages(2)
        position = ended["params"]["position"]
        missed = f"events 2 to 2, its answer among them, can be read with Last-Event-ID {position}"
        assert log["params"]["data"] == f"call 1:7 (tools/call) has ended; {missed}"


async def test_no_more_calls_are_told_at_a_time_than_the_bound(site: Site, peer: Peer) -> None:
    """Promise 6: the standalone stream is not filled with them; the rest is told the next time."""
    for number in range(MOST_TOLD + 1):
        await peer.result("count", id=number, n=0)
    streams = [s for s in await site.store.streams(SessionId(peer.session)) if s.kind is Kind.CALL][1:]
    assert len(streams) == MOST_TOLD + 1
    await site.store.commit([Reached(stream=s.id, generation=1, through=0, unread=True) for s in streams])
    first = await peer.get()
    assert [told(message)["requestId"] for message in await first.messages(MOST_TOLD)] == list(range(MOST_TOLD))
    await first.drop()
    assert told(await (await peer.get()).message())["requestId"] == MOST_TOLD


async def test_a_handshake_is_no_call_to_be_told_of(site: Site, shop: ToolServer, peer: Peer) -> None:
    [_, handshake] = await site.store.streams(SessionId(peer.session))
    await site.store.commit([Reached(stream=handshake.id, generation=1, through=0, unread=True)])
    await _nothing_is_told(site, shop, peer, await peer.get())
    assert await site.store.streams(SessionId(peer.session), only_unread=True) == []


async def test_what_the_store_cannot_say_in_time_is_told_later(caplog: pytest.LogCaptureFixture) -> None:
    """Promise 4: a store that fails at the moment of telling delays it."""
    shop, store = ToolServer(), FaultyStore(MemoryStore())
    async with serve(shop.server, store=store, retry=0.1) as site:
        peer = await site.join()
        call = await begin(shop, peer, 1, seen=1, id=7)
        await lose(site, peer, call)
        shop.open("g/1")
        await until(lambda: shop.seen)
        standalone = await peer.get()
        await standalone.event()
        with caplog.at_level(logging.DEBUG, "perdure"):
            store.reads = Fault.RAISES
            await until(lambda: "orphans.untold" in {getattr(record, "action", "") for record in caplog.records})
            store.works()
        assert told(await standalone.message())["state"] == "ended"


async def test_an_ended_call_is_told_once_while_the_store_can_be_read_and_not_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Promise 7: it is told live; that it was, reaches the store later, however often the client comes until then."""
    shop, store = ToolServer(), FaultyStore(MemoryStore())
    async with serve(shop.server, store=store, complaint="the store fails", retry=0.1) as site:
        peer = await site.join()
        call = await begin(shop, peer, 1, seen=1, id=7)
        await lose(site, peer, call)
        shop.open("g/1")
        await until(lambda: shop.seen)
        standalone = await peer.get()
        await standalone.event()
        store.writes = Fault.RAISES
        assert told(await standalone.message())["state"] == "ended"
        with caplog.at_level(logging.DEBUG, "perdure"):
            standalone = await peer.get(standalone.last_id)
            await until(lambda: "orphans.untold" in {getattr(record, "action", "") for record in caplog.records})
        store.works()
        await until(lambda: _is_told(site, peer))
        await peer.result("announce", n=1)
        assert (await standalone.message())["params"]["uri"] == "notice://1"
        assert site.app.counters.orphans_told == 1


async def _is_told(site: Site, peer: Peer) -> bool:
    return not await site.store.streams(SessionId(peer.session), only_unread=True)


async def test_how_far_readers_have_got_is_written_once_the_store_is_back() -> None:
    """Promise 7: while it fails, nothing is held for that; then one step says it all."""
    shop, store = ToolServer(), FaultyStore(MemoryStore())
    async with serve(shop.server, store=store, complaint="the store fails") as site:
        peer = await site.join()
        standalone = await peer.get()
        await standalone.event()
        store.writes = Fault.RAISES
        await peer.result("announce", n=3)
        await standalone.messages(3)
        await standalone.drop()
        assert site.app.counters.outages == 1
        assert await _delivered(site, peer) == 0
        store.works()
        await until(lambda: _delivered(site, peer))
        assert await _delivered(site, peer) == 3


async def _delivered(site: Site, peer: Peer) -> int:
    [record] = [s for s in await site.store.streams(SessionId(peer.session)) if s.kind is Kind.STANDALONE]
    return record.delivered


# Questions that were asked on a call's own stream


async def quiz(site: Site, shop: ToolServer, peer: Peer, **more: Any) -> tuple[Wire, Message]:
    """A call whose client has been asked something, and whose connection is lost; and the question."""
    shop.open("g")
    call = await peer.call("quiz", gate="g", question="who?", **more)
    asked = (await call.messages(2))[-1]
    assert asked["method"] == "elicitation/create"
    await lose(site, peer, call)
    return call, asked


async def questions(standalone: Wire) -> list[Message]:
    """The next two messages that do not tell of an orphan."""
    found: list[Message] = []
    while len(found) < 2:
        if (message := await standalone.message())["method"] != ORPHAN:
            found.append(message)
    return found


async def asked_again(peer: Peer, standalone: Wire, asked: Message) -> None:
    """The question comes again, under another id, behind the cancellation of the first."""
    cancelled, again = await questions(standalone)
    assert (cancelled["method"], cancelled["params"]["requestId"]) == ("notifications/cancelled", asked["id"])
    assert (again["method"], again["params"]) == (asked["method"], asked["params"])
    assert again["id"] != asked["id"]
    await peer.answer(again, {"action": "accept", "content": {"answer": "me"}})


async def test_a_client_that_comes_back_twice_without_positions_is_asked_each_time(
    site: Site, shop: ToolServer, peer: Peer
) -> None:
    """R5: it has forgotten the question; without another one its tool would wait for ever. The second time the question
    was asked on the standalone stream."""
    call, _ = await quiz(site, shop, peer)
    first = await peer.get()
    second = (await questions(first))[-1]
    await first.drop()
    await asked_again(peer, await peer.get(), second)
    assert text_of((await (await peer.get(call.last_id)).rest())[-1]) == "me"


async def test_a_client_that_kept_one_position_is_asked_again_once_its_call_is_an_orphan(
    site: Site, shop: ToolServer, peer: Peer
) -> None:
    before = await peer.get()
    start = await before.event()
    call, asked = await quiz(site, shop, peer)
    await before.drop()
    await asked_again(peer, await peer.get(start.id), asked)
    assert text_of((await (await peer.get(call.last_id)).rest())[-1]) == "me"


async def test_a_question_that_is_still_to_be_read_is_asked_once(site: Site, shop: ToolServer, peer: Peer) -> None:
    """The first GET of a client, which is asked on the standalone stream before it: it has forgotten nothing."""
    waiting = await peer.call("quiz", gate="g", question="who?")
    await waiting.message()
    await lose(site, peer, waiting)
    standalone = await peer.get()
    await standalone.event()
    shop.open("g")
    ask = await standalone.message()
    await peer.answer(ask, {"action": "accept", "content": {"answer": "me"}})
    assert text_of((await (await peer.get(waiting.last_id)).rest())[-1]) == "me"
    assert [e for e in standalone.seen if "notifications/cancelled" in e.data] == []


# A client that is there all the time


async def test_a_call_whose_connection_died_is_told_to_the_client_that_still_reads(
    site: Site, shop: ToolServer, peer: Peer
) -> None:
    """R5, promise 4: the standalone stream stays open, so the client never comes back."""
    standalone = await peer.get()
    await standalone.event()
    call = await begin(shop, peer, 3, seen=1, id=7)
    await lose(site, peer, call)
    assert told(await standalone.message())["state"] == "running"
    shop.open("g/1")
    shop.open("g/2")
    assert progress_of(await standalone.messages(2)) == [2, 3]
    shop.open("g/3")
    ended = await standalone.message()
    assert told(ended)["state"] == "ended"
    assert text_of((await (await peer.get(ended["params"]["position"])).rest())[-1]) == "counted to 3"


async def test_a_call_that_is_resumed_is_not_told_to_a_client_that_still_reads(
    site: Site, shop: ToolServer, peer: Peer
) -> None:
    """R12."""
    standalone = await peer.get()
    await standalone.event()
    call = await begin(shop, peer, 2, seen=1, id=7)
    await lose(site, peer, call)
    resumed = await peer.get(call.last_id)
    await resumed.event()
    other = await peer.call("wait", gate="other", id="other")
    await other.event()
    await lose(site, peer, other)
    assert told(await standalone.message())["requestId"] == "other"
    shop.open("g/1")
    shop.open("g/2")
    assert progress_of(await resumed.rest()) == [2]


async def test_a_client_whose_connections_were_all_cut_is_not_taken_for_present(
    site: Site, shop: ToolServer, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R4: it comes back with its positions when the time of its calls has passed; they are no orphans."""
    monkeypatch.setattr(orphans, "SLACK", 0.05)
    standalone = await peer.get()
    start = await standalone.event()
    call = await begin(shop, peer, 2, seen=1, id=7)
    passed: list[bool] = []

    def watched(self: orphans.Orphans, since: int) -> bool:
        passed.append(is_there(self, since))
        return passed[-1]

    monkeypatch.setattr(orphans.Orphans, "_is_there", watched)
    await standalone.drop()
    await lose(site, peer, call)
    await until(lambda: passed)
    assert passed == [False]
    resumed = await peer.get(call.last_id)
    await resumed.event()
    await (await peer.get(start.id)).event()
    shop.open("g/1")
    shop.open("g/2")
    assert progress_of(await resumed.rest()) == [2]


is_there = orphans.Orphans._is_there


# When


async def test_each_time_that_a_client_comes_begins_a_time_of_its_own(
    site: Site, shop: ToolServer, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that is loaded again shortly before its earlier visit's time has passed hears of what it lost after one
    such time, not after two."""
    monkeypatch.setattr(orphans, "SLACK", 2.8)
    first = await peer.get()
    await first.event()
    call = await begin(shop, peer, 1, seen=1, id=7)
    await asyncio.sleep(1.5)  # a part of the first visit's time
    await first.drop()
    await lose(site, peer, call)
    loop = asyncio.get_running_loop()
    came = loop.time()
    second = await peer.get()
    assert told(await second.message())["call"] == "1:7"
    assert loop.time() - came < 1.4 * 3.0  # it was 1.5 + 3.0


# Request ids that begin again


async def test_a_request_takes_the_id_of_an_orphan(site: Site, shop: ToolServer, peer: Peer) -> None:
    """A page that comes back by GET alone counts its requests from 0 again, while its old call still runs."""
    old = await begin(shop, peer, 2, seen=1, id=0)
    await lose(site, peer, old)
    standalone = await peer.get()
    await standalone.event()
    new = await begin(shop, peer, 2, seen=1, id=0, gate="new")
    assert told(await standalone.message()) == {
        "call": "1:0", "requestId": 0, "method": "tools/call", "name": "count", "state": "running"
    }  # fmt: skip
    shop.open("g/1")
    [progress] = await standalone.messages(1)
    assert progress["params"]["progressToken"] == "1:g"  # the page may use the token again, too
    shop.open("new/1")
    shop.open("new/2")
    assert text_of((await new.rest())[-1]) == "counted to 2"
    shop.open("g/2")
    ended = await standalone.message()
    assert (told(ended)["call"], told(ended)["state"]) == ("1:0", "ended")
    assert text_of((await (await peer.get(ended["params"]["position"])).rest())[-1]) == "counted to 2"


async def test_a_cancellation_means_the_request_that_took_the_id(site: Site, shop: ToolServer, peer: Peer) -> None:
    """A32: the orphan is cancelled by its name."""
    old = await peer.call("wait", id=0, gate="old")
    await old.event()
    await lose(site, peer, old)
    standalone = await peer.get()
    await standalone.event()
    new = await peer.call("wait", id=0, gate="new")
    await new.event()
    await peer.cancel(0)
    assert (await new.rest())[-1]["error"]["code"] == CANCELLED
    assert "cancelled at old" not in shop.seen
    await peer.cancel("1:0")
    await until(lambda: "cancelled at old" in shop.seen)


async def test_the_id_of_a_call_that_is_no_orphan_is_refused(site: Site, shop: ToolServer, peer: Peer) -> None:
    """P3: its client is there, or has not come back."""
    call = await peer.call("wait", id=0, gate="g")
    await call.event()
    standalone = await peer.get()
    await standalone.event()
    assert (await peer.send(peer.tool("wait", id=0, gate="g"))).status_code == 400
    shop.open("g")
    assert text_of((await call.rest())[-1]) == "went through g"


async def test_an_id_is_taken_so_many_times_at_most(site: Site, shop: ToolServer, peer: Peer) -> None:
    """Promise 6: each of its calls still runs."""
    for _ in range(MAX_TAKEN + 1):
        call = await peer.call("wait", id=0, gate="g")
        await call.event()
        await lose(site, peer, call)
        await (await peer.get()).event()
    assert (await peer.send(peer.tool("wait", id=0, gate="g"))).status_code == 400
    shop.open("g")


# Cancelling


async def test_a_client_that_begins_again_cancels_its_orphan_by_name(site: Site, shop: ToolServer, peer: Peer) -> None:
    """A32: its own ids begin at 0 again, so the id alone would name another call."""
    old = await peer.call("wait", id=7, gate="old")
    await old.event()
    again = await peer.reattach()
    new = await again.call("wait", id=7, gate="new")
    await new.event()
    standalone = await again.get()
    name = told(await standalone.message())["call"]
    assert (await again.cancel(name)).status_code == 202
    ended = await standalone.message()
    assert (told(ended)["call"], told(ended)["state"]) == (name, "ended")
    [answer] = await (await again.get(ended["params"]["position"])).rest()
    assert answer["error"]["code"] == CANCELLED
    await until(lambda: "cancelled at old" in shop.seen)
    shop.open("new")
    assert text_of((await new.rest())[-1]) == "went through new"


async def test_an_id_of_ones_own_comes_before_a_calls_name(site: Site, shop: ToolServer, peer: Peer) -> None:
    """A client may have chosen such an id itself."""
    old = await peer.call("wait", id=7, gate="old")
    await old.event()
    again = await peer.reattach()
    own = await again.call("wait", id="1:7", gate="own")
    await own.event()
    await again.cancel("1:7")
    assert (await own.rest())[-1]["error"]["code"] == CANCELLED
    assert "cancelled at old" not in shop.seen
    await again.cancel("1:7")
    await until(lambda: "cancelled at old" in shop.seen)


async def test_a_client_that_kept_its_session_cancels_by_the_id_that_it_gave(
    site: Site, shop: ToolServer, peer: Peer
) -> None:
    """It is the same incarnation."""
    call = await peer.call("wait", id=7, gate="g")
    await call.event()
    await lose(site, peer, call)
    standalone = await peer.get()
    assert told(await standalone.message())["requestId"] == 7
    await peer.cancel(7)
    assert told(await standalone.message())["state"] == "ended"
    await until(lambda: "cancelled at g" in shop.seen)
