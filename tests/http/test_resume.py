"""Coming back with `Last-Event-ID` (S2, S3, R4, R6, A14–A16)."""

from __future__ import annotations

import logging

import pytest

from tests.support.clients.wire_client import LATEST, SESSION_VERSIONS, Peer, Wire, notices_of, progress_of, text_of
from tests.support.servers.in_process import Site, info_of, serve, until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("version", SESSION_VERSIONS)
async def test_three_seen_three_while_away_one_live(shop: ToolServer, site: Site, version: str) -> None:
    """S3, basic resume: 1–3 seen, 4–6 while away, 7 live; each once, in order (promise 2)."""
    peer = await site.join(version)
    wire = await peer.call("count", n=7, gate="g", pauses=[3, 6], token=1)
    assert progress_of(await wire.messages(3)) == [1, 2, 3]
    await wire.drop()
    shop.open("g/3")
    await until(lambda: last_of_call(site, peer) == (6 if version == LATEST else 7))
    resumed = await peer.get(wire.last_id)
    assert progress_of(await resumed.messages(3)) == [4, 5, 6]
    shop.open("g/6")
    rest = await resumed.rest()
    assert progress_of(rest) == [7]
    assert text_of(rest[-1]) == "counted to 7"


def last_of_call(site: Site, peer: Peer) -> int:
    return max((stream.last for stream in info_of(site.app, peer.session).streams if stream.kind == "call"), default=0)


async def test_the_same_on_the_standalone_stream(site: Site, peer: Peer) -> None:
    """S3: 1–3 seen, 4–6 while away, 7 live."""
    wire = await peer.get()
    await peer.result("announce", n=3)
    assert notices_of(await wire.messages(3)) == [1, 2, 3]
    await wire.drop()
    await peer.result("announce", n=3, start=4)
    resumed = await peer.get(wire.last_id)
    assert notices_of(await resumed.messages(3)) == [4, 5, 6]
    await peer.result("announce", n=1, start=7)
    assert notices_of([await resumed.message()]) == [7]


async def test_several_disconnects_in_a_row(shop: ToolServer, peer: Peer) -> None:
    """S1, S3: ten times cut, nothing lost and nothing twice, and ids rise over all connections."""
    wires = [await peer.call("count", n=20, gate="g", pauses=list(range(2, 20, 2)), token=1)]
    seen = await wires[0].messages(2)
    for number in range(2, 20, 2):
        await wires[-1].drop()
        shop.open(f"g/{number}")
        wires.append(await peer.get(wires[-1].last_id))
        seen += await wires[-1].messages(2)
    seen += await wires[-1].rest()
    ids = [event.id for wire in wires for event in wire.seen if event.data]
    assert ids == sorted(set(ids))
    assert progress_of(seen) == list(range(1, 21))
    assert text_of(seen[-1]) == "counted to 20"


async def test_the_same_position_may_be_used_again_and_again(peer: Peer) -> None:
    """A20: a position is not used up, also after the call has ended."""
    wire = await peer.call("count", n=3, token=1)
    await wire.rest()
    for event in wire.seen[:-1]:
        resumed = await peer.get(event.id)
        messages = await resumed.rest()
        later = [e for e in wire.seen if e.data and e.id > event.id]
        assert [(e.id, e.data) for e in resumed.seen if e.data] == [(e.id, e.data) for e in later]
        assert text_of(messages[-1]) == "counted to 3"


async def test_without_a_position_the_standalone_stream_begins_where_it_was_left(peer: Peer) -> None:
    """S2: start fresh; what was delivered before does not come again."""
    wire = await peer.get()
    await peer.result("announce", n=2)
    await wire.messages(2)
    await wire.drop()
    await peer.result("announce", n=1, start=3)
    fresh = await peer.get()
    assert notices_of([await fresh.message()]) == [3]


async def test_the_end_of_a_complete_stream_is_answered_405(peer: Peer) -> None:
    """Nothing follows, and it is said so that stock clients stop asking."""
    wire = await peer.call("count", n=1, token=1)
    await wire.rest()
    response = await peer.try_get(wire.last_id)
    assert response.status_code == 405
    assert "GET" not in response.headers["allow"]
    assert response.json()["error"]["code"] == -31002


async def test_a_priming_id_of_the_end_is_the_end_as_well(peer: Peer) -> None:
    wire = await peer.call("count", n=1, token=1)
    await wire.rest()
    assert (await peer.try_get(f"{wire.last_id}~again")).status_code == 405


async def test_a_call_stream_that_the_session_does_not_have_is_told(site: Site, peer: Peer) -> None:
    """S2, S3 (invalid id), promise 4: well formed, but of nobody: 400 with -31002, never an empty stream."""
    wire = await peer.call("count", n=1)
    await wire.rest()
    unknown = wire.last_id.replace(wire.last_id[1:23], "A" * 22)
    response = await peer.try_get(unknown)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == -31002
    assert site.app.counters.positions_lost == 1


