"""What goes between a session and its runtime, both ways: the boundary at which ids change.

Inwards, the client's request ids and progress tokens become numbers of ours; outwards they are put back, and every
message is appended to the stream where it belongs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mcp.shared.message import ServerMessageMetadata
from mcp_types import JSONRPCError, JSONRPCMessage, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse
from pydantic_core import to_json
from starlette.requests import Request as HttpRequest

from perdure._core.jsonrpc import Notification
from perdure._core.states import CallState, CallStep
from perdure.log.stream import Stream
from perdure.runtime.base import Flow
from perdure.sessions.asks import Asks
from perdure.sessions.ledger import REQUEST_CANCELLED, Call, error_payload, unknown_outcome
from perdure.sessions.messages import answer_json, closer, encode_notification
from perdure.sessions.runtime_slot import RuntimeSlot
from perdure.store.base import Step
from perdure.telemetry import tracing as spans

if TYPE_CHECKING:
    from perdure.sessions.session import Session


class Exchange(RuntimeSlot):
    """One session's way to its runtime and back."""

    __slots__ = ("asks",)

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.asks = Asks(self)

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

    def notify(self, notification: Notification, http: HttpRequest | None, *, size: int = 0) -> None:
        """Pass on a notification of the client's, which takes so many bytes of memory."""
        if notification.method == "notifications/initialized":
            if self.session.record.initialized:
                return  # of a reattach: the server has seen it
            self.session.update(initialized=True)
        message = JSONRPCNotification(jsonrpc="2.0", method=notification.method, params=notification.params)
        self.feed(message, self.metadata(http), size=size)

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
        if self.loaded:
            self.feed(message, ServerMessageMetadata())

    def _answer_cancelled(self, call: Call) -> None:
        answer = error_payload(call.request.id, REQUEST_CANCELLED, "Request cancelled")
        if self.calls.answer(call, CallStep.CANCEL, answer):
            self.session.context.counters.calls_cancelled += 1

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

    def emit(self, message: JSONRPCMessage, related: int | str | None) -> Flow | None:
        """Append what the runtime sends to the stream where it belongs (R2), which is given back.

        A call that has its answer already, because it was cancelled, says nothing more; if it asks, it is told that
        nobody listens (`ClosedResourceError`).
        """
        if self.closed:
            return None
        if isinstance(message, JSONRPCNotification):
            return self._emit_notification(message.method, message.params, related)
        if isinstance(message, JSONRPCRequest):
            return self.asks.emit(message, related)
        return self._emit_answer(message)

    def _emit_notification(self, method: str, params: dict[str, Any] | None, related: int | str | None) -> Flow | None:
        call = None if related is None else self.calls.numbered(related)
        if params is not None:
            if method == "notifications/progress" and isinstance(token := params.get("progressToken"), int):
                # A number of ours, which means nothing outside: not after its call has ended, nor without a token.
                call = self.calls.numbered(token)
                if call is None or call.token is None or call.is_repeated(method, params):
                    return None
                params["progressToken"] = self._token(call)
            elif method == "notifications/cancelled":
                params = self.asks.withdraw(params)
            elif call is not None and call.is_repeated(method, params):
                return None
        if call is None and related is not None:
            return None  # of a call that has ended, or of a repeated sticky request
        return self.append(call, encode_notification(method, params))

    def _token(self, call: Call) -> int | str | None:
        """The progress token as the client may know it: it means something within one incarnation only."""
        if call.incarnation == self.session.record.incarnation:
            return call.token
        return f"{call.incarnation}:{call.token}"

    def append(self, call: Call | None, payload: bytes, also: Step | None = None) -> Flow | None:
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
        return self.session.context.settings.json_response or (
            stream.reader is None and self.session.orphans.is_orphan(stream)
        )

    def _emit_answer(self, message: JSONRPCResponse | JSONRPCError) -> Flow | None:
        call = self.calls.numbered(message.id)
        if call is None:
            self.answer_own(message)
            return None
        message.id = call.request.id
        # A result that cannot be written as JSON raises here, and the SDK answers the call with that error instead.
        payload = answer_json.dump_json(message, by_alias=True, exclude_unset=True)
        self.calls.runtime_done(call.number)
        if call.state is not CallState.RUNNING:
            return None
        also = self.session.consequence(call, message.result) if isinstance(message, JSONRPCResponse) else None
        self.calls.answer(call, CallStep.ANSWER, payload, also)
        self.session.context.counters.calls_answered += 1
        return call.stream

    # Answers that the runtime does not give

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
        self.session.context.counters.calls_answered += 1

    def abandon(self, reason: str) -> None:
        """Nobody will answer the running calls any more: say so (promise 3)."""
        for call in self.calls.all_running():
            self.answer_unknown(call, reason)

    def answer_unknown(self, call: Call, reason: str) -> None:
        request = call.request
        payload = unknown_outcome(request.id, method=request.method, reason=reason, params=request.params)
        with spans.settle(self.session.name, call.stream.id, outcome="unknown"):
            if self.calls.answer(call, CallStep.SETTLE, payload):
                self.session.context.counters.calls_settled += 1

    def runtime_may_go(self, idle: float) -> bool:
        """It was not used for so long, and nothing would be lost with it that loading it again does not bring back."""
        return not self.asks.open and self.is_idle(idle)

    async def aclose(self, reason: str) -> None:
        """The session ends: its running calls are answered, and the runtime goes without a word."""
        for call in self.calls.all_running():
            self.calls.answer(call, CallStep.CANCEL, error_payload(call.request.id, REQUEST_CANCELLED, reason))
        self.closed = True
        await self.drop_runtime()
