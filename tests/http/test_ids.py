"""Ids at the boundary: the client's own come back as they were, and never meet another's (design: Ids)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.clients.wire_client import Peer, progress_of, text_of
from tests.support.servers.in_process import until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio

IDS = [0, 1, -1, 2**53, -(2**63), 2**63 - 1, "8", "", "a", "ü ", "0x10", "1.0", "x" * 256, "ask-1", "sticky-0"]


async def test_request_ids_of_all_types_come_back_verbatim(peer: Peer) -> None:
    for request_id in IDS:
        [answer] = await (await peer.post(peer.request("ping", id=request_id))).rest()
        assert answer["id"] == request_id
        assert type(answer["id"]) is type(request_id)


async def test_progress_tokens_come_back_verbatim(peer: Peer) -> None:
    for token in (0, 7, "7", "", "token", -3, 2**53):
        messages = await (await peer.call("count", n=2, token=token)).rest()
        seen = [m["params"]["progressToken"] for m in messages[:-1]]
        assert seen == [token, token]
        assert all(type(value) is type(token) for value in seen)


async def test_two_calls_may_use_the_same_token(shop: ToolServer, peer: Peer) -> None:
    """Each stream carries its own progress, whatever the tokens are."""
    wires = [await peer.call("count", n=3, gate="g", pauses=[1], id=number, token="same") for number in range(2)]
    for wire in wires:
        await wire.messages(1)
    shop.open("g/1")
    for number, wire in enumerate(wires):
        messages = await wire.rest()
        assert progress_of(messages) == [2, 3]
        assert messages[-1]["id"] == number


async def test_a_token_may_be_another_calls_id(shop: ToolServer, peer: Peer) -> None:
    """Inside, calls have numbers of ours: 1, 2, 3 … Clients use the same ones for other things."""
    wires = [
        await peer.call("count", n=2, gate="g", pauses=[0], id=ours, token=theirs)
        for ours, theirs in ((1, 3), (2, 1), (3, 2))
    ]
    shop.open("g/0")
    for wire, (request_id, token) in zip(wires, ((1, 3), (2, 1), (3, 2)), strict=True):
        messages = await wire.rest()
        assert [m["params"]["progressToken"] for m in messages[:-1]] == [token, token]
        assert messages[-1]["id"] == request_id


async def test_what_is_no_token_brings_no_progress_and_no_harm(peer: Peer) -> None:
    not_tokens: list[Any] = [True, 1.5, None, {"a": 1}]
    for meta in ({}, *({"progressToken": token} for token in not_tokens)):
        message = peer.tool("count", n=2)
        message["params"]["_meta"] = meta
        assert progress_of(await (await peer.post(message)).rest()) == []
        assert await peer.result("count", n=1) == "counted to 1"


async def test_a_token_of_the_tools_own_is_left_as_it_is(peer: Peer) -> None:
    """A tool may make up a token; it is neither the client's nor ours, and nobody else's progress."""
    standalone = await peer.get()
    for alone in (False, True):
        wire = await peer.call("own_token", word="mine", alone=alone)
        message = await (standalone if alone else wire).message()
        assert message["params"]["progressToken"] == "mine"
        assert text_of((await wire.rest())[-1]) == "sent"


async def test_numbers_of_ours_never_leave(shop: ToolServer, peer: Peer) -> None:
    """A session object that a tool kept sends progress of a call that has ended: its number means nothing outside."""
    standalone = await peer.get()
    wire = await peer.call("keep_token", token="theirs")
    await wire.rest()
    await shop.late_progress()
    await peer.result("announce", n=1)
    assert (await standalone.message())["method"] == "notifications/resources/updated"


async def test_a_tool_that_reports_without_being_asked_is_not_heard(peer: Peer) -> None:
    """Progress under the call's own number, although the client gave no token: there is none to put in its place."""
    messages = await (await peer.call("guess_token")).rest()
    assert progress_of(messages) == []
    assert text_of(messages[-1]) == "guessed"


async def test_positions_of_calls_with_the_same_id_lead_to_each(peer: Peer) -> None:
    """An id may repeat, a stream does not."""
    wires = []
    for number in range(3):
        wire = await peer.call("count", n=number, id=1, token=1)
        answer = (await wire.rest())[-1]
        assert (answer["id"], text_of(answer)) == (1, f"counted to {number}")
        wires.append(wire)
    for number, wire in enumerate(wires):
        answer = (await (await peer.get(wire.seen[0].id)).rest())[-1]
        assert text_of(answer) == f"counted to {number}"


async def test_an_id_in_use_is_refused_and_the_first_call_goes_on(shop: ToolServer, peer: Peer) -> None:
    """Compared as the SDK compares them: "8" and 8 are one id."""
    pairs: list[tuple[Any, Any]] = [(8, 8), (8, "8"), ("8", 8), ("a", "a"), (8, " 8 "), (8, "+8")]
    for number, (first, second) in enumerate(pairs):
        wire = await peer.call("count", n=2, gate=f"g{number}", pauses=[1], id=first, token=1)
        await wire.messages(1)
        response = await peer.send(peer.request("ping", id=second))
        assert response.status_code == 400
        error = response.json()
        assert (error["id"], error["error"]["code"]) == (second, -32600)
        shop.open(f"g{number}/1")
        messages = await wire.rest()
        assert progress_of(messages) == [2]
        assert messages[-1]["id"] == first
        [answer] = await (await peer.post(peer.request("ping", id=second))).rest()
        assert answer["id"] == second


async def test_a_cancellation_may_spell_the_id_otherwise(shop: ToolServer, peer: Peer) -> None:
    pairs: list[tuple[Any, Any]] = [(8, "8"), ("8", 8), ("8", "8"), (8, 8)]
    for request_id, cancelled in pairs:
        shop.seen.clear()
        wire = await peer.call("wait", gate="never", id=request_id)
        await until(lambda: shop.seen)
        await peer.cancel(cancelled)
        [answer] = await wire.rest()
        assert (answer["id"], answer["error"]["code"]) == (request_id, -32800)
        assert type(answer["id"]) is type(request_id)
        await until(lambda: "cancelled at never" in shop.seen)


async def test_a_cancellation_reaches_the_call_that_the_client_means(shop: ToolServer, peer: Peer) -> None:
    """The client's 1 and 2 are other numbers to the runtime."""
    second = await peer.call("wait", gate="two", id=2)
    first = await peer.call("wait", gate="one", id=1)
    await until(lambda: len(shop.seen) == 2)
    await peer.cancel(1)
    [answer] = await first.rest()
    assert (answer["id"], answer["error"]["code"]) == (1, -32800)
    await until(lambda: "cancelled at one" in shop.seen)
    assert "cancelled at two" not in shop.seen
    shop.open("two")
    assert text_of((await second.rest())[-1]) == "went through two"
