"""Batches: several messages in one POST, for sessions of 2025-03-26 and nobody else (A7, P8)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.clients.wire_client import Peer, text_of
from tests.support.servers.in_process import Site, until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio

NOTE = {"jsonrpc": "2.0", "method": "notifications/roots/list_changed"}


@pytest.fixture
async def old(site: Site) -> Peer:
    return await site.join("2025-03-26")


async def test_one_stream_owes_as_many_responses_as_there_are_requests(shop: ToolServer, old: Peer) -> None:
    """The stream ends after the last of them, not after the first."""
    batch = [
        old.tool("count", n=2, id=1, token="a"),
        NOTE,
        old.tool("count", n=3, id="two", token="b", gate="g", pauses=[3]),
        old.request("ping", id=3),
    ]
    wire = await old.post(batch)
    early = await wire.messages(2 + 1 + 3 + 1)
    assert {m["id"] for m in early if "result" in m} == {1, 3}
    shop.open("g/3")
    [last] = await wire.rest()
    assert (last["id"], text_of(last)) == ("two", "counted to 3")
    tokens = [m["params"]["progressToken"] for m in early if "method" in m]
    assert sorted(tokens) == ["a", "a", "b", "b", "b"]


async def test_a_batch_resumes_as_one_stream(shop: ToolServer, old: Peer) -> None:
    """R4: what is still owed comes after the resume, and then the stream ends."""
    wire = await old.post([old.tool("count", n=1, id=1, token=1), old.tool("wait", gate="g", id=2)])
    seen = await wire.messages(2)
    assert {m.get("id") for m in seen} == {None, 1}
    await wire.drop()
    resumed = await old.get(wire.last_id)
    shop.open("g")
    [answer] = await resumed.rest()
    assert answer["id"] == 2
    whole = await (await old.get(wire.seen[0].id)).rest()
    assert [m["id"] for m in whole if "id" in m] == [1, 2]


async def test_notifications_and_responses_alone_are_accepted_with_202(old: Peer) -> None:
    """A4."""
    response = await old.send([NOTE, NOTE, {"jsonrpc": "2.0", "id": "ask-x", "result": {}}])
    assert (response.status_code, response.content) == (202, b"")


async def test_cancelling_within_the_batch_ends_only_that_call(old: Peer) -> None:
    """Messages are handed on in their order."""
    cancel = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}}
    batch = [old.tool("wait", gate="never", id=1), cancel, old.tool("count", n=1, id=2)]
    answers = {m["id"]: m for m in await (await old.post(batch)).rest()}
    assert answers[1]["error"]["code"] == -32800
    assert text_of(answers[2]) == "counted to 1"


async def test_answers_to_asks_may_come_in_a_batch(old: Peer) -> None:
    first, second = await old.call("sample", prompt="one"), await old.call("sample", prompt="two")
    asks = [await first.message(), await second.message()]
    results = [{"role": "assistant", "model": "m", "content": {"type": "text", "text": text}} for text in ("I", "II")]
    answers = [{"jsonrpc": "2.0", "id": ask["id"], "result": result} for ask, result in zip(asks, results, strict=True)]
    assert (await old.send(answers)).status_code == 202
    assert text_of((await first.rest())[-1]) == "I"
    assert text_of((await second.rest())[-1]) == "II"


@pytest.mark.parametrize(
    "batch",
    [
        [],
        [1],
        [{"jsonrpc": "2.0", "id": 1, "method": "ping"}, {"jsonrpc": "2.0", "id": 1, "method": "ping"}],
        [{"jsonrpc": "2.0", "id": 8, "method": "ping"}, {"jsonrpc": "2.0", "id": "8", "method": "ping"}],
        [{"jsonrpc": "2.0", "id": 1, "method": "ping"}, {"jsonrpc": "2.0", "id": 2, "method": "initialize"}],
        [{"jsonrpc": "2.0", "id": number, "method": "ping"} for number in range(101)],
    ],
    ids=["empty", "no message", "same id", "same id to the SDK", "initialize", "too many"],
)
async def test_a_bad_batch_is_refused_whole(shop: ToolServer, old: Peer, batch: list[Any]) -> None:
    """Nothing runs by halves; the ids are free again afterwards."""
    running = [old.tool("wait", gate="g", id="mine"), *batch]
    response = await old.send(running if batch else batch)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] == -32600
    assert shop.seen == []
    [answer] = await (await old.post(old.request("ping", id=1))).rest()
    assert answer["id"] == 1


@pytest.mark.parametrize("version", ["2025-06-18", "2025-11-25"])
async def test_later_revisions_have_no_batches(shop: ToolServer, site: Site, version: str) -> None:
    """A7: not even with the version header of the older revision."""
    peer = await site.join(version)
    for headers in ({}, {"mcp_protocol_version": "2025-03-26"}):
        response = await peer.send([peer.request("ping"), NOTE], **headers)
        assert response.status_code == 400
        assert version in response.json()["error"]["message"]
    assert (await peer.send([NOTE])).status_code == 400


async def test_a_batch_counts_against_the_running_calls(shop: ToolServer, old: Peer) -> None:
    """Promise 6."""
    full = [old.tool("wait", gate="g", id=number) for number in range(99)]
    wire = await old.post(full)
    await until(lambda: len(shop.seen) == 99)
    assert (await old.send([old.request("ping"), old.request("ping")])).status_code == 429
    shop.open("g")
    assert len(await wire.rest()) == 99
