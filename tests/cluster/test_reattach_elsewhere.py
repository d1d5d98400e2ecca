"""A client begins again, loses readers and comes back, through whichever of two nodes it meets (R5, R8, R10, H5)."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path

import pytest

from perdure._core.ids import Kind, SessionId
from perdure.store.records import SessionRecord
from perdure.store.steps import MailReceived
from tests.cluster.conftest import Node, Pair, Start
from tests.cluster.held_reads import HeldReads
from tests.http.test_orphans import counting
from tests.support.clients.wire_client import Ended, Message, Peer, answer_of, gaps_of, progress_of, text_of
from tests.support.servers.in_process import lose, read_calls, serve, until
from tests.support.servers.tool_server import ToolServer
from tests.support.stores.dead_node import life_of
from tests.support.stores.shared_store import SharedStore

pytestmark = pytest.mark.anyio

FULL = partial(ToolServer, logs=True, subscribes=True)


async def record_of(node: Node, session: str) -> SessionRecord:
    record = await node.site.store.session(SessionId(session))
    assert record is not None
    return record


async def logged(node: Node, peer: Peer) -> dict[Kind, list[Message]]:
    """All that the store has of a session, by kind of stream."""
    found: dict[Kind, list[Message]] = {Kind.STANDALONE: [], Kind.CALL: []}
    for stream in await node.site.store.streams(SessionId(peer.session)):
        events = await node.site.store.read(stream.id, after=0, limit=1000)
        found[stream.kind] += [json.loads(event.payload) for event in events]
    return found


# Reattach


async def test_a_client_begins_again_through_the_other_node(pair: Pair) -> None:
    """R10: the same id, the recorded result; its earlier call runs on where it runs, under a token of its own."""
    at_a, _ = await pair.join()
    old = await at_a.call("count", id=0, n=3, gate="old", pauses=[1, 2], token=1)
    await old.message()
    again = await at_a.reattach(pair.b.site)
    assert (again.session, again.welcome) == (at_a.session, at_a.welcome)
    assert (await record_of(pair.a, at_a.session)).incarnation == 2
    with pytest.raises(Ended):
        await old.message()
    new = await again.call("wait", id=0, gate="new")
    resumed = await again.get(old.last_id)
    await until(lambda: read_calls(pair.a.site, at_a))
    pair.a.shop.open("old/1")
    more = await resumed.message()
    assert (more["params"]["progressToken"], more["params"]["progress"]) == ("1:1", 2)
    await again.cancel(0)
    assert (await new.rest())[-1]["error"]["code"] == -32800
    pair.a.shop.open("old/2")
    assert text_of((await resumed.rest())[-1]) == "counted to 3"


@pytest.mark.parametrize("through", ["a", "b"])
@pytest.mark.parametrize("reads", ["a", "b"])
async def test_earlier_readers_are_ended_in_either_node(pair: Pair, through: str, reads: str) -> None:
    """R10: wherever they sit, and whichever node the client comes back through; what follows is an orphan's."""
    nodes = {"a": pair.a, "b": pair.b}
    at_a, _ = await pair.join()
    before = at_a.through(nodes[reads].site)
    call = await counting(at_a, 3)
    if reads == "b":
        call = await before.get(call.last_id)
        await call.event()
    standalone = await before.get()
    await standalone.event()
    await until(lambda: _knows(pair))
    again = await at_a.reattach(nodes[through].site)
    for wire in (call, standalone):
        with pytest.raises(Ended):
            await wire.message()
    fresh = await again.get()
    await fresh.event()
    await until(lambda: not read_calls(pair.a.site, at_a))
    await until(lambda: _knows(pair))  # also that the client is back without its call
    pair.a.shop.open("g/1")
    pair.a.shop.open("g/2")
    seen = await fresh.messages(2)
    assert [(m["params"]["progressToken"], m["params"]["progress"]) for m in seen] == [("1:1", 2), ("1:1", 3)]
    rest = await (await again.get(call.last_id)).rest()
    assert [text_of(message) for message in rest] == ["counted to 3"]


