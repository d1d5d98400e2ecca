"""Whatever a peer can make us keep has a limit, and the limit has an answer of its own (promise 6, P10).

Each test stands on both sides of a limit, and shows that the room is free again when what filled it has ended.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from mcp.server.auth.provider import AccessToken, TokenVerifier
from mcp.server.lowlevel.server import Server
from mcp_types import EmptyResult

from perdure._core import sticky
from perdure._core.jsonrpc import MAX_BATCH, MAX_DEPTH, MAX_ID, MAX_ID_CHARS, MAX_METHOD_CHARS
from tests.support.clients.raw_http import Answer, bearer, message
from tests.support.servers.gated_server import Live, live, readers
from tests.support.servers.gated_tools import open_gate
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio

LIMIT = -31004
INVALID = -32600
PARSE = -32700


def refused(answer: Answer, status: int, code: int, words: str) -> None:
    """The limit's own answer: its status, its code, and a sentence that names it."""
    assert (answer.status, answer.error["code"]) == (status, code)
    assert words in answer.error["message"]
    assert answer.header("retry-after") == ("1" if status in (429, 503) else None)


class Names(TokenVerifier):
    """Every token is the name of its principal."""

    async def verify_token(self, token: str) -> AccessToken | None:
        return AccessToken(token=token, client_id=token, subject=token, scopes=[])


@pytest.fixture
async def served() -> AsyncIterator[Live]:
    async with live() as running:
        yield running


# Bodies


@pytest.mark.parametrize(
    ("declared", "status"), [*((b"9" * digits, 413) for digits in (8, 4_301)), (b"0" * 5_000 + b"2", 400)]
)
async def test_a_content_length_of_any_number_of_digits_is_judged(served: Live, declared: bytes, status: int) -> None:
    """Asked of the application itself, because not every HTTP server stops such a number as llhttp does."""
    sent = await asked_with_length(served, declared)
    assert sent[0]["status"] == status
    assert (b"The body is larger than 4194304 bytes" in sent[1]["body"]) == (status == 413)


async def asked_with_length(served: Live, declared: bytes) -> list[Any]:
    """What the application sends in answer to `{}` with a Content-Length."""
    fields = {"host": "localhost", "accept": "application/json, text/event-stream", "content-type": "application/json"}
    headers = [(name.encode(), value.encode()) for name, value in fields.items()]
    scope = {"type": "http", "method": "POST", "path": "/mcp", "headers": [*headers, (b"content-length", declared)]}
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(event: Any) -> None:
        sent.append(event)

    await served.app(scope, receive, send)
    return sent


# Sessions


async def test_sessions_in_all() -> None:
    async with live(max_sessions=2) as served:
        first, second = await served.session(), await served.session()
        refused(await served.initialize(), 503, LIMIT, "has 2 sessions, its limit (max_sessions)")
        assert (await second.call("count", n=1)).status == 200
        await first.delete()
        third = await served.session()
        refused(await served.initialize(), 503, LIMIT, "max_sessions")
        await second.delete()
        await third.delete()
        assert len(served.app.session_ids()) == 0


async def test_a_handshake_that_fails_takes_no_room() -> None:
    """The answer is a JSON-RPC error, without a session id; nothing is kept."""
    async with live(max_sessions=1) as served:
        for _ in range(3):
            failed = await served.ask("POST", message("initialize", {"protocolVersion": 5}, id="first"))
            assert (failed.status, failed.json["id"], failed.error["code"]) == (200, "first", -32602)
            assert failed.header("mcp-session-id") is None
        assert served.app.session_ids() == []
        await served.session()


async def test_sessions_of_one_principal() -> None:
    async with live(auth=Names(), max_principal_sessions=2) as served:
        ann = [await served.session(**bearer("ann")) for _ in range(2)]
        refused(await served.initialize(**bearer("ann")), 429, LIMIT, "You have 2 sessions")
        await served.session(**bearer("bob"))
        await ann[0].delete()
        await served.session(**bearer("ann"))
        refused(await served.initialize(**bearer("ann")), 429, LIMIT, "(max_principal_sessions)")


async def test_a_large_handshake_is_refused(served: Live) -> None:
    """A session keeps what its client said of itself for as long as it lives."""
    params: dict[str, Any] = {"protocolVersion": "2025-11-25", "capabilities": {}}
    for size, status in ((10_000, 200), (1_000_000, 413)):
        body = message("initialize", {**params, "clientInfo": {"name": "x" * size, "version": "1"}}, id=1)
        answer = await served.ask("POST", body)
        assert answer.status == status
    refused(answer, 413, LIMIT, "initialize")


