"""Event streams as they come over the wire: what is in them, in which order, and when they end (P1–P5, S1, S5)."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from perdure.store import SqliteStore
from tests.support.site import Site, serve, until
from tests.support.wire import SESSION_VERSIONS, Ended, Peer, progress_of, text_of
from tests.support.workshop import Workshop

pytestmark = pytest.mark.anyio

OLDER = SESSION_VERSIONS[:-1]


async def test_a_call_streams_its_notifications_then_its_answer_then_ends(peer: Peer) -> None:
    """P1, A5, A19, A33: in order, and the end comes at once after the response."""
    wire = await peer.call("count", n=5, id=1, token="t")
    messages = await wire.rest()
    assert progress_of(messages) == [1, 2, 3, 4, 5]
    assert messages[-1]["id"] == 1
    assert len(messages) == 6


async def test_events_carry_id_event_and_data_in_one_frame(peer: Peer) -> None:
    """S1, P2."""
    wire = await peer.call("count", n=2, token=1)
    await wire.rest()
    frames = wire.raw.split(b"\n\n")[1:-1]
    assert len(frames) == 3
    assert all(re.fullmatch(rb"id: [!-~]+\nevent: message\ndata: \{.*\}", frame) for frame in frames)


async def test_ids_rise_within_a_stream_also_across_reconnects(shop: Workshop, peer: Peer) -> None:
    """S1."""
    first = await peer.call("count", n=6, gate="g", pauses=[2, 4], token=1)
    await first.messages(2)
    await first.drop()
    shop.open("g/2")
    second = await peer.get(first.last_id)
    await second.messages(2)
    await second.drop()
    shop.open("g/4")
    third = await peer.get(second.last_id)
    await third.rest()
    ids = [event.id for wire in (first, second, third) for event in wire.seen if event.data]
    assert ids == sorted(ids)
    assert len(set(ids)) == len(ids) == 7


async def test_ids_are_unique_across_all_streams_of_a_session(peer: Peer) -> None:
    """A12: priming events and resumed streams included, however often one resumes at the same place."""
    calls = [await peer.call("count", n=3, token=1) for _ in range(4)]
    for wire in calls:
        await wire.rest()
    again = [await peer.get(calls[0].seen[0].id) for _ in range(2)]
    for wire in again:
        await wire.rest()
    standalone = await peer.get()
    await standalone.event()
    first = [event.id for wire in (*calls, standalone) for event in wire.seen]
    assert len(set(first)) == len(first)
    primed = [wire.seen[0].id for wire in (*calls, *again, standalone)]
    assert len(set(primed)) == len(primed)
    replayed = [[event.id for event in wire.seen[1:]] for wire in (calls[0], *again)]
    assert replayed[0] == replayed[1] == replayed[2]


async def test_an_id_tells_its_stream(peer: Peer) -> None:
    """A13: without a session-wide search, events of one call lead to that call and to no other."""
    wires = [await peer.call("count", n=2, id=number, token=number) for number in range(3)]
    for wire in wires:
        await wire.rest()
    for number, wire in enumerate(wires):
        answer = (await (await peer.get(wire.seen[2].id)).rest())[-1]
        assert answer["id"] == number


async def test_the_headers_keep_proxies_from_storing_or_changing_a_stream(peer: Peer) -> None:
    """S5."""
    for wire in (await peer.call("count", n=0), await peer.get()):
        assert wire.headers["content-type"] == "text/event-stream"
        assert wire.headers["cache-control"] == "no-cache, no-transform"
        assert wire.headers["x-accel-buffering"] == "no"


async def test_an_idle_connection_carries_comments(shop: Workshop) -> None:
    """S5: on both kinds of streams, without disturbing the events."""
    async with serve(shop.server, keepalive_interval=0.2) as site:
        peer = await site.join()
        standalone = await peer.get()
        call = await peer.call("wait", gate="g")
        await standalone.comment("keep-alive")
        await call.comment("keep-alive")
        shop.open("g")
        [answer] = await call.rest()
        assert text_of(answer) == "went through g"


@pytest.mark.parametrize("number", range(3))
async def test_every_new_stream_of_the_newest_revision_is_primed(shop: Workshop, number: int) -> None:
    """A9, A10: an id with empty data and `retry`, on POST, on GET and on a resumed stream."""
    async with serve(shop.server, retry=1.5) as site:
        peer = await site.join()
        call = await peer.call("count", n=1, token=1)
        if number == 0:
            wire = call
        elif number == 1:
            wire = await peer.get()
        else:
            await call.rest()
            wire = await peer.get(call.seen[0].id)
        event = await wire.event()
        assert (event.data, event.retry) == ("", 1500)
        assert event.id


async def test_initialize_is_primed_as_well(site: Site) -> None:
    peer = Peer(site)
    wire = await peer.post(peer.handshake())
    assert (await wire.event()).data == ""
    assert (await wire.rest())[-1]["result"]["protocolVersion"] == peer.version


@pytest.mark.parametrize("version", OLDER)
async def test_older_revisions_get_neither_priming_nor_retry(site: Site, version: str) -> None:
    """A9, A11, P8: every event there carries a message."""
    peer = await site.join(version)
    call = await peer.call("count", n=2, token=1)
    assert progress_of(await call.rest()) == [1, 2]
    resumed = await peer.get(call.seen[0].id)
    assert progress_of(await resumed.rest()) == [2]
    standalone = await peer.get()
    await peer.result("announce", n=1)
    assert (await standalone.message())["method"] == "notifications/resources/updated"
    for wire in (call, resumed, standalone):
        assert all(event.data for event in wire.seen)
        assert b"retry:" not in wire.raw


async def test_the_priming_id_is_a_place_to_come_back_to(shop: Workshop, peer: Peer) -> None:
    """A9: a cut right after the priming event loses nothing."""
    wire = await peer.call("count", n=3, gate="g", pauses=[0], token=1)
    await wire.event()
    await wire.drop()
    shop.open("g/0")
    messages = await (await peer.get(wire.last_id)).rest()
    assert progress_of(messages) == [1, 2, 3]
    assert text_of(messages[-1]) == "counted to 3"


async def test_concurrent_calls_are_independent(shop: Workshop, peer: Peer) -> None:
    """P3: the second and third finish while the first waits, each on its own stream with its own messages (A17)."""
    slow = await peer.call("count", n=2, gate="g", pauses=[1], id="slow", token="slow")
    await slow.messages(1)
    quick = [await peer.call("count", n=3, id=f"q{number}", token=f"q{number}") for number in range(2)]
    for number, wire in enumerate(quick):
        messages = await wire.rest()
        assert progress_of(messages) == [1, 2, 3]
        assert {m["params"]["progressToken"] for m in messages[:-1]} == {f"q{number}"}
        assert messages[-1]["id"] == f"q{number}"
    shop.open("g/1")
    assert (await slow.rest())[-1]["id"] == "slow"


async def test_an_unread_stream_delays_nobody(shop: Workshop) -> None:
    """P3: nobody reads the first stream, which has far more to say than any buffer holds."""
    async with serve(shop.server, small_buffers=True, max_stream_events=50) as site:
        peer = await site.join()
        unread = await peer.call("flood", n=2000, size=1000, token=1)
        other = await site.join()
        for number in range(10):
            assert await peer.result("count", n=number) == f"counted to {number}"
            assert await other.result("count", n=number) == f"counted to {number}"
        assert "flooded" not in shop.seen
        assert progress_of(await unread.rest()) == list(range(1, 2001))


async def test_errors_come_over_the_stream_too(peer: Peer) -> None:
    """P4: a tool that raises, a JSON-RPC error of a tool's, an unknown tool, an unknown method, bad params."""
    [raised] = await (await peer.call("boom", id=1)).rest()
    assert (raised["id"], raised["result"]["isError"]) == (1, True)
    assert "boom" in text_of(raised)
    [refused] = await (await peer.call("boom", id=2, code=-32042)).rest()
    assert (refused["id"], refused["error"]["code"]) == (2, -32042)
    [unknown] = await (await peer.call("no such tool", id=3)).rest()
    assert unknown["id"] == 3
    assert unknown.get("error") or unknown["result"]["isError"]
    [method] = await (await peer.post(peer.request("no/such/method", id=4))).rest()
    assert (method["id"], method["error"]["code"]) == (4, -32601)
    [params] = await (await peer.post(peer.request("tools/call", {"name": 5}, id=5))).rest()
    assert (params["id"], params["error"]["code"]) == (5, -32602)
    assert await peer.result("count", n=1) == "counted to 1"


