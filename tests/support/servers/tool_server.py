"""A fresh MCP server for each test, with tools that stop where the test wants them to.

A tool waits at a *gate*, which the test opens; what a tool did is written down in `seen`. Both live in the test's own
process, so a test waits for what happened and never for time.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import mcp_types as types
from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.auth.provider import AccessToken, TokenVerifier
from mcp.server.context import ServerRequestContext
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.tools import Tool
from mcp.server.session import ServerSession
from mcp.shared.exceptions import MCPError
from mcp.shared.message import ServerMessageMetadata
from pydantic import BaseModel

#: Set by middleware of a test; tools read it to show that contexts travel.
trace: contextvars.ContextVar[str] = contextvars.ContextVar("trace", default="")


class Guests(TokenVerifier):
    """Knows ann and bob, each by any number of tokens: `ann-1`, `ann-2`."""

    async def verify_token(self, token: str) -> AccessToken | None:
        person = token.partition("-")[0]
        known = person in ("ann", "bob")
        return AccessToken(token=token, client_id="app", subject=person, scopes=[]) if known else None


class Fatal(BaseException):
    """What no tool should raise, and some do: it passes by every `except Exception`."""


class Answer(BaseModel):
    answer: str


#: Making a tool of a function takes 2 ms, and there are many tests: each is made once, without its server.
_made: dict[object, Tool] = {}


def _tool(method: Callable[..., Any]) -> Tool:
    function = getattr(method, "__func__", method)
    if function not in _made:
        _made[function] = Tool.from_function(method).model_copy(update={"fn": function})
    return _made[function].model_copy(update={"fn": method})


class ToolServer:
    """The server, its gates and what its tools saw."""

    def __init__(self, *, logs: bool = False, subscribes: bool = False) -> None:
        self.gates: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.thread_gate = threading.Event()
        self.seen: list[str] = []
        self.sent = 0
        self.kept: ServerSession | None = None
        self.kept_token: str | int | None = None
        self.levels: list[str] = []
        self.handshakes = 0
        self.subscribing: list[str] = []
        self.subscribers: defaultdict[str, list[ServerSession]] = defaultdict(list)
        tools = (
            self.count, self.flood, self.announce, self.wait, self.ask, self.sample, self.roots, self.close,
            self.close_standalone, self.boom, self.die, self.whoami, self.keep, self.log, self.stubborn, self.in_thread,
            self.own_token, self.keep_token, self.guess_token, self.remember, self.credentials, self.quiz,
        )  # fmt: skip
        self.server = MCPServer("tools", version="1", log_level="WARNING", tools=[_tool(tool) for tool in tools])
        if logs:
            self._declare_logging()
        if subscribes:
            self._declare_subscriptions()

    def open(self, gate: str) -> None:
        self.gates[gate].set()

    def _declare_logging(self) -> None:
        async def set_level(ctx: ServerRequestContext[Any], params: types.SetLevelRequestParams) -> types.EmptyResult:
            self.levels.append(params.level)
            return types.EmptyResult()

        self.server.streamable_http_app()
        self.server.session_manager.app.add_request_handler("logging/setLevel", types.SetLevelRequestParams, set_level)

    def _declare_subscriptions(self) -> None:
        async def subscribe(ctx: ServerRequestContext[Any], params: types.SubscribeRequestParams) -> types.EmptyResult:
            self.subscribing.append(f"+{params.uri}")
            self.subscribers[params.uri].append(ctx.session)
            return types.EmptyResult()

        async def unsubscribe(
            ctx: ServerRequestContext[Any], params: types.UnsubscribeRequestParams
        ) -> types.EmptyResult:
            self.subscribing.append(f"-{params.uri}")
            self.subscribers.pop(params.uri, None)
            return types.EmptyResult()

        async def initialized(_: ServerRequestContext[Any], __: types.NotificationParams | None) -> None:
            self.handshakes += 1

        self.server.streamable_http_app()
        app = self.server.session_manager.app
        app.add_request_handler("resources/subscribe", types.SubscribeRequestParams, subscribe)
        app.add_request_handler("resources/unsubscribe", types.UnsubscribeRequestParams, unsubscribe)
        app.add_notification_handler("notifications/initialized", types.NotificationParams, initialized)

    async def update(self, uri: str) -> None:
        """A resource has changed: its subscribers here are notified."""
        for session in self.subscribers[uri]:
            await session.send_resource_updated(uri)

    # Tools

    async def count(self, n: int, ctx: Context, gate: str = "", pauses: Sequence[int] = ()) -> str:
        """Report progress 1 … n. After each number in `pauses`, wait at the gate `<gate>/<number>`."""
        for number in range(n + 1):
            if number:
                await ctx.report_progress(number, n)
            if number in pauses:
                await self.gates[f"{gate}/{number}"].wait()
        self.seen.append(f"counted {n}")
        return f"counted to {n}"

    async def flood(self, n: int, size: int, ctx: Context, gate: str = "") -> str:
        """Report progress 1 … n with long messages; after the first, wait at the gate."""
        for number in range(1, n + 1):
            await ctx.report_progress(number, n, "x" * size)
            self.sent = number
            if gate and number == 1:
                await self.gates[gate].wait()
        self.seen.append("flooded")
        return f"flooded {n}"

    async def announce(self, n: int, ctx: Context, start: int = 1) -> str:
        """Send numbered notices that belong to no call: they go to the standalone stream."""
        for number in range(start, start + n):
            await ctx.session.send_resource_updated(f"notice://{number}")
        return f"announced {n}"

    async def wait(self, gate: str) -> str:
        self.seen.append(f"waiting at {gate}")
        try:
            await self.gates[gate].wait()
        except asyncio.CancelledError:
            self.seen.append(f"cancelled at {gate}")
            raise
        return f"went through {gate}"

    async def ask(self, question: str, ctx: Context, alone: bool = False) -> str:
        """Elicit; `alone` asks on the standalone stream."""
        if not alone:
            result = await ctx.elicit(question, Answer)
            return result.data.answer if result.action == "accept" else result.action
        schema = {"type": "object", "properties": {"answer": {"type": "string"}}}
        params = types.ElicitRequestFormParams(message=question, requested_schema=schema)
        answer = await ctx.session.send_request(types.ElicitRequest(params=params), types.ElicitResult)
        return str((answer.content or {}).get("answer"))

    async def quiz(self, question: str, gate: str, ctx: Context) -> str:
        """Say something, wait at the gate, then elicit."""
        await ctx.report_progress(1)
        await self.log("ready?", ctx)
        await self.gates[gate].wait()
        return await self.ask(question, ctx)

    async def sample(self, prompt: str, ctx: Context, alone: bool = False) -> str:
        message = types.SamplingMessage(role="user", content=types.TextContent(type="text", text=prompt))
        params = types.CreateMessageRequestParams(messages=[message], max_tokens=9)
        result = await ctx.session.send_request(
            types.CreateMessageRequest(params=params), types.CreateMessageResult, metadata=self._related(ctx, alone)
        )
        assert isinstance(result.content, types.TextContent)
        return result.content.text

    async def roots(self, ctx: Context, alone: bool = False) -> str:
        result = await ctx.session.send_request(
            types.ListRootsRequest(), types.ListRootsResult, metadata=self._related(ctx, alone)
        )
        return ", ".join(str(root.uri) for root in result.roots)

    @staticmethod
    def _related(ctx: Context, alone: bool) -> ServerMessageMetadata | None:
        return None if alone else ServerMessageMetadata(related_request_id=ctx.request_id)

    async def close(self, before: int, after: int, ctx: Context, gate: str = "") -> str:
        """Some progress, close this call's own connection (SEP-1699), wait at the gate, more progress."""
        for number in range(1, before + 1):
            await ctx.report_progress(number)
        await ctx.close_sse_stream()
        self.seen.append("closed")
        if gate:
            await self.gates[gate].wait()
        for number in range(before + 1, before + after + 1):
            await ctx.report_progress(number)
        return "came back"

    async def close_standalone(self, ctx: Context) -> str:
        await ctx.close_standalone_sse_stream()
        return "closed"

    async def boom(self, code: int = 0) -> str:
        """Raise: a result with `isError`, or with a code a JSON-RPC error."""
        raise MCPError(code, "boom") if code else RuntimeError("boom")

    async def die(self, how: str) -> str:
        """Take the whole runtime down."""
        if how == "raises":
            raise Fatal("dead")
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await self.gates["never"].wait()
        return "alive"

    async def whoami(self, header: str, ctx: Context) -> str:
        headers = ctx.headers or {}
        return f"{headers.get(header)} {trace.get()}"

    async def keep(self, ctx: Context) -> str:
        """Keep the session object, as a tool does that reports later."""
        self.kept = ctx.session
        return "kept"

    async def log(self, text: str, ctx: Context) -> str:
        """A log message that belongs to this call."""
        params = types.LoggingMessageNotificationParams(level="info", data=text)
        await ctx.session.send_notification(types.LoggingMessageNotification(params=params), ctx.request_id)
        return "logged"

    async def stubborn(self, gate: str, ctx: Context) -> str:
        """Do not stop when cancelled, and continue to send and to ask."""
        with anyio.CancelScope(shield=True):
            self.seen.append("stubborn")
            await self.gates[gate].wait()
            await ctx.report_progress(1)
            self.seen.append("talked")
            try:
                await ctx.elicit("Is anybody there?", Answer)
            except MCPError:
                self.seen.append("nobody listens")
        return "too late"

    def in_thread(self) -> str:
        """Block a thread, which cannot be cancelled."""
        self.seen.append("in a thread")
        self.thread_gate.wait()
        return "out of the thread"

    async def own_token(self, word: str, ctx: Context, alone: bool = False) -> str:
        """Send progress under a token that the tool made up."""
        params = types.ProgressNotificationParams(progress_token=word, progress=1)
        await ctx.session.send_notification(
            types.ProgressNotification(params=params), None if alone else ctx.request_id
        )
        return "sent"

    async def keep_token(self, ctx: Context) -> str:
        """Keep the session object and the token, for `late_progress`."""
        self.kept, meta = ctx.session, ctx.request_context.meta
        self.kept_token = None if meta is None else meta.get("progress_token")
        return "kept"

    async def late_progress(self) -> None:
        """What a tool that ended long ago may still try to send."""
        assert self.kept is not None
        assert self.kept_token is not None
        params = types.ProgressNotificationParams(progress_token=self.kept_token, progress=99)
        await self.kept.send_notification(types.ProgressNotification(params=params))

    async def guess_token(self, ctx: Context) -> str:
        """Send progress under this call's own number, asked or not."""
        number = int(ctx.request_id)
        params = types.ProgressNotificationParams(progress_token=number, progress=1)
        for related in (None, ctx.request_id):
            await ctx.session.send_notification(types.ProgressNotification(params=params), related)
        return "guessed"

    async def credentials(self, gate: str = "") -> str:
        """The token with which this tool was called; with a gate, once that is open."""
        if gate:
            await self.gates[gate].wait()
        token = get_access_token()
        return "nobody" if token is None else token.token

    async def remember(self, ctx: Context) -> str:
        """What the runtime knows of the client."""
        params = ctx.session.client_params
        assert params is not None
        return f"{params.client_info.name} speaks {ctx.protocol_version}"
