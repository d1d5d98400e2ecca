"""Serves `subscriptions/listen` of 2026-07-28: an acknowledgement, notifications of changes and of tasks, and an end.

A request that is none to listen goes to the SDK's own handler, which refuses it. So does every request if this process
cannot subscribe to its own server. A listener may stay for days, so of its request only the id and the filter
are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from mcp_types import SubscriptionsListenRequestParams
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from perdure._core import sse
from perdure._core.durable_calls import TaskFacts
from perdure._core.envelope import LISTEN, SUBSCRIPTION
from perdure._core.limits import Caller, Quota, share_of, weigh
from perdure._core.listening import ACKNOWLEDGED, METHODS, BadFilter, Cue, read_filter
from perdure.errors import StoreError
from perdure.http.access import SessionAccess, refuse_full
from perdure.http.credentials import EXPIRY, Expiry, caller_of, principal_of
from perdure.http.event_stream import BREAK_OFF, EventStream
from perdure.http.refusals import HttpRefusal, Refusal
from perdure.http.request import Headers, ModernRequest, needs_tasks, read_modern, replayed_first
from perdure.sessions.durable_calls import DurableCalls
from perdure.sessions.listening import Listening, TooManyResources
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


class ListenSource(Protocol):
    """Has the notifications of one kind for one listener."""

    @property
    def honoured(self) -> Mapping[str, Any]:
        """Its part of the acknowledged filter."""

    @property
    def is_over(self) -> bool:
        """Nothing more will be due. A listener ends by itself once that is so of all its sources."""

    def watch(self, on_due: Callable[[], None]) -> None:
        """Call `on_due` whenever something is due, or nothing will be any more."""

    def take(self) -> Sequence[Cue]:
        """All that is due at the moment, in its order."""

    def close(self) -> None:
        """The listener is gone."""


def _shown(facts: TaskFacts) -> tuple[object, ...]:
    """The part of a task whose change a listener is notified of; progress is not in it."""
    return facts.state, frozenset(facts.asks)


@dataclass(slots=True, eq=False)
class _TasksOfOne:
    """The tasks that one listener has named and that are its own."""

    _calls: DurableCalls
    _tasks: Sequence[SessionRecord]
    _wanted: bool
    _due: dict[str, TaskFacts] = field(default_factory=dict)
    """The newest state of each that is to be told."""
    _open: int = 0
    _on_due: Callable[[], None] = lambda: None
    _following: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def honoured(self) -> Mapping[str, Any]:
        return {TASK_IDS: [record.id for record in self._tasks]} if self._wanted else {}

    @property
    def is_over(self) -> bool:
        """All its tasks have ended."""
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
        """Tell how a task is, and whenever that changes, to its end."""
        seen: TaskFacts | None = None
        try:
            while seen is None or not seen.is_over:
                try:
                    facts = await self._next(record, seen)
                except StoreError:
                    await asyncio.sleep(_LATER)
                    continue
                if facts is None:
                    return  # it has expired
                if seen is None or _shown(facts) != _shown(seen):
                    seen = self._due[record.id] = facts
                    self._on_due()
        finally:
            self._open -= 1
            self._on_due()

    async def _next(self, record: SessionRecord, seen: TaskFacts | None) -> TaskFacts | None:
        if seen is None:
            return await self._calls.facts(record)
        before = _shown(seen)
        return await self._calls.wait(record, lambda facts: _shown(facts) != before, seconds=_WAIT)


@dataclass(slots=True, eq=False)
class _Listening:
    """One response to a listener. It has a task of its own only while it writes or waits for something to write."""

    id: int | str
    _keepalive: float
    _timeout: float
    sources: list[ListenSource] = field(default_factory=list)
    is_ended: bool = False
    """The server ends it: its client listens elsewhere."""
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self) -> None:
        self.is_ended = True
        self._wake.set()

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write until the server ends it, the token expires, or the client leaves."""
        response = EventStream(receive, send, abort=scope.get(BREAK_OFF), timeout=self._timeout)
        expiry: Expiry | None = scope[EXPIRY]
        watch = None if expiry is None else expiry.watch(self.end)
        try:
            await response.serve(asyncio.create_task(self._write(response), name="perdure-listener"), end=self.end)
        finally:
            if watch is not None:
                watch.cancel()

    async def _write(self, response: EventStream) -> None:
        for source in self.sources:
            source.watch(self._wake.set)
        await response.write(self._acknowledgement())
        while True:
            self._wake.clear()
            if due := [told for source in self.sources for told in source.take()]:
                for start in range(0, len(due), AT_ONCE):
                    await response.write(b"".join(map(self._frame, due[start : start + AT_ONCE])))
            elif self.is_ended or all(source.is_over for source in self.sources):
                return await response.write(self._completion(), last=True)
            else:
                try:
                    async with asyncio.timeout(self._keepalive):
                        await self._wake.wait()
                except TimeoutError:
                    await response.keep_alive()

    @property
    def honoured(self) -> Mapping[str, Any]:
        """What of its filter is served."""
        return {name: value for source in self.sources for name, value in source.honoured.items()}

    def _acknowledgement(self) -> bytes:
        return self._frame(Cue(ACKNOWLEDGED, {"notifications": self.honoured}))

    def _frame(self, told: Cue) -> bytes:
        params = {**told.params, "_meta": {SUBSCRIPTION: self.id}}
        return _framed({"jsonrpc": "2.0", "method": told.method, "params": params})

    def _completion(self) -> bytes:
        result = {"resultType": "complete", "_meta": {SUBSCRIPTION: self.id}}
        return _framed({"jsonrpc": "2.0", "id": self.id, "result": result})


