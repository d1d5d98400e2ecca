"""Serves the tasks extension: `tasks/get`, `tasks/update` and `tasks/cancel`, at any node."""

from mcp.shared.inbound import MCP_NAME_HEADER, decode_header_value
from starlette.types import Receive, Send

from perdure._core.durable_calls import TaskFacts
from perdure._core.jsonrpc import JsonObject
from perdure._core.states import CallState
from perdure.http.access import SessionAccess
from perdure.http.credentials import caller_of, while_good
from perdure.http.event_stream import EventStream
from perdure.http.known_calls import KnownCalls, needs_its_client
from perdure.http.modern_request import ModernRequest, needs_tasks
from perdure.http.refusals import Refusal, Refused
from perdure.sessions.durable_calls import DurableCalls
from perdure.store.records import SessionRecord


class TaskHandler:
    """Tells of tasks, takes what they ask for, and cancels them."""

    def __init__(self, access: SessionAccess, calls: DurableCalls, known: KnownCalls) -> None:
        self._access = access
        self._calls = calls
        self._known = known

    async def __call__(self, asked: ModernRequest, receive: Receive, send: Send) -> None:
        task_id = self._task_id(asked)
        with self._access.refusing(Refusal.STORE_UNREADABLE):
            found = await self._calls.look(task_id, asked.owner)
        if found is None:
            await self._known.refuse_given_up(task_id, asked.owner)
        if found is None or not found[0].initialized:
            raise Refused(Refusal.NO_TASK)
        record, facts = found
        answer: JsonObject = {"resultType": "complete"}
        match asked.request.method:
            case "tasks/get":
                answer |= await self._get(record, facts, asked)
            case "tasks/update":
                if asked.params.get("inputResponses") is None:
                    raise Refused(Refusal.BAD_RESPONSES, seen="nothing")
                await self._known.take_responses(record, asked)
            case _:
                with self._access.refusing(Refusal.STORE_FAILS):
                    await self._known.cancel_call(record, "it was cancelled as a task")
        response = EventStream(receive, send, streams=False)
        await response.result(asked.request.id, self._known.stamped(answer))

    def _task_id(self, asked: ModernRequest) -> object:
        if not asked.client.takes_tasks:
            raise needs_tasks()
        task_id = asked.params.get("taskId")
        header = asked.http.headers.get(MCP_NAME_HEADER)
        if header is not None and decode_header_value(header) != task_id:
            raise Refused(Refusal.NAME_MISMATCH, message=f"{MCP_NAME_HEADER} header does not match params.taskId")
        return task_id

    async def _get(self, record: SessionRecord, facts: TaskFacts, asked: ModernRequest) -> JsonObject:
        """How a task is. A client that repeats what breaks is told as soon as there is something to tell, and within
        `task_hold`, or the life of its token, in any case. Any other client is answered at once: it would end with a
        poll that is open when this process dies, and a poll that is held is nearly always open."""
        hold = while_good(self._access.settings.task_hold, asked.http.scope) if asked.client.repeats else 0.0
        if not needs_its_client(facts) and (hold or facts.state is CallState.WAITING):
            with self._access.refusing(Refusal.STORE_UNREADABLE):
                if facts.state is CallState.WAITING:
                    await self._known.run_again(record, asked.http)
                facts = await self._wait(record, asked, hold) or facts
        return self._known.view(facts)

    async def _wait(self, record: SessionRecord, asked: ModernRequest, seconds: float) -> TaskFacts | None:
        """Hold a poll; what it takes in memory counts as long."""
        with self._access.context.work.holding(caller_of(asked.owner, asked.http.scope), asked.size):
            return await self._calls.wait(record, self._may_tell, seconds=seconds)

    def _may_tell(self, facts: TaskFacts) -> bool:
        """Whether a poll is answered at once. A process that stops holds none: the next poll may go elsewhere."""
        return needs_its_client(facts) or self._access.is_draining or self._access.context.waiters.is_over
