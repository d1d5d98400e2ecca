"""Cancelling a request (A32): it gets -32800 at once, its stream ends, and nobody else notices."""

from __future__ import annotations

import pytest

from tests.support.clients.wire_client import SESSION_VERSIONS, Peer, progress_of, text_of
from tests.support.servers.in_process import Site, until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("version", SESSION_VERSIONS)
async def test_a_cancelled_call_is_answered_and_its_stream_ends(shop: ToolServer, site: Site, version: str) -> None:
    peer = await site.join(version)
    wire = await peer.call("wait", gate="never", id="c")
    await until(lambda: shop.seen)
    assert (await peer.cancel("c")).status_code == 202
    [answer] = await wire.rest()
    assert (answer["id"], answer["error"]["code"]) == ("c", -32800)
    await until(lambda: "cancelled at never" in shop.seen)
    assert site.app.counters.calls_cancelled == 1


async def test_a_cancelled_call_says_nothing_more(shop: ToolServer, peer: Peer) -> None:
    """A tool that does not stop talks to nobody; its stream was sealed at the cancellation. If it asks, it is told."""
    standalone = await peer.get()
    wire = await peer.call("stubborn", gate="g", id=1, token=1)
    await until(lambda: shop.seen)
    await peer.cancel(1)
    [answer] = await wire.rest()
    assert answer["error"]["code"] == -32800
    shop.open("g")
    await until(lambda: shop.seen == ["stubborn", "talked", "nobody listens"])
    assert [m.get("error", {}).get("code") for m in await (await peer.get(wire.seen[0].id)).rest()] == [-32800]
    await peer.result("announce", n=1)
    assert (await standalone.message())["method"] == "notifications/resources/updated"


async def test_the_cancelled_answer_can_be_resumed(shop: ToolServer, peer: Peer) -> None:
    """Promise 3: cancelled while its client was away, answered when it is back."""
    wire = await peer.call("count", n=2, gate="never", pauses=[1], id=1, token=1)
    await wire.messages(1)
    await wire.drop()
    await peer.cancel(1)
    [answer] = await (await peer.get(wire.last_id)).rest()
    assert (answer["id"], answer["error"]["code"]) == (1, -32800)


async def test_the_id_is_free_after_a_cancellation(shop: ToolServer, peer: Peer) -> None:
    """Also while the cancelled tool does not stop."""
    wire = await peer.call("stubborn", gate="g", id=7)
    await until(lambda: shop.seen)
    await peer.cancel(7)
    await wire.rest()
    again = await peer.call("count", n=2, id=7, token=7)
    messages = await again.rest()
    assert progress_of(messages) == [1, 2]
    assert messages[-1]["id"] == 7
    shop.open("g")


async def test_cancelling_what_does_not_run_is_ignored(shop: ToolServer, peer: Peer) -> None:
    """MUST tolerate races: late, unknown and odd ids, names of no call, and none at all."""
    wire = await peer.call("wait", gate="g", id=1)
    odd: list[object] = ["unknown", 999, None, True, 1.5, {"a": 1}, ["x"]]
    names = ("1:8", "2:1", "0:1", "9" * 9 + ":1", "9" * 10 + ":1", "1:", ":1", "one:1", "-1:1")
    for request_id in (*odd, *names):
        assert (await peer.cancel(request_id)).status_code == 202
    assert (await peer.send({"jsonrpc": "2.0", "method": "notifications/cancelled"})).status_code == 202
    shop.open("g")
    assert text_of((await wire.rest())[-1]) == "went through g"


async def test_a_late_cancellation_changes_nothing(peer: Peer) -> None:
    wire = await peer.call("count", n=1, id=5)
    [answer] = await wire.rest()
    assert (await peer.cancel(5)).status_code == 202
    assert (await (await peer.get(wire.seen[0].id)).rest())[-1] == answer


async def test_initialize_cannot_be_cancelled(peer: Peer) -> None:
    """Its id is 0 here; the session stands as it was."""
    assert (await peer.cancel(0)).status_code == 202
    assert await peer.result("remember") == "wire speaks 2025-11-25"


async def test_a_call_that_waits_for_its_client_is_cancelled_too(shop: ToolServer, peer: Peer) -> None:
    """The ask's answer may come late; it is dropped."""
    wire = await peer.call("sample", prompt="?", id=1)
    ask = await wire.message()
    await peer.cancel(1)
    assert (await wire.rest())[-1]["error"]["code"] == -32800
    content = {"type": "text", "text": "late"}
    late = await peer.answer(ask, {"role": "assistant", "model": "m", "content": content})
    assert late.status_code == 202
    assert await peer.result("count", n=1) == "counted to 1"