async def test_reattaches_at_once_through_both_nodes_get_incarnations_of_their_own(pair: Pair) -> None:
    at_a, at_b = await pair.join()
    shake = [("mcp-session-id", at_a.session), ("accept", "application/json, text/event-stream")]
    headers = [*shake, ("content-type", "application/json")]
    responses = await asyncio.gather(
        *(peer.site.request("POST", headers=headers, body=peer.handshake()) for peer in (at_a, at_b) * 3)
    )
    assert [answer_of(response) for response in responses] == [at_a.welcome] * 6
    rows = await pair.a.site.store.calls(SessionId(at_a.session))
    assert sorted(row.incarnation for row in rows if row.method == "initialize") == [1, 2, 3, 4, 5, 6, 7]
    assert await at_a.result("count", n=1) == "counted to 1"
    assert await at_b.result("count", n=1) == "counted to 1"


async def test_the_initialized_of_a_reattach_is_swallowed_everywhere(start: Start) -> None:
    pair = await start(FULL)
    at_a, _ = await pair.join()
    await until(lambda: pair.a.shop.handshakes == 1)
    again = await at_a.reattach(pair.b.site)
    assert await again.result("count", n=1) == "counted to 1"
    assert (pair.a.shop.handshakes, pair.b.shop.handshakes) == (1, 0)


async def test_an_ask_of_one_node_is_asked_again_and_answered_through_the_other(pair: Pair) -> None:
    """Asks: the old id is cancelled, an answer to it dropped; whoever resumes skips it without a gap."""
    at_a, _ = await pair.join()
    call = await at_a.call("ask", question="who?")
    start = await call.event()
    old = await call.message()
    again = await at_a.reattach(pair.b.site)
    standalone = await again.get()
    cancelled, fresh = await standalone.messages(2)
    assert (cancelled["method"], cancelled["params"]["requestId"]) == ("notifications/cancelled", old["id"])
    assert fresh["id"] != old["id"]
    for ask, answer in ((old, "too late"), (fresh, "me")):
        response = await again.answer(ask, {"action": "accept", "content": {"answer": answer}})
        assert response.status_code == 202
    rest = await (await again.get(start.id)).rest()
    assert ([text_of(m) for m in rest], gaps_of(rest)) == (["me"], [])


# Orphans


async def test_a_get_at_the_other_node_makes_orphans_too(pair: Pair) -> None:
    """R5: the call runs in A, its reader is lost, the client comes back through B."""
    at_a, at_b = await pair.join()
    call = await counting(at_a, 4)
    await lose(pair.a.site, at_a, call)
    standalone = await at_b.get()
    await until(lambda: _knows(pair))
    pair.a.shop.open("g/1")
    pair.a.shop.open("g/2")
    assert progress_of(await standalone.messages(2)) == [2, 3]
    back = await at_b.get(call.last_id)
    await until(lambda: read_calls(pair.a.site, at_a))
    pair.a.shop.open("g/3")
    rest = await back.rest()
    assert (progress_of(rest), text_of(rest[-1])) == ([4], "counted to 4")
    log = await logged(pair.a, at_a)
    assert (progress_of(log[Kind.CALL]), progress_of(log[Kind.STANDALONE])) == ([1, 4], [2, 3])


async def _knows(pair: Pair) -> bool:
    """All mail is dealt with, also what is being sent at the moment."""
    for node in (pair.a, pair.b):
        context = life_of(node.site).context
        await context.journal.write(MailReceived(node=context.node, through=0))  # behind all that was put before
    nodes = await pair.a.site.store.nodes()
    return not any([await pair.a.site.store.mail(node.id) for node in nodes])


