"""Hands requests of 2026-07-28 to the SDK's own handler, and answers them when the server stops before it does."""

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import Any

from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.subscriptions import SUBSCRIPTION_ID_META_KEY
from starlette.types import Message, Receive, Scope, Send

from perdure._core.limits import weigh
from perdure.http.access import SessionAccess
from perdure.http.body import Headers, replayed_first
from perdure.http.listening import LISTEN, ListeningHandler, hearing_changes
from perdure.http.refusals import Answer, Refusal, Refused
from perdure.sessions.ledger import unknown_outcome


@dataclass(slots=True, eq=False)
class _Running:
    """One request that the SDK handles, and how far its response has come."""

    send: Send
    listens: bool
    """It subscribes, and has no other answer than that it is over."""
    task: asyncio.Task[Any] | None = field(default_factory=asyncio.current_task)
    body: bytes = b""
    handled: bool = False
    """The SDK has it."""
    streams: bool = False
    """An event stream has begun."""
    over: bool = False
    """All of the response is sent, or on its way: a body of JSON follows its head at once."""
    ended: bool = False
    """The server stops, and ends it."""

    async def pass_on(self, message: Message) -> None:
        """Send a part of the response, and see what it is."""
        if self.ended:
            return  # it is answered already
        if message["type"] == "http.response.start":
            self.streams = any(value.startswith(b"text/event-stream") for _, value in message["headers"])
            self.over = not self.streams
        elif not message.get("more_body"):
            self.over = True
        await self.send(message)

    def end(self) -> None:
        """Have the SDK's handler stop; `finish` answers in its place."""
        if not self.over and not self.ended:
            self.ended = True
            if self.handled and self.task is not None:
                self.task.cancel()

    async def finish(self, receive: Receive) -> None:
        """Answer: what listens has listened to the end, what runs has an outcome that is not known."""
        request: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            request = json.loads(self.body)
        request = request if isinstance(request, dict) else {}
        name = request.get("id")
        if self.listens:
            result = {"resultType": "complete", "_meta": {SUBSCRIPTION_ID_META_KEY: name}}
            body = json.dumps({"jsonrpc": "2.0", "id": name, "result": result}).encode()
        else:
            params = request.get("params")
            body = unknown_outcome(
                name if isinstance(name, str | int) else "",
                method=str(request.get("method")),
                reason="the server is stopping",
                params=params if isinstance(params, dict) else None,
            )
        if self.streams:
            frame = b"event: message\r\ndata: %b\r\n\r\n" % body
            await self.send({"type": "http.response.body", "body": frame, "more_body": False})
        else:
            await Answer(status=200, body=body).send(receive, self.send)


class SessionlessHandler:
    """Serves requests without a session, `max_sessionless` at once at most. Each may hold an event stream and run a
    call, and has no session whose limits would count it."""

    def __init__(
        self, manager: StreamableHTTPSessionManager, access: SessionAccess, listening: ListeningHandler | None = None
    ) -> None:
        self._manager = manager
        self._access = access
        self._listening = listening
        self._running: set[_Running] = set()

    @property
    def is_busy(self) -> bool:
        """Whether a request runs that will have an answer: all but those that only listen."""
        return any(not running.listens for running in self._running)

    def end_listening(self) -> None:
        """End the subscriptions: their clients subscribe elsewhere."""
        for running in self._running:
            if running.listens:
                running.end()
        if self._listening is not None:
            self._listening.end()

    def end_all(self) -> None:
        """Answer whatever runs."""
        self.end_listening()
        for running in self._running:
            running.end()

    async def __call__(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        listens = headers.get(b"mcp-method") == LISTEN.encode()
        if listens and self._listening is not None and scope["method"] == "POST":
            await self._listening(scope, receive, send, headers, otherwise=self._pass_on)
        else:
            await self._pass_on(scope, receive, hearing_changes(send, self._access.context.changed.tell), headers)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        """Have the SDK answer a request."""
        context, settings = self._access.context, self._access.settings
        if len(self._running) >= settings.max_sessionless:
            raise Refused(Refusal.TOO_MANY_SESSIONLESS, limit=settings.max_sessionless)
        if context.hub.full:
            raise Refused(Refusal.TOO_MANY_READERS, limit=settings.max_readers)
        size, work = 0, context.work
        running = _Running(send, listens=headers.get(b"mcp-method") == LISTEN.encode())
        self._running.add(running)
        try:
            with context.hub.counting_sessionless():
                if scope["method"] == "POST":
                    running.body = body = await self._access.bodies.read(receive, headers)
                    if not work.has_room(weight := weigh(body)):
                        raise Refused(Refusal.TOO_MUCH_WORK, limit=settings.max_work)
                    work.take(size := weight)
                    receive = replayed_first(body, receive)
                await self._handle(running, scope, receive)
        finally:
            self._running.discard(running)
            work.give(size)

    async def _handle(self, running: _Running, scope: Scope, receive: Receive) -> None:
        if running.ended:
            raise Refused(Refusal.STOPPING)
        running.handled = True
        try:
            await self._manager.handle_request(scope, receive, running.pass_on)
        except asyncio.CancelledError:
            if not running.ended or (running.task is not None and running.task.uncancel() > 0):
                raise
        if running.ended:
            await running.finish(receive)
