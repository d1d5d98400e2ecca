"""One caller takes a part of what all share, and no more (promise 6): a principal, or an address without one.

Each test stands on both sides of a share: the caller that has taken its own is refused by name, another one is served,
and the room is free again when what filled it has ended.
"""

from __future__ import annotations

import pytest

from tests.http.test_bounds import LIMIT, Names, refused
from tests.http.test_listening import ask
from tests.support.clients.listeners import listening, wanted
from tests.support.clients.modern_requests import modern
from tests.support.clients.raw_http import Exchange, Peer, SessionPeer, bearer
from tests.support.servers.changing_server import new_server
from tests.support.servers.gated_server import Live, live
from tests.support.servers.gated_tools import open_gate
from tests.support.servers.in_process import serve, until

pytestmark = pytest.mark.anyio

ELSEWHERE = "127.0.0.2"


async def sessionless(peer: Peer, gate: str = "", **arguments: object) -> Exchange:
    """A call of 2026-07-28, with its first progress where it waits at a gate."""
    more = {"gate": gate, "first": 1} if gate else {}
    params = {"name": "count", "arguments": {"n": 2, **more, **arguments}, "_meta": {"progressToken": 1}}
    body, headers = modern("tools/call", params)
    return await peer.begin("POST", body, headers={**headers, "mcp-name": "count"})


async def status_of(exchange: Exchange) -> int:
    async with exchange:
        return (await exchange.answer()).status


def is_idle(served: Live) -> bool:
    process = served.app._process
    assert process is not None
    context = process.context
    return not context.running.held and not context.work.held


async def test_requests_without_a_session() -> None:
    async with live(max_sessionless=4, max_share=50) as served:
        other = Peer(port=served.port, address=ELSEWHERE)
        running = [await sessionless(served, "shared sessionless") for _ in range(2)]
        async with await sessionless(served) as beyond:
            words = "You take 2 of max_sessionless here, the limit for one caller (max_share)"
            refused(await beyond.answer(), 429, LIMIT, words)
        assert await status_of(await sessionless(other)) == 200
        open_gate("shared sessionless")
        assert [await status_of(exchange) for exchange in running] == [200, 200]
        assert await status_of(await sessionless(served)) == 200


async def test_event_streams() -> None:
    async with live(max_readers=4, max_share=50) as served:
        mine, again = await served.session(), await served.session()
        other = await Peer(port=served.port, address=ELSEWHERE).session()
        open_streams = [await mine.resume(""), await again.resume("")]
        for exchange in open_streams:
            assert await exchange.head() == 200
        words = "You take 2 of max_readers here"
        refused(await mine.call("count", n=1), 429, LIMIT, words)
        refused(await served.initialize(), 429, LIMIT, words)
        async with await sessionless(served) as beyond:
            refused(await beyond.answer(), 429, LIMIT, words)
        assert (await other.call("count", n=1)).status == 200
        # Taking one's own stream over needs no room.
        taken = await mine.resume("")
        assert await taken.head() == 200
        for exchange in (*open_streams, taken):
            await exchange.aclose()

        async def is_free() -> bool:
            return (await mine.call("count", n=1)).status == 200

        await until(is_free)


async def test_the_memory_of_messages() -> None:
    async with live(max_work=1_000_000, max_share=50) as served:
        peer, again = await served.session(), await served.session()
        other = await Peer(port=served.port, address=ELSEWHERE).session()
        heavy = {"gate": "shared work", "unused": "x" * 150_000}
        # The first is taken whatever its size: otherwise it could never run.
        first = await peer.begin_call("wait", gate="shared work", unused="x" * 300_000)
        assert await first.head() == 200
        refused(await again.call("wait", **heavy), 429, LIMIT, "You take 500000 of max_work here")
        second = await other.begin_call("wait", **heavy)
        assert await second.head() == 200
        open_gate("shared work")
        for call in (first, second):
            assert await status_of(call) == 200
        assert (await again.call("count", n=1, unused="x" * 150_000)).status == 200
        await until(lambda: is_idle(served))


async def begin(peer: SessionPeer, gate: str) -> Exchange:
    call = await peer.begin_call("wait", gate=gate)
    assert await call.head() == 200
    return call


async def test_running_calls_of_all_sessions_of_a_principal() -> None:
    async with live(auth=Names(), max_principal_calls=2) as served:
        ann, annas, bob = [await served.session(**bearer(name)) for name in ("ann", "ann", "bob")]
        calls = [await begin(ann, "own calls"), await begin(annas, "own calls")]
        words = "You have 2 running requests, your limit (max_principal_calls)"
        refused(await ann.call("count", n=1), 429, LIMIT, words)
        assert (await bob.call("count", n=1)).status == 200
        async with await sessionless(Peer(port=served.port, headers=bearer("ann"))) as plain:
            assert (await plain.answer()).status == 200  # no task: it has its share of `max_sessionless`
        # A call whose client has left runs on, and counts.
        calls[0].cut()
        refused(await annas.call("count", n=1), 429, LIMIT, words)
        open_gate("own calls")
        assert await status_of(calls[1]) == 200
        await until(lambda: is_idle(served))
        assert (await ann.call("count", n=1)).status == 200
        assert await again(ann) == 200
        await until(lambda: is_idle(served))


async def again(peer: SessionPeer) -> int:
    """A client that comes back to its session: the recorded handshake is its answer, and no call."""
    return (await peer.initialize(**{"mcp-session-id": peer.id})).status


async def test_tasks_count_among_the_running_calls_of_an_address() -> None:
    async with live(max_principal_calls=1, task_after=0.0) as served:
        peer = await served.session()
        call = await begin(peer, "own tasks")
        key = {"_meta": {"dev.perdure/idempotencyKey": "mine"}}
        body, headers = modern("tools/call", {"name": "count", "arguments": {"n": 1}, **key})
        headers |= {"mcp-name": "count", "idempotency-key": "mine"}
        refused(await served.ask("POST", body, headers=headers), 429, LIMIT, "(max_principal_calls)")
        open_gate("own tasks")
        assert await status_of(call) == 200
        await until(lambda: is_idle(served))
        assert (await served.ask("POST", body, headers=headers)).status == 200


async def test_resources_that_listeners_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this caller has named already costs nothing more; what no listener names any more counts no more."""
    monkeypatch.setattr("perdure.sessions.listening.MAX_UNION", 4)
    async with (
        serve(new_server(), max_share=50) as site,
        listening(site.port, "note://a", "note://b"),
        listening(site.port, "note://x", address=ELSEWHERE),
        listening(site.port, "note://x", "note://a"),
    ):
        answer = await ask(site, wanted("note://c"))
        assert (answer.status, answer.error["code"], answer.json["id"]) == (429, -31004, "mine")
        assert "You take 2 of the resources that listeners name here" in answer.error["message"]
        async with listening(site.port, "note://c", address=ELSEWHERE):
            pass