async def test_an_orphan_asks_through_the_home(start: Start) -> None:
    """R5, P6: the call runs in B, the home is A; asked on the standalone stream, answered through A."""
    pair = await start()
    at_a, at_b = await pair.join()
    call = await at_b.call("quiz", gate="g", question="who?")
    await call.message()
    await lose(pair.b.site, at_b, call)
    standalone = await at_a.get()
    await standalone.event()
    await until(lambda: _knows(pair))
    pair.b.shop.open("g")
    ask = await standalone.message()
    await at_a.answer(ask, {"action": "accept", "content": {"answer": "me"}})
    assert text_of((await (await at_a.get(call.last_id)).rest())[-1]) == "me"


# Homes and rest


async def test_a_subscription_lives_in_one_place_and_an_update_is_told_once(start: Start) -> None:
    """Loading a session: who is asked to subscribe becomes the home; the one before lets go."""
    pair = await start(FULL)
    at_a, at_b = await pair.join()
    assert (await at_a.send(at_a.request("resources/subscribe", {"uri": "x://1"}))).status_code == 200
    assert (await at_b.send(at_b.request("resources/subscribe", {"uri": "x://2"}))).status_code == 200
    await until(lambda: pair.a.shop.subscribing == ["+x://1", "-x://1"])
    await until(lambda: sorted(pair.b.shop.subscribing) == ["+x://1", "+x://2"])
    standalone = await at_a.get()
    await standalone.event()
    for uri in ("x://1", "x://2"):
        for node in (pair.a, pair.b):
            await node.shop.update(uri)
    await at_b.result("announce", n=1)
    seen = [message["params"]["uri"] for message in await standalone.messages(3)]
    assert seen == ["x://1", "x://2", "notice://1"]


async def test_what_is_unsubscribed_at_one_node_is_gone_in_all(start: Start) -> None:
    pair = await start(FULL)
    at_a, at_b = await pair.join()
    assert (await at_a.send(at_a.request("resources/subscribe", {"uri": "x://1"}))).status_code == 200
    assert (await at_b.send(at_b.request("resources/unsubscribe", {"uri": "x://1"}))).status_code == 200
    await until(lambda: not (pair.a.shop.subscribers["x://1"] or pair.b.shop.subscribers["x://1"]))
    assert (await record_of(pair.a, at_a.session)).sticky == ()


async def test_a_log_level_holds_in_every_runtime(start: Start) -> None:
    pair = await start(FULL)
    at_a, at_b = await pair.join()
    for peer in (at_a, at_b):
        assert await peer.result("count", n=1) == "counted to 1"
    assert (await at_a.send(at_a.request("logging/setLevel", {"level": "error"}))).status_code == 200
    assert await at_b.result("count", n=1) == "counted to 1"
    assert (pair.a.shop.levels, pair.b.shop.levels) == (["error"], ["error"])


async def test_what_another_node_writes_behind_a_read_is_seen_by_the_next_request(tmp_path: Path) -> None:
    """The stamp is that of before the read: a change between the two must not pass for known."""
    slow, quick = HeldReads(tmp_path / "log.db", "session"), SharedStore(tmp_path / "log.db")
    here, there = FULL(), FULL()
    async with (
        serve(here.server, store=slow, store_timeout=60.0) as a,
        serve(there.server, store=quick, store_timeout=60.0) as b,
    ):
        at_a = await a.join()
        at_b = at_a.through(b)
        assert await at_a.result("count", n=1) == "counted to 1"
        assert await at_b.result("count", n=1) == "counted to 1"  # so that A has to read again
        slow.hold = True
        told = asyncio.create_task(at_a.send({"jsonrpc": "2.0", "method": "notifications/roots/list_changed"}))
        await slow.reached.wait()
        assert (await at_b.send(at_b.request("logging/setLevel", {"level": "error"}))).status_code == 200
        slow.go.set()
        assert (await told).status_code == 202
        assert await at_a.result("count", n=3) == "counted to 3"
        assert (here.levels, there.levels) == (["error"], ["error"])


