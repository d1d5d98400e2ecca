"""Calls whose reader is gone while their client is back: what they still say reaches the standalone stream (R5).

Each message is on one stream only, the final answer always on the call's own (the specification forbids it elsewhere).
"""

from __future__ import annotations

import json

import pytest

from perdure._core.ids import SessionId
from tests.support.clients.wire_client import Message, Peer, Wire, notices_of, progress_of, text_of
from tests.support.servers.in_process import Site, info_of, lose, read_calls, serve, until
from tests.support.servers.tool_server import ToolServer
from tests.support.stores.shared_store import SHORT_GRACE

pytestmark = pytest.mark.anyio


async def counting(peer: Peer, n: int, *, token: int = 1) -> Wire:
    """A call that stops after each number, at the gates g/1, g/2 and so on."""
    wire = await peer.call("count", n=n, gate="g", pauses=list(range(1, n)), token=token)
    assert progress_of([await wire.message()]) == [1]
    return wire


async def logged(site: Site, peer: Peer) -> dict[str, list[Message]]:
    """All that the store has, by kind of stream: the progress on each, in order."""
    found: dict[str, list[Message]] = {"standalone": [], "call": []}
    for stream in await site.store.streams(SessionId(peer.session)):
        events = await site.store.read(stream.id, after=0, limit=1000)
        kind = "standalone" if stream.kind.name == "STANDALONE" else "call"
        found[kind] += [json.loads(event.payload) for event in events]
    return found


async def test_after_a_reattach_the_rest_is_there_before_anybody_reads(
    site: Site, shop: ToolServer, peer: Peer
) -> None:
    """R5: a reattach is enough, also for a reader that only the reattach has ended."""
    await counting(peer, 3)
    again = await peer.reattach()
    shop.open("g/1")
    shop.open("g/2")
    await until(lambda: shop.seen)
    standalone = await again.get()
    seen = await standalone.messages(2)
    assert progress_of(seen) == [2, 3]
    assert [m["params"]["progressToken"] for m in seen] == ["1:1", "1:1"]
    log = await logged(site, peer)
    assert (progress_of(log["call"]), progress_of(log["standalone"])) == ([1], [2, 3])


async def test_when_a_reader_returns_the_rest_comes_on_the_call_again(site: Site, shop: ToolServer, peer: Peer) -> None:
    """R5: to and fro; nothing is on two streams, none is lost, each is in order."""
    call = await counting(peer, 5)
    await lose(site, peer, call)
    standalone = await peer.get()
    await standalone.event()
    shop.open("g/1")
    assert progress_of([await standalone.message()]) == [2]
    back = await peer.get(call.last_id)
    await back.event()
    shop.open("g/2")
    assert progress_of([await back.message()]) == [3]
    await lose(site, peer, back)
    shop.open("g/3")  # lost after the GET: it stays where it was
    await until(lambda: _last(site, peer, 4))
    again = await peer.get()
    await again.event()
    shop.open("g/4")
    assert progress_of([await again.message()]) == [5]
    rest = await (await peer.get(back.last_id)).rest()
    assert (progress_of(rest), text_of(rest[-1])) == ([4], "counted to 5")
    log = await logged(site, peer)
    assert (progress_of(log["call"]), progress_of(log["standalone"])) == ([1, 3, 4], [2, 5])
    assert not any("result" in message for message in log["standalone"])


async def _last(site: Site, peer: Peer, number: int) -> bool:
    log = await logged(site, peer)
    return number in progress_of(log["call"] + log["standalone"])


async def test_a_first_get_changes_nothing_for_calls_that_are_read(site: Site, shop: ToolServer, peer: Peer) -> None:
    """R5: neither for the one that is read, nor once its reader is lost after the GET."""
    call = await counting(peer, 4)
    standalone = await peer.get()
    await standalone.event()
    shop.open("g/1")
    assert progress_of([await call.message()]) == [2]
    await lose(site, peer, call)
    shop.open("g/2")
    shop.open("g/3")
    await until(lambda: shop.seen)
    rest = await (await peer.get(call.last_id)).rest()
    assert (progress_of(rest), text_of(rest[-1])) == ([3, 4], "counted to 4")
    assert progress_of((await logged(site, peer))["standalone"]) == []


