"""Decides which calls of a session run as tasks of 2025-11-25, and answers `tasks/get`, `tasks/cancel`, `tasks/list`.

These three are answered as JSON, without a row: they read, or send a message to the node that runs the task. Errors
have the status 200, because clients of this revision read a JSON-RPC error from no other.
"""

import asyncio

from starlette.requests import Request as HttpRequest

from perdure._core import session_tasks
from perdure._core.codes import INTERNAL_ERROR
from perdure._core.durable_calls import CallClient, TaskFacts, TaskSupport, client_of, task_support
from perdure._core.jsonrpc import JsonObject, Request, error_payload
from perdure._core.limits import Caller
from perdure._core.session_tasks import CANCEL, LIST
from perdure._core.states import CallState
from perdure.http.access import SessionAccess
from perdure.runtime.base import Tools
from perdure.sessions.calls_by_id import KnownCall, cancellation, find_answered, resume_if_waiting
from perdure.sessions.ledger import encode, encode_answer, name_of
from perdure.sessions.session import FirstAnswer, Session
from perdure.sessions.session_tasks import facts_of
from perdure.store.records import AnsweredPage, StreamRecord

PAGE = 100
"""Tasks in one answer to `tasks/list`: each takes some reads of the store."""

USUAL = TaskSupport.NEVER
"""A tool without a rule or a declaration does not run as a task: VS Code runs every tool as a task that may be one, and
shows nothing of results with `isError`."""

CANCEL_SECONDS = 5.0
"""Seconds for which a request waits until its task is cancelled, at whatever node: a tool need not stop for that."""

Answer = tuple[bytes | None, FirstAnswer | None]
"""The response to a request; or how its call is answered at once, if it becomes a task."""


class SessionTaskHandler:
    """Answers for the sessions whose tasks are Perdure's."""

    def __init__(self, access: SessionAccess, tools: Tools | None) -> None:
        self._access = access
        self._context = access.context
        self._tasks = access.context.tasks
        self._tools = tools

    async def announced(self, request: Request, owner: str, http: HttpRequest) -> JsonObject | None:
        """The capability that a new session's client is told of, if any tool runs as a task."""
        params = request.params or {}
        if not session_tasks.may_announce(params.get("protocolVersion")):
            return None
        found = session_tasks.has_task_tools(self._tasks.rules)
        if found is None:
            client = CallClient.from_params(params)
            tools = [] if self._tools is None else await self._tools.tools(owner, client, http)
            found = any(task_support("", {}, tool, usual=USUAL) is not TaskSupport.NEVER for tool in tools)
        return session_tasks.capability(lists=bool(owner)) if found else None

    async def __call__(self, session: Session, request: Request, http: HttpRequest) -> Answer:
        match request.method:
            case "tools/call":
                return await self._call(session, request, http)
            case "tasks/get" | "tasks/cancel" | "tasks/list":
                return await self._answer(session, request, http), None
        return None, None

    async def _call(self, session: Session, request: Request, http: HttpRequest) -> Answer:
        name, wants = name_of(request.params) or "", session_tasks.wants_task(request.params)
        rules, record, tool = self._tasks.rules, session.record, None
        has_rule = name in rules or "*" in rules
        if self._tools is not None and not has_rule:
            tool = await self._tools.tool(name, record.owner, client_of(record.client_params), http)
        support = task_support(name, rules, tool, usual=USUAL)
        is_known = has_rule or tool is not None  # of what is not known in time, the client has seen the declaration
        if wants and support is TaskSupport.NEVER and is_known:
            return error_payload(request.id, *session_tasks.FORBIDDEN), None
        if not wants and support is TaskSupport.REQUIRED:
            return error_payload(request.id, *session_tasks.REQUIRED), None

        def created(stream: StreamRecord) -> bytes:
            facts = TaskFacts(
                id=stream.id, created=stream.opened, updated=stream.opened, state=CallState.RUNNING, asks={}
            )
            task = self._tasks.view(facts, now=stream.opened)
            return encode_answer(request.id, encode(session_tasks.created(task, name)))

        return None, created if wants else None

    async def _answer(self, session: Session, request: Request, http: HttpRequest) -> bytes:
        params = request.params or {}
        if request.method == LIST:
            return await self._list(session, request, params.get("cursor"))
        store, owner = self._context.store, session.record.owner
        found = await find_answered(store, owner, params.get("taskId"))
        if found is None:
            return error_payload(request.id, *session_tasks.NOT_FOUND)
        await resume_if_waiting(found.row, http)
        facts = await facts_of(store, found.stream, found.row)
        if request.method == CANCEL:
            if facts.is_over:
                return error_payload(request.id, *session_tasks.OVER)
            facts = await self._cancel(found)
            if not facts.is_over:
                message = "The task is being cancelled, and the process that runs it has not said that it is"
                return error_payload(request.id, INTERNAL_ERROR, message)
            if facts.state is not CallState.CANCELLED:
                return error_payload(request.id, *session_tasks.OVER)  # its end came first
        return encode_answer(request.id, encode(self._tasks.view(facts, now=self._context.clock())))

    async def _list(self, session: Session, request: Request, cursor: object) -> bytes:
        """The tasks of a caller that is known, over all its sessions, the oldest first."""
        store, owner = self._context.store, session.record.owner
        if not owner:
            return error_payload(request.id, *session_tasks.NO_LIST)
        after = (0.0, "") if cursor is None else session_tasks.read_cursor(cursor)
        if after is None:
            return error_payload(request.id, *session_tasks.BAD_CURSOR)
        streams = await store.streams(AnsweredPage(Caller(owner, ""), after=after, limit=PAGE + 1))
        tasks: list[JsonObject] = []
        for stream in streams[:PAGE]:
            rows = await store.calls(stream.session, stream=stream.id)
            if len(rows) == 1:  # else it was forgotten meanwhile
                facts = await facts_of(store, stream, rows[0])
                tasks.append(self._tasks.view(facts, now=self._context.clock()))
        last = streams[PAGE - 1] if len(streams) > PAGE else None
        following = {} if last is None else {"nextCursor": session_tasks.cursor(last.opened, last.id)}
        return encode_answer(request.id, encode({"tasks": tasks, **following}))

    async def _cancel(self, found: KnownCall) -> TaskFacts:
        """Cancel a task, wherever it runs or waits, and wait until it is, for some time."""
        store, stream = self._context.store, found.stream
        cancelled = cancellation(stream, found.row, by="id")
        async with self._access.sessions.using(stream.session) as session:
            if session is not None:
                await session.cancel_call(cancelled, self._access.principal_calls.cancel)
        until = asyncio.get_running_loop().time() + CANCEL_SECONDS
        with self._context.waiters.watch(stream.id, until=until) as watch:
            while True:
                rows = await store.calls(stream.session, stream=stream.id)
                facts = await facts_of(store, stream, rows[0] if rows else found.row)
                if facts.is_over or not await watch.again():
                    return facts
