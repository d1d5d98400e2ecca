"""A server of 2026-07-28 in the test's own process that speaks tasks and keys, on the SDK's `MCPServer` over real HTTP.

It stands for any server that has the tasks extension, and for Perdure's where it has keys too. Its tools run beside the
requests that began them, wait at *gates* that the test opens, and are counted in `runs`. `asked` has every request.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.mcpserver import MCPServer
from mcp.shared.exceptions import MCPError
from mcp.shared.subscriptions import SUBSCRIPTION_ID_META_KEY
from mcp_types import CLIENT_CAPABILITIES_META_KEY, INVALID_PARAMS, Notification, RequestId, ToolAnnotations
from starlette.types import ASGIApp

from perdure._core.envelope import CALLS, CANCEL, KEY, TASKS

QUESTION = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
FRESH = {"ttlMs": 0, "cacheScope": "private"}
ISO = "2026-07-28T00:00:00Z"


@dataclass(kw_only=True)
class Job:
    """One run of a tool, and what became of it."""

    id: str
    running: asyncio.Task[None] | None = None
    questions: dict[str, str] = field(default_factory=dict)
    answers: defaultdict[str, asyncio.Future[str]] = field(default_factory=lambda: defaultdict(asyncio.Future))
    end: dict[str, Any] = field(default_factory=dict)
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    has_asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(self, question: str) -> str:
        key = f"q{len(self.answers)}"
        self.answers[key]  # asked from now on
        self.questions[key] = question
        self.has_asked.set()
        answer = await self.answers[key]
        del self.questions[key]
        return answer

    @property
    def requests(self) -> dict[str, Any]:
        params = {"mode": "form", "requestedSchema": QUESTION}
        return {
            key: {"method": "elicitation/create", "params": {**params, "message": question}}
            for key, question in self.questions.items()
        }

    def answer(self, responses: Mapping[str, Any]) -> None:
        for key, response in responses.items():
            if key in self.questions and not self.answers[key].done():
                self.answers[key].set_result(response["content"]["answer"])

    @property
    def task(self) -> dict[str, Any]:
        status = self.end.get("status") or ("input_required" if self.questions else "working")
        asked = {"inputRequests": self.requests} if status == "input_required" else {}
        times = {"createdAt": ISO, "lastUpdatedAt": ISO, "ttlMs": None, "pollIntervalMs": 20}
        return {"taskId": self.id, "status": status, **times, **asked, **self.end}


class SdkTaskServer:
    """`tasks`: calls become tasks at once, except those of `quick` and `safe`. `keys`: it knows Perdure's extension."""

    def __init__(self, *, tasks: bool = False, keys: bool = False) -> None:
        self.gates: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.runs: list[str] = []
        self.asked: list[tuple[str, RequestId | None, dict[str, Any]]] = []
        self.cancelled: list[str] = []
        self.jobs: dict[str, Job] = {}
        self.kept: dict[str, Any] = {}
        """What `server/discover` says of keys."""
        self.empty_pages = 0
        """Pages of `tools/list` before the one with the tools."""
        self.honours: Callable[[dict[str, Any]], dict[str, Any]] = dict
        """The part of a listener's filter that is acknowledged."""
        self._has_tasks, self._has_keys = tasks, keys
        self._changes: list[tuple[str, dict[str, Any]]] = []
        self._changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self.server = MCPServer("tasks", version="1", log_level="WARNING")
        for tool in (self.work, self.quick, self.ask, self.survey, self.fail):
            self.server.add_tool(tool)
        self.server.add_tool(self.safe, annotations=ToolAnnotations(idempotent_hint=True))

    @property
    def app(self) -> ASGIApp:
        app = self.server.streamable_http_app()
        self.server.session_manager.app.middleware.insert(0, self._serve)
        return app

    def requests(self, method: str) -> list[dict[str, Any]]:
        return [params for asked, _, params in self.asked if asked == method]

    def ids(self, method: str) -> list[RequestId | None]:
        return [request_id for asked, request_id, _ in self.asked if asked == method]

    # Tools

    async def work(self, gate: str) -> str:
        """Wait at a gate."""
        self.runs.append("work")
        await self.gates[gate].wait()
        return f"worked at {gate}"

    async def safe(self, gate: str) -> str:
        """The same, and it may run twice."""
        self.runs.append("safe")
        await self.gates[gate].wait()
        return f"worked at {gate}"

    async def quick(self) -> str:
        self.runs.append("quick")
        return "done"

    async def fail(self) -> str:
        self.runs.append("fail")
        raise MCPError(-32050, "it broke")

    async def ask(self, questions: list[str]) -> str:
        raise MCPError(-32603, "a tool that asks needs a task or a key")

    async def survey(self, questions: list[str]) -> str:
        """The same, one after the other."""
        return await self.ask(questions)

    async def _run(self, job: Job, name: str, arguments: Mapping[str, Any]) -> None:
        try:
            if name == "survey":
                self.runs.append("survey")
                said = " ".join([await job.ask(question) for question in arguments["questions"]])
            elif name == "ask":
                self.runs.append("ask")
                async with asyncio.TaskGroup() as group:
                    asking = [group.create_task(job.ask(question)) for question in arguments["questions"]]
                said = " ".join(task.result() for task in asking)
            else:
                said = await getattr(self, name)(**arguments)
            content = [{"type": "text", "text": said}]
            job.end = {"status": "completed", "result": {"content": content, "structuredContent": {"result": said}}}
        except MCPError as error:
            job.end = {"status": "failed", "error": {"code": error.code, "message": error.message}}
        except asyncio.CancelledError:
            self.cancelled.append(name)
            job.end = {"status": "cancelled"}
        finally:
            job.is_over.set()

    # Requests

    async def _serve(self, ctx: ServerRequestContext[Any, Any], call_next: CallNext) -> HandlerResult:
        params = dict(ctx.params or {})
        self.asked.append((ctx.method, ctx.request_id, params))
        match ctx.method:
            case "server/discover":
                found: Any = await call_next(ctx)
                extensions: dict[str, Any] = {TASKS: {}} if self._has_tasks else {}
                if self._has_keys:
                    extensions[CALLS] = self.kept
                return {**found, "capabilities": {**found["capabilities"], "extensions": extensions}}
            case "tools/list" if (page := int(params.get("cursor") or 0)) < self.empty_pages:
                return {"resultType": "complete", "tools": [], "nextCursor": str(page + 1), **FRESH}
            case "tools/list":
                return await call_next(replace(ctx, params={"_meta": params["_meta"]}))
            case "tools/call":
                return await self._call(ctx, call_next, params)
            case "tasks/get":
                return {"resultType": "complete", **self._job(params).task}
            case "tasks/update":
                self._job(params).answer(params["inputResponses"])
                return {"resultType": "complete"}
            case "tasks/cancel":
                self.cancel(self._job(params).id)
                return {"resultType": "complete"}
            case method if method == CANCEL:
                self.cancel(params["key"])
                return {"resultType": "complete"}
            case "subscriptions/listen":
                return await self._listen(ctx, params)
        return await call_next(ctx)

    def _job(self, params: Mapping[str, Any]) -> Job:
        if (job := self.jobs.get(params["taskId"])) is None:
            raise MCPError(INVALID_PARAMS, "no such task")
        return job

    def cancel(self, name: str) -> None:
        """End the run of a task, or of a call with a key."""
        running = self.jobs[name].running
        assert running is not None
        running.cancel()

    async def _call(
        self, ctx: ServerRequestContext[Any, Any], call_next: CallNext, params: dict[str, Any]
    ) -> HandlerResult:
        meta = params["_meta"]
        declared = TASKS in (meta[CLIENT_CAPABILITIES_META_KEY].get("extensions") or {})
        is_task = self._has_tasks and declared and params["name"] not in ("quick", "safe")
        key = meta.get(KEY) if self._has_keys else None
        if not is_task and key is None:
            return await call_next(ctx)
        name = key or f"task-{len(self.jobs)}"
        if (job := self.jobs.get(name)) is None:
            job = self.jobs[name] = Job(id=name)
            job.running = asyncio.create_task(self._run(job, params["name"], params.get("arguments") or {}))
        if is_task:
            return {**{k: v for k, v in job.task.items() if k not in ("result", "inputRequests")}, "resultType": "task"}
        job.answer(params.get("inputResponses") or {})
        return await self._round(job)

    async def _round(self, job: Job) -> dict[str, Any]:
        """The answer to a call with a key; or its questions, for a client without tasks."""
        job.has_asked.clear()
        if not job.questions or all(job.answers[key].done() for key in job.questions):
            over, asked = asyncio.ensure_future(job.is_over.wait()), asyncio.ensure_future(job.has_asked.wait())
            try:
                await asyncio.wait({over, asked}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                over.cancel()
                asked.cancel()
        if not job.is_over.is_set():
            return {"resultType": "input_required", "inputRequests": job.requests, "requestState": f"state of {job.id}"}
        if job.end["status"] == "completed":
            return {"resultType": "complete", **job.end["result"]}
        error = job.end.get("error") or {"code": -32800, "message": "cancelled"}
        raise MCPError(error["code"], error["message"])

    # Listening

    def change(self, kind: Literal["tools", "resource"], uri: str = "") -> None:
        """Publish a change to all listeners."""
        tools: tuple[str, dict[str, Any]] = ("notifications/tools/list_changed", {})
        self._changes.append(tools if kind == "tools" else ("notifications/resources/updated", {"uri": uri}))
        self._changed.set()
        self._changed = asyncio.Event()

    def stop_listeners(self) -> None:
        """End all subscriptions in good order, as at a stop."""
        self._stopping.set()
        self._changed.set()
        self._stopping, self._changed = asyncio.Event(), asyncio.Event()

    async def _listen(self, ctx: ServerRequestContext[Any, Any], params: dict[str, Any]) -> dict[str, Any]:
        heard = len(self._changes)

        async def say(method: str, params: dict[str, Any]) -> None:
            meta = {SUBSCRIPTION_ID_META_KEY: ctx.request_id}
            note = Notification[dict[str, Any], str](method=method, params={**params, "_meta": meta})
            await ctx.session.send_notification(note, related_request_id=ctx.request_id)  # type: ignore[arg-type]

        stopping = self._stopping
        await say("notifications/subscriptions/acknowledged", {"notifications": self.honours(params["notifications"])})
        while not stopping.is_set():
            changed = self._changed
            while heard < len(self._changes):
                heard += 1
                await say(*self._changes[heard - 1])
            await changed.wait()
        return {"resultType": "complete", "_meta": {SUBSCRIPTION_ID_META_KEY: ctx.request_id}}
