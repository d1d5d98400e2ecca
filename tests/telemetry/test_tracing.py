"""Spans, looked at with OpenTelemetry's own SDK (S8)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from perdure.store import SqliteStore
from perdure.telemetry import tracing as spans
from tests.support.clients.wire_client import Peer
from tests.support.servers.in_process import Site, serve, until
from tests.support.servers.tool_server import ToolServer
from tests.telemetry.tracing import Traced, traced

pytestmark = pytest.mark.anyio

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@pytest.fixture
def shop() -> ToolServer:
    return ToolServer()


@pytest.fixture
def trace() -> Iterator[Traced]:
    with traced() as trace:
        yield trace


@pytest.fixture
async def site(shop: ToolServer, trace: Traced) -> AsyncIterator[Site]:
    async with serve(shop.server) as site:
        yield site


@pytest.fixture
async def peer(site: Site) -> Peer:
    return await site.join()


def told(span: ReadableSpan) -> dict[str, Any]:
    """A span's own attributes, without its stream, which is made up anew each time."""
    attributes = dict(span.attributes or {})
    assert attributes.pop("perdure.stream", "a stream") != ""
    return attributes


async def last(trace: Traced, name: str, count: int) -> ReadableSpan:
    """A span ends after its client has all it wants, so it is waited for."""
    await until(lambda: len(trace.named(name)) >= count)
    return trace.named(name)[-1]


async def test_a_call_has_a_span_and_the_handlers_span_is_its_child(trace: Traced, peer: Peer) -> None:
    """S8."""
    await peer.result("count", n=3)
    post = await last(trace, "perdure.post", 3)  # after the handshake's two
    assert told(post) == {
        "perdure.session": peer.session[:8],
        "perdure.replay": "none",
        "perdure.missed_events": 0,
    }
    assert (post.kind, post.status.status_code) == (SpanKind.SERVER, StatusCode.UNSET)
    [handler] = trace.named("tools/call count")
    assert handler.parent is not None
    assert post.context is not None
    assert (handler.parent.span_id, handler.context and handler.context.trace_id) == (
        post.context.span_id,
        post.context.trace_id,
    )


async def test_a_resume_tells_its_position_and_what_it_missed(shop: ToolServer, trace: Traced, peer: Peer) -> None:
    """S8."""
    wire = await peer.call("count", n=5, gate="g", pauses=[2], token="t")
    await wire.messages(2)
    position = wire.last_id
    await wire.drop()
    shop.open("g/2")
    await until(lambda: "counted 5" in shop.seen)
    await (await peer.get(position)).rest()
    got = await last(trace, "perdure.get", 1)
    expected = {"perdure.session": peer.session[:8], "perdure.replay": "active", "perdure.missed_events": 4}
    assert told(got) == {**expected, "perdure.last_event_id": position}
    assert got.attributes is not None
    assert str(got.attributes["perdure.stream"]) in position
    [replay] = trace.named("perdure.replay")
    assert (told(replay), replay.status.status_code) == (expected, StatusCode.UNSET)
    assert replay.parent is not None
    assert got.context is not None
    assert replay.parent.span_id == got.context.span_id


async def test_a_get_that_is_refused_tells_the_position_that_it_named(trace: Traced, peer: Peer) -> None:
    """S8."""
    position = "cAAAAAAAAAAAAAAAAAAAAAA.000001.0000000001"
    assert (await peer.try_get(position)).status_code == 400
    assert told(await last(trace, "perdure.get", 1))["perdure.last_event_id"] == position


async def test_a_reader_that_missed_nothing_has_no_replay(trace: Traced, peer: Peer) -> None:
    """S8."""
    wire = await peer.get()
    await wire.drop()
    got = await last(trace, "perdure.get", 1)
    assert (told(got)["perdure.replay"], told(got)["perdure.missed_events"]) == ("none", 0)
    assert trace.named("perdure.replay") == []


async def test_a_refusal_is_an_error_with_its_name_and_status(trace: Traced, peer: Peer) -> None:
    """S8."""
    secret, peer.session = peer.session, "A" * len(peer.session)
    await peer.try_get()
    got = await last(trace, "perdure.get", 1)
    assert told(got) == {"error.type": "session_gone", "http.response.status_code": 404}
    assert (got.status.status_code, got.status.description) == (StatusCode.ERROR, "Session not found")
    assert all(secret not in repr(span.attributes) for span in trace.all)


async def test_the_end_of_a_stream_that_was_read_to_its_end_is_no_error(trace: Traced, peer: Peer) -> None:
    """A stock client asks once more after the answer (405)."""
    wire = await peer.call("count", n=1)
    await wire.rest()
    assert (await peer.try_get(wire.last_id)).status_code == 405
    got = await last(trace, "perdure.get", 1)
    assert (told(got)["error.type"], got.status.status_code) == ("nothing_more", StatusCode.UNSET)


