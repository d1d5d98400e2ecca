"""A session in front of servers of 2026-07-28, over real HTTP: the official SDK's, one with tasks and keys."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.mcpserver import Context, MCPServer
from mcp.shared.exceptions import MCPDeprecationWarning
from mcp_types import LoggingLevel
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from perdure._core.envelope import CAPABILITIES, LOG_LEVEL, TASKS
from perdure._core.envelope import CLIENT as CLIENT_INFO
from perdure.gateway.lane import Reason, RequestKey, UpstreamUnavailable
from tests.client.sdk_task_server import SdkTaskServer
from tests.gateway.modern_lanes import BRIEF, CLIENT, Front, http_lane, modern_only, text
from tests.support.proxies.cutting_proxy import CuttingProxy, cutting_proxy
from tests.support.servers.changing_server import new_server as new_changing_server
from tests.support.servers.in_process import serve, under_uvicorn, until
from tests.support.servers.round_tools import server as round_tools
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def tool_front(tools: ToolServer) -> AsyncIterator[Front]:
    async with (
        under_uvicorn(modern_only(tools.server.streamable_http_app()), complaint=".*") as port,
        http_lane(f"http://127.0.0.1:{port}/mcp") as front,
    ):
        yield front


@asynccontextmanager
async def task_lane(task_server: SdkTaskServer) -> AsyncIterator[tuple[Front, CuttingProxy]]:
    async with (
        under_uvicorn(modern_only(task_server.app), complaint=".*") as port,
        cutting_proxy(port) as proxy,
        http_lane(proxy.url) as front,
    ):
        yield front, proxy


async def test_a_handshake_is_made_of_the_discovery() -> None:
    async with tool_front(ToolServer(logs=True)) as front:
        assert front.opened.version == "2026-07-28"
        result = front.opened.result
        assert result["protocolVersion"] == CLIENT["protocolVersion"]
        assert result["serverInfo"] == {"name": "tools", "version": "1"}
        assert result["capabilities"]["tools"] == {"listChanged": True}
        assert result.keys() == {"protocolVersion", "serverInfo", "capabilities"}


async def test_a_call_has_its_progress_under_its_own_token_and_a_plain_result() -> None:
    tools = ToolServer()
    async with tool_front(tools) as front:
        key = front.call("count", "tok", n=2)
        result = await front.heard.answer(key)
        assert text(result) == "counted to 2"
        assert result.keys() == {"content", "structuredContent", "isError"}
        assert [(params, of) for _, params, of in front.heard.notifications] == [
            ({"progressToken": "tok", "progress": 1, "total": 2}, key),
            ({"progressToken": "tok", "progress": 2, "total": 2}, key),
        ]


async def test_lists_come_without_cache_hints_and_unknown_methods_get_the_servers_own_error() -> None:
    async with tool_front(ToolServer()) as front:
        assert (await front.ask("tools/list")).keys() == {"tools"}
        assert (await front.ask("shop/open"))["code"] == -32601
        refused = await front.ask("server/discover")
        assert refused == {"code": -32601, "message": "Method not found: server/discover is not a method of a session"}
        assert await front.ask("ping") == {}


async def test_the_envelope_tells_the_recorded_client_and_the_log_level() -> None:
    """A client that sets no level gets all messages, as from a server with sessions."""
    task_server = SdkTaskServer()
    async with task_lane(task_server) as (front, _):
        await front.ask("tools/list", meta={"com.example/trace": 7})
        assert await front.ask("logging/setLevel", level="error") == {}
        refused = await front.ask("logging/setLevel", level="loud")
        assert refused["code"] == -32602
        assert "'loud'" in refused["message"]
        await front.ask("tools/list")
    first, second = (params["_meta"] for params in task_server.requests("tools/list"))
    assert first["com.example/trace"] == 7
    assert first[CLIENT_INFO] == CLIENT["clientInfo"]
    extensions = first[CAPABILITIES].pop("extensions")
    assert TASKS in extensions
    assert first[CAPABILITIES] == {"elicitation": {}, "sampling": {}, "roots": {}}
    assert (first[LOG_LEVEL], second[LOG_LEVEL]) == ("debug", "error")
    assert task_server.requests("logging/setLevel") == []


async def test_log_messages_come_with_their_call_from_the_set_level_on() -> None:
    server = MCPServer("scribe", version="1", log_level="WARNING")

    @server.tool()
    async def log(level: LoggingLevel, ctx: Context) -> str:
        with pytest.warns(MCPDeprecationWarning):
            await ctx.log(level, "hello")
        return "logged"

    async with (
        under_uvicorn(modern_only(server.streamable_http_app())) as port,
        http_lane(f"http://127.0.0.1:{port}/mcp") as front,
    ):
        key = front.call("log", level="debug")
        await front.heard.answer(key)
        assert front.heard.notifications == [("notifications/message", {"level": "debug", "data": "hello"}, key)]
        await front.ask("logging/setLevel", level="warning")
        for level in ("info", "error"):
            await front.heard.answer(front.call("log", level=level))
        assert [(params or {})["level"] for params in front.heard.of("notifications/message")] == ["debug", "error"]


async def test_a_cancelled_call_is_cancelled_at_the_server_and_not_reported() -> None:
    tools = ToolServer()
    async with tool_front(tools) as front:
        key = front.call("wait", gate="g")
        await until(lambda: tools.seen == ["waiting at g"])
        front.lane.cancel(key, None)
        front.lane.cancel(key, None)
        await until(lambda: tools.seen[-1] == "cancelled at g")
        await front.ask("ping")
        assert (front.heard.answers, front.heard.lost) == ({2: {}}, {})


async def test_a_servers_error_passes_unchanged() -> None:
    async with tool_front(ToolServer()) as front:
        assert await front.heard.answer(front.call("boom", code=-32050)) == {"code": -32050, "message": "boom"}


# --- Input that a result requires


async def test_a_round_becomes_an_ask_whose_answer_the_retry_brings() -> None:
    async with (
        under_uvicorn(modern_only(round_tools.streamable_http_app())) as port,
        http_lane(f"http://127.0.0.1:{port}/mcp") as front,
    ):
        key = front.call("order", "tok")
        await until(lambda: front.heard.asks)
        [(ask, (method, params, of))] = front.heard.asks.items()
        assert (method, of, (params or {})["message"]) == ("elicitation/create", key, "Which loaf?")
        front.lane.reply(ask, {"result": {"action": "accept", "content": {"loaf": "rye"}}})
        front.lane.reply(ask, {"result": {"action": "decline"}})
        front.lane.reply("another", {"result": {}})
        assert text(await front.heard.answer(key)) == "a rye loaf"
        assert front.heard.withdrawn == []


class Rounds:
    """An SDK server whose tool requires input as often as it is told, and remembers what each request brought."""

    def __init__(self, *results: dict[str, Any]) -> None:
        self.brought: list[dict[str, Any]] = []
        self.server = MCPServer("rounds", version="1", log_level="WARNING")
        self._results = list(results)

    @property
    def app(self) -> ASGIApp:
        app = self.server.streamable_http_app()
        self.server.session_manager.app.middleware.insert(0, self._serve)
        return app

    async def _serve(self, ctx: ServerRequestContext[Any, Any], call_next: CallNext) -> HandlerResult:
        if ctx.method != "tools/call":
            return await call_next(ctx)
        params = dict(ctx.params or {})
        self.brought.append({name: value for name, value in params.items() if name not in ("_meta", "name")})
        return self._results.pop(0) if len(self._results) > 1 else self._results[0]


@asynccontextmanager
async def rounds_lane(*results: dict[str, Any]) -> AsyncIterator[tuple[Front, Rounds]]:
    rounds = Rounds(*results)
    async with (
        under_uvicorn(modern_only(rounds.app), complaint=".*") as port,
        http_lane(f"http://127.0.0.1:{port}/mcp") as front,
    ):
        yield front, rounds


DONE: dict[str, Any] = {"resultType": "complete", "content": []}
ROOTS = {"method": "roots/list"}
SAMPLE = {"method": "sampling/createMessage", "params": {"messages": [], "maxTokens": 1}}


async def test_several_questions_are_asked_together_and_the_state_comes_back_as_it_was() -> None:
    asked = {"resultType": "input_required", "inputRequests": {"a": ROOTS, "b": SAMPLE}, "requestState": " opaque\n"}
    async with rounds_lane(asked, {"resultType": "input_required", "requestState": "only"}, DONE) as (front, rounds):
        key = front.call("t", x=1)
        await until(lambda: len(front.heard.asks) == 2)
        first, second = front.heard.asks
        assert front.heard.asks[first] == ("roots/list", None, key)
        front.lane.reply(second, {"result": {"role": "assistant"}})
        front.lane.reply(first, {"result": {"roots": []}})
        assert await front.heard.answer(key) == {"content": []}
    arguments = {"arguments": {"x": 1}}
    answers = {"a": {"roots": []}, "b": {"role": "assistant"}}
    assert rounds.brought == [
        arguments,
        {**arguments, "inputResponses": answers, "requestState": " opaque\n"},
        {**arguments, "requestState": "only"},
    ]


async def test_an_ask_that_the_client_refuses_ends_the_call_with_its_error() -> None:
    """The other questions are withdrawn, and the server is not asked again."""
    asked = {"resultType": "input_required", "inputRequests": {"a": ROOTS, "b": SAMPLE}}
    async with rounds_lane(asked) as (front, rounds):
        key = front.call("t")
        await until(lambda: len(front.heard.asks) == 2)
        first, second = front.heard.asks
        front.lane.reply(first, {"error": {"code": -1, "message": "no"}})
        assert await front.heard.answer(key) == {"code": -1, "message": "no"}
        assert front.heard.failed == {key}
        assert front.heard.withdrawn == [second]
    assert len(rounds.brought) == 1


async def test_the_asks_of_a_cancelled_call_are_over_without_a_word() -> None:
    async with rounds_lane({"resultType": "input_required", "inputRequests": {"a": ROOTS}}) as (front, _):
        key = front.call("t")
        await until(lambda: front.heard.asks)
        front.lane.cancel(key, {"requestId": key})
        await front.ask("ping")
        assert front.heard.withdrawn == []
        assert key not in front.heard.answers


async def test_a_server_that_asks_for_ever_is_given_ten_rounds() -> None:
    async with rounds_lane({"resultType": "input_required", "requestState": "s"}) as (front, rounds):
        error = await front.heard.answer(front.call("t"))
        assert error == {"code": -32603, "message": "The server asked for input in more than 10 rounds"}
    assert len(rounds.brought) == 11


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        ({"resultType": "input_required"}, "neither inputRequests nor requestState"),
        ({"resultType": "input_required", "inputRequests": {"a": 1}}, "'a' is not a request"),
        ({"resultType": "com.example/x"}, "the unknown type 'com.example/x'"),
    ],
)
async def test_a_result_that_a_session_cannot_have_is_an_error(result: dict[str, Any], problem: str) -> None:
    async with rounds_lane(result) as (front, _):
        error = await front.heard.answer(front.call("t"))
        assert error["code"] == -32603
        assert problem in error["message"]


# --- Tasks


async def test_a_task_is_polled_to_its_result_and_leads_a_later_lane_to_it() -> None:
    task_server = SdkTaskServer(tasks=True)
    async with task_lane(task_server) as (front, proxy):
        key = front.call("work", gate="g")
        await until(lambda: key in front.heard.positions)
        [state] = front.heard.positions[key]
        assert state == {"task": "task-0"}
        await front.lane.aclose(ended=False)
        async with http_lane(proxy.url) as later:
            later.lane.follow("k", "tools/call", {"name": "work", "arguments": {"gate": "g"}}, state)
            polls = len(task_server.requests("tasks/get"))
            await until(lambda: len(task_server.requests("tasks/get")) > polls)
            task_server.gates["g"].set()
            result = await later.heard.answer("k")
            assert text(result) == "worked at g"
            assert result.keys() == {"content", "structuredContent"}
    assert (task_server.runs, task_server.cancelled) == (["work"], [])


async def test_a_task_that_fails_is_an_error_and_a_forgotten_one_is_lost() -> None:
    task_server = SdkTaskServer(tasks=True)
    async with task_lane(task_server) as (front, _):
        assert await front.heard.answer(front.call("fail")) == {"code": -32050, "message": "it broke"}
        front.lane.follow("k", "tools/call", {"name": "work"}, {"task": "nobody"})
        lost = await front.heard.loss("k")
        assert lost.ran
        assert "no such task" in lost.why


async def test_a_tasks_questions_are_asks_each_once() -> None:
    task_server = SdkTaskServer(tasks=True)
    async with task_lane(task_server) as (front, _):
        key = front.call("ask", questions=["one", "two"])
        await until(lambda: len(front.heard.asks) == 2)
        polls = len(task_server.requests("tasks/get"))
        await until(lambda: len(task_server.requests("tasks/get")) > polls + 2)
        for ask, (_, params, _) in list(front.heard.asks.items()):
            content = {"answer": (params or {})["message"].upper()}
            front.lane.reply(ask, {"result": {"action": "accept", "content": content}})
        assert text(await front.heard.answer(key)) == "ONE TWO"
        assert len(front.heard.asks) == 2
        assert front.heard.withdrawn == []


async def test_a_task_is_cancelled_by_its_client_and_by_a_refused_ask() -> None:
    task_server = SdkTaskServer(tasks=True)
    async with task_lane(task_server) as (front, _):
        front.lane.cancel(await begun(front, task_server, "work", gate="g"), None)
        await until(lambda: task_server.cancelled == ["work"])
        key = front.call("ask", questions=["one"])
        await until(lambda: front.heard.asks)
        [ask] = front.heard.asks
        front.lane.reply(ask, {"error": {"code": -1, "message": "no"}})
        assert await front.heard.answer(key) == {"code": -1, "message": "no"}
        await until(lambda: task_server.cancelled == ["work", "ask"])


async def begun(front: Front, task_server: SdkTaskServer, tool: str, **arguments: Any) -> RequestKey:
    key, runs = front.call(tool, **arguments), len(task_server.runs)
    await until(lambda: len(task_server.runs) > runs and key in front.heard.positions)
    return key


async def test_a_tasks_question_that_cannot_be_asked_ends_the_call_and_the_task() -> None:
    task_server = SdkTaskServer(tasks=True)
    async with task_lane(task_server) as (front, _):
        key = await begun(front, task_server, "work", gate="g")
        task_server.jobs["task-0"].end = {"status": "input_required", "inputRequests": {"odd": "Who?"}}
        error = await front.heard.answer(key)
        assert error["code"] == -32603
        assert "'odd' is not a request" in error["message"]
        await until(lambda: task_server.cancelled == ["work"])


async def test_an_ask_of_a_task_that_ends_is_withdrawn() -> None:
    task_server = SdkTaskServer(tasks=True)
    async with task_lane(task_server) as (front, _):
        key = front.call("ask", questions=["one"])
        await until(lambda: front.heard.asks)
        task_server.cancel("task-0")
        assert (await front.heard.answer(key))["code"] == -32800
        assert front.heard.withdrawn == list(front.heard.asks)


# --- Keys


async def test_a_call_with_a_key_is_found_again_by_a_later_lane() -> None:
    task_server = SdkTaskServer(keys=True)
    async with task_lane(task_server) as (front, proxy):
        key = front.call("work", gate="g")
        await until(lambda: task_server.runs)
        [state] = front.heard.positions[key]
        assert state.keys() == {"key", "until"}
        await front.lane.aclose(ended=False)
        async with http_lane(proxy.url) as later:
            later.lane.follow("k", "tools/call", {"name": "work", "arguments": {"gate": "g"}}, state)
            await until(lambda: len(task_server.requests("tools/call")) == 2)
            task_server.gates["g"].set()
            assert text(await later.heard.answer("k")) == "worked at g"
    assert (task_server.runs, task_server.cancelled) == (["work"], [])


async def test_a_call_with_a_key_outlives_its_connection() -> None:
    task_server = SdkTaskServer(keys=True)
    async with task_lane(task_server) as (front, proxy):
        key = front.call("work", gate="g")
        await until(lambda: task_server.runs)
        proxy.cut()
        await until(lambda: len(task_server.requests("tools/call")) == 2)
        task_server.gates["g"].set()
        assert text(await front.heard.answer(key)) == "worked at g"
    assert task_server.runs == ["work"]


async def test_a_call_whose_key_may_be_forgotten_is_not_sent_again() -> None:
    task_server = SdkTaskServer(keys=True)
    async with task_lane(task_server) as (front, _):
        front.lane.follow("k", "tools/call", {"name": "quick"}, {"key": "old", "until": 1.0})
        assert (await front.heard.loss("k")).ran
        front.lane.follow("l", "tools/call", {"name": "quick"}, {"rerun": True})
        assert (await front.heard.loss("l")).ran
    assert task_server.runs == []


async def test_a_call_with_a_key_is_cancelled_by_it() -> None:
    task_server = SdkTaskServer(keys=True)
    async with task_lane(task_server) as (front, _):
        front.lane.cancel(await begun(front, task_server, "work", gate="g"), None)
        await until(lambda: task_server.cancelled == ["work"])


# --- Connections that break


async def test_a_broken_response_of_a_plain_call_is_lost_and_may_have_run() -> None:
    task_server = SdkTaskServer()
    async with task_lane(task_server) as (front, proxy):
        key = front.call("work", gate="g")
        await until(lambda: task_server.runs)
        proxy.cut()
        lost = await front.heard.loss(key)
        assert lost.ran
        assert lost.unavailable is None
        assert text(await front.heard.answer(front.call("quick"))) == "done"
        assert front.heard.closed == []
    assert task_server.runs == ["work", "quick"]


async def test_a_read_waits_for_a_server_that_is_away() -> None:
    task_server = SdkTaskServer()
    async with task_lane(task_server) as (front, proxy):
        proxy.refuse()
        proxy.cut()
        key = front.start("tools/list")
        seen = proxy.accepted
        await until(lambda: proxy.accepted > seen + 2)
        proxy.accept()
        assert "tools" in await front.heard.answer(key)


async def test_a_call_to_a_server_that_stays_away_did_not_run() -> None:
    task_server = SdkTaskServer()
    async with AsyncExitStack() as stack:
        async with under_uvicorn(task_server.app, complaint=".*") as port:
            url = f"http://127.0.0.1:{port}/mcp"
            front = await stack.enter_async_context(http_lane(url, listens=False, patience=BRIEF))
        lost = await front.heard.loss(front.call("quick"))
        assert not lost.ran
        assert lost.unavailable is not None
        assert lost.unavailable.reason is Reason.UNREACHABLE


# --- Which server


@asynccontextmanager
async def answering(status: int, body: object) -> AsyncIterator[str]:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await JSONResponse(body, status_code=status)(scope, receive, send)

    async with under_uvicorn(app, complaint=".*") as port:
        yield f"http://127.0.0.1:{port}/mcp"


def error(code: int, data: object = None) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": "no such thing", "data": data}}


@pytest.mark.parametrize(
    ("status", "body", "reason", "words"),
    [
        (400, error(-32022, {"supported": ["2027-01-01", "x"]}), Reason.VERSION, "it names 2027-01-01, x"),
        (400, error(-32600), Reason.VERSION, "it answers: no such thing"),
        (404, error(-32601), Reason.VERSION, "it answers: no such thing"),
        (200, error(-32602), Reason.VERSION, "it answers: no such thing"),
        (400, {}, Reason.VERSION, "HTTP 400"),
        (200, error(-32603), Reason.SERVER_ERROR, "fails at server/discover: no such thing"),
        (404, {}, Reason.NOT_FOUND, "there is no MCP server"),
        (401, {}, Reason.UNAUTHORIZED, "wants a token"),
        (403, {}, Reason.FORBIDDEN, "does not let us in"),
        (500, {}, Reason.SERVER_ERROR, "HTTP 500"),
        (200, {}, Reason.NOT_MCP, "is not an MCP server"),
    ],
)
async def test_servers_that_are_not_of_this_revision(status: int, body: object, reason: Reason, words: str) -> None:
    async with answering(status, body) as url:
        with pytest.raises(UpstreamUnavailable, match=words) as refused:
            async with http_lane(url):
                pass
    assert refused.value.reason is reason


async def test_a_server_of_other_revisions_names_them() -> None:
    async with serve(ToolServer().server, eras="session") as site:
        with pytest.raises(UpstreamUnavailable, match=r"it names .*2025-11-25") as refused:
            async with http_lane(site.url):
                pass
    assert refused.value.reason is Reason.VERSION


async def test_an_error_about_the_gateways_credentials_is_not_the_clients_answer() -> None:
    async with task_lane(SdkTaskServer()) as (front, proxy), answering(401, error(-32001)) as url:
        proxy.upstreams = (int(url.split(":")[2].removesuffix("/mcp")),)
        proxy.cut()
        lost = await front.heard.loss(front.start("tools/list"))
        assert not lost.ran
        assert lost.unavailable is not None
        assert lost.unavailable.reason is Reason.UNAUTHORIZED


async def test_a_server_that_changes_its_revision_ends_the_lane() -> None:
    older = error(-32022, {"supported": ["2025-11-25"]})
    async with task_lane(SdkTaskServer()) as (front, proxy), answering(400, older) as url:
        proxy.upstreams = (int(url.split(":")[2].removesuffix("/mcp")),)
        proxy.cut()
        lost = await front.heard.loss(front.start("tools/list"))
        assert not lost.ran
        assert lost.unavailable is not None
        assert lost.unavailable.reason is Reason.VERSION
        await until(lambda: front.heard.closed)


# --- Changes


@asynccontextmanager
async def changing_lane() -> AsyncIterator[tuple[Front, CuttingProxy]]:
    async with (
        under_uvicorn(modern_only(new_changing_server().streamable_http_app()), complaint=".*") as port,
        cutting_proxy(port) as proxy,
        http_lane(proxy.url) as front,
    ):
        yield front, proxy


async def changed(front: Front, what: str) -> None:
    await front.heard.answer(front.call("change", what=what))


TOOLS, UPDATED = "notifications/tools/list_changed", "notifications/resources/updated"


async def test_changes_of_lists_and_of_subscribed_resources_belong_to_no_request() -> None:
    async with changing_lane() as (front, _):
        assert await front.ask("resources/subscribe", uri="notice://a") == {}
        for what in ("notice://a", "notice://b", "tools"):
            await changed(front, what)
        await until(lambda: front.heard.of(TOOLS))
        assert front.heard.notifications == [(UPDATED, {"uri": "notice://a"}, None), (TOOLS, None, None)]
        assert await front.ask("resources/subscribe", uri="notice://b") == {}
        assert await front.ask("resources/unsubscribe", uri="notice://a") == {}
        assert await front.ask("resources/unsubscribe", uri="notice://z") == {}
        assert await front.ask("resources/subscribe", uri="notice://c") == {}
        for what in ("notice://a", "notice://b", "notice://c"):
            await changed(front, what)
        await until(lambda: len(front.heard.of(UPDATED)) == 3)
        assert front.heard.of(UPDATED)[1:] == [{"uri": "notice://b"}, {"uri": "notice://c"}]


async def test_a_lane_that_leaves_the_lists_to_another_one_still_hears_of_its_resources() -> None:
    async with changing_lane() as (front, _):
        assert await front.ask("resources/subscribe", uri="notice://a") == {}
        front.lane.listen(False)
        assert await front.ask("resources/subscribe", uri="notice://b") == {}
        await changed(front, "tools")
        await changed(front, "notice://a")
        await until(lambda: front.heard.of(UPDATED))
        assert front.heard.of(TOOLS) == []
        front.lane.listen(True)
        assert await front.ask("resources/subscribe", uri="notice://c") == {}
        await changed(front, "tools")
        await until(lambda: front.heard.of(TOOLS))


async def test_many_subscriptions_at_once_are_few_requests() -> None:
    task_server = SdkTaskServer()
    async with task_lane(task_server) as (front, _):
        keys = [front.start("resources/subscribe", uri=f"notice://{number}") for number in range(100)]
        for key in keys:
            assert await front.heard.answer(key) == {}
        assert len(task_server.requests("subscriptions/listen")) < 5
        assert len(task_server.requests("subscriptions/listen")[-1]["notifications"]["resourceSubscriptions"]) == 100


async def test_a_broken_subscription_is_repeated_with_a_cue_for_everything() -> None:
    task_server = SdkTaskServer()
    async with task_lane(task_server) as (front, proxy):
        assert await front.ask("resources/subscribe", uri="notice://a") == {}
        front.heard.notifications.clear()
        asked = len(task_server.requests("subscriptions/listen"))
        proxy.cut()
        await until(lambda: front.heard.of(UPDATED))
        assert len(task_server.requests("subscriptions/listen")) == asked + 1
        assert {method for method, _, _ in front.heard.notifications} >= {TOOLS, UPDATED}
        task_server.stop_listeners()
        await until(lambda: len(front.heard.of(UPDATED)) == 2)


async def test_a_server_that_does_not_listen_refuses_subscriptions_with_its_own_error() -> None:
    server = MCPServer("no-changes", version="1", log_level="WARNING", subscriptions=False)
    async with (
        under_uvicorn(modern_only(server.streamable_http_app())) as port,
        http_lane(f"http://127.0.0.1:{port}/mcp") as front,
    ):
        assert (await front.ask("resources/subscribe", uri="notice://a"))["code"] == -32601
        refused = await front.ask("resources/subscribe", uri=7)
        assert refused == {"code": -32602, "message": "uri is 7; it must be a string"}


async def test_a_resource_that_the_server_does_not_honour_is_refused() -> None:
    task_server = SdkTaskServer()
    task_server.honours = lambda wanted: {**wanted, "resourceSubscriptions": wanted["resourceSubscriptions"][:1]}
    async with task_lane(task_server) as (front, _):
        assert await front.ask("resources/subscribe", uri="notice://a") == {}
        refused = await front.ask("resources/subscribe", uri="notice://b")
        assert refused["code"] == -32602
        assert "notice://b" in refused["message"]
