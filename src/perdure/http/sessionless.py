"""Bounds the requests of 2026-07-28, which the SDK's own handler answers."""

from __future__ import annotations

from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from starlette.types import Receive, Scope, Send

from perdure._core.limits import weigh
from perdure.http.access import Headers
from perdure.http.body import Bodies, replayed_first
from perdure.http.refusals import Refusal, Refused
from perdure.sessions.context import ServerContext


class SessionlessHandler:
    """Hands requests to the SDK's handler, `max_sessionless` at once at most. Each may hold an event stream and run a
    call, and has no session whose limits would count it."""

    def __init__(self, manager: StreamableHTTPSessionManager, context: ServerContext, bodies: Bodies) -> None:
        self._manager = manager
        self._context = context
        self._settings = context.settings
        self._bodies = bodies
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        hub, settings = self._context.hub, self._settings
        if self._running >= settings.max_sessionless:
            raise Refused(Refusal.TOO_MANY_SESSIONLESS, limit=settings.max_sessionless)
        if hub.full:
            raise Refused(Refusal.TOO_MANY_READERS, limit=settings.max_readers)
        size, work = 0, self._context.work
        self._running += 1
        try:
            with hub.counting_sessionless():
                if scope["method"] == "POST":
                    body = await self._bodies.read(receive, headers)
                    if not work.has_room(weight := weigh(body)):
                        raise Refused(Refusal.TOO_MUCH_WORK, limit=settings.max_work)
                    work.take(size := weight)
                    receive = replayed_first(body, receive)
                    del body  # it is the handler's now
                await self._manager.handle_request(scope, receive, send)
        finally:
            self._running -= 1
            work.give(size)
