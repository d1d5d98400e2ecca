"""Calls side by side, and calls without a connection: nobody waits for anybody, and nothing is lost (P3–P5, R2, R3)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from perdure.store import MemoryStore
from perdure.store.interface import Store
from perdure.store.steps import Append, Refusals, Step
from tests.support.clients.wire_client import Ended, Peer, progress_of, text_of
from tests.support.servers.in_process import Site, info_of, serve, until
from tests.support.servers.tool_server import ToolServer
from tests.support.stores.faulty_store import FaultyStore

pytestmark = pytest.mark.anyio


async def test_concurrent_calls_are_independent(shop: ToolServer, peer: Peer) -> None:
    """P3: the second and third finish while the first waits, each on its own stream with its own messages (A17)."""
    slow = await peer.call("count", n=2, gate="g", pauses=[1], id="slow", token="slow")
    await slow.messages(1)
    quick = [await peer.call("count", n=3, id=f"q{number}", token=f"q{number}") for number in range(2)]
    for number, wire in enumerate(quick):
        messages = await wire.rest()
        assert progress_of(messages) == [1, 2, 3]
        assert {m["params"]["progressToken"] for m in messages[:-1]} == {f"q{number}"}
        assert messages[-1]["id"] == f"q{number}"
    shop.open("g/1")
    assert (await slow.rest())[-1]["id"] == "slow"


async def test_errors_come_over_the_stream_too(peer: Peer) -> None:
    """P4: a tool that raises, a JSON-RPC error of a tool's, an unknown tool, an unknown method, bad params."""
    [raised] = await (await peer.call("boom", id=1)).rest()
    assert (raised["id"], raised["result"]["isError"]) == (1, True)
    assert "boom" in text_of(raised)
    [refused] = await (await peer.call("boom", id=2, code=-32042)).rest()
    assert (refused["id"], refused["error"]["code"]) == (2, -32042)
    [unknown] = await (await peer.call("no such tool", id=3)).rest()
    assert unknown["id"] == 3
    assert unknown.get("error") or unknown["result"]["isError"]
    [method] = await (await peer.post(peer.request("no/such/method", id=4))).rest()
    assert (method["id"], method["error"]["code"]) == (4, -32601)
    [params] = await (await peer.post(peer.request("tools/call", {"name": 5}, id=5))).rest()
    assert (params["id"], params["error"]["code"]) == (5, -32602)
    assert await peer.result("count", n=1) == "counted to 1"


async def test_ping_is_answered_while_calls_run(shop: ToolServer, peer: Peer) -> None:
    """A34."""
    await peer.call("wait", gate="g")
    [answer] = await (await peer.post(peer.request("ping", id="p"))).rest()
    assert answer == {"jsonrpc": "2.0", "id": "p", "result": {}}


async def test_log_messages_of_a_call_come_on_its_stream(peer: Peer) -> None:
    """A17: related messages go to the call's stream, and to no other."""
    standalone = await peer.get()
    messages = await (await peer.call("log", text="hello")).rest()
    assert messages[0]["params"]["data"] == "hello"
    assert text_of(messages[1]) == "logged"
    await peer.result("announce", n=1)
    assert (await standalone.message())["method"] == "notifications/resources/updated"


async def test_what_belongs_to_no_call_comes_on_the_standalone_stream_only(peer: Peer) -> None:
    """A16, A17: notifications there, never a response."""
    standalone = await peer.get()
    [answer] = await (await peer.call("announce", n=3)).rest()
    assert text_of(answer) == "announced 3"
    seen = await standalone.messages(3)
    assert [m["params"]["uri"] for m in seen] == ["notice://1", "notice://2", "notice://3"]
    for _ in range(3):
        await peer.result("count", n=1)
    await peer.result("announce", n=1, start=4)
    assert (await standalone.message())["params"]["uri"] == "notice://4"


async def test_notices_that_nobody_read_wait_for_the_first_reader(peer: Peer) -> None:
    await peer.result("announce", n=2)
    standalone = await peer.get()
    assert len(await standalone.messages(2)) == 2


async def test_dropping_a_connection_cancels_nothing(shop: ToolServer, site: Site, peer: Peer) -> None:
    """A18, R3: the call goes on and its output is kept; several such calls at once."""
    wires = [await peer.call("count", n=4, gate="g", pauses=[2], token=number) for number in range(3)]
    for wire in wires:
        await wire.messages(2)
        await wire.drop()
    await until(lambda: not _readers(site, peer))
    shop.open("g/2")
    await until(lambda: len(shop.seen) == 3)
    for wire in wires:
        messages = await (await peer.get(wire.last_id)).rest()
        assert progress_of(messages) == [3, 4]
        assert text_of(messages[-1]) == "counted to 4"


def _readers(site: Site, peer: Peer) -> list[Any]:
    return [stream for stream in info_of(site.app, peer.session).streams if stream.connected_since is not None]


