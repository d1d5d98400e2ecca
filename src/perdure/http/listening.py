"""Serves `subscriptions/listen` of 2026-07-28: an acknowledgement, notifications of changes and of tasks, and an end.

The SDK's own handler gets every request that is not a valid request to listen, and refuses it. It also gets every
request if this process cannot subscribe to its own server. A listener may stay for days, so only the id and the filter
of its request are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from perdure._core import sse
from perdure._core.durable_calls import TaskFacts
from perdure._core.envelope import LISTEN, SUBSCRIPTION
from perdure._core.limits import Quota, share_of, weigh
from perdure._core.listening import ACKNOWLEDGED, METHODS, BadFilter, Cue, read_filter
from perdure.errors import StoreError
from perdure.http.access import SessionAccess, refuse_full
from perdure.http.credentials import caller_of, ending_with_token, principal_of
from perdure.http.event_stream import BREAK_OFF, EventStream
from perdure.http.refusals import HttpRefusal, Refusal
from perdure.http.request import Headers, ModernRequest, needs_tasks, read_modern, replayed_first
from perdure.sessions.durable_calls import DurableCalls
from perdure.sessions.listening import ChangeListener, Listening, TooManyResources
from perdure.store.records import SessionRecord

TASK_CHANGED = "notifications/tasks"
TASK_IDS = "taskIds"

AT_ONCE = 64
"""Notifications in one write: a client that reads slowly is waited for in between."""

MAX_TASKS = 100
"""Tasks that one listener may name: each is followed by a task of this process. A client that has more listens twice,
or polls."""

_WAIT = 60.0
"""Seconds of one wait for a change; the next one follows."""

_LATER = 1.0
"""Seconds until a task is read again after the store has failed."""

_EVENT = b"event: message\r\ndata: "
_METHODS = tuple(method.encode() for method in sorted(METHODS))

Otherwise = Callable[[Scope, Receive, Send, Headers], Awaitable[None]]


def _differs(before: TaskFacts, now: TaskFacts) -> bool:
    """Whether a listener is notified of a change: of a task's state or its questions, not of its progress."""
    return (before.state, before.asks.keys()) != (now.state, now.asks.keys())


@dataclass(slots=True, eq=False)
class _NamedTasks:
    """The tasks that one listener has named, and that belong to its caller."""

    _calls: DurableCalls
    _tasks: Sequence[SessionRecord]
    _wanted: bool
    _due: dict[str, TaskFacts] = field(default_factory=dict)
    """The newest state of each task that the listener is to be notified of."""
    _open: int = 0
    _on_due: Callable[[], None] = lambda: None
    _following: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def honoured(self) -> Mapping[str, Any]:
        return {TASK_IDS: [record.id for record in self._tasks]} if self._wanted else {}

    @property
    def is_over(self) -> bool:
        return self._wanted and not self._open and not self._due

    def watch(self, on_due: Callable[[], None]) -> None:
        self._on_due = on_due
        self._open = len(self._tasks)
        self._following = [
            asyncio.create_task(self._follow(record), name="perdure-task-listener") for record in self._tasks
        ]

    def take(self) -> Sequence[Cue]:
        due, self._due = self._due, {}
        return [Cue(TASK_CHANGED, self._calls.view(facts)) for facts in due.values()]

    def close(self) -> None:
        for task in self._following:
            task.cancel()

    async def _follow(self, record: SessionRecord) -> None:
        """Report the state of a task, and each change of it, until the task has ended."""
        seen: TaskFacts | None = None
        try:
            while seen is None or not seen.is_over:
                try:
                    if seen is None:
                        facts = await self._calls.facts(record)
                    else:
                        facts = await self._calls.wait(record, partial(_differs, seen), seconds=_WAIT)
                except StoreError:
                    await asyncio.sleep(_LATER)
                    continue
                if facts is None:
                    return  # it has expired
                if seen is None or _differs(seen, facts):
                    seen = self._due[record.id] = facts
                    self._on_due()
        finally:
            self._open -= 1
            self._on_due()