# Calls and readers


async def test_running_calls_of_a_session() -> None:
    async with live(max_calls=2) as served:
        peer, other = await served.session(), await served.session()
        running = [await peer.begin_call("wait", gate="calls") for _ in range(2)]
        for call in running:
            assert await call.head() == 200
        beyond = await peer.call("count", n=1, id="beyond")
        refused(beyond, 429, LIMIT, "has 2 running requests, its limit (max_calls)")
        assert beyond.json["id"] == "beyond"
        assert (await other.call("count", n=1)).status == 200
        assert (await peer.ask("POST", message("notifications/cancelled", {"requestId": 1}))).status == 202
        assert (await running[0].answer()).messages[0]["error"]["code"] == -32800
        while (await peer.call("count", n=1)).status != 200:
            pass  # until the tool has stopped
        open_gate("calls")
        await running[1].answer()
        assert (await peer.call("count", n=1)).status == 200
        for call in running:
            await call.aclose()


async def test_a_call_that_does_not_stop_counts_until_it_does() -> None:
    """Or whoever starts and cancels it again and again would have us run any number of them."""
    async with live(max_calls=3) as served:
        peer = await served.session()
        for number in range(3):
            async with await peer.begin_call("stubborn", id=number, gate="stubborn") as call:
                assert await call.head() == 200
                await peer.ask("POST", message("notifications/cancelled", {"requestId": number}))
                assert (await call.answer()).messages[-1]["error"]["code"] == -32800
        refused(await peer.call("count", n=1), 429, LIMIT, "(max_calls)")
        open_gate("stubborn")
        while (await peer.call("count", n=1)).status != 200:
            pass


async def test_a_call_that_lost_its_connection_still_counts() -> None:
    async with live(max_calls=1) as served:
        peer = await served.session()
        call = await peer.begin_call("wait", gate="lost connection")
        assert await call.head() == 200
        call.cut()
        assert (await peer.call("count", n=1)).status == 429
        open_gate("lost connection")
        await until(lambda: served.app.counters.calls_answered >= 2)
        assert (await peer.call("count", n=1)).status == 200
        await call.aclose()


async def test_readers_in_all() -> None:
    async with live(max_readers=2, max_share=100) as served:
        peer, other = await served.session(), await served.session()
        standalone = await peer.resume("")
        assert await standalone.head() == 200
        call = await other.begin_call("wait", gate="readers")
        assert await call.head() == 200
        words = "has 2 event streams, its limit (max_readers)"
        refused(await other.ask("GET"), 503, LIMIT, words)
        refused(await peer.call("count", n=1), 503, LIMIT, words)
        refused(await served.initialize(), 503, LIMIT, words)
        # Taking one's own stream over needs no room: a connection that reads no more locks nobody out.
        again = await peer.resume(standalone.position)
        assert await again.head() == 200
        while await standalone.read():
            pass
        open_gate("readers")
        await call.answer()
        assert (await peer.call("count", n=1)).status == 200
        for exchange in (standalone, again, call):
            await exchange.aclose()


async def test_a_reader_that_left_makes_room() -> None:
    async with live(max_readers=1) as served:
        peer = await served.session()
        for _ in range(2):
            standalone = await peer.resume("")
            assert await standalone.head() == 200
            assert (await peer.call("count", n=1)).status == 503
            standalone.cut()
            await until(lambda: readers(served, peer) == 0)
            assert (await peer.call("count", n=1)).status == 200
            await standalone.aclose()


# Bodies and headers


async def test_the_size_of_a_body() -> None:
    """Also of one that does not tell it."""
    async with live(max_body=2_000) as served:
        peer = await served.session()
        for size, status in ((2_000, 200), (2_001, 413)):
            answer = await peer.ask("POST", _padded(size))
            chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in _parts(_padded(size), 100))
            head = peer.request("POST", headers={"transfer-encoding": "chunked", "content-type": "application/json"})
            async with await peer.open(head + chunks + b"0\r\n\r\n") as exchange:
                chunked = await exchange.answer()
            assert (answer.status, chunked.status) == (status, status)
        refused(answer, 413, LIMIT, "larger than 2000 bytes")
        refused(chunked, 413, LIMIT, "larger than 2000 bytes")


