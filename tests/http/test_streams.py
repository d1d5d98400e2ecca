"""Event streams as they come over the wire: what is in them, in which order, and when they end (P1–P5, S1, S5)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mcp.server.mcpserver import Context, MCPServer

from tests.support.clients.wire_client import SESSION_VERSIONS, Peer, progress_of, text_of
from tests.support.servers.in_process import Site, serve
from tests.support.servers.tool_server import ToolServer
from tests.support.stores.shared_store import SharedStore

pytestmark = pytest.mark.anyio

OLDER = SESSION_VERSIONS[:-1]


async def test_a_call_streams_its_notifications_then_its_answer_then_ends(peer: Peer) -> None:
    """P1, P2, S1, A5, A19, A33: in order, and the end comes at once after the response. Events carry id, event and data
    in one frame."""
    wire = await peer.call("count", n=5, id=1, token="t")
    messages = await wire.rest()
    assert progress_of(messages) == [1, 2, 3, 4, 5]
    assert messages[-1]["id"] == 1
    assert len(messages) == 6
    frames = wire.raw.split(b"\n\n")[1:-1]
    assert len(frames) == 6
    assert all(re.fullmatch(rb"id: [!-~]+\nevent: message\ndata: \{.*\}", frame) for frame in frames)


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


async def test_an_idle_connection_carries_comments(shop: ToolServer) -> None:
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


@pytest.mark.parametrize("version", SESSION_VERSIONS)
async def test_a_response_begins_also_where_nothing_comes(shop: ToolServer, version: str) -> None:
    """Clients wait for the head of a response no longer than for any other answer."""
    async with serve(shop.server, keepalive_interval=3600.0) as site:
        peer = await site.join(version)
        standalone = await peer.get()
        call = await peer.call("wait", gate="g")
        shop.open("g")
        [answer] = await call.rest()
        assert text_of(answer) == "went through g"
        await standalone.drop()


async def test_every_new_stream_of_the_newest_revision_is_primed(shop: ToolServer) -> None:
    """A9, A10: an id with empty data and `retry`, on POST, the handshake among them, on GET and on a resumed stream."""
    async with serve(shop.server, retry=1.5) as site:
        peer = await site.join()
        call = await peer.call("count", n=1, token=1)
        await call.rest()
        opening = await Peer(site).post(peer.handshake())
        others = [opening, await peer.get(), await peer.get(call.seen[0].id)]
        for event in (call.seen[0], *[await wire.event() for wire in others]):
            assert (event.data, event.retry) == ("", 1500)
            assert event.id
        assert (await opening.rest())[-1]["result"]["protocolVersion"] == peer.version


@pytest.mark.parametrize("version", OLDER)
async def test_older_revisions_are_not_primed_and_get_retry_with_their_first_event(site: Site, version: str) -> None:
    """A9, A11, P8: every event there carries a message; the first of a call with a token is progress."""
    peer = await site.join(version)
    call = await peer.call("count", n=2, token=1)
    first, *messages = await call.rest()
    assert (first["params"]["progress"], progress_of(messages)) == (0, [1, 2])
    resumed = await peer.get(call.seen[1].id)
    assert progress_of(await resumed.rest()) == [2]
    standalone = await peer.get()
    await peer.result("announce", n=1)
    assert (await standalone.message())["method"] == "notifications/resources/updated"
    for wire in (call, resumed, standalone):
        assert all(event.data for event in wire.seen)
        assert [event.retry for event in wire.seen] == [5000] + [None] * (len(wire.seen) - 1)
        assert wire.raw.count(b"retry:") == 1


@pytest.mark.parametrize("version", OLDER)
async def test_a_silent_call_of_an_older_revision_outlives_a_cut(shop: ToolServer, site: Site, version: str) -> None:
    """With a progress token it has a position from the first moment, in an event that every client can read."""
    peer = await site.join(version)
    call = await peer.call("wait", gate="g", token="t")
    first = await call.message()
    assert first["params"] == {"progressToken": "t", "progress": 0}
    await call.drop()
    shop.open("g")
    [answer] = await (await peer.get(call.last_id)).rest()
    assert text_of(answer) == "went through g"


async def test_a_tools_own_0_is_above_the_first_progress() -> None:
    server = MCPServer("early", log_level="WARNING")

    @server.tool()
    async def start(ctx: Context) -> str:
        await ctx.report_progress(0, 3, "begun")
        await ctx.report_progress(1, 3)
        return "done"

    async with serve(server) as site:
        for version, values in (("2025-06-18", [0, 1e-9, 1]), ("2025-11-25", [0, 1])):
            peer = await site.join(version)
            *said, answer = await (await peer.call("start", token=1)).rest()
            assert [each["params"]["progress"] for each in said] == values
            assert said[-2]["params"]["message"] == "begun"
            assert text_of(answer) == "done"


async def test_the_priming_id_is_a_place_to_come_back_to(shop: ToolServer, peer: Peer) -> None:
    """A9: a cut right after the priming event loses nothing."""
    wire = await peer.call("count", n=3, gate="g", pauses=[0], token=1)
    await wire.event()
    await wire.drop()
    shop.open("g/0")
    messages = await (await peer.get(wire.last_id)).rest()
    assert progress_of(messages) == [1, 2, 3]
    assert text_of(messages[-1]) == "counted to 3"


TEXTS = [
    "plain",
    "two\nlines\r\nand \r more",
    "ü 漢字 😀 \u2028 \u2029 \x85",
    'data: {"x": 1}\n\nid: forged',
    "\u0000\u001f\ufeff",
    "",
]


async def test_any_text_arrives_as_it_was(peer: Peer) -> None:
    """Nothing in a payload can end its event, begin another one or change on the way, live or replayed."""
    for text in TEXTS:
        wire = await peer.call("log", text=text)
        messages = await wire.rest()
        assert messages[0]["params"]["data"] == text
        again = await peer.get(wire.seen[0].id)
        assert await again.rest() == messages
        assert [event.data for event in again.seen] == [event.data for event in wire.seen]


async def test_large_events_arrive_whole(shop: ToolServer, tmp_path: Path) -> None:
    """Larger than every buffer on the way, live and from the file."""
    async with serve(shop.server, store=SharedStore(tmp_path / "log.db")) as site:
        peer = await site.join()
        wire = await peer.call("flood", n=2, size=2_000_000, token=1)
        messages = await wire.rest()
        assert [len(m["params"]["message"]) for m in messages[:-1]] == [2_000_000] * 2
        assert await (await peer.get(wire.seen[0].id)).rest() == messages