async def test_each_call_is_an_orphan_for_itself(site: Site, shop: ToolServer, peer: Peer) -> None:
    """R5, P3: one was lost, the other was not."""
    lost = await peer.call("count", n=2, gate="lost", pauses=[1], token=1)
    await lost.message()
    await lost.drop()
    await until(lambda: not read_calls(site, peer))
    kept = await peer.call("count", n=2, gate="kept", pauses=[1], token=2)
    await kept.message()
    standalone = await peer.get()
    await standalone.event()
    shop.open("lost/1")
    shop.open("kept/1")
    assert (await standalone.message())["params"]["progressToken"] == 1
    rest = await kept.rest()
    assert [m["params"]["progressToken"] for m in rest[:-1]] == [2]


# Dormancy (R8)


@pytest.fixture
def busy() -> ToolServer:
    return ToolServer(logs=True, subscribes=True)


async def test_a_session_at_rest_is_loaded_with_its_sticky_requests_once(busy: ToolServer) -> None:
    """R8: the last level and what is subscribed, each once, whatever comes first."""
    async with serve(busy.server, session_grace=0.3) as site:
        peer = await site.join()
        for request in (
            peer.request("logging/setLevel", {"level": "info"}),
            peer.request("logging/setLevel", {"level": "error"}),
            peer.request("resources/subscribe", {"uri": "x://1"}),
            peer.request("resources/subscribe", {"uri": "x://2"}),
            peer.request("resources/unsubscribe", {"uri": "x://2"}),
        ):
            assert (await peer.send(request)).status_code == 200
        await until(lambda: site.app.session_info(peer.session) is None)
        busy.levels.clear()
        busy.subscribing.clear()
        busy.subscribers.clear()
        standalone = await peer.get()
        assert await peer.result("count", n=1) == "counted to 1"
        assert (busy.levels, busy.subscribing) == (["error"], ["+x://1"])
        await busy.update("x://1")
        assert (await standalone.message())["params"]["uri"] == "x://1"


async def test_a_reconnect_stops_the_timer_and_a_reattach_wakes(busy: ToolServer) -> None:
    """R8, R10: from rest to a reader that stays, and the subscription lives."""
    async with serve(busy.server, session_grace=0.3) as site:
        peer, idle = await site.join(), await site.join()
        assert (await peer.send(peer.request("resources/subscribe", {"uri": "x://1"}))).status_code == 200
        await until(lambda: site.app.session_ids() == [])
        busy.subscribers.clear()
        again = await peer.reattach()
        assert again.session == peer.session
        standalone = await again.get()
        await standalone.event()
        assert await idle.result("count", n=1) == "counted to 1"
        await until(lambda: site.app.session_info(idle.session) is None)
        assert site.app.session_ids() == [peer.session]
        await busy.update("x://1")
        assert (await standalone.message())["params"]["uri"] == "x://1"


async def test_the_home_keeps_its_runtime_while_something_is_subscribed(busy: ToolServer) -> None:
    """R8: an idle runtime goes, one with a subscription stays; without it, it goes as well."""
    async with serve(busy.server, runtime_idle=0.2) as site:
        peer, idle = await site.join(), await site.join()
        assert (await peer.send(peer.request("resources/subscribe", {"uri": "x://1"}))).status_code == 200
        await until(lambda: not loaded(site, idle))
        assert loaded(site, peer)
        assert (await peer.send(peer.request("resources/unsubscribe", {"uri": "x://1"}))).status_code == 200
        await until(lambda: not loaded(site, peer))


def loaded(site: Site, peer: Peer) -> bool:
    return info_of(site.app, peer.session).loaded


async def test_a_request_in_the_moment_of_resting_finds_its_session(busy: ToolServer) -> None:
    """R8: whoever comes while the home is being let go of waits for that, and becomes the home again."""
    async with serve(busy.server, session_grace=SHORT_GRACE / 2) as site:
        peer = await site.join()
        for _ in range(20):
            await until(lambda: site.app.session_info(peer.session) is None)
            assert await peer.result("announce", n=1) == "announced 1"
            stream = (await site.store.streams(SessionId(peer.session)))[0]
            assert stream.node or site.app.session_info(peer.session) is None
        assert notices_of(await (await peer.get()).messages(20)) == [1] * 20
