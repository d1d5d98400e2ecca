"""Passes requests of 2026-07-28 on to the SDK's own handler, and answers them when the server stops before it does."""

import asyncio
import contextlib
import json
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from perdure._core.envelope import CALLS, DISCOVER, LISTEN, SUBSCRIPTION, TASKS
from perdure._core.limits import Quota, share_of, weigh
from perdure._core.revisions import REVISIONS
from perdure._core.states import PASSED_ON, PassedOnState, PassedOnStep, advance
from perdure.http.access import SessionAccess, refuse_full
from perdure.http.credentials import caller_of, ending_with_token, principal_of
from perdure.http.durable_calls import DurableCallHandler
from perdure.http.event_stream import EventStream
from perdure.http.listening import ListeningHandler, hearing_changes
from perdure.http.refusals import HttpRefusal, Refusal
from perdure.http.request import Headers, ModernRequest, read_modern, replayed_first
from perdure.runtime.base import CALLER
from perdure.runtime.hosted import SessionlessHandler
from perdure.sessions.ledger import unknown_outcome
from perdure.telemetry.log_records import log_event

_OWING = (PassedOnState.OWED, PassedOnState.LAST)
"""The server has stopped before the SDK has answered, and answers in its place."""

_UNANSWERED = (PassedOnState.RUNNING, PassedOnState.STREAMING)


@dataclass(slots=True, eq=False)
class PassedOn:
    """One request, and how far its response has come (`_core.states`)."""

    send: Send
    body: bytes
    listens: bool
    """It is a subscription, whose only answer is that it is over."""
    task: asyncio.Task[Any] | None = field(default_factory=asyncio.current_task)
    state: PassedOnState = PassedOnState.RUNNING
    is_cut: bool = False
    """The client left before the answer was whole."""

    @property
    def is_owing(self) -> bool:
        return self.state in _OWING

    def advance(self, step: PassedOnStep) -> None:
        self.state = advance(PASSED_ON, self.state, step)

    async def pass_on(self, message: Message) -> None:
        """Send a part of the SDK's response, and note how far the response is."""
        if message["type"] == "http.response.start":
            is_stream = any(value.startswith(b"text/event-stream") for _, value in message["headers"])
            self.advance(PassedOnStep.BEGIN_STREAM if is_stream else PassedOnStep.BEGIN_BODY)
        elif not message.get("more_body"):
            self.advance(PassedOnStep.COMPLETE)
        if not self.is_owing:
            await self.send(message)

    def watching(self, receive: Receive) -> Receive:
        """A `receive` that notes that the client has left."""

        async def watched() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" and self.state in _UNANSWERED:
                self.is_cut = True
            return message

        return watched

    def stop(self) -> None:
        """Stop the SDK's handler, if it has not answered; `SdkPassthrough` answers in its place."""
        was_owing = self.is_owing
        self.advance(PassedOnStep.STOP)
        if self.is_owing and not was_owing and self.task is not None:
            self.task.cancel()


def last_word(body: bytes, *, listens: bool) -> bytes:
    """The response to a request that the server ends, whatever its body is: a subscription is complete, a call has an
    unknown outcome."""
    request: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        request = json.loads(body)
    request = request if isinstance(request, dict) else {}
    name = request.get("id")
    if listens:
        result = {"resultType": "complete", "_meta": {SUBSCRIPTION: name}}
        return json.dumps({"jsonrpc": "2.0", "id": name, "result": result}).encode()
    params = request.get("params")
    return unknown_outcome(
        name if isinstance(name, str | int) else "",
        method=str(request.get("method")),
        reason="the server is stopping",
        params=params if isinstance(params, dict) else None,
    )


