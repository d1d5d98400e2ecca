"""Serves `notifications/tasks` to listeners that name tasks: what `tasks/get` says, at once and at each change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcp_types import CLIENT_CAPABILITIES_META_KEY

from perdure._core.durable_calls import Client, TaskFacts
from perdure._core.jsonrpc import JsonObject
from perdure._core.listening import Notification
from perdure.errors import StoreError
from perdure.http.listening import ListenRequest, ListenSource
from perdure.http.modern_request import needs_tasks
from perdure.http.refusals import Refusal, Refused
from perdure.sessions.durable_calls import DurableCalls
from perdure.store.records import SessionRecord

METHOD = "notifications/tasks"
TASK_IDS = "taskIds"

MAX_TASKS = 100
"""Tasks that one listener may name: each is followed by a task of this process. A client that has more listens twice,
or polls."""

_WAIT = 60.0
"""Seconds of one wait for a change; the next one follows."""

_LATER = 1.0
"""Seconds until a task is looked at again after the store has failed."""


def _shown(facts: TaskFacts) -> tuple[object, ...]:
    """What a listener is told a change of; progress is not among it."""
    return facts.state, frozenset(facts.asks)


@dataclass(slots=True, eq=False)
class _TasksOfOne:
    """The tasks that one listener has named and that are its own."""

    _calls: DurableCalls
    _view: Callable[[TaskFacts], JsonObject]
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

    def take(self) -> Sequence[Notification]:
        due, self._due = self._due, {}
        return [Notification(METHOD, self._view(facts)) for facts in due.values()]

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


@dataclass(frozen=True, slots=True)
class TaskSources:
    """Tasks, at whatever node they run."""

    _calls: DurableCalls
    _view: Callable[[TaskFacts], JsonObject]

    async def open(self, request: ListenRequest) -> ListenSource:
        """Tasks that are not the caller's own are left out, as unknown ones are."""
        names = request.filter.get(TASK_IDS)
        if names is None:
            return _TasksOfOne(self._calls, self._view, (), False)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise Refused(Refusal.BAD_FILTER, reason=f"{TASK_IDS} must be a list of strings")
        if len(names) > MAX_TASKS:
            raise Refused(Refusal.BAD_FILTER, reason=f"{TASK_IDS} may name {MAX_TASKS} tasks, not {len(names)}")
        client = Client(version="", info=None, capabilities=request.meta.get(CLIENT_CAPABILITIES_META_KEY))
        if not client.takes_tasks:
            raise needs_tasks()
        try:
            found = [await self._calls.find(name, request.owner) for name in dict.fromkeys(names)]
        except StoreError:
            raise Refused(Refusal.STORE_UNREADABLE) from None
        tasks = [record for record in found if record is not None and record.initialized]
        return _TasksOfOne(self._calls, self._view, tasks, True)