@pytest.mark.parametrize("text", ["x", "c" * 500, "s.1.1", "café"])
async def test_what_is_no_position_is_warned_about_and_read_from_the_oldest(
    site: Site, peer: Peer, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """S2, S3 (invalid id): the standalone stream from its oldest retained event, never an empty answer, never a 500."""
    await peer.result("announce", n=2)
    first = await peer.get()
    await first.messages(2)
    with caplog.at_level(logging.WARNING, "perdure"):
        headers = [(name.encode(), value.encode("latin-1")) for name, value in peer.headers(accept="text/event-stream")]
        headers.append((b"last-event-id", text.encode("latin-1")))
        wire = Wire(await site.open("GET", headers=headers))  # type: ignore[arg-type]
        assert notices_of(await wire.messages(2)) == [1, 2]
    assert [record.action for record in caplog.records if hasattr(record, "action")] == ["position.unreadable"]
    assert site.app.counters.positions_lost == 1
    assert b": " in wire.raw, "a comment tells whoever reads the wire"


async def test_an_unknown_standalone_position_is_a_gap(site: Site, peer: Peer) -> None:
    """S2: a gap is told, then what is retained follows."""
    await peer.result("announce", n=2)
    position = f"s{'A' * 22}.000001.0000000005"
    wire = await peer.get(position)
    messages = await wire.messages(3)
    assert messages[0]["method"] == "notifications/perdure/gap"
    assert messages[0]["params"]["reason"] == "unknown position"
    assert notices_of(messages) == [1, 2]
    assert (site.app.counters.gaps, site.app.counters.positions_lost) == (1, 1)


@pytest.mark.parametrize("kind", ["standalone", "call"])
async def test_a_position_beyond_the_end_is_a_gap_and_the_stream_goes_on(
    shop: ToolServer, peer: Peer, kind: str
) -> None:
    """Generations: a lost tail is told on the same stream, which goes on from its end."""
    if kind == "call":
        wire = await peer.call("count", n=3, gate="g", pauses=[2], token=1)
        await wire.messages(2)
    else:
        wire = await peer.get()
        await peer.result("announce", n=2)
        await wire.messages(2)
    beyond = wire.last_id[:-10] + "0000000009"
    resumed = await peer.get(beyond)
    gap = await resumed.message()
    assert gap["method"] == "notifications/perdure/gap"
    assert (gap["params"]["from"], gap["params"]["to"], gap["params"]["reason"]) == (3, 9, "lost")
    if kind == "call":
        shop.open("g/2")
        assert progress_of(await resumed.rest()) == [3]
    else:
        await peer.result("announce", n=1, start=3)
        assert notices_of([await resumed.message()]) == [3]


async def test_a_gap_is_told_in_the_log_where_the_server_logs() -> None:
    """Promise 4: `notifications/message` beside the notification, only where the server declares logging."""
    shop = ToolServer(logs=True)
    async with serve(shop.server) as site:
        peer = await site.join()
        await peer.result("announce", n=1)
        wire = await peer.get(f"s{'A' * 22}.000001.0000000005")
        gap, log = await wire.messages(2)
        assert gap["method"] == "notifications/perdure/gap"
        assert log["method"] == "notifications/message"
        assert log["params"]["level"] == "warning"


async def test_with_replay_off_positions_are_answered_as_lost(shop: ToolServer) -> None:
    """S4, enable_replay: calls 400, the standalone stream a gap and from now on."""
    async with serve(shop.server, enable_replay=False) as site:
        peer = await site.join()
        wire = await peer.call("count", n=2, token=1)
        await wire.rest()
        response = await peer.try_get(wire.seen[1].id)
        assert (response.status_code, response.json()["error"]["code"]) == (400, -31002)

        standalone = await peer.get()
        await peer.result("announce", n=2)
        await standalone.messages(1)
        for position in (standalone.seen[0].id, "no position"):
            await peer.result("announce", n=2)
            resumed = await peer.get(position)
            await peer.result("announce", n=1, start=9)
            messages = [await resumed.message()]
            while notices_of(messages[-1:]) != [9]:
                messages.append(await resumed.message())
            assert notices_of(messages) == [9]


async def test_a_resume_of_a_call_replays_nothing_of_another_stream(shop: ToolServer, peer: Peer) -> None:
    """A15: neither of another call's nor of the standalone stream."""
    first = await peer.call("count", n=2, gate="g", pauses=[1], token="first")
    await first.messages(1)
    await first.drop()
    second = await peer.call("count", n=3, token="second")
    await second.rest()
    await peer.result("announce", n=3)
    shop.open("g/1")
    messages = await (await peer.get(first.last_id)).rest()
    assert [m["params"]["progressToken"] for m in messages if "params" in m] == ["first"]
    assert len(messages) == 2


async def test_a_standalone_resume_replays_no_responses(peer: Peer) -> None:
    """A16."""
    standalone = await peer.get()
    await standalone.event()
    for _ in range(3):
        await peer.result("announce", n=1)
    await standalone.drop()
    again = await peer.get(standalone.seen[0].id)
    messages = await again.messages(3)
    assert all(m["method"] == "notifications/resources/updated" for m in messages)


async def test_priming_events_are_not_replayed(peer: Peer) -> None:
    """R6: a resume shows each message under its own id, and one priming event of its own."""
    wire = await peer.call("count", n=2, token=1)
    await wire.rest()
    resumed = await peer.get(wire.seen[0].id)
    await resumed.rest()
    assert [event.data == "" for event in resumed.seen] == [True, False, False, False]


async def test_counters_tell_of_resumes_and_replays(shop: ToolServer, site: Site, peer: Peer) -> None:
    """P9."""
    wire = await peer.call("count", n=5, token=1)
    await wire.rest()
    before = site.app.counters.snapshot()
    await (await peer.get(wire.seen[2].id)).rest()
    after = site.app.counters.snapshot()
    assert after["resumes"] - before["resumes"] == 1
    assert after["events_replayed"] - before["events_replayed"] == 4
    assert after["gaps"] == before["gaps"]