@dataclass(slots=True, eq=False)
class _Listener:
    """The response to one listener."""

    id: int | str
    _keepalive: float
    _timeout: float
    sources: list[ChangeListener | _NamedTasks] = field(default_factory=list)
    """It ends by itself once nothing more will be due from any of them."""
    is_ended: bool = False
    """The server ends it: its client listens elsewhere."""
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self) -> None:
        self.is_ended = True
        self._wake.set()

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write until the server ends it, the token expires, or the client leaves."""

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self._timeout):
                await send(message)

        response = EventStream(receive, send_in_time, break_off=scope.get(BREAK_OFF))
        with ending_with_token(scope, self.end):
            await response.serve(asyncio.create_task(self._write(response), name="perdure-listener"), end=self.end)

    async def _write(self, response: EventStream) -> None:
        for source in self.sources:
            source.watch(self._wake.set)
        await response.write(self._frame(Cue(ACKNOWLEDGED, {"notifications": self.honoured})))
        while True:
            self._wake.clear()
            if due := [told for source in self.sources for told in source.take()]:
                for start in range(0, len(due), AT_ONCE):
                    await response.write(b"".join(map(self._frame, due[start : start + AT_ONCE])))
            elif self.is_ended or all(source.is_over for source in self.sources):
                result = {"resultType": "complete", "_meta": {SUBSCRIPTION: self.id}}
                completion = _framed({"jsonrpc": "2.0", "id": self.id, "result": result})
                return await response.write(completion, last=True)
            else:
                try:
                    async with asyncio.timeout(self._keepalive):
                        await self._wake.wait()
                except TimeoutError:
                    await response.write(sse.KEEP_ALIVE)

    @property
    def honoured(self) -> Mapping[str, Any]:
        """The part of the filter that is served."""
        return {name: value for source in self.sources for name, value in source.honoured.items()}

    def _frame(self, told: Cue) -> bytes:
        params = {**told.params, "_meta": {SUBSCRIPTION: self.id}}
        return _framed({"jsonrpc": "2.0", "method": told.method, "params": params})


class ListeningHandler:
    """Serves listeners, `max_listeners` at once, and `max_share` of them of one caller."""

    def __init__(self, access: SessionAccess, listening: Listening, calls: DurableCalls | None) -> None:
        """`calls`: the tasks, unless the server serves its own."""
        self._access = access
        self._listening = listening
        self._calls = calls
        self._open: set[_Listener] = set()
        most = access.settings.max_listeners
        self._quota = Quota(most, each=share_of(most, access.settings.max_share))

    def __len__(self) -> int:
        return len(self._open)

    def end(self) -> None:
        """End all listeners with a completion result: their clients listen elsewhere."""
        for listening in self._open:
            listening.end()

    async def __call__(
        self, scope: Scope, receive: Receive, send: Send, headers: Headers, *, otherwise: Otherwise
    ) -> None:
        """Serve a listener; `otherwise` gets what cannot be served here, with its body."""
        body = await self._access.bodies.read(receive, headers)
        async with AsyncExitStack() as stack:
            listening = await self._begin(scope, headers, body, stack)
            if listening is not None:
                del body
                await listening.serve(scope, receive, send)
                return
        await otherwise(scope, replayed_first(body, receive), send, headers)

    async def _begin(self, scope: Scope, headers: Headers, body: bytes, stack: AsyncExitStack) -> _Listener | None:
        """Read a request and open what it wants to hear; `None` if it cannot be served here. What it takes in memory
        counts until then; what is kept of it, as long as it listens."""
        settings, context = self._access.settings, self._access.context
        caller = caller_of(principal_of(scope), scope)
        self._access.refuse_work(caller, size := weigh(body))
        with context.work.holding(caller, size):
            request = read_modern(scope, headers, body, size=0, json_only=False)
            if request is None or request.message.method != LISTEN:
                return None
            from mcp_types import SubscriptionsListenRequestParams
            from pydantic import ValidationError

            try:
                SubscriptionsListenRequestParams.model_validate(request.params, by_name=False)
            except ValidationError:
                return None
            refuse_full(self._quota.lacks(caller), Refusal.TOO_MANY_LISTENERS, self._quota, "max_listeners")
            self._access.refuse_readers(caller)
            listening = _Listener(request.message.id, settings.keepalive_interval, settings.stream_timeout)
            self._open.add(listening)
            stack.callback(self._open.discard, listening)
            stack.enter_context(self._quota.holding(caller))
            stack.enter_context(context.hub.open.holding(caller))
            try:
                changes = await self._listening.join(read_filter(request.params["notifications"]), caller=caller)
            except BadFilter as error:
                raise HttpRefusal(Refusal.BAD_FILTER, reason=error) from None
            except TooManyResources as full:
                if full.of_caller:
                    what = "the resources that listeners name"
                    raise HttpRefusal(Refusal.OWN_SHARE, limit=full.limit, what=what) from None
                raise HttpRefusal(Refusal.TOO_MANY_RESOURCES, limit=full.limit) from None
            if changes is None:  # only the server itself can serve this request
                await stack.aclose()
                return None
            stack.callback(changes.close)
            listening.sources.append(changes)
            if self._calls is not None:
                tasks = await _open_tasks(request, self._calls)
                stack.callback(tasks.close)
                listening.sources.append(tasks)
            if listening.is_ended:
                raise HttpRefusal(Refusal.STOPPING)
            stack.enter_context(context.work.holding(caller, 2 * len(json.dumps(listening.honoured))))
            return listening


async def _open_tasks(request: ModernRequest, calls: DurableCalls) -> _NamedTasks:
    """Open the tasks that a listener names, at whatever node. Tasks of other callers are left out, as unknown ones."""
    names = request.params["notifications"].get(TASK_IDS)
    if names is None:
        return _NamedTasks(calls, (), False)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise HttpRefusal(Refusal.BAD_FILTER, reason=f"{TASK_IDS} must be a list of strings")
    if len(names) > MAX_TASKS:
        reason = f"{TASK_IDS} may name {MAX_TASKS} tasks, not {len(names)}"
        raise HttpRefusal(Refusal.BAD_FILTER, reason=reason)
    if not request.client.takes_tasks:
        raise needs_tasks()
    found = [await calls.find(name, request.owner) for name in dict.fromkeys(names)]
    return _NamedTasks(calls, [record for record in found if record is not None and record.is_task], True)


def hearing_changes(send: Send, tell: Callable[[str, Mapping[str, Any] | None], None]) -> Send:
    """A `send` for a response of the SDK that also reports the changes in it: a tool of a server without subscriptions
    notifies its own caller alone. The SDK sends each event in one piece."""

    async def send_and_report(message: MutableMapping[str, Any]) -> None:
        body: bytes = message.get("body", b"")
        if body.startswith(_EVENT) and any(method in body for method in _METHODS):
            with contextlib.suppress(ValueError, AttributeError, RecursionError):
                said = json.loads(body.removeprefix(_EVENT))
                if (method := said.get("method")) in METHODS:
                    tell(method, said.get("params"))
        await send(message)

    return send_and_report


def _framed(message: Mapping[str, Any]) -> bytes:
    return sse.encode_message(json.dumps(message, separators=(",", ":")).encode())