async def test_ping_is_answered_while_calls_run(shop: Workshop, peer: Peer) -> None:
    """A34."""
    await peer.call("wait", gate="g")
    [answer] = await (await peer.post(peer.request("ping", id="p"))).rest()
    assert answer == {"jsonrpc": "2.0", "id": "p", "result": {}}


async def test_log_messages_of_a_call_come_on_its_stream(peer: Peer) -> None:
    """A17: related messages go to the call's stream, and to no other."""
    standalone = await peer.get()
    messages = await (await peer.call("log", text="hello")).rest()
    assert messages[0]["params"]["data"] == "hello"
    assert text_of(messages[1]) == "logged"
    await peer.result("announce", n=1)
    assert (await standalone.message())["method"] == "notifications/resources/updated"


async def test_what_belongs_to_no_call_comes_on_the_standalone_stream_only(peer: Peer) -> None:
    """A16, A17: notifications there, never a response."""
    standalone = await peer.get()
    [answer] = await (await peer.call("announce", n=3)).rest()
    assert text_of(answer) == "announced 3"
    seen = await standalone.messages(3)
    assert [m["params"]["uri"] for m in seen] == ["notice://1", "notice://2", "notice://3"]
    for _ in range(3):
        await peer.result("count", n=1)
    await peer.result("announce", n=1, start=4)
    assert (await standalone.message())["params"]["uri"] == "notice://4"


