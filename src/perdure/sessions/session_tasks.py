"""Serves the tasks of 2025-11-25 in sessions: `tasks/result`, the state of a task, and notifications of its status.

The task is the row of its call. `tasks/result` is a request of the session like all others: it has a row and a stream,
resumes, and goes on elsewhere if its process dies.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from perdure._core import session_tasks
from perdure._core.durable_calls import TaskFacts, TaskStatus, TaskSupport
from perdure._core.ids import parse_stream_id
from perdure._core.jsonrpc import JsonObject, error_payload
from perdure._core.states import UNENDED
from perdure.errors import StoreError
from perdure.sessions.calls_by_id import final_answer, find_answered, resume_if_waiting
from perdure.sessions.ledger import Call, encode, encode_answer, encode_notification
from perdure.store.interface import Store
from perdure.store.records import CallRecord, StreamRecord

if TYPE_CHECKING:
    from perdure.sessions.home import Home, NoHome
    from perdure.sessions.runtime_link import RuntimeLink


class SessionTasks:
    """The rules of one process."""

    def __init__(self, rules: Mapping[str, TaskSupport], *, kept: float) -> None:
        """`kept`: seconds for which the result of a task is kept."""
        self.rules = rules
        self._kept = kept

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

    async def result(self, link: RuntimeLink, call: Call, origin: object) -> bytes:
        """Wait for the end of a task, at whatever node it runs, and however long the store fails meanwhile."""
        waits, is_first = link.context.waits, True
        task, store = parse_stream_id((call.request.params or {}).get("taskId")), link.context.store
        unknown = error_payload(call.request.id, *session_tasks.NOT_FOUND)
        if task is None:
            return unknown
        with link.context.waiters.watch(task) as watch:
            try:
                while True:
                    with contextlib.suppress(StoreError):
                        found = await find_answered(store, link.keeper.record.owner, task)
                        if found is None:
                            return unknown
                        if found.stream.sealed:
                            if (final := await final_answer(store, found.stream)) is None:
                                return unknown
                            response = json.loads(final.payload)
                            if (error := response.get("error")) is not None:
                                return encode_answer(call.request.id, encode(error), failed=True)
                            return encode_answer(call.request.id, encode(session_tasks.result_of(response, task)))
                        await resume_if_waiting(found.row, origin)
                        if is_first or waits.of(task) is None:
                            is_first = False
                            waits.put(found.stream, call)
                            if not link.home.standalone.readers.present:  # its reader has seen what was asked
                                link.asks.repeat(link.asks.of(task))
                    await watch.again()
            finally:
                waits.remove(task, call)


async def facts_of(store: Store, stream: StreamRecord, row: CallRecord) -> TaskFacts:
    """The state of a task, as the store has it."""
    is_open = row.state in UNENDED
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
