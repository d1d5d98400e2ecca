"""Hands requests of 2026-07-28 to the SDK's own handler, and answers them when the server stops before it does."""

import asyncio
import contextlib
import json
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.subscriptions import SUBSCRIPTION_ID_META_KEY
from starlette.types import Message, Receive, Scope, Send

from perdure._core.envelope import CALLS, DISCOVER, LISTEN, TASKS
from perdure._core.limits import Quota, share_of, weigh
from perdure._core.revisions import REVISIONS
from perdure._core.states import EXCHANGE, ExchangeState, ExchangeStep, advance
from perdure.http.access import SessionAccess, refuse_full
from perdure.http.body import Headers, replayed_first
from perdure.http.credentials import EXPIRY, caller_of, principal_of
from perdure.http.event_stream import EventStream
from perdure.http.listening import ListeningHandler, hearing_changes
from perdure.http.modern_request import read_request
from perdure.http.refusals import Refusal, Refused
from perdure.http.single_call_endpoint import SingleCallEndpoint
from perdure.sessions.ledger import unknown_outcome
from perdure.telemetry.log_records import log_event

_OWING = (ExchangeState.OWED, ExchangeState.LAST)
"""The server has stopped before the SDK has answered, and answers in its place."""


@dataclass(slots=True, eq=False)
class _Exchange:
    """One request, and how far its response has come (`_core.states`)."""

    send: Send
    listens: bool
    """It subscribes, and has no other answer than that it is over."""
    task: asyncio.Task[Any] | None = field(default_factory=asyncio.current_task)
    body: bytes = b""
    state: ExchangeState = ExchangeState.ACCEPTED

    @property
    def is_owing(self) -> bool:
        return self.state in _OWING

    def advance(self, step: ExchangeStep) -> None:
        self.state = advance(EXCHANGE, self.state, step)

    async def pass_on(self, message: Message) -> None:
        """Send a part of the SDK's response, and see what it is."""
        if message["type"] == "http.response.start":
            is_stream = any(value.startswith(b"text/event-stream") for _, value in message["headers"])
            self.advance(ExchangeStep.BEGIN_STREAM if is_stream else ExchangeStep.BEGIN_BODY)
        elif not message.get("more_body"):
            self.advance(ExchangeStep.COMPLETE)
        if not self.is_owing:
            await self.send(message)

    def stop(self) -> None:
        """Have the SDK's handler stop, if it has not answered; `finish` answers in its place."""
        was_owing = self.is_owing
        self.advance(ExchangeStep.STOP)
        if self.is_owing and not was_owing and self.task is not None:
            self.task.cancel()

    async def finish(self, receive: Receive) -> None:
        """Give what is owed."""
        response = EventStream(receive, self.send)
        response.has_begun = self.state is ExchangeState.LAST
        await response.answer(last_word(self.body, listens=self.listens), 200)


def last_word(body: bytes, *, listens: bool) -> bytes:
    """Give the response to a request that the server ends, whatever its body is: what listens has listened to the end,
    what runs has an outcome that is not known."""
    request: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        request = json.loads(body)
    request = request if isinstance(request, dict) else {}
    name = request.get("id")
    if listens:
        result = {"resultType": "complete", "_meta": {SUBSCRIPTION_ID_META_KEY: name}}
        return json.dumps({"jsonrpc": "2.0", "id": name, "result": result}).encode()
    params = request.get("params")
    return unknown_outcome(
        name if isinstance(name, str | int) else "",
        method=str(request.get("method")),
        reason="the server is stopping",
        params=params if isinstance(params, dict) else None,
    )