async def test_notices_that_nobody_read_wait_for_the_first_reader(peer: Peer) -> None:
    await peer.result("announce", n=2)
    standalone = await peer.get()
    assert len(await standalone.messages(2)) == 2


async def test_dropping_a_connection_cancels_nothing(shop: Workshop, site: Site, peer: Peer) -> None:
    """A18, R3: the call goes on and its output is kept; several such calls at once."""
    wires = [await peer.call("count", n=4, gate="g", pauses=[2], token=number) for number in range(3)]
    for wire in wires:
        await wire.messages(2)
        await wire.drop()
    await until(lambda: not _readers(site, peer))
    shop.open("g/2")
    await until(lambda: len(shop.seen) == 3)
    for wire in wires:
        messages = await (await peer.get(wire.last_id)).rest()
        assert progress_of(messages) == [3, 4]
        assert text_of(messages[-1]) == "counted to 4"


def _readers(site: Site, peer: Peer) -> list[Any]:
    info = site.app.session_info(peer.session)
    assert info is not None
    return [stream for stream in info.streams if stream.connected_since is not None]


async def test_a_dead_connection_neither_raises_into_the_tool_nor_loses_an_event(
    shop: Workshop, site: Site, peer: Peer
) -> None:
    """R2: the tool writes on while nobody is there."""
    wire = await peer.call("count", n=300, gate="g", pauses=[1], token=1)
    await wire.messages(1)
    await wire.drop()
    await until(lambda: not _readers(site, peer))
    shop.open("g/1")
    await until(lambda: "counted 300" in shop.seen)
    messages = await (await peer.get(wire.last_id)).rest()
    assert progress_of(messages) == list(range(2, 301))
    assert text_of(messages[-1]) == "counted to 300"


async def test_no_event_leaves_before_it_is_stored(shop: Workshop) -> None:
    """R2, promise 1: what a client has read is in the store at that moment."""
    async with serve(shop.server) as site:
        peer = await site.join()
        wire = await peer.call("count", n=20, token=1)
        async for message in wire:
            stream = wire.last_id[1:23]
            kept = await site.store.read(stream, after=0, limit=100)  # type: ignore[arg-type]
            assert len(kept) >= len([event for event in wire.seen if event.data]), message