@dataclass(eq=False)
class SdkPassthrough:
    """Serves requests without a session, `max_sessionless` at once at most. Each may hold an event stream and run a
    call, and has no session whose limits would count it."""

    _manager: SessionlessHandler
    """The SDK's handler: has what neither `_durable_calls` nor `_listening` takes."""
    _access: SessionAccess
    _durable_calls: DurableCallHandler
    _listening: ListeningHandler | None
    _running: set[PassedOn] = field(default_factory=set)
    _quota: Quota = field(init=False)
    """Also of requests that `durable_calls` has: they end by themselves, and a poll that is held delays no stop."""
    _ended: bool = False
    _has_led: bool = False
    """A client was led to a session. Logged once, as is the next."""
    _has_served: bool = False
    """A client was served without one."""

    def __post_init__(self) -> None:
        most = self._access.settings.max_sessionless
        self._quota = Quota(most, each=share_of(most, self._access.settings.max_share))

    @property
    def is_busy(self) -> bool:
        """Whether a request runs that will have an answer: all but subscriptions."""
        return self._durable_calls.is_beginning or bool(self.count)

    @property
    def count(self) -> int:
        """How many requests the SDK has, without subscriptions."""
        return sum(not running.listens for running in self._running)

    def give_handles(self) -> None:
        """Give handles to clients that take them, in place of the answers that they wait for."""
        self._durable_calls.give_handles()

    def end_listening(self) -> None:
        """End the subscriptions: their clients subscribe elsewhere."""
        for running in self._running:
            if running.listens:
                running.stop()
        if self._listening is not None:
            self._listening.end()

    def end_all(self) -> None:
        """Answer every request that runs."""
        self._ended = True
        self.end_listening()
        for running in self._running:
            running.stop()
        self._durable_calls.end_all()

    async def __call__(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        method = headers.get(b"mcp-method")
        if method != DISCOVER.encode():
            self._log_served()
        if method == LISTEN.encode() and self._listening is not None and scope["method"] == "POST":
            await self._listening(scope, receive, send, headers, otherwise=self._pass_on)
        else:
            await self._pass_on(scope, receive, send, headers)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        """Have the SDK answer a request, unless it is one for `durable_calls`."""
        scope[CALLER] = caller = caller_of(principal_of(scope), scope)
        method = headers.get(b"mcp-method")
        settings, context = self._access.settings, self._access.context
        refuse_full(self._quota.lacks(caller), Refusal.TOO_MANY_SESSIONLESS, self._quota, "max_sessionless")
        self._access.refuse_readers(caller)
        with self._quota.holding(caller), context.hub.open.holding(caller):
            body, size = b"", 0
            if scope["method"] == "POST":
                body = await self._access.bodies.read(receive, headers)
                self._access.refuse_work(caller, size := weigh(body))
                is_durable, request = self._durable_calls.wants(headers), None
                if is_durable or (method == DISCOVER.encode() and settings.eras == "auto"):
                    request = read_modern(scope, headers, body, size=size, json_only=settings.json_response)
                if method == DISCOVER.encode():
                    self._lead(request)
                if is_durable and request is not None and await self._durable_calls(request, receive, send):
                    return
                receive = replayed_first(body, receive)
            if self._ended:
                raise HttpRefusal(Refusal.STOPPING)
            running = PassedOn(send, body, listens=method == LISTEN.encode())
            self._running.add(running)
            try:
                with context.work.holding(caller, size):
                    await self._handle(running, scope, receive, headers)
            finally:
                self._running.discard(running)

    def _lead(self, request: ModernRequest | None) -> None:
        """Lead a client to a session if it asks which revisions there are and declares neither tasks nor keys: it would
        lose a call with its connection. `request`: what the client declares, unless every client is served."""
        if request is None or request.client.takes_tasks or request.client.repeats:
            self._log_served()
            return
        if not self._has_led:
            self._has_led = True
            sentence = "a client of 2026-07-28 that declares no tasks was led to a session; --eras both prevents that"
            log_event(logging.INFO, "era.session", sentence, client=request.client.name)
        seen = request.client.version
        data = {"supported": list(REVISIONS), "requested": seen}
        raise HttpRefusal(Refusal.LED_TO_SESSION, seen=seen, tasks=TASKS, keys=CALLS, data=data)

    def _log_served(self) -> None:
        """Log once that a client has no session."""
        if self._has_served:
            return
        self._has_served = True
        sentence = "a client speaks 2026-07-28: only tasks and calls with a key outlive its connections"
        if self._access.settings.eras == "auto":
            log_event(logging.INFO, "era.sessionless", f"{sentence}; it declares tasks, or did not ask server/discover")
        else:
            log_event(logging.WARNING, "era.sessionless", f"{sentence}; --eras auto leads it to a session")

    async def _handle(self, running: PassedOn, scope: Scope, receive: Receive, headers: Headers) -> None:
        if not running.listens:
            running.send = hearing_changes(running.send, self._access.context.report_change)
        begun = time.perf_counter()
        # A call has its answer: its client could not come back.
        until = ending_with_token(scope, running.stop) if running.listens else contextlib.nullcontext()
        try:
            with until:
                await self._manager.handle_request(scope, running.watching(receive), running.pass_on)
            if running.is_cut and headers.get(b"mcp-method") == b"tools/call":
                self._access.context.counters.calls_cut += 1
            elif headers.get(b"mcp-method") == b"tools/call":
                name, took = headers.get(b"mcp-name", b"").decode("latin-1"), time.perf_counter() - begun
                log_event(logging.INFO, "call.answered", f"{name} has answered after {took:.3g} s")
        except asyncio.CancelledError:
            # Of `stop`, or of the server that runs us, or of both, when that stops. uvicorn would log a traceback.
            if not running.is_owing:
                running.advance(PassedOnStep.STOP)
            if not running.is_owing:
                raise
            if running.task is not None:
                running.task.uncancel()
        if running.is_owing:
            response = EventStream(receive, running.send)
            response.has_begun = running.state is PassedOnState.LAST
            await response.answer(last_word(running.body, listens=running.listens), 200)