class SessionlessHandler:
    """Serves requests without a session, `max_sessionless` at once at most. Each may hold an event stream and run a
    call, and has no session whose limits would count it."""

    def __init__(
        self,
        manager: StreamableHTTPSessionManager,
        access: SessionAccess,
        single_calls: SingleCallEndpoint | None,
        listening: ListeningHandler | None,
    ) -> None:
        """`single_calls` and `listening` take what they want to; the SDK's handler has the rest."""
        self._manager = manager
        self._access = access
        self._single_calls = single_calls
        self._listening = listening
        self._running: set[_Exchange] = set()
        most = access.settings.max_sessionless
        self._quota = Quota(most, each=share_of(most, access.settings.max_share))
        """Also of requests that `single_calls` has: they end by themselves, and a poll that is held keeps no process
        from its stop."""
        self._ended = False
        self._has_led = self._has_served = False
        """A client was led to a session; one was served without. The log says each once."""

    @property
    def is_busy(self) -> bool:
        """Whether a request runs that will have an answer: all but those that only listen."""
        is_beginning = self._single_calls is not None and self._single_calls.is_beginning
        return is_beginning or bool(self.count)

    @property
    def count(self) -> int:
        """How many requests the SDK has, without those that only listen."""
        return sum(not running.listens for running in self._running)

    def hand_out(self) -> None:
        """Give handles to clients that take them, in place of the answers that they wait for."""
        if self._single_calls is not None:
            self._single_calls.hand_out()

    def end_listening(self) -> None:
        """End the subscriptions: their clients subscribe elsewhere."""
        for running in self._running:
            if running.listens:
                running.stop()
        if self._listening is not None:
            self._listening.end()

    def end_all(self) -> None:
        """Answer whatever runs."""
        self._ended = True
        self.end_listening()
        for running in self._running:
            running.stop()
        if self._single_calls is not None:
            self._single_calls.end_all()

    async def __call__(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        listens = headers.get(b"mcp-method") == LISTEN.encode()
        if headers.get(b"mcp-method") != DISCOVER.encode():
            self._tell_served()
        if listens and self._listening is not None and scope["method"] == "POST":
            await self._listening(scope, receive, send, headers, otherwise=self._pass_on)
        else:
            await self._pass_on(scope, receive, hearing_changes(send, self._access.context.changed.tell), headers)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        """Have the SDK answer a request."""
        caller = caller_of(principal_of(scope), scope)
        refuse_full(self._quota.lacks(caller), Refusal.TOO_MANY_SESSIONLESS, self._quota, "max_sessionless")
        self._access.refuse_readers(caller)
        size, work = 0, self._access.context.work
        running = _Exchange(send, listens=headers.get(b"mcp-method") == LISTEN.encode())
        self._running.add(running)
        try:
            with self._quota.holding(caller), self._access.context.hub.open.holding(caller):
                if scope["method"] == "POST":
                    running.body = body = await self._access.bodies.read(receive, headers)
                    self._access.refuse_work(caller, weight := weigh(body))
                    if headers.get(b"mcp-method") == DISCOVER.encode():
                        self._lead(scope, headers, body)
                    if self._single_calls is not None and self._single_calls.wants(headers):
                        self._running.discard(running)
                        if await self._single_calls(scope, receive, send, headers, body, size=weight):
                            return
                        if self._ended:
                            raise Refused(Refusal.STOPPING)
                        self._running.add(running)
                    work.take(caller, size := weight)
                    receive = replayed_first(body, receive)
                await self._handle(running, scope, receive, headers)
        finally:
            self._running.discard(running)
            work.take(caller, -size)

    def _lead(self, scope: Scope, headers: Headers, body: bytes) -> None:
        """Lead a client to a session if it asks which revisions there are and declares neither tasks nor keys: it would
        lose a call with its connection. With `both` every client is served."""
        asked = None
        if self._access.settings.eras == "auto":
            asked = read_request(scope, headers, body, size=0, json_only=self._access.settings.json_response)
        if asked is None or asked.client.takes_tasks or asked.client.repeats:
            self._tell_served()
            return
        if not self._has_led:
            self._has_led = True
            sentence = "a client of 2026-07-28 that declares no tasks was led to a session; --eras both prevents that"
            log_event(logging.INFO, "era.session", sentence, client=asked.client.name)
        seen = asked.client.version
        data = {"supported": list(REVISIONS), "requested": seen}
        raise Refused(Refusal.LED_TO_SESSION, id=asked.request.id, seen=seen, tasks=TASKS, keys=CALLS, data=data)

    def _tell_served(self) -> None:
        """Say once that there is a client without a session."""
        if self._has_served:
            return
        self._has_served = True
        sentence = "a client speaks 2026-07-28: only tasks and calls with a key outlive its connections"
        if self._access.settings.eras == "auto":
            log_event(logging.INFO, "era.sessionless", f"{sentence}; it declares tasks, or did not ask server/discover")
        else:
            log_event(logging.WARNING, "era.sessionless", f"{sentence}; --eras auto leads it to a session")

    async def _handle(self, running: _Exchange, scope: Scope, receive: Receive, headers: Headers) -> None:
        if running.state is ExchangeState.REFUSED:
            raise Refused(Refusal.STOPPING)
        running.advance(ExchangeStep.HAND_OVER)
        begun = time.perf_counter()
        expiry = scope[EXPIRY] if running.listens else None  # a call has its answer: its client could not come back
        watch = None if expiry is None else expiry.watch(running.stop)
        try:
            await self._manager.handle_request(scope, receive, running.pass_on)
            if headers.get(b"mcp-method") == b"tools/call":
                name, took = headers.get(b"mcp-name", b"").decode("latin-1"), time.perf_counter() - begun
                log_event(logging.INFO, "call.answered", f"{name} has answered after {took:.3g} s")
        except asyncio.CancelledError:
            # Of `stop`, or of the server that runs us, or of both, when that stops. uvicorn would log a traceback.
            if not running.is_owing:
                running.advance(ExchangeStep.STOP)
            if not running.is_owing:
                raise
            if running.task is not None:
                running.task.uncancel()
        finally:
            if watch is not None:
                watch.cancel()
        if running.is_owing:
            await running.finish(receive)