class ListeningHandler:
    """Serves listeners, `max_listeners` at once, and `max_share` of them of one caller."""

    def __init__(self, access: SessionAccess, listening: Listening, calls: DurableCalls | None) -> None:
        """`calls`: the tasks, unless the server serves its own."""
        self._access = access
        self._listening = listening
        self._calls = calls
        self._open: set[_Listening] = set()
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

    async def _begin(self, scope: Scope, headers: Headers, body: bytes, stack: AsyncExitStack) -> _Listening | None:
        """Read a request and open what it wants to hear; `None` if it cannot be served here. What it takes in memory
        counts until then; what is kept of it, as long as it listens."""
        settings, work = self._access.settings, self._access.context.work
        caller = caller_of(principal_of(scope), scope)
        self._access.refuse_work(caller, size := weigh(body))
        work.take(caller, size)
        try:
            request = _read(scope, headers, body)
            if request is None:
                return None
            listening = _Listening(request.message.id, settings.keepalive_interval, settings.stream_timeout)
            try:
                stack.enter_context(self._counting(listening, caller))
                changes = await self._open_changes(request, caller)
                if changes is None:
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
            except HttpRefusal as refused:
                raise refused.answering(request.message.id) from None
            kept = 2 * len(json.dumps(listening.honoured))
            work.take(caller, kept)
            stack.callback(work.take, caller, -kept)
            return listening
        finally:
            work.take(caller, -size)

    async def _open_changes(self, request: ModernRequest, caller: Caller) -> ListenSource | None:
        """Changes of the server's lists and resources, at whatever node; `None` if only the server itself can serve
        this request."""
        try:
            return await self._listening.join(read_filter(request.params["notifications"]), caller=caller)
        except BadFilter as error:
            raise HttpRefusal(Refusal.BAD_FILTER, reason=error) from None
        except TooManyResources as full:
            if full.of_caller:
                what = "the resources that listeners name"
                raise HttpRefusal(Refusal.OWN_SHARE, limit=full.limit, what=what) from None
            raise HttpRefusal(Refusal.TOO_MANY_RESOURCES, limit=full.limit) from None
        except StoreError:
            raise HttpRefusal(Refusal.STORE_UNREADABLE) from None

    @contextmanager
    def _counting(self, listening: _Listening, caller: Caller) -> Iterator[None]:
        refuse_full(self._quota.lacks(caller), Refusal.TOO_MANY_LISTENERS, self._quota, "max_listeners")
        self._access.refuse_readers(caller)
        self._open.add(listening)
        try:
            with self._quota.holding(caller), self._access.context.hub.open.holding(caller):
                yield
        finally:
            self._open.discard(listening)


def _read(scope: Scope, headers: Headers, body: bytes) -> ModernRequest | None:
    """Read a request to listen; `None` if it is not exactly that: the SDK refuses it."""
    request = read_modern(scope, headers, body, size=0, json_only=False)
    if request is None or request.message.method != LISTEN:
        return None
    try:
        SubscriptionsListenRequestParams.model_validate(request.params, by_name=False)
    except ValidationError:
        return None
    return request


async def _open_tasks(request: ModernRequest, calls: DurableCalls) -> ListenSource:
    """The tasks that a listener names, at whatever node. Tasks of other callers are left out, as unknown ones."""
    names = request.params["notifications"].get(TASK_IDS)
    if names is None:
        return _TasksOfOne(calls, (), False)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise HttpRefusal(Refusal.BAD_FILTER, reason=f"{TASK_IDS} must be a list of strings")
    if len(names) > MAX_TASKS:
        reason = f"{TASK_IDS} may name {MAX_TASKS} tasks, not {len(names)}"
        raise HttpRefusal(Refusal.BAD_FILTER, reason=reason)
    if not request.client.takes_tasks:
        raise needs_tasks()
    try:
        found = [await calls.find(name, request.owner) for name in dict.fromkeys(names)]
    except StoreError:
        raise HttpRefusal(Refusal.STORE_UNREADABLE) from None
    tasks = [record for record in found if record is not None and record.initialized]
    return _TasksOfOne(calls, tasks, True)


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
