"""`initialize` on a session that exists: the client began again, and everything else goes on (R10, R9)."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest

from perdure._core.ids import SessionId
from perdure.store.records import SessionRecord
from tests.support.clients.wire_client import (
    CAPABILITIES,
    Ended,
    Message,
    Peer,
    answer_of,
    gaps_of,
    progress_of,
    text_of,
)
from tests.support.servers.in_process import Site, info_of, serve
from tests.support.servers.tool_server import Guests, ToolServer

pytestmark = pytest.mark.anyio

UNKNOWN = "A" * 43
"""An id of the right form that nobody has."""


@pytest.fixture
def shop() -> ToolServer:
    return ToolServer(logs=True, subscribes=True)


async def record_of(site: Site, session: str) -> SessionRecord:
    record = await site.store.session(SessionId(session))
    assert record is not None
    return record


async def shake(peer: Peer, body: Message | None = None, /, **headers: str) -> httpx2.Response:
    """A handshake and nothing more; without a session id unless one is given."""
    given: dict[str, Any] = {"mcp_session_id": "", "mcp_protocol_version": "", **headers}
    return await peer.send(peer.handshake() if body is None else body, **given)


async def test_a_client_that_begins_again_keeps_its_session(site: Site, shop: ToolServer, peer: Peer) -> None:
    """R10: the id, the recorded result, the runtime and the running calls; only the incarnation is another."""
    running = await peer.call("count", n=2, gate="g", pauses=[1], token=1)
    await running.message()
    again = await peer.reattach()
    assert (again.session, again.welcome) == (peer.session, peer.welcome)
    assert (await record_of(site, peer.session)).incarnation == 2
    assert site.app.counters.sessions_opened == 1
    info = info_of(site.app, peer.session)
    assert (info.loaded, info.running_calls) == (True, ("tools/call",))
    shop.open("g/1")
    rest = await (await again.get(running.last_id)).rest()
    assert text_of(rest[-1]) == "counted to 2"


async def test_the_recorded_result_is_given_also_when_the_server_has_changed(
    site: Site, shop: ToolServer, peer: Peer
) -> None:
    """R10: what was agreed on holds for the session; a new one hears the new words."""
    shop.server.session_manager.app.instructions = "everything is different now"
    assert (await peer.reattach()).welcome == peer.welcome
    assert (await site.join()).welcome["result"]["instructions"] == "everything is different now"


async def test_subscriptions_and_the_log_level_are_kept_and_not_repeated(shop: ToolServer, peer: Peer) -> None:
    """R10: they live in the runtime, which goes on. The server hears of no second handshake."""
    assert (await peer.send(peer.request("resources/subscribe", {"uri": "x://1"}))).status_code == 200
    assert (await peer.send(peer.request("logging/setLevel", {"level": "error"}))).status_code == 200
    again = await peer.reattach()
    standalone = await again.get()
    await shop.update("x://1")
    assert (await standalone.message())["params"]["uri"] == "x://1"
    assert (shop.subscribing, shop.levels) == (["+x://1"], ["error"])
    assert shop.handshakes == 1


async def test_ids_and_tokens_begin_again_and_neither_call_disturbs_the_other(shop: ToolServer, peer: Peer) -> None:
    """R10: two calls with id 7 and token 1, of two incarnations."""
    old = await peer.call("count", id=7, n=3, gate="old", pauses=[1, 2], token=1)
    await old.message()
    again = await peer.reattach()
    new = await again.call("count", id=7, n=3, gate="new", pauses=[1], token=1)
    first = await new.message()
    assert (first["params"]["progressToken"], first["params"]["progress"]) == (1, 1)
    resumed = await again.get(old.last_id)
    shop.open("old/1")
    more = await resumed.message()
    assert (more["params"]["progressToken"], more["params"]["progress"]) == ("1:1", 2)
    assert (await again.cancel(7)).status_code == 202
    assert (await new.rest())[-1]["error"]["code"] == -32800
    shop.open("old/2")
    rest = await resumed.rest()
    assert [m["params"]["progressToken"] for m in rest[:-1]] == ["1:1"]
    assert (rest[-1]["id"], text_of(rest[-1])) == (7, "counted to 3")


async def test_a_duplicate_id_is_refused_within_the_new_incarnation_too(shop: ToolServer, peer: Peer) -> None:
    await peer.call("wait", id=7, gate="g")
    again = await peer.reattach()
    await again.call("wait", id=7, gate="g")
    refused = await again.send(again.tool("count", n=1, id=7))
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, -32600)


async def test_the_session_may_be_named_in_a_header_of_its_own(site: Site, peer: Peer) -> None:
    """R10: for clients that must run their ordinary handshake."""
    response = await shake(peer, x_mcp_reconnect_session=peer.session)
    assert (response.headers["mcp-session-id"], answer_of(response)) == (peer.session, peer.welcome)
    assert (await record_of(site, peer.session)).incarnation == 2


async def test_two_that_come_back_at_once_get_two_incarnations(site: Site, peer: Peer) -> None:
    """R10: both have their answer, under ids that meet in no ledger."""
    responses = await asyncio.gather(*(shake(peer, mcp_session_id=peer.session) for _ in range(5)))
    assert [answer_of(response) for response in responses] == [peer.welcome] * 5
    assert (await record_of(site, peer.session)).incarnation == 6
    rows = await site.store.calls(SessionId(peer.session))
    shaken = sorted(row.incarnation for row in rows if row.method == "initialize")
    assert shaken == [1, 2, 3, 4, 5, 6]


async def test_another_client_gets_a_session_of_its_own(site: Site, peer: Peer) -> None:
    """R10: the old one stays as it is."""
    standalone = await peer.get()
    changes: list[Message] = [
        {"protocolVersion": "2025-06-18"},
        {"capabilities": {}},
        {"capabilities": {**CAPABILITIES, "tasks": {}}},
    ]
    for change in changes:
        handshake = peer.handshake()
        handshake["params"] |= change
        for header in ("mcp_session_id", "x_mcp_reconnect_session"):
            response = await shake(peer, handshake, **{header: peer.session})
            assert response.status_code == 200
            assert response.headers["mcp-session-id"] != peer.session
    assert (await record_of(site, peer.session)).incarnation == 1
    assert await peer.result("announce", n=1) == "announced 1"
    assert (await standalone.message())["params"]["uri"] == "notice://1"


async def test_a_session_that_does_not_exist_is_replaced_by_a_new_one(site: Site, peer: Peer) -> None:
    await peer.delete()
    seen = {peer.session}
    for header in ("mcp_session_id", "x_mcp_reconnect_session"):
        for named in (UNKNOWN, "short", "!" * 43, "x" * 5_000, peer.session):
            response = await shake(peer, None, **{header: named})
            assert response.status_code == 200
            assert response.headers["mcp-session-id"] not in seen
            seen.add(response.headers["mcp-session-id"])
    assert site.app.counters.sessions_opened == len(seen)


async def test_earlier_readers_are_ended_at_once(shop: ToolServer, peer: Peer) -> None:
    """R10: the page that held them is gone, whatever its sockets say."""
    standalone = await peer.get()
    call = await peer.call("count", n=2, gate="g", pauses=[1], token=1)
    await call.message()
    await standalone.event()
    again = await peer.reattach()
    for wire in (standalone, call):
        with pytest.raises(Ended):
            await wire.message()
    fresh = await again.get()
    shop.open("g/1")
    assert (await fresh.message())["params"]["progressToken"] == "1:1"


async def test_an_open_ask_is_asked_again_under_another_id(site: Site, shop: ToolServer, peer: Peer) -> None:
    """Asks: the old id is cancelled, an answer to it is dropped; the answer to the new one reaches the tool."""
    call = await peer.call("ask", question="who?")
    old = await call.message()
    again = await peer.reattach()
    standalone = await again.get()
    cancelled, fresh = await standalone.messages(2)
    assert (cancelled["method"], cancelled["params"]["requestId"]) == ("notifications/cancelled", old["id"])
    assert fresh["id"] != old["id"]
    assert {**fresh, "id": None} == {**old, "id": None}
    assert [ask.id for ask in await site.store.asks(SessionId(peer.session))] == [fresh["id"]]
    for ask, answer in ((old, "too late"), (fresh, "me")):
        response = await again.answer(ask, {"action": "accept", "content": {"answer": answer}})
        assert response.status_code == 202
    resumed = await again.get(call.last_id)
    assert text_of((await resumed.rest())[-1]) == "me"


async def test_a_client_that_resumes_is_not_asked_what_no_call_waits_for(peer: Peer) -> None:
    """Asks: skipped without a word of a gap, in the middle of what is replayed."""
    call = await peer.call("ask", question="who?")
    start = await call.event()
    old = await call.message()
    again = await peer.reattach()
    standalone = await again.get()
    fresh = (await standalone.messages(2))[1]
    resumed = await again.get(start.id)
    await again.answer(fresh, {"action": "accept", "content": {"answer": "me"}})
    rest = await resumed.rest()
    assert gaps_of(rest) == []
    assert [text_of(m) for m in rest] == ["me"]
    assert old["id"] not in str(rest)


async def test_a_client_that_comes_back_twice_has_one_open_ask(site: Site, peer: Peer) -> None:
    await (await peer.call("ask", question="who?")).message()
    again = await (await peer.reattach()).reattach()
    # The second one was closed before it could be read, and is skipped.
    *cancelled, fresh = await (await again.get()).messages(3)
    assert [m["method"] for m in cancelled] == ["notifications/cancelled"] * 2
    assert [ask.id for ask in await site.store.asks(SessionId(peer.session))] == [fresh["id"]]


async def test_with_json_answers_it_works_the_same(shop: ToolServer) -> None:
    async with serve(shop.server, json_response=True) as site:
        peer = await site.join()
        again = await peer.reattach()
        assert (again.session, again.welcome) == (peer.session, peer.welcome)


# Credentials (R9)


async def test_a_fresh_token_of_the_same_principal_is_what_tools_see(shop: ToolServer) -> None:
    """R9: with any request, and after a reattach; a call that runs meanwhile sees the newest, too."""
    async with serve(shop.server, auth=Guests()) as site:
        peer = await site.join(token="ann-1")
        assert await peer.result("credentials") == "ann-1"
        running = await peer.call("credentials", gate="g")
        peer.token = "ann-2"
        assert await peer.result("credentials") == "ann-2"
        peer.token = "ann-3"
        again = await peer.reattach()
        assert (again.session, again.welcome) == (peer.session, peer.welcome)
        assert await again.result("credentials") == "ann-3"
        resumed = await again.get((await running.event()).id)
        shop.open("g")
        assert text_of((await resumed.rest())[-1]) == "ann-3"


async def test_another_principal_cannot_tell_a_foreign_session_from_none(shop: ToolServer) -> None:
    """R9, promise 5: a new session in either case, and the one whose id it named has noticed nothing."""
    async with serve(shop.server, auth=Guests()) as site:
        ann = await site.join(token="ann-1")
        standalone = await ann.get()
        await standalone.event()
        bob = Peer(site, token="bob-1")
        for header in ("mcp_session_id", "x_mcp_reconnect_session"):
            answers = [await shake(bob, None, **{header: named}) for named in (ann.session, UNKNOWN)]
            ids = [answer.headers["mcp-session-id"] for answer in answers]
            assert len({*ids, ann.session}) == 3
            assert [as_seen(answer) for answer in answers[:1]] == [as_seen(answer) for answer in answers[1:]]
        assert (await record_of(site, ann.session)).incarnation == 1
        assert await ann.result("announce", n=1) == "announced 1"
        assert (await standalone.message())["params"]["uri"] == "notice://1"
        assert (await bob.send(ann.tool("count", n=1), mcp_session_id=ann.session)).status_code == 404


def as_seen(response: httpx2.Response) -> tuple[int, list[str], Message]:
    return response.status_code, sorted(response.headers), answer_of(response)


# What we issued is initialized (H5)


async def test_a_client_that_never_says_initialized_is_served_all_the_same(site: Site, shop: ToolServer) -> None:
    """H5"""
    peer = Peer(site)
    peer.session = (await shake(peer)).headers["mcp-session-id"]
    wire = await peer.call("count", n=2, token=1)
    messages = await wire.rest()
    assert (progress_of(messages), text_of(messages[-1])) == ([1, 2], "counted to 2")
    assert shop.handshakes == 0
    again = await peer.reattach()  # whose `initialized` is the first
    assert await again.result("count", n=1) == "counted to 1"
    assert shop.handshakes == 1