async def test_the_callers_trace_goes_on_here(trace: Traced, peer: Peer) -> None:
    """By the W3C's header, which the propagators that are configured by default read."""
    wire = await peer.post(peer.tool("count", n=1), traceparent=f"00-{TRACE}-{PARENT}-01")
    await wire.rest()
    post = await last(trace, "perdure.post", 3)
    assert post.parent is not None
    assert post.parent.is_remote
    assert f"{post.parent.span_id:016x}" == PARENT
    [handler] = trace.named("tools/call count")
    assert handler.context is not None
    assert f"{handler.context.trace_id:032x}" == TRACE


@pytest.mark.parametrize(
    ("lines", "parent"),
    [
        ([f"00-{TRACE}-{PARENT}-01"], True),
        ([f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-01"], False),
        (["nonsense"], False),
        ([""], False),
    ],
)
def test_only_one_valid_parent_counts(trace: Traced, lines: list[str], parent: bool) -> None:
    """W3C Trace Context, 3.2: a traceparent that is sent twice, or is none, is as if there were none."""
    headers = [(b"traceparent", line.encode()) for line in lines]
    with spans.request("POST", [(b"accept", b"*/*"), *headers]):
        pass
    [post] = trace.all
    assert (post.parent is not None) is parent


async def test_a_settled_call_has_a_span(shop: ToolServer, trace: Traced, site: Site, peer: Peer) -> None:
    """S8, promise 3."""
    wire = await peer.call("wait", gate="never")
    await until(lambda: "waiting at never" in shop.seen)
    site.app.begin_stop()
    [answer] = await wire.rest()
    assert answer["error"]["code"] == -31001
    [settle] = trace.named("perdure.settle")
    assert told(settle) == {"perdure.session": peer.session[:8], "perdure.outcome": "unknown"}


async def test_loading_a_session_has_a_span(trace: Traced, tmp_path: Path) -> None:
    """S8: another node on the same file loads it."""
    path = str(tmp_path / "log.db")
    async with (
        serve(ToolServer().server, store=SqliteStore(path)) as one,
        serve(ToolServer().server, store=SqliteStore(path)) as other,
    ):
        peer = await one.join()
        assert trace.named("perdure.load") == []
        await peer.through(other).result("count", n=1)
        [load] = trace.named("perdure.load")
        assert told(load) == {"perdure.session": peer.session[:8]}
        post = await last(trace, "perdure.post", 3)
        assert post.context is not None
        assert load.parent is not None
        assert load.parent.span_id == post.context.span_id


async def test_json_answers_have_their_session_and_stream(shop: ToolServer, trace: Traced) -> None:
    async with serve(shop.server, json_response=True) as site:
        peer = await site.join()
        await peer.send(peer.tool("count", n=1))
        post = await last(trace, "perdure.post", 3)
        assert post.attributes is not None
        assert set(post.attributes) == {"perdure.session", "perdure.stream"}


async def test_a_header_that_a_client_made_up_is_short_and_printable(trace: Traced, peer: Peer) -> None:
    wire = await peer.get("a\t" + "x" * 5_000)
    await wire.drop()
    shown = told(await last(trace, "perdure.get", 1))["perdure.last_event_id"]
    assert shown == "a�" + "x" * 126


def test_without_tracing_all_requests_share_one_object() -> None:
    """A stream at rest keeps nothing for spans that nobody records."""
    headers = [(b"accept", b"text/event-stream")]
    assert spans.request("GET", headers) is spans.request("GET", headers)


_ALONE = """
import importlib.abc, sys

class NoSdk(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("opentelemetry.sdk"):
            raise ModuleNotFoundError(name)
        return None

sys.meta_path.insert(0, NoSdk())

import anyio, httpx2, perdure
from mcp.server.mcpserver import MCPServer

BODY = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {
    "protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "me", "version": "1"}}}

async def main():
    app = perdure.asgi(MCPServer("alone"), store="memory:")
    headers = {"Accept": "application/json, text/event-stream", "traceparent": "00-%s-%s-01" % ("a" * 32, "b" * 16)}
    async with app.lifespan():
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost") as http:
            print((await http.post("/mcp", json=BODY, headers=headers)).status_code)
    print([name for name in sys.modules if name.startswith("opentelemetry.sdk")])

anyio.run(main)
"""


def test_it_serves_with_the_api_alone() -> None:
    """S8: no OpenTelemetry SDK is needed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _ALONE],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stdout) == (0, "200\n[]\n"), done.stderr