async def test_a_body_that_never_ends_is_refused_at_the_limit() -> None:
    async with live(max_body=100_000) as served:
        peer = await served.session()
        head = peer.request("POST", headers={"transfer-encoding": "chunked", "content-type": "application/json"})
        async with await peer.open(head) as exchange:
            sent = 0
            while not exchange.parser.status and sent < 100:
                await exchange.send(b"1000\r\n" + b" " * 4096 + b"\r\n")
                sent += 1
                if sent > 100_000 // 4096:
                    assert await exchange.head() == 413
        assert sent <= 26


async def test_a_body_that_stops_coming_is_let_go() -> None:
    async with live(stream_timeout=0.2) as served:
        peer = await served.session()
        body = peer.call_body("count", n=1)
        async with await peer.open(peer.request("POST", body)[:-1]) as exchange:
            refused(await exchange.answer(), 408, LIMIT, "did not arrive within 0.2 seconds")


async def test_the_size_of_the_headers() -> None:
    async with live(max_headers=1_024) as served:
        peer = await served.session()
        assert (await peer.ask("POST", peer.call_body("count", n=1), headers={"x-pad": "x" * 200})).status == 200
        answer = await peer.ask("POST", peer.call_body("count", n=1), headers={"x-pad": "x" * 1_024})
        refused(answer, 431, LIMIT, "larger than 1024 bytes")


def _padded(size: int) -> bytes:
    body = message("ping", {"pad": ""}, id=1)
    return body.replace(b'"pad": ""', b'"pad": "%b"' % (b"x" * (size - len(body))))


def _parts(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


# Messages


async def test_the_size_of_a_batch(served: Live) -> None:
    peer = await served.session("2025-03-26")
    pings = [json.loads(message("ping", id=number)) for number in range(MAX_BATCH + 1)]
    answer = await peer.ask("POST", json.dumps(pings[:MAX_BATCH]).encode())
    assert sorted(m["id"] for m in answer.messages) == list(range(MAX_BATCH))
    refused(await peer.ask("POST", json.dumps(pings).encode()), 400, INVALID, f"more than {MAX_BATCH}")


async def test_the_size_of_an_id_and_of_a_method(served: Live) -> None:
    peer = await served.session()
    longest = "i" * MAX_ID_CHARS
    for within, beyond, words in (
        (longest, longest + "i", "a string of at most 256 characters"),
        (MAX_ID, MAX_ID + 1, "a 64-bit integer"),
        (-MAX_ID - 1, -MAX_ID - 2, "a 64-bit integer"),
    ):
        assert (await peer.ask("POST", message("ping", id=within))).messages[-1]["id"] == within
        refused(await peer.ask("POST", message("ping", id=beyond)), 400, INVALID, words)
    known = await peer.ask("POST", message("m" * MAX_METHOD_CHARS, id=1))
    assert known.messages[-1]["error"]["code"] == -32601
    too_long = await peer.ask("POST", message("m" * (MAX_METHOD_CHARS + 1), id=1))
    refused(too_long, 400, INVALID, "a string of 1 to 256 characters")


async def test_the_depth_of_a_message(served: Live) -> None:
    peer = await served.session()
    for depth, status in ((MAX_DEPTH, 200), (MAX_DEPTH + 1, 400), (100_000, 400)):
        inner = depth - 2  # the message and its params
        body = b'{"jsonrpc":"2.0","id":1,"method":"ping","params":{"deep":%b%b}}' % (b"[" * inner, b"]" * inner)
        answer = await peer.ask("POST", body)
        assert answer.status == status
    refused(answer, 400, PARSE, f"deeper than {MAX_DEPTH} levels")


# What a session remembers


def subscribing() -> Server[Any]:
    """A server that takes every subscription."""

    async def subscribe(_: Any, params: Any) -> EmptyResult:
        return EmptyResult()

    server: Server[Any] = Server("subscribing", version="1", on_subscribe_resource=subscribe)
    return server


async def test_subscriptions_of_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number, and the size of each: the record is written whole, and lives as long as the session."""
    monkeypatch.setattr(sticky, "MAX_STICKY", 3)
    async with live(server=subscribing()) as served:
        peer = await served.session()

        async def subscribe(uri: str) -> Answer:
            return await peer.ask("POST", message("resources/subscribe", {"uri": uri}, id=1))

        refused(await subscribe("x://" + "y" * 1_000_000), 429, LIMIT, "subscriptions")
        for uri in ("x://0", "x://1", "x://" + "y" * 1_000, "x://0"):
            assert (await subscribe(uri)).messages[-1]["result"] == {}
        refused(await subscribe("x://3"), 429, LIMIT, "may hold 3 subscriptions")
