"""Serves the tasks of 2025-11-25 in sessions: `tasks/result`, the state of a task, and notifications of its status.

The task is the row of its call. `tasks/result` is a request of the session like all others: it has a row and a stream,
resumes, and goes on elsewhere if its process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from perdure._core import session_tasks
from perdure._core.durable_calls import TaskFacts, TaskStatus, TaskSupport
from perdure._core.ids import StreamId, parse_stream_id
from perdure._core.jsonrpc import JsonObject, error_payload
from perdure._core.states import CallState
from perdure.errors import StoreError
from perdure.log.chores import cancel_all
from perdure.sessions.calls_by_id import LOOK_AGAIN, AnsweredCall, final_answer, find_answered, resume_if_waiting
from perdure.sessions.ledger import Call, encode, encode_answer, encode_notification
from perdure.store.interface import Store

if TYPE_CHECKING:
    from perdure.sessions.home import Home, NoHome
    from perdure.sessions.runtime_link import RuntimeLink


class SessionTasks:
    """The rules of one process, and the requests for results that wait here."""

    def __init__(self, rules: Mapping[str, TaskSupport], *, kept: float) -> None:
        """`kept`: seconds for which the result of a task is kept."""
        self.rules = rules
        self._kept = kept
        self._served: dict[Call, asyncio.Task[None]] = {}
        self._results: dict[StreamId, Call] = {}
        """The newest open request for a task's result, by the task."""

    async def aclose(self) -> None:
        await cancel_all(list(self._served.values()))

    def show(self, link: RuntimeLink, body: bytes) -> bytes:
        """A result of `tools/list` as its client sees it."""
        if not self.rules or not link.serves_tasks:
            return body
        return encode(session_tasks.show_support(json.loads(body), self.rules))

    def view(self, facts: TaskFacts, *, now: float) -> JsonObject:
        return session_tasks.task_of(facts, now=now, ttl=self._kept)

    def tell(self, home: Home | NoHome, facts: TaskFacts, *, told: TaskStatus = TaskStatus.WORKING) -> TaskStatus:
        """Notify the client of a task's status, unless it was told so last. Returns the status."""
        view = self.view(facts, now=facts.updated)
        if (status := TaskStatus(view["status"])) is not told:
            home.send(encode_notification(session_tasks.STATUS_CHANGED, view))
        return status

    # The request for a result

    def serve(self, link: RuntimeLink, call: Call, origin: object) -> None:
        self._served[call] = task = asyncio.create_task(link.answer_here(call, self._result(link, call, origin)))
        task.add_done_callback(lambda _: self._served.pop(call, None))

    def stop(self, call: Call) -> bool:
        """Stop a request for a result. Returns whether it was one that waits here."""
        task = self._served.get(call)
        if task is not None:
            task.cancel()
        return task is not None

    def result_for(self, call: Call) -> Call | None:
        """The open request for a task's result, on whose stream its client can be asked."""
        found = self._results.get(call.stream.id)
        return found if found is not None and found.state is CallState.RUNNING else None

    async def _result(self, link: RuntimeLink, call: Call, origin: object) -> bytes:
        """Wait for the end of a task, at whatever node it runs, and however long the store fails meanwhile."""
        task, store = parse_stream_id((call.request.params or {}).get("taskId")), link.context.store
        unknown = error_payload(call.request.id, *session_tasks.NOT_FOUND)
        if task is None:
            return unknown
        with link.context.waiters.watch(task) as changed:
            try:
                while True:
                    changed.clear()
                    with contextlib.suppress(StoreError):
                        found = await find_answered(store, link.keeper.record.owner, task)
                        if found is None:
                            return unknown
                        if found.stream.sealed:
                            final = await final_answer(store, found.stream)
                            return unknown if final is None else _answer(call, task, json.loads(final.payload))
                        await resume_if_waiting(found.row, origin)
                        if self._results.get(task) is not call:
                            self._results[task] = call
                            self._repeat_asks(link, task)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_AGAIN):
                            await changed.wait()
            finally:
                if self._results.get(task) is call:
                    del self._results[task]

    def _repeat_asks(self, link: RuntimeLink, task: StreamId) -> None:
        """Ask again, on the stream of the new request, what no reader of the standalone stream has seen."""
        asks = link.asks.open.items()
        if not link.home.standalone.readers.present:
            link.asks.repeat([name for name, ask in asks if ask.call is not None and ask.call.stream.id == task])


def _answer(call: Call, task: StreamId, response: JsonObject) -> bytes:
    request_id, error = call.request.id, response.get("error")
    if error is not None:
        return encode_answer(request_id, encode(error), failed=True)
    return encode_answer(request_id, encode(session_tasks.result_of(response, task)))


async def facts_of(store: Store, found: AnsweredCall) -> TaskFacts:
    """The state of a task, as the store has it."""
    stream, row = found
    is_open = row.state in (CallState.RUNNING, CallState.WAITING)
    asks = await store.asks(stream.session) if is_open else []
    final = None if is_open else await final_answer(store, stream)
    return TaskFacts(
        id=stream.id,
        created=stream.opened,
        updated=stream.opened if final is None else final.time,
        state=row.state,
        asks={ask.id: ask.request for ask in asks if session_tasks.is_related(json.loads(ask.request), stream.id)},
        answer=None if final is None else final.payload,
    )