async def test_a_home_does_not_rest_while_its_client_uses_the_other_node(start: Start) -> None:
    """R8: activity renews the timer, wherever it is; the subscription goes on."""
    pair = await start(FULL, session_grace=1.5)
    at_a, at_b = await pair.join()
    running = await at_b.call("wait", gate="g")  # from here on it is in use
    assert (await at_a.send(at_a.request("resources/subscribe", {"uri": "x://1"}))).status_code == 200
    idle = await pair.a.site.join()
    await until(lambda: pair.a.site.app.session_info(idle.session) is None)
    assert await idle.result("count", n=1) == "counted to 1"
    await until(lambda: pair.a.site.app.session_info(idle.session) is None)
    assert pair.a.site.app.session_info(at_a.session) is not None
    assert pair.a.shop.subscribing == ["+x://1"]
    pair.b.shop.open("g")
    assert text_of((await running.rest())[-1]) == "went through g"


async def test_a_session_at_rest_is_loaded_elsewhere_with_its_sticky_requests_once(start: Start) -> None:
    """R8, H1"""
    pair = await start(FULL, session_grace=0.3)
    at_a, at_b = await pair.join()
    assert (await at_a.send(at_a.request("resources/subscribe", {"uri": "x://1"}))).status_code == 200
    assert (await at_a.send(at_a.request("logging/setLevel", {"level": "error"}))).status_code == 200
    await until(lambda: pair.a.site.app.session_info(at_a.session) is None)
    standalone = await at_b.get()
    assert await at_b.result("count", n=1) == "counted to 1"
    assert (pair.b.shop.subscribing, pair.b.shop.levels) == (["+x://1"], ["error"])
    await pair.b.shop.update("x://1")
    assert (await standalone.message())["params"]["uri"] == "x://1"


async def test_an_ask_waits_for_a_client_that_is_attached_elsewhere(start: Start) -> None:
    """Asks: the grace is for those who are away. Asked by B, of a client that reads at its home A."""
    pair = await start(session_grace=1.0)
    _, at_b = await pair.join()
    idle = await pair.b.site.join()
    call = await at_b.call("ask", question="who?")
    await call.message()
    again = await at_b.reattach(pair.a.site)  # which ends the reader at B: the client is away for this moment only
    standalone = await again.get()
    fresh = (await standalone.messages(2))[1]
    await until(lambda: pair.b.site.app.session_info(idle.session) is None)
    assert await idle.result("count", n=1) == "counted to 1"
    await until(lambda: pair.b.site.app.session_info(idle.session) is None)
    await again.answer(fresh, {"action": "accept", "content": {"answer": "me"}})
    assert text_of((await (await again.get(call.last_id)).rest())[-1]) == "me"


# What we issued is initialized (H5)


async def test_the_first_call_may_go_to_another_node_than_the_handshake(pair: Pair) -> None:
    """H5: right behind `initialized`, many times."""
    for number in range(10):
        _, at_b = await pair.join()
        assert await at_b.result("count", n=number) == f"counted to {number}"


async def test_the_handshake_may_be_split_over_two_nodes(start: Start) -> None:
    """H5: `initialize` at A, `initialized` at B, calls at A; or no `initialized` at all."""
    pair = await start(FULL)
    for says_it in (True, False):
        peer = Peer(pair.a.site)
        headers = [(name, value) for name, value in peer.headers() if name != "mcp-protocol-version"]
        response = await peer.site.request("POST", headers=headers, body=peer.handshake())
        peer.session = response.headers["mcp-session-id"]
        at_b = peer.through(pair.b.site)
        if says_it:
            body = {"jsonrpc": "2.0", "method": "notifications/initialized"}
            assert (await at_b.send(body)).status_code == 202
        assert await peer.result("count", n=1) == "counted to 1"
        assert await at_b.result("count", n=1) == "counted to 1"