async def test_a_dead_connection_neither_raises_into_the_tool_nor_loses_an_event(
    shop: ToolServer, site: Site, peer: Peer
) -> None:
    """R2: the tool writes on while nobody is there."""
    wire = await peer.call("count", n=300, gate="g", pauses=[1], token=1)
    await wire.messages(1)
    await wire.drop()
    await until(lambda: not _readers(site, peer))
    shop.open("g/1")
    await until(lambda: "counted 300" in shop.seen)
    messages = await (await peer.get(wire.last_id)).rest()
    assert progress_of(messages) == list(range(2, 301))
    assert text_of(messages[-1]) == "counted to 300"


class Hesitant(FaultyStore):
    """A store that takes its time, as long as a test wants; what waits there is not stored."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.waiting: list[Step] = []

    def commit_now(self, steps: Sequence[Step]) -> Refusals | None:
        return super().commit_now(steps) if self.goes_on.is_set() else None

    async def commit(self, steps: Sequence[Step]) -> Refusals:
        self.waiting += steps
        await self.goes_on.wait()
        return await super().commit(steps)


async def test_no_event_leaves_before_it_is_stored(shop: ToolServer) -> None:
    """R2, promise 1: while the store has not accepted an event, its reader gets no byte of it."""
    store = Hesitant(MemoryStore())
    async with serve(shop.server, store=store, store_timeout=60.0) as site:
        peer = await site.join()
        wire = await peer.call("count", n=2, gate="g", pauses=[1], token=1)
        assert progress_of(await wire.messages(1)) == [1]
        store.goes_on.clear()
        read, more = len(wire.raw), asyncio.create_task(wire.rest())
        shop.open("g/1")
        await until(lambda: any(isinstance(step, Append) for step in store.waiting))
        for _ in range(3):  # whole requests meanwhile: what was sent too early would be there before them
            assert (await site.http.get(f"http://127.0.0.1:{site.port}/healthz")).json() == {"status": "ok"}
        assert len(wire.raw) == read
        store.goes_on.set()
        assert progress_of(await more) == [2]


async def test_the_standalone_stream_stays_open_beside_calls_and_resumes(shop: ToolServer, peer: Peer) -> None:
    """P5: one client holds the standalone stream, a running call and several resumes at once."""
    standalone = await peer.get()
    running = await peer.call("wait", gate="g")
    done = await peer.call("count", n=3, token=1)
    await done.rest()
    resumes = [await peer.get(event.id) for event in done.seen[:3]]
    # Each of them takes the stream over; the last one owns it, and the others have ended.
    assert progress_of(await resumes[-1].rest()) == [3]
    for earlier in resumes[:-1]:
        await earlier.rest()
    shop.open("g")
    assert text_of((await running.rest())[-1]) == "went through g"
    await peer.result("announce", n=1)
    assert (await standalone.message())["params"]["uri"] == "notice://1"


async def test_resumes_of_several_calls_at_once(shop: ToolServer, peer: Peer) -> None:
    """P5."""
    wires = [await peer.call("count", n=3, gate="g", pauses=[1], id=number, token=number) for number in range(5)]
    for wire in wires:
        await wire.messages(1)
        await wire.drop()
    resumed = await asyncio.gather(*(peer.get(wire.last_id) for wire in wires))
    shop.open("g/1")
    answers = await asyncio.gather(*(wire.rest() for wire in resumed))
    assert [progress_of(messages) for messages in answers] == [[2, 3]] * 5
    assert [messages[-1]["id"] for messages in answers] == list(range(5))


async def test_a_resumed_stream_ends_after_the_response(shop: ToolServer, peer: Peer) -> None:
    """P5, A19: whether the response comes from the log or live."""
    wire = await peer.call("count", n=2, gate="g", pauses=[1], token=1)
    await wire.messages(1)
    await wire.drop()
    live = await peer.get(wire.last_id)
    await live.event()
    shop.open("g/1")
    assert len(await live.rest()) == 2
    logged = await peer.get(wire.last_id)
    assert len(await logged.rest()) == 2
    with pytest.raises(Ended):
        await logged.event()


async def test_a_long_replay_delays_nobody(shop: ToolServer) -> None:
    """S9: one client asks for thousands of events and does not take them; others are answered."""
    async with serve(shop.server, small_buffers=True, max_stream_events=20_000, max_session_events=20_000) as site:
        peer, other = await site.join(), await site.join()
        wire = await peer.call("count", n=10_000, token=1)
        await wire.rest()
        replay = await peer.get(wire.seen[0].id)
        for _ in range(5):
            assert await other.result("count", n=1) == "counted to 1"
            assert await peer.result("count", n=1) == "counted to 1"
        assert progress_of(await replay.rest()) == list(range(1, 10_001))
