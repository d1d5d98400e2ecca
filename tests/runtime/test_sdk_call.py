"""The runtime of a durable call, with the real SDK server behind it: what its tools say, ask and answer."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import mcp_types as types
import pytest
from fastmcp import FastMCP
from mcp.server.mcpserver import Context, MCPServer
from mcp.shared.exceptions import MCPError
from starlette.requests import Request as HttpRequest

from perdure._core.ids import RecordKind, SessionId, StreamId
from perdure._core.jsonrpc import Notification, Request, Response
from perdure._core.states import SessionState
from perdure.runtime.base import CallEnded
from perdure.runtime.sdk import CallRuntime
from perdure.runtime.server import host
from perdure.settings import Settings
from perdure.store.records import SessionRecord
from tests.support.clients.modern_requests import modern
from tests.support.servers.asking_tools import server as asking_tools
from tests.support.servers.fastmcp_asking_tools import server as fastmcp_asking_tools
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio

Asked = tuple[str, str, dict[str, Any] | None]


class Notes:
    """An outlet that writes down what comes, in place of a session."""

    is_task = False

    def __init__(self) -> None:
        self.answers: dict[int, tuple[dict[str, Any], bool]] = {}
        self.notices: list[tuple[str, dict[str, Any] | None, int | None]] = []
        self.asks: list[Asked] = []
        self.stopped: list[int] = []
        self.ended = False
        self._names = itertools.count(1)

    def new_ask_id(self) -> str:
        return f"ask-n-{next(self._names)}"

    def ask(self, ask_id: str, method: str, params: dict[str, Any] | None, *, call: int | None) -> None:
        if self.ended:
            raise CallEnded
        self.asks.append((ask_id, method, params))

    def notify(self, method: str, params: dict[str, Any] | None, *, call: int | None) -> None:
        self.notices.append((method, params, call))

    def answer(self, call: int, body: bytes, *, failed: bool) -> None:
        self.answers[call] = json.loads(body), failed

    def interrupted(self, call: int) -> None:
        self.stopped.append(call)

    async def answered(self, call: int = 1) -> tuple[dict[str, Any], bool]:
        await until(lambda: call in self.answers)
        return self.answers[call]

    async def asked(self, count: int = 1) -> list[Asked]:
        await until(lambda: len(self.asks) >= count)
        return self.asks


def record(capabilities: dict[str, Any], version: str = "2026-07-28") -> SessionRecord:
    told = {"capabilities": capabilities, "clientInfo": {"name": "c", "version": "1"}}
    return SessionRecord(
        id=SessionId("s"),
        owner="",
        state=SessionState.ACTIVE,
        version=version,
        client_params=json.dumps(told).encode(),
        result=b"",
        initialized=False,
        sticky=(),
        incarnation=1,
        standalone=StreamId(""),
        created=0.0,
        active=0.0,
        kind=RecordKind.CALL,
    )


@asynccontextmanager
async def running(
    server: object, capabilities: dict[str, Any] | None = None, *, version: str = "2026-07-28"
) -> AsyncIterator[tuple[CallRuntime, Notes]]:
    notes = Notes()
    async with host(server, Settings(), path="/mcp").start() as started:
        runtime = started.runtimes.load(record(capabilities or {}, version), notes)  # type: ignore[arg-type]
        assert isinstance(runtime, CallRuntime), "a record of a durable call has this runtime"
        try:
            yield runtime, notes
        finally:
            await runtime.aclose(ended=False)


def call(tool: str, *, number: int = 1, token: int | None = None, **arguments: Any) -> Request:
    params: dict[str, Any] = {"name": tool, "arguments": arguments}
    if token is not None:
        params["_meta"] = {"progressToken": token}
    params = json.loads(modern("tools/call", params)[0])["params"]
    return Request(id=number, method="tools/call", params=params, raw={})


def texts(result: dict[str, Any]) -> str:
    text: str = result["content"][0]["text"]
    return text


def respond(name: str, **fields: Any) -> Response:
    return Response(id=name, raw={"jsonrpc": "2.0", "id": name, **fields})


ACCEPTED = {"action": "accept", "content": {"answer": "yes"}}


async def test_a_question_waits_for_its_answer_and_is_given_it_once() -> None:
    async with running(asking_tools, {"elicitation": {}}) as (runtime, notes):
        runtime.send(call("ask", question="Well?"), origin=None)
        [(name, method, params)] = await notes.asked()
        assert (method, (params or {})["message"]) == ("elicitation/create", "Well?")
        runtime.send(respond("ask-n-99", result=ACCEPTED), origin=None)
        runtime.send(respond(name, result=ACCEPTED), origin=None)
        runtime.send(respond(name, result={"action": "decline"}), origin=None)
        result, failed = await notes.answered()
        assert (texts(result), failed) == ("yes", False)


async def test_an_error_as_the_answer_is_raised_in_the_tool() -> None:
    async with running(asking_tools, {"elicitation": {}}) as (runtime, notes):
        runtime.send(call("try_to_ask"), origin=None)
        [(name, _, _)] = await notes.asked()
        runtime.send(respond(name, error={"code": -7, "message": "no", "data": {"why": "away"}}), origin=None)
        result, _ = await notes.answered()
        assert texts(result) == "-7 {'why': 'away'}"


async def test_what_the_client_did_not_declare_is_not_asked() -> None:
    async with running(asking_tools, {"sampling": {}}) as (runtime, notes):
        runtime.send(call("try_to_ask"), origin=None)
        result, _ = await notes.answered()
        assert texts(result) == "-32021 {'requiredCapabilities': {'elicitation': {}}}"
        assert notes.asks == []


async def test_a_call_that_has_ended_asks_nothing_more() -> None:
    async with running(asking_tools, {"elicitation": {}}) as (runtime, notes):
        notes.ended = True
        runtime.send(call("try_to_ask"), origin=None)
        result, _ = await notes.answered()
        assert texts(result).startswith("-32000")


async def test_a_cancelled_call_is_interrupted_and_withdraws_its_question() -> None:
    async with running(asking_tools, {"elicitation": {}}) as (runtime, notes):
        runtime.send(call("ask", question="Well?"), origin=None)
        [(name, _, _)] = await notes.asked()
        runtime.send(Notification(method="notifications/cancelled", params={"requestId": 9}, raw={}), origin=None)
        runtime.send(Notification(method="notifications/cancelled", params={"requestId": 1}, raw={}), origin=None)
        await until(lambda: notes.stopped)
        assert notes.stopped == [1]
        assert notes.notices == [("notifications/cancelled", {"requestId": name, "reason": "caller cancelled"}, 1)]
        assert notes.answers == {}


async def test_a_runtime_that_is_closed_says_nothing_any_more() -> None:
    async with running(asking_tools, {"elicitation": {}}) as (runtime, notes):
        runtime.send(call("ask", question="Well?"), origin=None)
        await notes.asked()
        await runtime.aclose(ended=False)
        assert (notes.stopped, notes.notices, notes.answers) == ([], [], {})


# What servers do


def odd() -> MCPServer:
    server = MCPServer("odd", version="1", log_level="CRITICAL")

    @server.tool()
    async def progress(ctx: Context) -> str:
        await ctx.report_progress(1, 2, "half")
        await ctx.report_progress(2)
        return "done"

    @server.tool()
    async def refuse() -> str:
        raise MCPError(-7, "no", {"why": "odd"})

    @server.tool()
    async def header(ctx: Context) -> str:
        return str((ctx.headers or {}).get("x-test"))

    @server.tool()
    async def wait_shortly(ctx: Context) -> str:
        try:
            async with asyncio.timeout(0.01):
                await ctx.session.send_request(types.ListRootsRequest(), types.ListRootsResult)
        except TimeoutError:
            return "not waited"
        return "waited"

    return server


async def test_progress_goes_out_under_the_token_of_the_call_and_without_one_not_at_all() -> None:
    async with running(odd()) as (runtime, notes):
        runtime.send(call("progress", token=1), origin=None)
        runtime.send(call("progress", number=2), origin=None)
        await notes.answered(1)
        await notes.answered(2)
        half = {"progressToken": 1, "progress": 1, "total": 2, "message": "half"}
        assert notes.notices == [
            ("notifications/progress", half, 1),
            ("notifications/progress", {"progressToken": 1, "progress": 2}, 1),
        ]


async def test_errors_are_answered_as_the_sdks_own_handler_does() -> None:
    async with running(odd()) as (runtime, notes):
        runtime.send(call("refuse"), origin=None)
        runtime.send(Request(id=2, method="tools/call", params={"arguments": {}}, raw={}), origin=None)
        runtime.send(Request(id=3, method="no/such", params={}, raw={}), origin=None)
        assert await notes.answered(1) == ({"code": -7, "message": "no", "data": {"why": "odd"}}, True)
        assert (await notes.answered(2))[0]["code"] == -32602
        assert (await notes.answered(3))[0]["code"] == -32601


async def test_a_tool_sees_the_request_that_began_the_call() -> None:
    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": [(b"x-test", b"here")]}
    async with running(odd()) as (runtime, notes):
        runtime.send(call("header"), origin=HttpRequest(scope))
        runtime.send(call("header", number=2), origin=None)
        assert texts((await notes.answered(1))[0]) == "here"
        assert texts((await notes.answered(2))[0]) == "None"


async def test_a_question_whose_time_has_passed_is_withdrawn() -> None:
    async with running(odd(), {"roots": {}}) as (runtime, notes):
        runtime.send(call("wait_shortly"), origin=None)
        result, _ = await notes.answered()
        assert texts(result) == "not waited"
        [(method, params, number)] = notes.notices
        assert params is not None
        assert (method, params["requestId"], number) == ("notifications/cancelled", "ask-n-1", 1)


@pytest.mark.parametrize(("server", "version"), [(asking_tools, "2026-07-28"), (fastmcp_asking_tools, "2025-11-25")])
async def test_every_result_says_what_the_revision_wants(server: MCPServer | FastMCP, version: str) -> None:
    """Also where the server runs the call as in a session, which has no such words."""
    async with running(server, {"elicitation": {}}, version=version) as (runtime, notes):
        runtime.send(call("ask_each", questions=["Well?"]), origin=None)
        [(name, _, _)] = await notes.asked()
        runtime.send(respond(name, result=ACCEPTED), origin=None)
        result, failed = await notes.answered()
        assert (texts(result), failed) == ("yes", False)
        assert result["resultType"] == "complete"
        assert result["_meta"]["io.modelcontextprotocol/serverInfo"]["name"] in ("asking_tools", "fastmcp_asking_tools")
