"""What every runtime does for its session (`perdure.runtime.base`): the SDK's server, and a fake without the SDK.

The numbers are those of the promises in `Outlet`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from mcp.server.mcpserver import Context, MCPServer
from mcp.shared.exceptions import MCPError
from mcp.shared.message import ServerMessageMetadata
from mcp_types import ListRootsRequest, ListRootsResult

from perdure._core.ids import SessionId, StreamId
from perdure._core.jsonrpc import Notification, Request, Response
from perdure._core.settling import UpstreamCall
from perdure._core.states import SessionState
from perdure.runtime.base import CallEnded, Flow, Runtime, Runtimes
from perdure.runtime.server import host
from perdure.settings import Settings
from perdure.store.records import SessionRecord
from tests.support.servers.fake_runtime import Broken, FakeRuntimes
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio

VERSION = "2025-11-25"
CLIENT = {"protocolVersion": VERSION, "capabilities": {"roots": {}}, "clientInfo": {"name": "client", "version": "1"}}

OPENING = SessionRecord(
    id=SessionId("s" * 43),
    owner="",
    state=SessionState.OPENING,
    version="",
    client_params=json.dumps(CLIENT).encode(),
    result=b"",
    initialized=False,
    sticky=(),
    incarnation=1,
    standalone=StreamId("t" * 22),
    created=0.0,
    active=0.0,
)
ACTIVE = replace(OPENING, state=SessionState.ACTIVE, version=VERSION, result=b"{}", initialized=True)


class Room:
    """Where a writer waits until the test makes room."""

    def __init__(self) -> None:
        self.is_full = False
        self.entered = 0
        self._free = asyncio.Event()

    async def wait_for_room(self) -> None:
        self.entered += 1
        await self._free.wait()

    def free(self) -> None:
        self.is_full = False
        self._free.set()


class RecordingOutlet:
    """A session as a runtime sees it: writes down what is said."""

    closes_early = is_home = is_listening = True
    is_task = False
    sticky = ()
    kept = b""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []
        self.room = Room()
        self.over: set[int] = set()
        """Calls that have their answer already."""
        self._names = itertools.count(1)

    def notify(self, method: str, params: dict[str, Any] | None, *, call: int | None) -> Flow | None:
        self.said.append(("notify", method, params, call))
        return self.room if self.room.is_full else None

    def new_ask_id(self) -> str:
        return f"ask-{next(self._names)}"

    def ask(self, ask_id: str, method: str, params: dict[str, Any] | None, *, call: int | None) -> Flow | None:
        if call in self.over:
            raise CallEnded
        self.said.append(("ask", ask_id, method, call))
        return self.room if self.room.is_full else None

    async def begin_round(self, call: int) -> None: ...

    def answer(self, call: int, body: bytes, *, failed: bool) -> None:
        self.said.append(("answer", call, json.loads(body), failed))

    def interrupted(self, call: int, why: str = "") -> None:
        self.said.append(("interrupted", call))

    def crashed(self, call: int, why: str, *, may_run_again: bool | None) -> None:
        self.said.append(("crashed", call, why, may_run_again))

    def replace_result(self, result: bytes) -> None:
        self.said.append(("result", result))

    def unsubscribe(self, subscription: bytes) -> None:
        self.said.append(("unsubscribe", subscription))

    def end(self, why: str) -> None:
        self.said.append(("end", why))

    def keep(self, state: bytes) -> None:
        self.said.append(("keep", state))

    async def take_home(self) -> None: ...

    async def keep_as_home(self, state: bytes) -> bool:
        return True

    def keep_call(self, call: int, kept: UpstreamCall) -> None:
        self.said.append(("keep call", call, kept))

    def handled(self, size: int) -> None:
        self.said.append(("handled", size))

    def close_reader(self, call: int | None) -> None:
        self.said.append(("close", call))

    async def received(self, count: int) -> list[tuple[Any, ...]]:
        """Wait until so much was said."""
        await until(lambda: len(self.said) >= count)
        return self.said


class Bench:
    """One kind of runtime under test, and an outlet for it."""

    def __init__(self, runtimes: Runtimes, gates: defaultdict[str, asyncio.Event]) -> None:
        self.runtimes = runtimes
        self.gates = gates
        self.outlet = RecordingOutlet()
        self._loaded: list[Runtime] = []

    def load(self, record: SessionRecord = ACTIVE) -> Runtime:
        runtime = self.runtimes.load(record, self.outlet)
        self._loaded.append(runtime)
        return runtime

    async def aclose(self) -> None:
        for runtime in self._loaded:
            await runtime.aclose(ended=False)


def sdk_server(gates: defaultdict[str, asyncio.Event]) -> MCPServer[Any]:
    """The tools of the fake, on the SDK."""
    server: MCPServer[Any] = MCPServer("sdk", log_level="CRITICAL")

    @server.tool()
    async def count(n: int, ctx: Context, gate: str = "", first: int = 0) -> str:
        for step in range(1, n + 1):
            if gate and step == first + 1:
                await gates[gate].wait()
            await ctx.report_progress(step)
        return f"counted to {n}"

    @server.tool()
    async def ask(ctx: Context) -> str:
        related = ServerMessageMetadata(related_request_id=ctx.request_id)
        found = await ctx.session.send_request(ListRootsRequest(), ListRootsResult, metadata=related)
        return f"{len(found.roots)} roots"

    @server.tool(name="break")
    async def break_() -> str:
        raise Broken

    return server


@pytest.fixture(params=["sdk", "fake"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    if request.param == "fake":
        fake = FakeRuntimes()
        bench = Bench(fake, fake.gates)
        yield bench
        await bench.aclose()
        return
    gates: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
    async with host(sdk_server(gates), Settings(), path="/mcp").start() as started:
        bench = Bench(started.runtimes, gates)
        yield bench
        await bench.aclose()


def request_of(number: int, method: str, params: dict[str, Any] | None = None) -> Request:
    return Request(id=number, method=method, params=params, raw={})


def call_of(number: int, tool: str, **arguments: Any) -> Request:
    params = {"name": tool, "arguments": arguments, "_meta": {"progressToken": number}}
    return request_of(number, "tools/call", params)


def text_of(answer: tuple[Any, ...]) -> str:
    text: str = answer[2]["content"][0]["text"]
    return text


def progress(call: int, step: int) -> tuple[Any, ...]:
    return ("notify", "notifications/progress", {"progressToken": call, "progress": step}, call)


async def test_the_handshake_is_a_request_like_any_other(bench: Bench) -> None:
    runtime = bench.load(OPENING)
    runtime.send(request_of(1, "initialize", CLIENT), origin=None)
    [(kind, call, result, failed)] = await bench.outlet.received(1)
    assert (kind, call, result["protocolVersion"], failed) == ("answer", 1, VERSION, False)
    assert not runtime.keeps_state


async def test_a_runtime_that_is_loaded_from_a_record_needs_no_handshake(bench: Bench) -> None:
    bench.load().send(call_of(7, "count", n=0), origin=None)
    [answer] = await bench.outlet.received(1)
    assert (answer[:2], answer[3], text_of(answer)) == (("answer", 7), False, "counted to 0")


async def test_what_a_call_says_comes_in_order_before_its_answer(bench: Bench) -> None:
    """1."""
    bench.load().send(call_of(3, "count", n=3), origin=None)
    *said, answer = await bench.outlet.received(4)
    assert said == [progress(3, 1), progress(3, 2), progress(3, 3)]
    assert (answer[0], answer[1]) == ("answer", 3)


async def test_a_full_session_makes_a_call_wait_before_it_says_more(bench: Bench) -> None:
    """1."""
    bench.outlet.room.is_full = True
    bench.load().send(call_of(1, "count", n=2), origin=None)
    await until(lambda: bench.outlet.room.entered == 1)
    assert bench.outlet.said == [progress(1, 1)]
    bench.outlet.room.free()
    assert (await bench.outlet.received(3))[1] == progress(1, 2)


async def test_calls_run_beside_each_other(bench: Bench) -> None:
    runtime = bench.load()
    runtime.send(call_of(1, "count", n=1, gate="slow"), origin=None)
    runtime.send(call_of(2, "count", n=1), origin=None)
    assert [said[-1] if said[0] == "notify" else said[1] for said in await bench.outlet.received(2)] == [2, 2]
    bench.gates["slow"].set()
    assert (await bench.outlet.received(4))[2] == progress(1, 1)


async def test_a_request_that_cannot_be_answered_is_answered_with_an_error(bench: Bench) -> None:
    bench.load().send(request_of(1, "no/such/method"), origin=None)
    [(kind, call, error, failed)] = await bench.outlet.received(1)
    assert (kind, call, error["code"], failed) == ("answer", 1, -32601, True)
    assert isinstance(error["message"], str)


async def test_an_ask_waits_for_the_clients_answer(bench: Bench) -> None:
    runtime = bench.load()
    runtime.send(call_of(1, "ask"), origin=None)
    assert await bench.outlet.received(1) == [("ask", "ask-1", "roots/list", 1)]
    result = {"roots": [{"uri": "file:///a"}, {"uri": "file:///b"}]}
    runtime.send(Response(id="ask-1", raw={"jsonrpc": "2.0", "id": "ask-1", "result": result}), origin=None)
    _, answer = await bench.outlet.received(2)
    assert (answer[1], text_of(answer)) == (1, "2 roots")


async def test_a_call_that_has_its_answer_does_not_wait_for_an_ask(bench: Bench) -> None:
    """2."""
    bench.outlet.over.add(1)
    bench.load().send(call_of(1, "ask"), origin=None)
    [(kind, call, *_)] = await bench.outlet.received(1)
    assert (kind, call) == ("answer", 1)


async def test_a_cancelled_call_ends_without_an_answer(bench: Bench) -> None:
    runtime = bench.load()
    runtime.send(call_of(1, "count", n=2, gate="never", first=1), origin=None)
    await bench.outlet.received(1)
    runtime.send(Notification(method="notifications/cancelled", params={"requestId": 1}, raw={}), origin=None)
    assert await bench.outlet.received(2) == [progress(1, 1), ("interrupted", 1)]
    runtime.send(call_of(2, "count", n=0), origin=None)
    assert [said[:2] for said in await bench.outlet.received(3)][2:] == [("answer", 2)]


async def test_a_notification_with_a_size_is_reported_once_it_was_handled(bench: Bench) -> None:
    runtime = bench.load()
    note = Notification(method="notifications/roots/list_changed", params=None, raw={})
    runtime.send(note, origin=None, size=123)
    runtime.send(note, origin=None)
    assert await bench.outlet.received(1) == [("handled", 123)]
    runtime.send(call_of(1, "count", n=0), origin=None)
    assert [said[0] for said in await bench.outlet.received(2)] == ["handled", "answer"]


async def test_a_closed_runtime_says_nothing_more(bench: Bench) -> None:
    """3."""
    runtime = bench.load()
    runtime.send(call_of(1, "count", n=2, gate="closed", first=1), origin=None)
    await bench.outlet.received(1)
    await runtime.aclose(ended=False)
    bench.gates["closed"].set()
    with quiet(bench.outlet):
        other = bench.load()
        other.send(call_of(2, "count", n=0), origin=None)
        await bench.outlet.received(2)
    assert [said[:2] for said in bench.outlet.said[1:]] == [("answer", 2)]


@contextmanager
def quiet(outlet: RecordingOutlet) -> Iterator[None]:
    """Nothing is said of call 1 meanwhile."""
    before = len([said for said in outlet.said if 1 in said])
    yield
    assert len([said for said in outlet.said if 1 in said]) == before


async def test_a_call_that_breaks_is_interrupted_and_no_other(bench: Bench) -> None:
    runtime = bench.load()
    runtime.send(call_of(1, "count", n=0, gate="never"), origin=None)
    runtime.send(call_of(2, "break"), origin=None)
    said = await bench.outlet.received(2)
    assert sorted(message[:2] for message in said) == [("answer", 1), ("interrupted", 2)]


async def test_a_runtime_may_be_loaded_again_for_the_same_session(bench: Bench) -> None:
    first = bench.load()
    first.send(call_of(1, "count", n=0), origin=None)
    await bench.outlet.received(1)
    await first.aclose(ended=False)
    second = bench.load()
    second.mark_initialized()
    second.send(call_of(2, "count", n=0), origin=None)
    assert [said[:2] for said in await bench.outlet.received(2)] == [("answer", 1), ("answer", 2)]


async def test_a_tool_of_the_sdk_hears_its_clients_progress_and_waits_no_longer_than_it_means_to() -> None:
    """The options of an ask, which the SDK's own dispatcher would serve."""
    server: MCPServer[Any] = MCPServer("sdk", log_level="CRITICAL")
    heard: list[tuple[Any, ...]] = []

    @server.tool()
    async def ask(ctx: Context, seconds: float) -> str:
        async def on_progress(*progress: Any) -> None:
            heard.append(progress)

        related = ServerMessageMetadata(related_request_id=ctx.request_id)
        try:
            await ctx.session.send_request(ListRootsRequest(), ListRootsResult, seconds, related, on_progress)
        except MCPError as error:
            return error.error.message
        return "answered"

    async with host(server, Settings(), path="/mcp").start() as started:
        bench = Bench(started.runtimes, defaultdict(asyncio.Event))
        runtime = bench.load()
        runtime.send(call_of(1, "ask", seconds=60.0), origin=None)
        [(_, name, _, call)] = await bench.outlet.received(1)
        for token in (name, "ask-9"):
            params = {"progressToken": token, "progress": 1, "total": 2, "message": "half"}
            runtime.send(Notification(method="notifications/progress", params=params, raw={}), origin=None)
        await until(lambda: heard)
        runtime.send(Response(id=name, raw={"jsonrpc": "2.0", "id": name, "result": {"roots": []}}), origin=None)
        assert (text_of((await bench.outlet.received(2))[1]), heard, call) == ("answered", [(1.0, 2, "half")], 1)
        runtime.send(call_of(2, "ask", seconds=0.01), origin=None)
        withdrawn, answer = (await bench.outlet.received(5))[3:]
        assert withdrawn[2] == {"requestId": "ask-2", "reason": "timed out after 0.01s"}
        assert text_of(answer) == "Request 'roots/list' timed out"
        await bench.aclose()
