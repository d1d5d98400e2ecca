"""A key in a session means what it means at 2026-07-28: requests with equal keys are one call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from perdure._core.envelope import KEY
from perdure.store.interface import Store
from tests.http.test_heartbeats import new_stores
from tests.support.clients.wire_client import Message, Peer, Web, Wire, answer_of, progress_of, text_of
from tests.support.processes.serving import serving
from tests.support.servers.gate_file_tools import diary, open_gate
from tests.support.servers.in_process import Site, serve, until
from tests.support.servers.tool_server import Guests, ToolServer
from tests.support.stores.postgres import store_url

pytestmark = pytest.mark.anyio

GATE_FILE_TOOLS = "tests.support.servers.gate_file_tools:server"
GIVEN_UP, TAKEN = -31011, -31009


def keyed(peer: Peer, tool: str, /, *, key: Any = "order-7", id: Any = None, **given: Any) -> Message:  # noqa: A002
    request = peer.tool(tool, id=id, **given)
    request["params"].setdefault("_meta", {})[KEY] = key
    return request


async def begun(peer: Peer, tool: str, /, **given: Any) -> Wire:
    return await peer.post(keyed(peer, tool, **given))


async def answered(peer: Peer, tool: str, /, **given: Any) -> Message:
    return (await (await begun(peer, tool, **given)).rest())[-1]


async def test_requests_with_equal_keys_are_one_call_and_each_has_its_answer(shop: ToolServer, site: Site) -> None:
    peer, other = await site.join(), await site.join()
    first = await begun(peer, "wait", gate="g", id="first")
    joined = [await begun(peer, "wait", gate="g", id="second"), await begun(other, "wait", gate="g", id="first")]
    shop.open("g")
    answers = [(await wire.rest())[-1] for wire in (first, *joined)]
    later = [await answered(each, "wait", gate="g", id="later") for each in (peer, other, await site.join())]
    assert {text_of(answer) for answer in (*answers, *later)} == {"went through g"}
    assert [answer["id"] for answer in (*answers, *later)] == ["first", "second", "first", *["later"] * 3]
    assert shop.seen == ["waiting at g"]
    assert await peer.result("wait", gate="g") == "went through g"  # without a key it is a call of its own
    assert len(shop.seen) == 2


async def test_a_joined_request_shows_progress_and_resumes(
    shop: ToolServer, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.sessions.context.READ_AGAIN", 0.02)
    peer, other = await site.join(), await site.join()
    count = {"n": 3, "gate": "g", "pauses": [2], "token": "t"}
    first = await begun(peer, "count", **count)
    assert progress_of(await first.messages(2)) == [1, 2]
    joined = await begun(other, "count", id="mine", **count)
    assert progress_of(await joined.messages(1)) == [2]
    await joined.drop()
    shop.open("g/2")
    rest = await (await other.get(joined.last_id)).rest()
    assert (rest[-1]["id"], text_of(rest[-1])) == ("mine", "counted to 3")
    assert text_of((await first.rest())[-1]) == "counted to 3"
    assert shop.seen == ["counted 3"]


async def test_another_request_under_a_key_is_refused_as_at_2026_07_28(shop: ToolServer, site: Site) -> None:
    shop.open("g")
    peer = await site.join()
    await answered(peer, "wait", gate="g")
    modern = {"name": "wait", "arguments": {"gate": "g"}, "_meta": {KEY: "modern"}}
    assert text_of(answer_of(await site.modern("tools/call", modern))) == "went through g"
    modern["arguments"] = {"gate": "other"}
    expected = await site.modern("tools/call", modern)
    for request in (keyed(peer, "wait", gate="other", id=1), keyed(peer, "whoami", id=1)):
        refused = await peer.send(request)
        assert (refused.status_code, refused.content) == (expected.status_code, expected.content)
        assert refused.json()["error"]["code"] == TAKEN
    assert shop.seen == ["waiting at g"] * 2


async def test_a_malformed_key_or_one_in_a_batch_is_refused_and_nothing_runs(shop: ToolServer, site: Site) -> None:
    peer = await site.join()
    for key in ("", "k" * 256, 7, None, ["k"], "a\nb"):
        refused = await peer.send(keyed(peer, "wait", gate="g", key=key))
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, -32602), key
        assert "_meta['dev.perdure/key'] must be a string" in refused.json()["error"]["message"]
    old = await site.join("2025-03-26")
    refused = await old.send([keyed(old, "wait", gate="g"), old.tool("whoami")])
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, -32602)
    assert "must be sent alone" in refused.json()["error"]["message"]
    assert not shop.seen
    listed = keyed(peer, "whoami")
    assert "result" in answer_of(await peer.send({**listed, "method": "tools/list"}))  # a read has no key


async def test_keys_belong_to_their_principal(shop: ToolServer) -> None:
    async with serve(shop.server, auth=Guests()) as site:
        shop.open("g")
        ann, bob = [await site.join(token=token) for token in ("ann-1", "bob-1")]
        first = await answered(ann, "wait", gate="g")
        assert text_of(await answered(bob, "wait", gate="g")) == text_of(first)
        assert shop.seen == ["waiting at g"] * 2
        again = await site.join(token="ann-2")
        assert (await answered(again, "wait", gate="g", id=first["id"])) == first
        assert len(shop.seen) == 2


async def test_a_cancelled_request_cancels_the_call_of_its_key(shop: ToolServer, site: Site) -> None:
    peer, other = await site.join(), await site.join()
    first = await begun(peer, "wait", gate="g")
    await until(lambda: shop.seen)
    joined = await begun(other, "wait", gate="g", id="joined")
    await other.cancel("joined")
    for wire in (first, joined):
        assert (await wire.rest())[-1]["error"]["code"] == -32800
    assert shop.seen == ["waiting at g", "cancelled at g"]
    assert (await answered(peer, "wait", gate="g"))["error"]["code"] == -32800  # the key has its answer


async def test_a_broken_connection_and_the_end_of_a_joined_session_cancel_nothing(shop: ToolServer, site: Site) -> None:
    peer, other = await site.join(), await site.join()
    first = await begun(peer, "wait", gate="g")
    joined = await begun(other, "wait", gate="g")
    await joined.event()
    await other.delete()
    await first.event()
    await first.drop()
    shop.open("g")
    assert text_of((await (await peer.get(first.last_id)).rest())[-1]) == "went through g"
    assert shop.seen == ["waiting at g"]


async def test_a_question_is_asked_where_the_call_began(shop: ToolServer, site: Site) -> None:
    peer, other = await site.join(), await site.join()
    first = await begun(peer, "ask", question="Why?")
    asked = await first.message()
    joined = await begun(other, "ask", question="Why?")
    await peer.answer(asked, {"action": "accept", "content": {"answer": "because"}})
    for wire in (first, joined):
        assert text_of((await wire.rest())[-1]) == "because"


async def test_a_call_whose_session_has_ended_does_not_run_again(shop: ToolServer, site: Site) -> None:
    shop.open("g")
    peer, other = await site.join(), await site.join()
    await answered(peer, "wait", gate="g")
    await peer.delete()
    refused = await other.send(keyed(other, "wait", gate="g"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, GIVEN_UP)
    refused = await other.send(keyed(other, "wait", gate="another"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, TAKEN)
    assert shop.seen == ["waiting at g"]


async def test_a_call_of_2026_07_28_is_joined_in_a_session_and_one_of_a_session_is_fetched_there(
    shop: ToolServer, site: Site
) -> None:
    """No call runs twice, whichever era comes first."""
    shop.open("g")
    peer, modern = await site.join(), {"name": "wait", "arguments": {"gate": "g"}, "_meta": {KEY: "modern"}}
    first = answer_of(await site.modern("tools/call", modern))
    assert text_of(await answered(peer, "wait", gate="g", key="modern")) == text_of(first) == "went through g"
    waiting = await begun(peer, "wait", gate="later")
    modern |= {"arguments": {"gate": "later"}, "_meta": {KEY: "order-7"}}
    for _ in range(2):
        refused = await site.modern("tools/call", modern)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, TAKEN)
        assert "begun in a session" in refused.json()["error"]["message"]
        shop.open("later")
        await waiting.rest()
    await peer.delete()
    refused = await site.modern("tools/call", modern)
    assert refused.json()["error"]["code"] == GIVEN_UP
    assert shop.seen == ["waiting at g", "waiting at later"]


async def test_a_json_answer_has_its_key_too(shop: ToolServer) -> None:
    shop.open("g")
    async with serve(shop.server, json_response=True) as site:
        peer = await site.join()
        for number in (1, 2):
            answer = (await peer.send(keyed(peer, "wait", gate="g", id=number))).json()
            assert (answer["id"], text_of(answer)) == (number, "went through g")
    assert shop.seen == ["waiting at g"]


async def test_requests_that_come_at_once_are_one_call(shop: ToolServer, site: Site) -> None:
    peers = [await site.join() for _ in range(3)]
    wires = await asyncio.gather(*(begun(peer, "wait", gate="g") for peer in peers * 3))
    shop.open("g")
    for wire in wires:
        assert text_of((await wire.rest())[-1]) == "went through g"
    assert shop.seen == ["waiting at g"]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_at_two_nodes_equal_keys_are_one_call(tmp_path: Path, kind: str) -> None:
    opened: Callable[[], Store] = new_stores(kind, tmp_path)
    shops = (ToolServer(), ToolServer())
    async with AsyncExitStack() as stack:
        sites = [await stack.enter_async_context(serve(each.server, store=opened())) for each in shops]
        await until(lambda: all(len(site.app.other_nodes()) == 1 for site in sites))
        peers = [await site.join() for site in sites]
        for number in range(5):
            key = f"order-{number}"
            wires = await asyncio.gather(*(begun(peer, "wait", gate="g", key=key) for peer in peers))
            for each in shops:
                each.open("g")
            for wire in wires:
                assert text_of((await wire.rest())[-1]) == "went through g"
            assert sum(len(each.seen) for each in shops) == number + 1
            for peer in peers:
                other = await peer.send(keyed(peer, "wait", gate="another", key=key))
                assert other.json()["error"]["code"] == TAKEN
        waiting = await begun(peers[0], "wait", gate="later", key="cancelled")
        joined = await begun(peers[1], "wait", gate="later", key="cancelled", id="joined")
        await peers[1].cancel("joined")
        for wire in (waiting, joined):
            assert (await wire.rest())[-1]["error"]["code"] == -32800


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_kill_is_survived_by_a_call_its_key_and_the_requests_that_were_joined(
    tmp_path: Path, kind: str
) -> None:
    """A tool that may run again does, once for all of them; any other has one outcome, which is unknown."""
    options = ("--store", store_url() if kind == "postgres" else f"sqlite:{tmp_path}/log.db")
    log, gate = tmp_path / "diary", tmp_path / "gate"
    arguments = {"n": 1, "gate": str(gate), "pauses": [1], "log": str(log)}

    def request(peer: Peer, tool: str, number: object) -> Message:
        message = keyed(peer, tool, key=tool, id=number, **arguments)
        message["params"]["arguments"]["key"] = tool
        return message

    async with serving(GATE_FILE_TOOLS, *options) as server:
        peer, other = [await (web := Web(server.url)).join() for _ in range(2)]
        first = [await peer.post(request(peer, tool, tool)) for tool in ("put", "pay")]
        joined = [await other.post(request(other, tool, tool)) for tool in ("put", "pay")]
        for wire in (*first, *joined):
            await wire.event()
        await until(lambda: len(diary(log)) == 2)
        await server.kill()
    async with serving(GATE_FILE_TOOLS, *options) as server:
        web = Web(server.url)
        resumed = [
            await each.through(web).get(wire.last_id)
            for each, wires in ((peer, first), (other, joined))
            for wire in wires
        ]
        again = await web.join()
        resumed += [await again.post(request(again, tool, tool)) for tool in ("put", "pay")]
        open_gate(f"{gate}.1")
        answers = [(await wire.rest())[-1] for wire in resumed]
        assert [answer["id"] for answer in answers] == ["put", "pay"] * 3
        assert {text_of(answer) for answer in answers[::2]} == {"counted to 1"}
        assert {answer["error"]["code"] for answer in answers[1::2]} == {-31001}
        assert sorted(key for key, _ in diary(log)) == ["pay", "put", "put"]
        await web.aclose()
