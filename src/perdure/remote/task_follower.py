"""Follows a task of 2026-07-28 to its end: polls it (`_core/polling.py`), and has its questions answered, each once."""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.abc

from perdure._core import splice
from perdure._core.envelope import GET_TASK, UPDATE_TASK
from perdure._core.jsonrpc import JsonObject
from perdure._core.polling import MAX_ANSWERED, MAX_QUESTIONS, Next, after_poll
from perdure._core.reconnect import Patience
from perdure.remote.call import Ended
from perdure.remote.message import Message, encode
from perdure.remote.stream import Attempts


class QuestionRefused(Exception):
    """The client does not answer a question. `error` is the answer to the call then."""

    def __init__(self, error: JsonObject) -> None:
        super().__init__(error.get("message"))
        self.error = error


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskEnd:
    """What a task came to."""

    next: Next
    """RESULT, ERROR, UNKNOWN or, where no question can be put, ANSWER."""
    body: str = ""
    """The result, the error or the questions, as JSON."""
    reason: str = ""
    """For UNKNOWN."""


Ask = Callable[[str, Mapping[str, Any]], Awaitable[Message | Ended]]
"""Sends a request of the follower's own, without an envelope."""


@dataclass(kw_only=True)
class TaskFollower:
    handle: str
    ask: Ask
    patience: Patience
    """For polls that the server fails at."""
    on_progress: Callable[[JsonObject], Awaitable[None]]
    """Takes the params of the progress that the task reports, without a token."""
    told: float
    """The last progress that the client has seen."""
    put_question: Callable[[str, object], Awaitable[dict[str, Any]]] | None
    """Returns the client's answer to a question, or raises `QuestionRefused`. None: questions are the task's end."""
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The client's answers that the server has not acknowledged, by the questions' keys."""
    answered: list[str] = field(default_factory=list)
    """The keys of questions whose answers the server has."""
    on_changed: Callable[[], None] = lambda: None
    """`answers` or `answered` has changed."""
    _open: set[str] = field(default_factory=set)
    """The keys of the questions that are put at the moment."""
    _wake: anyio.Event = field(default_factory=anyio.Event)
    _failure: Exception | None = None

    async def end(self) -> TaskEnd:
        """Exactly one. Raises what `put_question` has raised."""
        async with anyio.create_task_group() as group:
            found = await self._poll(group)
            group.cancel_scope.cancel()
        if self._failure is not None:  # it has cancelled the group
            raise self._failure
        return found

    async def _poll(self, group: anyio.abc.TaskGroup) -> TaskEnd:
        attempts = Attempts(self.patience)
        while True:
            began = time.monotonic()
            found = await self.ask(GET_TASK, {"taskId": self.handle})
            if isinstance(found, Ended):
                return TaskEnd(next=Next.UNKNOWN, reason=found.why)
            polled = {"error": found.body["error"]} if found.is_error else {"result": found.result}
            decision = after_poll(polled, answered=self.answered, took=time.monotonic() - began)
            match decision.next:
                case Next.RETRY:
                    attempts.failed(found.why)
                    if not await attempts.wait():
                        return TaskEnd(next=Next.UNKNOWN, reason=decision.reason)
                    continue
                case Next.RESULT:
                    text = splice.members(found.payload)["result"]  # as it came: numbers may be larger than ours
                    completed = {"resultType": '"complete"', **splice.members(text)}  # some servers leave the type out
                    return TaskEnd(next=Next.RESULT, body=splice.object_of(completed))
                case Next.ANSWER if self.put_question is not None:
                    for key, question in (decision.value or {}).items():
                        if key not in self._open and len(self._open) < MAX_QUESTIONS:
                            self._open.add(key)
                            group.start_soon(self._question, key, question, group.cancel_scope)
                case Next.ERROR | Next.UNKNOWN | Next.ANSWER:
                    return TaskEnd(next=decision.next, body=encode(decision.value), reason=decision.reason)
            attempts = Attempts(self.patience)
            if decision.progress is not None and decision.progress["progress"] > self.told:
                self.told = decision.progress["progress"]
                await self.on_progress(decision.progress)
            with anyio.move_on_after(decision.pause):
                await self._wake.wait()  # an answered question leads on at once
            self._wake = anyio.Event()

    async def _question(self, key: str, question: object, scope: anyio.CancelScope) -> None:
        assert self.put_question is not None
        if key not in self.answers:
            try:
                self.answers[key] = await self.put_question(key, question)
            except Exception as failure:
                self._failure = failure
                scope.cancel()
                return
            self.on_changed()
        is_taken = await update_task(self.handle, {key: self.answers[key]}, self.answered, self.ask)
        self._open.discard(key)
        if is_taken:  # otherwise it is sent again while the task shows the question
            del self.answers[key]
            self.on_changed()
            self._wake.set()


async def update_task(handle: str, answers: Mapping[str, Any], answered: list[str], ask: Ask) -> bool:
    """Bring answers to a task's questions, and add their keys to `answered`. False if the server did not take them, and
    so shows the questions again."""
    found = await ask(UPDATE_TASK, {"taskId": handle, "inputResponses": answers})
    is_taken = isinstance(found, Message) and not found.is_error
    if is_taken:
        answered += answers
        del answered[:-MAX_ANSWERED]
    return is_taken