async def test_the_standalone_stream_stays_open_beside_calls_and_resumes(shop: Workshop, peer: Peer) -> None:
    """P5: one client holds the standalone stream, a running call and several resumes at once."""
    standalone = await peer.get()
    running = await peer.call("wait", gate="g")
    done = await peer.call("count", n=3, token=1)
    await done.rest()
    resumes = [await peer.get(event.id) for event in done.seen[:3]]
    # Each of them takes the stream over; the last one owns it, and the others have ended.
    assert progress_of(await resumes[-1].rest()) == [3]
    for earlier in resumes[:-1]:
        await earlier.rest()
    shop.open("g")
    assert text_of((await running.rest())[-1]) == "went through g"
    await peer.result("announce", n=1)
    assert (await standalone.message())["params"]["uri"] == "notice://1"


async def test_resumes_of_several_calls_at_once(shop: Workshop, peer: Peer) -> None:
    """P5."""
    wires = [await peer.call("count", n=3, gate="g", pauses=[1], id=number, token=number) for number in range(5)]
    for wire in wires:
        await wire.messages(1)
        await wire.drop()
    resumed = await asyncio.gather(*(peer.get(wire.last_id) for wire in wires))
    shop.open("g/1")
    answers = await asyncio.gather(*(wire.rest() for wire in resumed))
    assert [progress_of(messages) for messages in answers] == [[2, 3]] * 5
    assert [messages[-1]["id"] for messages in answers] == list(range(5))


async def test_a_resumed_stream_ends_after_the_response(shop: Workshop, peer: Peer) -> None:
    """P5, A19: whether the response comes from the log or live."""
    wire = await peer.call("count", n=2, gate="g", pauses=[1], token=1)
    await wire.messages(1)
    await wire.drop()
    live = await peer.get(wire.last_id)
    await live.event()
    shop.open("g/1")
    assert len(await live.rest()) == 2
    logged = await peer.get(wire.last_id)
    assert len(await logged.rest()) == 2
    with pytest.raises(Ended):
        await logged.event()


TEXTS = [
    "plain",
    "two\nlines\r\nand \r more",
    "ü 漢字 😀 \u2028 \u2029 \x85",
    'data: {"x": 1}\n\nid: forged',
    "\u0000\u001f\ufeff",
    "",
]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
async def test_any_text_arrives_as_it_was(peer: Peer, text: str) -> None:
    """Nothing in a payload can end its event, begin another one or change on the way, live or replayed."""
    wire = await peer.call("log", text=text)
    messages = await wire.rest()
    assert messages[0]["params"]["data"] == text
    again = await peer.get(wire.seen[0].id)
    assert await again.rest() == messages
    assert [event.data for event in again.seen] == [event.data for event in wire.seen]


@pytest.mark.parametrize("size", [100_000, 3_000_000])
async def test_large_events_arrive_whole(shop: Workshop, tmp_path: Path, size: int) -> None:
    """Larger than every buffer on the way, live and from the file."""
    async with serve(shop.server, store=SqliteStore(str(tmp_path / "log.db"))) as site:
        peer = await site.join()
        wire = await peer.call("flood", n=3, size=size, token=1)
        messages = await wire.rest()
        assert [len(m["params"]["message"]) for m in messages[:-1]] == [size] * 3
        assert await (await peer.get(wire.seen[0].id)).rest() == messages


async def test_a_long_replay_delays_nobody(shop: Workshop) -> None:
    """S9: one client asks for thousands of events and does not take them; others are answered."""
    async with serve(shop.server, small_buffers=True, max_stream_events=20_000, max_session_events=20_000) as site:
        peer, other = await site.join(), await site.join()
        wire = await peer.call("count", n=10_000, token=1)
        await wire.rest()
        replay = await peer.get(wire.seen[0].id)
        for _ in range(5):
            assert await other.result("count", n=1) == "counted to 1"
            assert await peer.result("count", n=1) == "counted to 1"
        assert progress_of(await replay.rest()) == list(range(1, 10_001))
