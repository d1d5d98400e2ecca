"""The MCP endpoint of the session era: hands a request to the handler of its method."""

from __future__ import annotations

from starlette.types import Receive, Scope

from perdure._core.states import SessionStep
from perdure.cluster.settler import Settler
from perdure.http.access import Headers, SessionAccess
from perdure.http.body import Bodies
from perdure.http.event_stream import EventStreamResponse
from perdure.http.get import GetHandler
from perdure.http.post import PostHandler
from perdure.http.refusals import Answer, Refusal, Refused
from perdure.sessions.context import ServerContext
from perdure.sessions.registry import SessionRegistry

ALLOW = ((b"allow", b"GET, POST, DELETE, OPTIONS"),)


class Endpoint:
    """Answers requests; raises `Refused` for every one that it does not take."""

    def __init__(self, context: ServerContext, sessions: SessionRegistry, settler: Settler, bodies: Bodies) -> None:
        self._desk = SessionAccess(context, sessions, settler, bodies)
        self._post = PostHandler(self._desk)
        self._get = GetHandler(self._desk)

    async def __call__(
        self, scope: Scope, receive: Receive, headers: Headers, owner: str
    ) -> Answer | EventStreamResponse:
        match scope["method"]:
            case "POST":
                return await self._post(scope, receive, headers, owner)
            case "GET":
                return await self._get(scope, headers, owner)
            case "DELETE":
                async with self._desk.session(headers, owner, scope, resume=False) as session:
                    why = "The session was deleted by its client"
                    await self._desk.sessions.end(session, SessionStep.CLIENT_DELETED, why)
                    return Answer(status=200)
            case method:
                raise Refused(Refusal.METHOD, method=method, headers=ALLOW)

    def drain(self) -> None:
        """Take no new work: the process is about to stop."""
        self._desk.draining = True
