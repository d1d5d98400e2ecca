"""The server asks the client (P6): on the call's stream or on the standalone one; the answer finds who waits."""

from __future__ import annotations

from typing import Any

import pytest

from perdure._core.ids import SessionId
from tests.support.clients.wire_client import Message, Peer, text_of
from tests.support.servers.in_process import Site, serve, until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio

QUESTIONS: dict[str, tuple[str, dict[str, Any], Message, str]] = {
    "elicitation": (
        "elicitation/create",
        {"question": "name?"},
        {"action": "accept", "content": {"answer": "Ada"}},
        "Ada",
    ),
    "sampling": (
        "sampling/createMessage",
        {"prompt": "poem"},
        {"role": "assistant", "model": "m", "content": {"type": "text", "text": "roses"}},
        "roses",
    ),
    "roots": ("roots/list", {}, {"roots": [{"uri": "file:///a"}, {"uri": "file:///b"}]}, "file:///a, file:///b"),
}
TOOLS = {"elicitation": "ask", "sampling": "sample", "roots": "roots"}


async def test_an_ask_comes_on_the_stream_of_its_call_or_on_the_standalone_stream(peer: Peer) -> None:
    """The call waits; its own stream carries nothing but its own asks and the answer."""
    standalone = await peer.get()
    for kind, (method, arguments, answer, text) in QUESTIONS.items():
        wire = await peer.call(TOOLS[kind], **arguments)
        ask = await wire.message()
        assert ask["method"] == method
        response = await peer.answer(ask, answer)
        assert (response.status_code, response.content) == (202, b"")
        assert text_of((await wire.rest())[-1]) == text
        wire = await peer.call(TOOLS[kind], alone=True, **arguments)
        ask = await standalone.message()
        assert ask["method"] == method
        await peer.answer(ask, answer)
        [result] = await wire.rest()
        assert text_of(result) == text


async def test_answers_find_the_call_that_waits(peer: Peer) -> None:
    """Given in another order than asked, by another connection than either stream's."""
    wires = [await peer.call("ask", question=f"{number}?") for number in range(5)]
    asks = [await wire.message() for wire in wires]
    assert [ask["params"]["message"] for ask in asks] == [f"{number}?" for number in range(5)]
    for number in (3, 0, 4, 2, 1):
        await peer.answer(asks[number], {"action": "accept", "content": {"answer": f"it is {number}"}})
    for number, wire in enumerate(wires):
        assert text_of((await wire.rest())[-1]) == f"it is {number}"


async def test_an_error_is_an_answer_too(peer: Peer) -> None:
    wire = await peer.call("sample", prompt="?")
    ask = await wire.message()
    body = {"jsonrpc": "2.0", "id": ask["id"], "error": {"code": -1, "message": "user said no"}}
    assert (await peer.send(body)).status_code == 202
    answer = (await wire.rest())[-1]
    assert "user said no" in str(answer)


async def test_a_null_member_beside_the_result_does_no_harm(peer: Peer) -> None:
    """Some clients write every member of a response."""
    extras: list[Message] = [{"error": None}, {"x-unknown": 1}]
    for extra in extras:
        wire = await peer.call("ask", question="?")
        ask = await wire.message()
        result = {"action": "accept", "content": {"answer": "yes"}}
        response = await peer.send({"jsonrpc": "2.0", "id": ask["id"], "result": result, **extra})
        assert response.status_code == 202
        assert text_of((await wire.rest())[-1]) == "yes"


async def test_ids_of_asks_never_repeat(site: Site, peer: Peer) -> None:
    """A27: within a session, nor across its calls; and they never look like a client's numbers."""
    other = await site.join()
    ids = []
    for client in (peer, other, peer):
        wire = await client.call("ask", question="?")
        ask = await wire.message()
        ids.append(ask["id"])
        await client.answer(ask, {"action": "decline"})
        assert text_of((await wire.rest())[-1]) == "decline"
    assert len(set(ids)) == 3
    assert all(isinstance(ask, str) and not ask.isdigit() for ask in ids)


async def test_an_answer_from_another_session_is_not_taken(site: Site, peer: Peer) -> None:
    """Promise 5: the id alone opens nothing."""
    wire = await peer.call("ask", question="secret?")
    ask = await wire.message()
    stranger = await site.join()
    await stranger.answer(ask, {"action": "accept", "content": {"answer": "forged"}})
    await peer.answer(ask, {"action": "accept", "content": {"answer": "mine"}})
    assert text_of((await wire.rest())[-1]) == "mine"


async def test_the_second_answer_to_an_ask_is_dropped(peer: Peer) -> None:
    wire = await peer.call("ask", question="?")
    ask = await wire.message()
    for text in ("first", "second"):
        response = await peer.answer(ask, {"action": "accept", "content": {"answer": text}})
        assert response.status_code == 202
    assert text_of((await wire.rest())[-1]) == "first"


async def test_an_ask_is_replayed_to_a_client_that_comes_back(peer: Peer) -> None:
    """R4: cut right before the ask arrived; the same ask comes, and its answer is taken."""
    wire = await peer.call("ask", question="still there?")
    await wire.event()
    await wire.drop()
    resumed = await peer.get(wire.last_id)
    ask = await resumed.message()
    await peer.answer(ask, {"action": "accept", "content": {"answer": "yes"}})
    assert text_of((await resumed.rest())[-1]) == "yes"


async def test_an_answer_may_come_while_nobody_reads(shop: ToolServer, peer: Peer) -> None:
    """The answer is a POST of its own: it needs no stream."""
    wire = await peer.call("ask", question="?")
    ask = await wire.message()
    await wire.drop()
    await peer.answer(ask, {"action": "accept", "content": {"answer": "in passing"}})
    assert text_of((await (await peer.get(wire.last_id)).rest())[-1]) == "in passing"


async def test_open_asks_are_in_the_store_and_closed_ones_are_not(site: Site, peer: Peer) -> None:
    key = SessionId(peer.session)
    wire = await peer.call("ask", question="?")
    ask = await wire.message()
    assert [record.id for record in await site.store.asks(key)] == [ask["id"]]
    await peer.answer(ask, {"action": "decline"})
    await wire.rest()
    assert list(await site.store.asks(key)) == []


async def test_an_ask_does_not_wait_for_ever_for_a_client_that_is_away(shop: ToolServer) -> None:
    """Promise 3: after `session_grace` whoever waits is told, and the call ends."""
    async with serve(shop.server, session_grace=0.5) as site:
        peer = await site.join()
        wire = await peer.call("sample", prompt="anybody?")
        await wire.message()
        await wire.drop()
        await until(lambda: site.app.counters.calls_answered == 2)
        answer = (await (await peer.get(wire.last_id)).rest())[-1]
        assert "away" in str(answer)


async def test_an_attached_client_may_take_its_time(shop: ToolServer) -> None:
    """The grace is for those who are away: a reader that is attached is there."""
    async with serve(shop.server, session_grace=0.5) as site:
        peer, idle = await site.join(), await site.join()
        wire = await peer.call("ask", question="?")
        ask = await wire.message()

        await until(lambda: site.app.session_info(idle.session) is None)  # it rests in the store
        await peer.answer(ask, {"action": "accept", "content": {"answer": "at last"}})
        assert text_of((await wire.rest())[-1]) == "at last"
