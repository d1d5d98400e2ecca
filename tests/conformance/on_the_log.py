"""Puts every tool call of the conformance suite on the log.

The suite's clients of 2026-07-28 bring no keys, and declare tasks in the `tasks-*` scenarios alone. What stands between
them and Perdure here does it for them, as a gateway could.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.shared.inbound import ERROR_CODE_HTTP_STATUS
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perdure._core.envelope import CALLS
from perdure._core.ids import RecordKind
from perdure.http.request import replayed
from perdure.store.interface import Store
from tests.support.clients.modern_requests import TASKS

CAPABILITIES = "io.modelcontextprotocol/clientCapabilities"
#: Numbers the calls, for those who have to tell them apart.
NUMBER = b"x-number"
JSON = (b"content-type", b"application/json")
#: Tools that ask by rounds: they do it first, and are tasks only behind that. Held, they would ask within their task.
ASK_FIRST = (
    "test_input_required_result",
    "test_elicitation",
    "test_sampling",
    "test_missing_capability",
    "test_streaming_elicitation",
)


class Gateway:
    """Stands in front of an application, and gives everything but tool calls through as it is."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        #: Tool calls so far.
        self.calls = 0
        #: Those that Perdure answered with a result.
        self.results = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (b"mcp-method", b"tools/call") in scope["headers"]:
            self.calls += 1
            await self.call(with_headers(scope, {NUMBER: b"%d" % self.calls}), receive, send)
        else:
            await self.app(scope, receive, send)

    async def call(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    async def on_tool(self, ctx: ServerRequestContext[Any, Any], call_next: CallNext) -> HandlerResult:
        """A middleware of the server behind, in front of its tools."""
        return await call_next(ctx)

    async def logged(self, store: Store) -> int:
        """How many calls went on the log."""
        raise NotImplementedError


class WithKeys(Gateway):
    """Gives each call a key of its own. Everything that a call says reaches its client, on the call's response."""

    async def call(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def seen(message: Message) -> None:
            self.results += b'"result":' in message.get("body", b"")
            await send(message)

        await self.app(with_headers(scope, {b"idempotency-key": b"call %d" % self.calls}), receive, seen)

    async def logged(self, store: Store) -> int:
        return sum((await store.count_states(RecordKind.CALL)).values())


class WithTasks(Gateway):
    """Declares tasks with each call, and follows the handle that comes back to the outcome, which the client gets.
    A tool begins when the handle is out: otherwise most of them would be faster, and answer themselves."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app)
        self._handles = 0
        self._begins: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def on_tool(self, ctx: ServerRequestContext[Any, Any], call_next: CallNext) -> HandlerResult:
        if ctx.method == "tools/call" and ctx.request is not None:
            await self._begins[ctx.request.headers[NUMBER.decode()]].wait()
        return await call_next(ctx)

    async def logged(self, store: Store) -> int:
        return self._handles

    async def call(self, scope: Scope, receive: Receive, send: Send) -> None:
        begins = self._begins[str(self.calls)]
        body = await read_body(receive)
        try:
            request = json.loads(body)
            declared = request["params"]["_meta"][CAPABILITIES]
            declared["extensions"] = {**declared.get("extensions", {}), TASKS: {}, CALLS: {}}
        except (ValueError, KeyError, TypeError, AttributeError):
            await self.app(scope, replayed(body), send)  # Perdure has to refuse it
            return
        if str(request["params"].get("name")).startswith(ASK_FIRST):
            begins.set()
            await self.app(scope, staying(body), send)
            return
        status, [*before, answer] = await self.post(scope, json.dumps(request).encode())
        begins.set()
        if answer.get("result", {}).get("resultType") == "task":
            self._handles += 1
            answer = await self.outcome(scope, request, answer["result"]["taskId"])
            status = ERROR_CODE_HTTP_STATUS.get(answer["error"]["code"], 200) if "error" in answer else 200
        assert not before, f"nothing comes in front of a handle, but {before}"
        self.results += "result" in answer
        await send({"type": "http.response.start", "status": status, "headers": [JSON]})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    async def outcome(self, scope: Scope, request: dict[str, Any], task: str) -> dict[str, Any]:
        """Poll the task until it is over. Perdure holds each poll, because the gateway declares `dev.perdure/calls`."""
        polled = with_headers(scope, {b"mcp-method": b"tasks/get", b"mcp-name": task.encode()})
        params = {"taskId": task, "_meta": request["params"]["_meta"]}
        poll = {"jsonrpc": "2.0", "id": "poll", "method": "tasks/get", "params": params}
        while True:
            status, [said] = await self.post(polled, json.dumps(poll).encode())
            assert status == 200, said
            match said["result"]["status"]:
                case "completed":
                    return {"jsonrpc": "2.0", "id": request["id"], "result": said["result"]["result"]}
                case "failed":
                    return {"jsonrpc": "2.0", "id": request["id"], "error": said["result"]["error"]}
                case other:
                    assert other == "working", said

    async def post(self, scope: Scope, body: bytes) -> tuple[int, Sequence[dict[str, Any]]]:
        """Post a message; the status, and all messages of the response, the answer last."""
        told: list[Message] = []

        async def take(message: Message) -> None:
            told.append(message)

        await self.app(with_headers(scope, {b"content-length": b"%d" % len(body)}), staying(body), take)
        [start, *parts] = told
        content = b"".join(part["body"] for part in parts)
        if JSON in start["headers"]:
            return start["status"], [json.loads(content)]
        lines = content.decode().splitlines()
        return start["status"], [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def with_headers(scope: Scope, headers: dict[bytes, bytes]) -> Scope:
    kept = [(name, value) for name, value in scope["headers"] if name not in headers]
    return {**scope, "headers": [*kept, *headers.items()]}


async def read_body(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body


def staying(body: bytes) -> Receive:
    """The body of a client that waits for its answer."""
    unread = [body]

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError

    return receive
