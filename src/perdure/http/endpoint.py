"""The MCP endpoint of the session era: which method is served by whom."""

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
from perdure.sessions.registry import Sessions

ALLOW = ((b"allow", b"GET, POST, DELETE, OPTIONS"),)


class Endpoint:
    """From a request to its response; `Refused` is raised for every no."""

    def __init__(self, context: ServerContext, sessions: Sessions, settler: Settler, bodies: Bodies) -> None:
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
                return await self._delete(scope, headers, owner)
            case method:
                raise Refused(Refusal.METHOD, method=method, headers=ALLOW)

    def drain(self) -> None:
        """The end has begun: take no new work."""
        self._desk.draining = True

    async def _delete(self, scope: Scope, headers: Headers, owner: str) -> Answer:
        async with self._desk.session(headers, owner, scope, resume=False) as session:
            await self._desk.sessions.end(session, SessionStep.CLIENT_DELETED, "The session was deleted by its client")
            return Answer(status=200)
