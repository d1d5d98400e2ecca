"""The MCP endpoint: hands a request to the handler of its method, of the broker, or of the era without sessions."""

from collections.abc import Callable

from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from starlette.types import Receive, Scope, Send

from perdure._core.limits import weigh
from perdure._core.states import SessionStep
from perdure.assembly import ServerProcess
from perdure.http.access import SessionAccess
from perdure.http.body import Headers, replayed_first
from perdure.http.event_stream import EventStreamResponse
from perdure.http.get import GetHandler
from perdure.http.post import PostHandler
from perdure.http.refusals import Answer, Refusal, Refused
from perdure.http.resume_tokens import RESUME, ResumeTokenEndpoint

ALLOW = ((b"allow", b"GET, POST, DELETE, OPTIONS"),)


class Endpoint:
    """Answers requests; raises `Refused` for every one that it does not take."""

    def __init__(
        self,
        process: ServerProcess,
        sessionless: StreamableHTTPSessionManager | None,
        *,
        is_draining: Callable[[], bool],
    ) -> None:
        self._access = access = SessionAccess(process, is_draining)
        self._post = PostHandler(access)
        self._get = GetHandler(access)
        self._resume = ResumeTokenEndpoint(access)
        self.sessionless = None if sessionless is None else SessionlessHandler(sessionless, access)

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
                async with self._access.session(headers, owner, scope, resume=False) as session:
                    why = "The session was deleted by its client"
                    await self._access.sessions.end(session, SessionStep.CLIENT_DELETED, why)
                    return Answer(status=200)
            case method:
                raise Refused(Refusal.METHOD, method=method, headers=ALLOW)


class SessionlessHandler:
    """Hands requests of 2026-07-28 to the SDK's own handler, `max_sessionless` at once at most. Each may hold an event
    stream and run a call, and has no session whose limits would count it."""

    def __init__(self, manager: StreamableHTTPSessionManager, access: SessionAccess) -> None:
        self._manager = manager
        self._access = access
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        context, settings = self._access.context, self._access.settings
        if self._running >= settings.max_sessionless:
            raise Refused(Refusal.TOO_MANY_SESSIONLESS, limit=settings.max_sessionless)
        if context.hub.full:
            raise Refused(Refusal.TOO_MANY_READERS, limit=settings.max_readers)
        size, work = 0, context.work
        self._running += 1
        try:
            with context.hub.counting_sessionless():
                if scope["method"] == "POST":
                    body = await self._access.bodies.read(receive, headers)
                    if not work.has_room(weight := weigh(body)):
                        raise Refused(Refusal.TOO_MUCH_WORK, limit=settings.max_work)
                    work.take(size := weight)
                    receive = replayed_first(body, receive)
                    del body  # it is the handler's now
                await self._manager.handle_request(scope, receive, send)
        finally:
            self._running -= 1
            work.give(size)
