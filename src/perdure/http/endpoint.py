"""The MCP endpoint: hands a request to the handler of its method, of the broker, or of the era without sessions."""

from collections.abc import Callable

from starlette.types import Receive, Scope

from perdure._core.states import SessionStep
from perdure.assembly import ServerProcess
from perdure.http.access import SessionAccess
from perdure.http.body import Headers
from perdure.http.event_stream import EventStreamResponse
from perdure.http.get import GetHandler
from perdure.http.known_calls import KnownCalls
from perdure.http.listening import ChangesSources, ListeningHandler, ListenSources
from perdure.http.post import PostHandler
from perdure.http.refusals import Answer, Refusal, Refused
from perdure.http.resume_tokens import RESUME, ResumeTokenEndpoint
from perdure.http.sessionless import SessionlessHandler
from perdure.http.single_call_endpoint import SingleCallEndpoint
from perdure.http.single_calls import SingleCallHandler
from perdure.http.task_listening import TaskSources
from perdure.http.tasks import TaskHandler
from perdure.runtime.server import Started
from perdure.sessions.durable_calls import DurableCalls

ALLOW = ((b"allow", b"GET, POST, DELETE, OPTIONS"),)


class Endpoint:
    """Answers requests; raises `Refused` for every one that it does not take."""

    def __init__(
        self,
        process: ServerProcess,
        started: Started,
        *,
        call_secret: bytes,
        is_draining: Callable[[], bool],
    ) -> None:
        """`call_secret`: of the store; the ids of calls with a key are made with it."""
        self._access = access = SessionAccess(process, is_draining)
        self._post = PostHandler(access)
        self._get = GetHandler(access)
        self._resume = ResumeTokenEndpoint(access)
        self.sessionless: SessionlessHandler | None = None
        if started.sessionless is not None:
            single_calls, sources = None, list[ListenSources]()
            if process.listening is not None:
                sources.append(ChangesSources(process.listening))
            if started.tools is not None:
                calls = DurableCalls(process.context, process.sessions)
                known = KnownCalls(access, calls, started.tools)
                asks = started.asks_in_session
                handler = SingleCallHandler(access, calls, known, started.tools, call_secret, asks_in_session=asks)
                single_calls = SingleCallEndpoint(access, handler, TaskHandler(access, calls, known))
                if not started.tools.serves_tasks:
                    sources.append(TaskSources(calls, known.view))
            listening = None if process.listening is None else ListeningHandler(access, sources)
            self.sessionless = SessionlessHandler(started.sessionless, access, single_calls, listening)

    async def __call__(
        self, scope: Scope, receive: Receive, headers: Headers, owner: str
    ) -> Answer | EventStreamResponse:
        if RESUME in scope:
            return await self._resume(scope, receive, headers, owner)
        match scope["method"]:
            case "POST":
                return await self._post(scope, receive, headers, owner)
            case "GET":
                return await self._get(scope, headers, owner)
            case "DELETE":
                session = await self._access.find(headers, owner, scope)
                with session.in_use():
                    await self._access.come_back(session, scope, resume=False)
                    why = "The session was deleted by its client"
                    await self._access.sessions.end(session, SessionStep.CLIENT_DELETED, why)
                    return Answer(status=200)
            case method:
                raise Refused(Refusal.METHOD, method=method, headers=ALLOW)
