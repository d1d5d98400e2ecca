"""Follows a server's task (`io.modelcontextprotocol/tasks`) to the answer of the call that became it.

The user's code sees none of it: it waits for the result of `call_tool`. The task's questions go to the client's own
callbacks, each once, also over a crash of this process: an answer is on disk before it is sent. What to do in which
status, and when to ask again, stands in `_core/polling.py`.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio
import anyio.abc
import mcp_types as types
from pydantic import TypeAdapter, ValidationError

from perdure._core.codes import INTERNAL_ERROR, REQUEST_CANCELLED
from perdure._core.delivery import CANCEL_TASK, GET_TASK, UPDATE_TASK
from perdure._core.polling import GONE, MAX_ANSWERED, MAX_QUESTIONS, Next, next_of, pause
from perdure.client.memory import Memory, SingleCall
from perdure.client.requests import Requests
from perdure.remote.call import unknown
from perdure.remote.message import Message, encode, error, messages_in
from perdure.remote.stream import Attempts
from perdure.telemetry.events import log_event

Tell = Callable[[object], Awaitable[None]]
"""Passes on how far a task says that it is."""

Asked = Callable[[str, types.InputRequest], Awaitable[types.InputResponse | types.ErrorData]]
"""Puts a question to the client's callbacks, under its key."""

_QUESTION: TypeAdapter[types.InputRequest] = TypeAdapter(types.InputRequest)


async def put_question(asked: Asked, key: str, question: object) -> dict[str, Any] | types.ErrorData:
    """The user's answer to a question as it came, as it is sent."""
    try:
        found = await asked(key, _QUESTION.validate_python(question, by_name=False))
    except ValidationError as invalid:
        return types.ErrorData(
            code=INTERNAL_ERROR, message=f"The question cannot be read: {invalid.error_count()} errors"
        )
    except Exception as failure:  # of the user's callback: it costs this call alone
        return types.ErrorData(code=INTERNAL_ERROR, message=f"{type(failure).__name__}: {failure}")
    if isinstance(found, types.ErrorData):
        return found
    return found.model_dump(by_alias=True, mode="json", exclude_none=True)


def refused(call: str, found: types.ErrorData) -> Message:
    """The answer to a call whose question was not answered."""
    told = found.model_dump(by_alias=True, mode="json", exclude_none=True)
    return messages_in(encode({"jsonrpc": "2.0", "id": call, "error": told}))[0]


class Task:
    """The task of one call, whose handle is in the state already."""

    def __init__(self, call: SingleCall, memory: Memory, requests: Requests, asked: Asked) -> None:
        assert call.task is not None
        self._call = call
        self._id = call.task
        self._memory = memory
        self._requests = requests
        self._asked = asked
        self._open: set[str] = set()
        """The keys of the questions that are put at the moment."""
        self._wake = anyio.Event()
        self._refusal: Message | None = None

    async def answer(self, tell: Tell) -> Message:
        """The answer to the call, as if it had come directly. Exactly one."""
        try:
            async with anyio.create_task_group() as group:
                found = await self._follow(group, tell)
                group.cancel_scope.cancel()
        except Exception as failure:
            return self._unknown(f"{type(failure).__name__}: {failure}")
        return found

    async def cancel(self) -> None:
        found = await self._request(CANCEL_TASK)
        if found.is_error:
            log_event(logging.INFO, "client.not_cancelled", f"a task could not be cancelled: {found.why}")

    async def _follow(self, group: anyio.abc.TaskGroup, tell: Tell) -> Message:
        attempts = Attempts(self._requests.limits.patience)
        while self._refusal is None:
            began = time.monotonic()
            found = await self._request(GET_TASK)
            if found.is_error:
                attempts.failed(found.why)
                reported = found.body["error"]
                if reported.get("code") in GONE or not await attempts.wait():
                    return self._unknown(f"the server does not say what became of the task: {found.why}")
                continue
            attempts = Attempts(self._requests.limits.patience)
            task = found.result
            match next_of(task.get("status")):
                case Next.RESULT:
                    return self._result(task.get("result"))
                case Next.ERROR:
                    return self._error(task)
                case Next.CANCELLED:
                    said = task.get("statusMessage")
                    sentence = f"The task was cancelled: {said}" if isinstance(said, str) else "The task was cancelled"
                    return error(encode(self._call.id), REQUEST_CANCELLED, sentence)
                case Next.POLL:
                    await tell(task.get("statusMessage"))
                case Next.ANSWER:
                    self._put_questions(group, task.get("inputRequests"))
                case None:
                    return self._unknown(f"the task has the status {task.get('status')!r}, which is none")
            with anyio.move_on_after(pause(task.get("pollIntervalMs"), took=time.monotonic() - began)):
                await self._wake.wait()
            self._wake = anyio.Event()
        await self.cancel()
        return self._refusal

    async def _request(self, method: str, **params: object) -> Message:
        return await self._requests.ask(method, {"taskId": self._id, **params}, self._call.params, self._id)

    def _put_questions(self, group: anyio.abc.TaskGroup, questions: object) -> None:
        for key, question in questions.items() if isinstance(questions, Mapping) else ():
            if key not in self._open and key not in self._call.answered and len(self._open) < MAX_QUESTIONS:
                self._open.add(key)
                group.start_soon(self._question, key, question)

    async def _question(self, key: str, question: object) -> None:
        call = self._call
        if key not in call.answers:
            found = await put_question(self._asked, key, question)
            if isinstance(found, types.ErrorData):
                self._refusal = refused(call.id, found)
                self._wake.set()
                return
            call.answers[key] = found
            self._memory.changed()
        told = await self._request(UPDATE_TASK, inputResponses={key: call.answers[key]})
        self._open.discard(key)
        if told.is_error:  # it is sent again while the task shows the question
            return
        del call.answers[key]
        call.answered = [*call.answered, key][-MAX_ANSWERED:]
        self._memory.changed()
        self._wake.set()

    def _result(self, result: object) -> Message:
        if not isinstance(result, Mapping):
            return self._unknown("the task is completed, and has no result")
        # A task's result is what the call would have returned; some servers leave out what says so.
        whole = {"jsonrpc": "2.0", "id": self._call.id, "result": {"resultType": "complete", **result}}
        return messages_in(encode(whole))[0]

    def _error(self, task: Mapping[str, Any]) -> Message:
        found = task.get("error")
        if not isinstance(found, Mapping) or not isinstance(found.get("code"), int):
            return self._unknown(f"the task has failed, and has no error: {task.get('statusMessage')}")
        return messages_in(encode({"jsonrpc": "2.0", "id": self._call.id, "error": {"message": "", **found}}))[0]

    def _unknown(self, reason: str) -> Message:
        return unknown(self._call.id, "tools/call", self._call.tool, reason)
