"""One process holds what a failing store does not take, and its client comes to another: that one denies nothing, tells
no gap for what is only late, and repeats nothing (promises 2, 4 and 7)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from perdure._core.ids import parse_position
from perdure.store.interface import stream_by_id
from perdure.store.steps import Release
from tests.cluster.test_between_nodes import follow
from tests.support.clients.wire_client import (
    Peer,
    Web,
    Wire,
    answer_of,
    gaps_of,
    notices_of,
    progress_of,
    text_of,
)
from tests.support.processes.serving import BASIC_TOOLS, Served, serving
from tests.support.servers.in_process import Site, info_of, serve, until
from tests.support.servers.tool_server import ToolServer
from tests.support.stores.dead_node import DeadNode
from tests.support.stores.faulty_store import Fault, FaultyStore
from tests.support.stores.shared_store import SharedStore, held_up, shared_address

pytestmark = pytest.mark.anyio

HELD_ELSEWHERE = {
    "code": -31005,
    "message": "Another process of this server holds events that are not in the log yet; try again",
}


@dataclass(kw_only=True)
class Two:
    """Two processes on one file, as clients see them, and the way to have that file fail."""

    path: Path
    processes: tuple[Served, Served]
    a: Web
    b: Web

    def outage(self) -> Any:
        """Another program holds the file, as a backup does."""
        return held_up(self.path)

    def signal_a(self, how: signal.Signals) -> None:
        os.kill(self.processes[0].pid, how)


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Two]:
    path = tmp_path / "log.db"
    options = ("--store", shared_address(path), "--store-timeout", "500ms")
    async with serving(BASIC_TOOLS, *options) as first, serving(BASIC_TOOLS, *options) as second:
        web = Two(path=path, processes=(first, second), a=Web(first.url), b=Web(second.url))
        yield web
        await web.a.aclose()
        await web.b.aclose()


async def health(web: Web) -> str:
    response = await web.http.get(web.url.removesuffix("/mcp") + "/healthz")
    status: str = response.json()["status"]
    return status


async def recovered(*webs: Web) -> None:
    """The outage is over for these processes as well."""

    async def well() -> bool:
        return [await health(web) for web in webs] == ["ok"] * len(webs)

    await until(well)


async def open_gate(peer: Peer, name: str) -> None:
    assert await peer.result("open_gate", name=name) == f"opened {name}"


async def held_call(peer: Peer) -> Wire:
    """A call whose first two numbers are in the log; numbers 3 and 4 were shown, and are held."""
    wire = await peer.call("count", n=6, gate="g", pauses=[2, 4], token=1, id=7)
    assert progress_of(await wire.messages(2)) == [1, 2]
    return wire


async def show_held(peer: Peer, wire: Wire) -> None:
    await open_gate(peer, "g/2")
    assert progress_of(await wire.messages(2)) == [3, 4]
    assert await health(peer.site) == "degraded"


async def test_who_saw_held_events_resumes_elsewhere_and_gets_the_rest_once(two: Two) -> None:
    """Promises 2 and 4: what was shown is not lost as long as the process that holds it lives."""
    peer = await two.a.join()
    wire = await held_call(peer)
    async with two.outage():
        await show_held(peer, wire)
        await wire.drop()
        reader = await peer.through(two.b).get(wire.last_id)
        await open_gate(peer, "g/4")
    rest = await reader.rest()
    assert gaps_of(rest) == []
    assert progress_of(rest) == [5, 6]
    assert text_of(rest[-1]) == "counted to 6"


async def test_what_died_with_its_process_is_told_as_a_gap_once(two: Two) -> None:
    """Promise 4: the reader that waited for it elsewhere is ended, and its client is told when it comes again."""
    peer = await two.a.join()
    wire = await held_call(peer)
    twin = peer.through(two.b)
    async with two.outage():
        await show_held(peer, wire)
        reader = await twin.get(wire.last_id)
        await two.processes[0].kill()
    assert await reader.rest() == []
    other = await two.b.join()
    for gate in ("g/2", "g/4"):
        await open_gate(other, gate)
    seen = await (await twin.get(wire.last_id)).rest()
    assert gaps_of(seen) == [(3, 4)]
    assert progress_of(seen) == [5, 6], "it ran again, and the position tells that these were seen"
    assert text_of(seen[-1]) == "counted to 6"


async def test_a_position_that_nobody_holds_is_a_gap_once_the_writer_has_written_everything(two: Two) -> None:
    peer = await two.a.join()
    wire = await held_call(peer)
    async with two.outage():
        await show_held(peer, wire)
        shown = parse_position(wire.last_id)
        assert shown is not None
        beyond = str(replace(shown, seq=77))
        reader = await peer.through(two.b).get(beyond)
    assert await reader.rest() == []
    again = await peer.through(two.b).get(beyond)
    await open_gate(peer, "g/4")
    rest = await again.rest()
    assert gaps_of(rest) == [(5, 77)]
    assert progress_of(rest) == [5, 6]


async def test_a_session_that_another_process_holds_is_not_denied(two: Two) -> None:
    """Promise 5 as well: a session that does not exist gets the same answer."""
    async with two.outage():
        peer = await two.a.join()
        assert await peer.result("count", n=1) == "counted to 1"
        here = peer.through(two.b)
        nobody = Peer(two.b)
        nobody.session = "A" * 43
        for stranger in (here, nobody):
            refusals = [
                await stranger.send(stranger.tool("count", n=1, id=5)),
                await stranger.try_get(),
                await stranger.delete(),
                await stranger.send({"jsonrpc": "2.0", "method": "notifications/roots/list_changed"}),
                await stranger.send(stranger.handshake()),
            ]
            assert [refused.status_code for refused in refusals] == [503] * len(refusals)
            assert {refused.headers["retry-after"] for refused in refusals} == {"1"}
            assert [refused.json()["error"] for refused in refusals] == [HELD_ELSEWHERE] * len(refusals)
    await recovered(two.a, two.b)
    assert await here.result("count", n=2) == "counted to 2"
    assert (await nobody.send(nobody.tool("count", n=1))).status_code == 404


async def test_a_call_that_another_process_holds_is_not_denied(two: Two) -> None:
    peer = await two.a.join()
    async with two.outage():
        wire = await peer.call("count", n=3, token=1)
        await wire.rest()
        refused = await peer.through(two.b).try_get(wire.seen[0].id)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"] == HELD_ELSEWHERE
    await recovered(two.a, two.b)
    assert progress_of(await (await peer.through(two.b).get(wire.seen[0].id)).rest()) == [1, 2, 3]
    unknown = await peer.through(two.b).try_get("c" + "A" * 22 + ".000001.0000000001")
    assert unknown.status_code == 400


async def test_a_home_that_holds_is_not_taken_and_nothing_is_shown_again(two: Two) -> None:
    """A subscription moves the home; its caller waits for a while, and is then told to come again."""
    peer = await two.a.join()
    standalone = await peer.get()
    twin = peer.through(two.b)
    subscribe = twin.request("resources/subscribe", {"uri": "notice://1"}, id="subscribe")
    async with two.outage():
        await peer.result("announce", n=3)
        assert notices_of(await standalone.messages(3)) == [1, 2, 3]
        refused = await twin.send(subscribe)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json() == {"jsonrpc": "2.0", "id": "subscribe", "error": HELD_ELSEWHERE}
        waiting = asyncio.create_task(twin.send(subscribe))
    answer = await waiting
    while answer.status_code == 503:
        answer = await twin.send(subscribe)
    assert answer_of(answer)["id"] == "subscribe"
    await standalone.drop()
    await twin.result("announce", n=2, start=4)
    seen = await follow(twin, standalone.last_id, 2)
    assert (gaps_of(seen), notices_of(seen)) == ([], [4, 5])


async def test_a_process_that_stands_still_while_it_holds_loses_nothing(two: Two) -> None:
    peer = await two.a.join()
    standalone = await peer.get()
    twin = peer.through(two.b)
    subscribe = twin.request("resources/subscribe", {"uri": "notice://1"})
    async with two.outage():
        await peer.result("announce", n=3)
        assert notices_of(await standalone.messages(3)) == [1, 2, 3]
        two.signal_a(signal.SIGSTOP)
    try:
        assert (await twin.send(subscribe)).status_code == 503
        rests = await twin.get(standalone.last_id)
    finally:
        two.signal_a(signal.SIGCONT)
    await recovered(two.a, two.b)
    assert answer_of(await twin.send(subscribe))["id"] == subscribe["id"]
    await standalone.drop()
    await rests.drop()
    await twin.result("announce", n=2, start=4)
    seen = await follow(twin, standalone.last_id, 2)
    assert (gaps_of(seen), notices_of(seen)) == ([], [4, 5])


async def test_an_answer_to_what_a_holding_process_asked_reaches_it(two: Two) -> None:
    """The ask is not in the log yet, and neither is the call that a cancellation names."""
    peer = await two.a.join()
    async with two.outage():
        asking = await peer.call("ask", question="which?")
        ask = await asking.message()
        waiting = await peer.call("gate", name="never", id=9)
        await waiting.event()
        twin = peer.through(two.b)
        content = {"action": "accept", "content": {"answer": "this one"}}
        assert (await twin.answer(ask, content)).status_code == 202
        assert (await twin.cancel(9)).status_code == 202
    assert text_of((await asking.rest())[-1]) == "this one"
    assert (await waiting.rest())[-1]["error"]["code"] == -32800


async def test_what_is_said_to_another_process_is_refused_when_no_more_can_be_held(tmp_path: Path) -> None:
    """Promise 6: a client that answers asks of another process cannot fill the memory of this one."""
    path = str(tmp_path / "log.db")
    full = FaultyStore(SharedStore(path))
    shops = [ToolServer(), ToolServer()]
    async with (
        serve(shops[0].server, store=SharedStore(path), complaint="the store fails") as a,
        serve(shops[1].server, store=full, store_timeout=0.5, max_held_events=10, complaint="the store fails") as b,
    ):
        peer = await a.join()
        asking = await peer.call("ask", question="which?")
        ask = await asking.message()
        twin = peer.through(b)
        assert await twin.result("count", n=1) == "counted to 1"
        full.writes = Fault.RAISES
        flooding = await twin.call("count", n=30, token=2)
        await flooding.messages(10)
        answer = {"action": "accept", "content": {"answer": "this one"}}
        refused = await twin.answer(ask, answer)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["message"] == "The log of this server fails at the moment; try again"
        full.works()
        assert progress_of(await flooding.rest()) == list(range(11, 31))
        await recovered(b)
        assert (await twin.answer(ask, answer)).status_code == 202
        assert text_of((await asking.rest())[-1]) == "this one"


# A home that begins to hold in the moment in which another node becomes the home


@pytest.mark.parametrize("shown", [True, False])
async def test_what_was_shown_and_could_not_be_written_is_told_as_a_gap_and_the_rest_arrives(
    shown: bool, tmp_path: Path
) -> None:
    """What a client was sent does not come again under another number; what it was not sent does come."""
    path = tmp_path / "log.db"
    shop, store = ToolServer(), FaultyStore(SharedStore(path))
    async with serve(shop.server, store=store, store_timeout=0.5, complaint="the store fails") as site:
        peer = await site.join()
        standalone = await peer.get()
        await peer.result("announce", n=1)
        assert notices_of(await standalone.messages(1)) == [1]
        written = standalone.last_id
        dead_node = await DeadNode.on(path)
        if not shown:
            await standalone.drop()
            await until(lambda: not is_read(site, peer))
        store.writes = Fault.RAISES
        for number in (2, 3):  # each held by itself
            await peer.result("announce", n=1, start=number)
            if shown:
                assert notices_of(await standalone.messages(1)) == [number]
        await become_home_and_release(dead_node, written)
        store.works()
        await recovered(site)
        if shown:
            assert await standalone.rest() == []
        reader = await peer.get(written)
        await peer.result("announce", n=1, start=4)
        seen = await reader.messages(2 if shown else 3)
        assert gaps_of(seen) == ([(2, 3)] if shown else [])
        assert sorted(notices_of(seen)) == ([4] if shown else [2, 3, 4])
        await dead_node.die()


def is_read(site: Site, peer: Peer) -> bool:
    return any(stream.connected_since is not None for stream in info_of(site.app, peer.session).streams)


async def become_home_and_release(dead_node: DeadNode, standalone: str) -> None:
    """Another node has taken the standalone stream, and has gone on to rest."""
    position = parse_position(standalone)
    assert position is not None
    record = await stream_by_id(dead_node.store, position.stream)
    assert record is not None
    claimed = await dead_node.store.claim(record.id, node=dead_node.node, held=record.fence)
    assert claimed is not None
    assert not any(await dead_node.store.commit([Release(stream=claimed.id, fence=claimed.fence)]))
