"""Hands requests of 2026-07-28 that concern single calls to their handlers."""

from starlette.types import Receive, Scope, Send

from perdure._core.envelope import CANCEL
from perdure.http.access import SessionAccess
from perdure.http.body import Headers
from perdure.http.modern_request import read_request
from perdure.http.refusals import Refusal, Refused
from perdure.http.single_calls import SingleCallHandler
from perdure.http.tasks import TaskHandler

TASK_METHODS = frozenset({b"tasks/get", b"tasks/update", b"tasks/cancel"})
CALL_METHOD = b"tools/call"
CANCEL_METHOD = CANCEL.encode()


class SingleCallEndpoint:
    """Answers calls and what concerns tasks."""

    def __init__(self, access: SessionAccess, calls: SingleCallHandler, tasks: TaskHandler) -> None:
        self._access = access
        self._calls = calls
        self._tasks = tasks

    def wants(self, headers: Headers) -> bool:
        """Whether a request may be one for these handlers."""
        method = headers.get(b"mcp-method")
        return method in (CALL_METHOD, CANCEL_METHOD) or (method in TASK_METHODS and not self._calls.leaves_tasks)

    async def __call__(
        self, scope: Scope, receive: Receive, send: Send, headers: Headers, body: bytes, *, size: int
    ) -> bool:
        """Answer a request; `False` if it is one for the SDK's own handler."""
        settings = self._access.settings
        asked = read_request(scope, headers, body, size=size, json_only=settings.json_response)
        if asked is None:
            return False
        try:
            if not self._access.context.journal.may_show:
                raise Refused(Refusal.FROZEN)
            if asked.request.method == CALL_METHOD.decode():
                self._access.refuse_if_draining()
                return await self._calls(asked, receive, send)
            handle = self._calls.cancel if asked.request.method == CANCEL else self._tasks
            await handle(asked, receive, send)
        except Refused as refused:
            raise refused.answering(asked.request.id) from None
        return True

    @property
    def is_beginning(self) -> bool:
        """Whether a call is about to run."""
        return self._calls.beginning > 0

    def hand_out(self) -> None:
        """The process is about to stop."""
        self._calls.hand_out()

    def end_all(self) -> None:
        """The process stops: answer what waits."""
        self._calls.end_all()
        self._access.context.waiters.end()  # a poll that is held tells how far its task is
