"""What goes between a session and its runtime, both ways: the boundary at which ids change.

Inwards, the client's request ids and progress tokens become numbers of ours; outwards they are put back, and every
message is appended to the stream where it belongs. The runtime is loaded with the first message and may be dropped
when it is idle; the next message loads it again, from the record.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mcp.shared.message import ServerMessageMetadata, SessionMessage
from mcp_types import JSONRPCError, JSONRPCMessage, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse
from pydantic_core import to_json
from starlette.requests import Request as HttpRequest

from perdure import spans
from perdure._core import sticky
from perdure._core.jsonrpc import Notification
from perdure._core.states import CallState, CallStep
from perdure.asks import Asks
from perdure.ledger import REQUEST_CANCELLED, Call, Calls, error_payload, unknown_outcome
from perdure.messages import answer_json, closer, encode_notification, stand_in
from perdure.observe import note
from perdure.runtime.sdk import Runtime
from perdure.store.base import Step
from perdure.streams import Stream

if TYPE_CHECKING:
    from perdure.session import Session

_private_ids = itertools.count(1)

_OWN_SECONDS = 10.0
"""How long a server may take to tell which tools it has."""


class Exchange:
    """One session's way to its runtime and back."""

    __slots__ = ("_closed", "_fed", "_private", "_runtime", "_subscribed", "asks", "calls", "session")

    def __init__(self, session: Session) -> None:
        self.calls = Calls()
        self.session = session
        self._runtime: Runtime | None = None
        self.asks = Asks(self)
        self._private: dict[str, asyncio.Future[dict[str, Any] | None]] | None = None
        self._fed = session.record.active
        self._closed = False
        self._subscribed: tuple[bytes, ...] = ()
        """Subscriptions that are alive in this runtime, whatever the record says by now."""

    # Inwards

    def start(self, call: Call, http: HttpRequest | None) -> None:
        """Hand a call to the runtime, in the context of the HTTP request that brought it (or of the principal's next
        one, or of none, where it runs again)."""
        if self.calls.is_cancelled(call):
            self.calls.runtime_done(call.number)
            self._answer_cancelled(call)
            return
        params = call.request.params
        if call.token is not None and params is not None:
            params = {**params, "_meta": {**params["_meta"], "progressToken": call.number}}
        message = JSONRPCRequest(jsonrpc="2.0", id=call.number, method=call.request.method, params=params)
        self.feed(message, self._call_metadata(call, http))

    def notify(self, notification: Notification, http: HttpRequest | None) -> None:
        """Pass on a notification of the client's."""
        if notification.method == "notifications/initialized":
            if self.session.record.initialized:
                return  # of a reattach: the server has seen it
            self.session.update(initialized=True)
        message = JSONRPCNotification(jsonrpc="2.0", method=notification.method, params=notification.params)
        self.feed(message, self.metadata(http))

    def cancel(self, request_id: int | str, *, incarnation: int, params: dict[str, Any]) -> bool:
        """Answer the call that is cancelled, and tell the runtime. Tells whether it is one of this node's."""
        call = self.calls.running(request_id, incarnation=incarnation)
        if call is None:
            return self.calls.cancel_early(request_id, incarnation=incarnation)
        if call.request.method != "initialize":
            self._answer_cancelled(call)
            self._stop(call, params)
        return True

    def stop_calls(self, stream: Stream) -> None:
        """Another node has taken these calls over: the runtime is told to stop."""
        for call in self.calls.forget(stream):
            call.state = CallState.WAITING  # whatever the runtime still says of it is dropped
            self._stop(call, {"reason": "taken over by another node"})

    def _stop(self, call: Call, params: dict[str, Any]) -> None:
        stop = {**params, "requestId": call.number}
        message = JSONRPCNotification(jsonrpc="2.0", method="notifications/cancelled", params=stop)
        if self._runtime is not None:
            self.feed(message, ServerMessageMetadata())

    def _answer_cancelled(self, call: Call) -> None:
        answer = error_payload(call.request.id, REQUEST_CANCELLED, "Request cancelled")
        if self.calls.answer(call, CallStep.CANCEL, answer):
            self.session.house.counters.calls_cancelled += 1

    def feed(self, message: JSONRPCMessage, metadata: ServerMessageMetadata) -> None:
        """Hand a message to the runtime, which is loaded if it is not there."""
        if self._closed:
            return  # a runtime that is loaded now would never be dropped
        self._fed = self.session.house.clock()
        runtime = self._runtime or self._load()
        runtime.inbox.feed(contextvars.copy_context(), SessionMessage(message, metadata))

    def metadata(self, http: HttpRequest | None) -> ServerMessageMetadata:
        """What goes with a message to the runtime."""
        as_json = self.session.house.settings.json_response
        return ServerMessageMetadata(request_context=http or stand_in(self.session.id), can_send_request=not as_json)

    def _call_metadata(self, call: Call, http: HttpRequest | None) -> ServerMessageMetadata:
        metadata = self.metadata(http)

        async def unanswered() -> None:
            self.calls.runtime_done(call.number)

        metadata.on_request_unanswered = unanswered
        if self.session.closes_early:
            metadata.close_sse_stream = closer(call.stream)
            metadata.close_standalone_sse_stream = closer(self.session.standalone)
        return metadata

    # Outwards

    def emit(self, message: JSONRPCMessage, related: int | str | None) -> Stream | None:
        """Append what the runtime sends to the stream where it belongs (R2), which is given back.

        A call that has its answer already, because it was cancelled, says nothing more; if it asks, it is told that
        nobody listens (`ClosedResourceError`).
        """
        if self._closed:
            return None
        if isinstance(message, JSONRPCNotification):
            return self._emit_notification(message.method, message.params, related)
        if isinstance(message, JSONRPCRequest):
            return self.asks.emit(message, related)
        return self._emit_answer(message)

    def _emit_notification(
        self, method: str, params: dict[str, Any] | None, related: int | str | None
    ) -> Stream | None:
        call = None if related is None else self.calls.numbered(related)
        if params is not None:
            if method == "notifications/progress" and isinstance(token := params.get("progressToken"), int):
                # A number of ours, which means nothing outside: not after its call has ended, nor without a token.
                call = self.calls.numbered(token)
                if call is None or call.token is None or _is_repeated(call, params):
                    return None
                params["progressToken"] = self._token(call)
            elif method == "notifications/cancelled":
                params = self.asks.withdraw(params)
        if call is None and related is not None:
            return None  # of a call that has ended, or of a repeated sticky request
        return self.append(call, encode_notification(method, params))

    def _token(self, call: Call) -> int | str | None:
        """The progress token as the client may know it: it means something within one incarnation only."""
        if call.incarnation == self.session.record.incarnation:
            return call.token
        return f"{call.incarnation}:{call.token}"

    def append(self, call: Call | None, payload: bytes, also: Step | None = None) -> Stream | None:
        """Append a message to the stream where it belongs, which is given back if it is written here.

        What belongs to a call goes to the call's stream, unless nobody reads that and its client has begun anew (R5);
        and a JSON body has room for the answer only.
        """
        if call is not None and call.state is not CallState.RUNNING:
            return None
        if call is None or self.goes_standalone(call):
            return self.session.home.say(payload, also)
        call.stream.append(payload, also=also)
        return call.stream

    def goes_standalone(self, call: Call) -> bool:
        """What belongs to this call finds nobody on the call's own stream."""
        stream = call.stream
        return self.session.house.settings.json_response or (stream.reader is None and self.session.is_orphan(stream))

    def _emit_answer(self, message: JSONRPCResponse | JSONRPCError) -> Stream | None:
        call = self.calls.numbered(message.id)
        if call is None:
            self._answer_private(message)
            return None
        message.id = call.request.id
        # A result that cannot be written as JSON raises here, and the SDK answers the call with that error instead.
        payload = answer_json.dump_json(message, by_alias=True, exclude_unset=True)
        self.calls.runtime_done(call.number)
        if call.state is not CallState.RUNNING:
            return None
        also = self.session.consequence(call, message.result) if isinstance(message, JSONRPCResponse) else None
        self.calls.answer(call, CallStep.ANSWER, payload, also)
        self.session.house.counters.calls_answered += 1
        return call.stream

    # The runtime

    def _load(self) -> Runtime:
        house, record = self.session.house, self.session.record
        runtime = Runtime(
            house.server,
            house.lifespan_state,
            self,
            record,
            ask_ids=house.ask_ids,
            node=house.node,
            context=house.context.copy(),
        )
        runtime.task.add_done_callback(lambda _: self._runtime_ended(runtime))
        self._runtime = runtime
        subscriptions = sticky.subscriptions(record.sticky)
        self._subscribed = subscriptions if self.session.home.here else ()
        for request in record.sticky:
            if self.session.home.here or request not in subscriptions:
                self._repeat(runtime, request)
        return runtime

    def repeat(self, request: bytes) -> None:
        """Another node has taken a sticky request that concerns every runtime."""
        if self._runtime is not None:
            self._repeat(self._runtime, request)

    def stuck(self, request: bytes) -> None:
        """The runtime has taken a sticky request."""
        self._subscribed = sticky.subscriptions(sticky.after(self._subscribed, request))

    def _repeat(self, runtime: Runtime, request: bytes) -> None:
        """Feed a sticky request once more; nobody hears its answer."""
        message = JSONRPCRequest.model_validate_json(request, by_name=False)
        message.id = f"sticky-{next(_private_ids)}"
        runtime.inbox.feed(self.session.house.context.copy(), SessionMessage(message, self.metadata(None)))

    def came_home(self) -> None:
        """This node is the session's home now: what the session has subscribed to lives here."""
        subscriptions = sticky.subscriptions(self.session.record.sticky)
        if self._runtime is None:
            if subscriptions and not self._closed:
                self._load()
            return
        self._subscribed = subscriptions
        for request in subscriptions:
            self._repeat(self._runtime, request)

    def left_home(self) -> None:
        """Another node is the home now: no subscription may be alive twice."""
        subscribed, self._subscribed = self._subscribed, ()
        if self._runtime is not None:
            for request in subscribed:
                self._repeat(self._runtime, sticky.unsubscribe(request))

    def mark_initialized(self) -> None:
        """The client's `initialized` has reached another node."""
        if self._runtime is not None:
            self._runtime.mark_initialized()

    async def ask_runtime(
        self, method: str, params: Mapping[str, Any] | None, http: HttpRequest | None
    ) -> dict[str, Any] | None:
        """Ask the runtime something on our own behalf; `None` if it has no result for us."""
        name = f"own-{next(_private_ids)}"
        self._private = self._private if self._private is not None else {}
        future: asyncio.Future[dict[str, Any] | None] = asyncio.get_running_loop().create_future()
        self._private[name] = future
        message = JSONRPCRequest(jsonrpc="2.0", id=name, method=method, params=dict(params or {}))
        self.feed(message, self.metadata(http))
        try:
            async with asyncio.timeout(_OWN_SECONDS):
                return await future
        except TimeoutError:
            return None
        finally:
            del self._private[name]

    def _answer_private(self, message: JSONRPCResponse | JSONRPCError) -> None:
        """An answer to a request of our own; one to a repeated sticky request is heard by nobody."""
        future = None if self._private is None else self._private.get(str(message.id))
        if future is not None and not future.done():
            future.set_result(message.result if isinstance(message, JSONRPCResponse) else None)

    def _runtime_ended(self, runtime: Runtime) -> None:
        """A runtime that ends by itself has failed: what it was running gets its answer all the same."""
        if self._runtime is not runtime:
            return
        self._runtime = None
        failure = None if runtime.task.cancelled() else runtime.task.exception()
        name = self.session.name
        note(logging.ERROR, "runtime.failed", f"a session's runtime ended: {failure!r}", session=name)
        self.abandon("its runtime failed")
        self.calls.runtime_gone()

    def interrupted(self, number: object) -> None:
        """The runtime cut a call short, without having been asked to."""
        if (call := self.calls.numbered(number)) is not None:
            self.calls.runtime_done(call.number)
            self.answer_unknown(call, "its runtime failed")

    def answer_recorded(self, call: Call) -> None:
        """Answer an `initialize` on a session that has had its handshake."""
        result = b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (to_json(call.request.id), self.session.record.result)
        self.calls.runtime_done(call.number)
        self.calls.answer(call, CallStep.ANSWER, result)
        self.session.house.counters.calls_answered += 1

    def abandon(self, reason: str) -> None:
        """Nobody will answer the running calls any more: say so (promise 3)."""
        for call in self.calls.all_running():
            self.answer_unknown(call, reason)

    def answer_unknown(self, call: Call, reason: str) -> None:
        request = call.request
        payload = unknown_outcome(request.id, method=request.method, reason=reason, params=request.params)
        with spans.settle(self.session.name, call.stream.id, outcome="unknown"):
            if self.calls.answer(call, CallStep.SETTLE, payload):
                self.session.house.counters.calls_settled += 1

    @property
    def loaded(self) -> bool:
        return self._runtime is not None

    def runtime_may_go(self, idle: float) -> bool:
        """It was not used for so long, and nothing would be lost with it that loading it again does not bring back."""
        runtime = self._runtime
        return (
            runtime is not None
            and self.session.house.clock() - self._fed >= idle
            and self.calls.runtime_is_idle
            and not self._private
            and not (self.asks.open or runtime.keeps_state)
            and not (self.session.home.here and sticky.subscriptions(self.session.record.sticky))
        )

    async def drop_runtime(self) -> None:
        """Let the runtime go; the next message loads it again."""
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            self.calls.runtime_gone()
            await runtime.aclose()

    async def aclose(self, reason: str) -> None:
        """The session ends: its running calls are answered, and the runtime goes without a word."""
        for call in self.calls.all_running():
            self.calls.answer(call, CallStep.CANCEL, error_payload(call.request.id, REQUEST_CANCELLED, reason))
        self._closed = True
        await self.drop_runtime()


def _is_repeated(call: Call, params: dict[str, Any]) -> bool:
    """Progress of a call that runs again, which its client has seen already."""
    progress = params.get("progress")
    return call.progress is not None and isinstance(progress, int | float) and progress <= call.progress
