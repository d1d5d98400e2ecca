"""What messages take in memory on their way in and while they are handled is bounded in bytes (promise 6, P10)."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import pytest
from mcp.server.lowlevel.server import Server
from mcp_types import NotificationParams
from starlette.types import Message

from perdure._core.limits import weigh
from perdure.http import request
from perdure.http.endpoint import MAX_HANDSHAKE, MAX_HANDSHAKE_MEMORY
from perdure.http.refusals import HttpRefusal
from perdure.http.request import Bodies
from perdure.settings import Settings
from tests.http.test_bounds import LIMIT, refused
from tests.http.test_shares import sessionless
from tests.support.clients.raw_http import Answer, Exchange, Peer, SessionPeer, message
from tests.support.servers.gated_server import Live, live
from tests.support.servers.gated_tools import open_gate
from tests.support.servers.in_process import info_of, until

pytestmark = pytest.mark.anyio

# Bodies on their way


async def test_bodies_that_are_not_complete_are_bounded_together() -> None:
    async with live(max_body=80_000, max_work=8 * 150_000) as served, AsyncExitStack() as stack:
        peer = await served.session()
        whole = peer.request("POST", _ping(80_000))
        unfinished = [await stack.enter_async_context(await peer.open(whole[:-100])) for _ in range(2)]
        refusal = await unfinished[1].answer()
        refused(refusal, 503, LIMIT, "take 150000 bytes, the limit (an eighth of max_work)")
        assert (await peer.ask("POST", _ping(1_000))).status == 200  # in one piece: it takes no room
        unfinished[0].cut()

        async def is_served() -> bool:
            return (await peer.ask("POST", _ping(80_000))).status == 200

        await until(is_served)
        third, fourth = [await stack.enter_async_context(await peer.open(whole[:-40_000])) for _ in range(2)]
        for exchange in (third, fourth):  # both fit: half of each is still to come
            await exchange.send(whole[-40_000:])
            assert (await exchange.answer()).status in (200, 400)


async def test_a_body_that_stalls_is_refused_before_the_time_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "PACE_SECONDS", 0.2)
    async with live(stream_timeout=300.0) as served:
        peer = await served.session()
        async with await peer.open(peer.request("POST", _ping(5_000))[:-1]) as exchange:
            refused(await exchange.answer(), 408, LIMIT, "brought less than 10000 bytes in 0.2 seconds")


async def test_a_slow_body_that_keeps_the_pace_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "PACE_SECONDS", 3.0)

    async def receive() -> Message:
        await asyncio.sleep(1.0)
        chunks.append(b"x" * request.PACE_BYTES)
        return {"type": "http.request", "body": chunks[-1], "more_body": len(chunks) < 4}

    chunks: list[bytes] = []
    assert len(await Bodies(Settings()).read(receive, {})) == 4 * request.PACE_BYTES


async def test_a_body_that_trickles_does_not_keep_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "PACE_SECONDS", 0.2)

    async def receive() -> Message:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b"x", "more_body": True}

    with pytest.raises(HttpRefusal, match="brought less than"):
        await Bodies(Settings()).read(receive, {})


def _ping(size: int) -> bytes:
    empty = message("ping", {"pad": ""}, id=size)
    return message("ping", {"pad": "x" * (size - len(empty))}, id=size)


# Notifications


class Slow:
    """A server whose handler of one notification waits."""

    def __init__(self) -> None:
        self.gate = anyio.Event()
        self.handled = 0
        self.server: Server[Any] = Server("slow", version="1")
        self.server.add_notification_handler("notifications/x", NotificationParams, self._handle)

    async def _handle(self, *_: Any) -> None:
        await self.gate.wait()
        self.handled += 1


@asynccontextmanager
async def slow(**settings: Any) -> AsyncIterator[tuple[Slow, Live]]:
    it = Slow()
    async with live(server=it.server, **settings) as served:
        yield it, served


def _notification(size: int = 10) -> bytes:
    return message("notifications/x", {"_meta": {"pad": "x" * size}})


async def test_notifications_of_a_session_that_are_being_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.http.endpoint.MAX_NOTIFICATIONS", 3)
    async with slow() as (it, served):
        peer, other = await served.session(), await served.session()
        for _ in range(3):
            assert (await peer.ask("POST", _notification())).status == 202
        words = "This session has 3 running notifications, its limit"
        refused(await peer.ask("POST", _notification()), 429, LIMIT, words)
        assert (await other.ask("POST", _notification())).status == 202
        assert (await peer.ask("POST", message("ping", id=1))).status == 200
        assert (await peer.ask("POST", message("notifications/cancelled", {"requestId": 5}))).status == 202
        it.gate.set()
        await until(lambda: it.handled == 4)
        assert (await peer.ask("POST", _notification())).status == 202


async def test_the_bytes_of_a_sessions_notifications() -> None:
    size = weigh(_notification(200_000))
    async with slow(max_work=16 * size) as (it, served):
        peer = await served.session()
        for _ in range(2):
            assert (await peer.ask("POST", _notification(200_000))).status == 202
        words = f"messages take {2 * size} bytes, its limit (an eighth of max_work)"
        refused(await peer.ask("POST", _notification(200_000)), 429, LIMIT, words)
        it.gate.set()
        await until(lambda: it.handled == 2)
        assert (await peer.ask("POST", _notification(200_000))).status == 202


async def test_the_bytes_of_all_messages_that_are_being_handled() -> None:
    size = weigh(_notification(200_000))
    async with slow(max_work=2 * size, max_share=100) as (it, served):
        peers = [await served.session() for _ in range(3)]
        for peer in peers[:2]:
            assert (await peer.ask("POST", _notification(200_000))).status == 202
        words = f"that this server handles take {2 * size} bytes, its limit (max_work)"
        refused(await peers[2].ask("POST", _notification(200_000)), 503, LIMIT, words)
        await peers[0].delete()  # what it had running goes with it
        assert (await peers[2].ask("POST", _notification(200_000))).status == 202
        it.gate.set()


async def test_a_runtime_is_not_dropped_while_it_handles_a_notification() -> None:
    async with slow(runtime_idle=0.05) as (it, served):
        busy, idle = await served.session(), await served.session()
        assert (await busy.ask("POST", _notification())).status == 202
        for number in range(2):  # it was not used for longer than the other one, which goes twice
            assert (await idle.ask("POST", message("ping", id=number))).status == 200
            await until(lambda: not _is_loaded(served, idle))
        assert _is_loaded(served, busy)
        it.gate.set()
        await until(lambda: not _is_loaded(served, busy))
        assert it.handled == 1


def _is_loaded(served: Live, peer: SessionPeer) -> bool:
    return info_of(served.app, peer.id).loaded


# Calls


async def test_the_bytes_of_a_sessions_running_calls() -> None:
    async with live(max_work=8 * 500_000, max_share=100) as served:
        peer, other = await served.session(), await served.session()
        arguments = {"gate": "heavy calls", "unused": "x" * 200_000}
        # The first is taken whatever its size: otherwise it could never run.
        first = await peer.begin_call("wait", gate="heavy calls", unused="x" * 600_000)
        assert await first.head() == 200
        beyond = await peer.call("wait", id="beyond", **arguments)
        refused(beyond, 429, LIMIT, "bytes, its limit (an eighth of max_work)")
        assert beyond.json["id"] == "beyond"
        second = await other.begin_call("wait", **arguments)
        assert await second.head() == 200
        open_gate("heavy calls")
        for call in (first, second):
            await call.answer()
            await call.aclose()
        assert (await peer.call("wait", **arguments)).status == 200


async def test_a_call_that_was_refused_or_has_failed_counts_no_longer() -> None:
    async with live(max_work=400_000, max_share=100) as served:
        peer = await served.session()
        for _ in range(5):
            body = message("tools/call", {"name": "no such tool", "arguments": {"x": "x" * 100_000}}, id="same")
            assert (await peer.ask("POST", body)).status == 200
            big = message("ping", {"x": "x" * 100_000}, id=1)
            answers = await asyncio.gather(*(peer.ask("POST", big) for _ in range(3)))
            assert {answer.status for answer in answers} <= {200, 400, 429, 503}
        assert (await peer.ask("POST", message("ping", {"x": "x" * 300_000}, id=2))).status == 200


def test_what_a_message_weighs() -> None:
    """Never less than what the parsed message takes, for what is dense in JSON."""
    for value in ("{}", "[]", "[[]]", '"ab"', "12345", '{"a":1}'):
        dense = b'{"jsonrpc":"2.0","method":"x","params":{"x":[%b]}}' % b",".join([value.encode()] * 10_000)
        assert weigh(dense) >= _deep_size(json.loads(dense))


def _deep_size(value: Any) -> int:
    size = sys.getsizeof(value)
    if isinstance(value, dict):
        return size + sum(_deep_size(inner) for inner in value.values())
    return size + sum(map(_deep_size, value)) if isinstance(value, list) else size


# The handshake


async def test_a_handshake_that_would_fill_memory_is_refused() -> None:
    async with live() as served:
        for count, status in ((2_000, 200), (20_000, 413)):
            params = {"protocolVersion": "2025-11-25", "clientInfo": {"name": "x", "version": "1"}}
            dense = json.dumps({**params, "capabilities": {"experimental": {"x": {"y": [{}] * count}}}})
            body = b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":%b}' % dense.replace(" ", "").encode()
            assert len(body) < MAX_HANDSHAKE
            answer = await served.ask("POST", body)
            assert answer.status == status
        refused(answer, 413, LIMIT, f"may not take more than {MAX_HANDSHAKE_MEMORY} bytes in memory")


# Requests without a session


async def _answer(peer: Peer, **arguments: object) -> Answer:
    async with await sessionless(peer, "", **arguments) as exchange:
        return await exchange.answer()


async def test_requests_without_a_session() -> None:
    async with live(max_sessionless=1) as served:
        running = await _running(served, "sessionless")
        refusal = await _answer(served)
        refused(
            refusal, 503, LIMIT, "This server has 1 running requests without a session, its limit (max_sessionless)"
        )
        assert (await (await served.session()).call("count", n=1)).status == 200
        open_gate("sessionless")
        assert (await running.answer()).status == 200
        await running.aclose()
        assert (await _answer(served)).status == 200


async def test_requests_without_a_session_are_counted_among_the_readers() -> None:
    async with live(max_readers=1) as served:
        peer = await served.session()
        running = await _running(served, "sessionless reader")
        words = "has 1 event streams, its limit (max_readers)"
        refused(await peer.call("count", n=1), 503, LIMIT, words)
        refused(await _answer(served), 503, LIMIT, words)
        running.cut()
        await running.aclose()

        async def is_free() -> bool:
            return (await peer.call("count", n=1)).status == 200

        await until(is_free)
        open_gate("sessionless reader")


async def test_bodies_and_work_without_a_session_are_bounded_as_others_are() -> None:
    async with live(max_body=300_000, max_work=400_000, max_share=100) as served:
        assert (await _answer(served, x="x" * 300_000)).status == 413
        running = await _running(served, "heavy sessionless", x="x" * 150_000)
        refusal = await _answer(served, x="x" * 150_000)
        refused(refusal, 503, LIMIT, "bytes, its limit (max_work)")
        open_gate("heavy sessionless")
        assert (await running.answer()).status == 200
        await running.aclose()
        assert (await _answer(served, x="x" * 150_000)).status == 200


async def _running(served: Live, gate: str, **more: object) -> Exchange:
    """A call without a session that is under way: it has sent its first progress."""
    exchange = await sessionless(served, gate, **more)
    await exchange.until_messages(1)
    return exchange
