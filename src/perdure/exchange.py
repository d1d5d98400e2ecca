"""What goes between a session and its runtime, both ways: the boundary at which ids change.

Inwards, the client's request ids and progress tokens become numbers of ours; outwards they are put back, and every
message is appended to the stream where it belongs. The runtime is loaded with the first message and may be dropped
when it is idle; the next message loads it again, from the record.
"""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import anyio
from mcp.shared.message import ServerMessageMetadata, SessionMessage
from mcp_types import JSONRPCError, JSONRPCMessage, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse
from pydantic import TypeAdapter
from pydantic_core import to_json
from starlette.requests import Request as HttpRequest

from perdure import spans, sticky
from perdure._core.jsonrpc import Notification, Response
from perdure._core.states import CallState, CallStep
from perdure.ledger import OUTCOME_UNKNOWN, REQUEST_CANCELLED, Call, Calls, error_payload
from perdure.observe import note
from perdure.runtime.sdk import Runtime
from perdure.store.base import AskRecord, CloseAsk, OpenAsk
from perdure.streams import Stream

if TYPE_CHECKING:
    from perdure.session import Session

CLIENT_AWAY = -31007
"""The answer that an ask gets when its client has been away for too long."""

_answer_json: TypeAdapter[JSONRPCResponse | JSONRPCError] = TypeAdapter(JSONRPCResponse | JSONRPCError)
_ask_json = TypeAdapter(JSONRPCRequest)


class Exchange:
    """One session's way to its runtime and back."""

    __slots__ = ("_asks", "_closed", "_fed", "_runtime", "_session", "calls")

    def __init__(self, session: Session) -> None:
        self.calls = Calls()
        self._session = session
        self._runtime: Runtime | None = None
        self._asks: dict[str, None] = {}  # in order; an empty set would be three times as large
        self._fed = session.record.active
        self._closed = False

    # Inwards

    def start(self, call: Call, http: HttpRequest) -> None:
        """Hand a call to the runtime, in the context of the HTTP request that brought it."""
        if self.calls.is_cancelled(call):
            self.calls.runtime_done(call.number)
            self._answer_cancelled(call)
            return
        params = call.request.params
        if call.token is not None and params is not None:
            params = {**params, "_meta": {**params["_meta"], "progressToken": call.number}}
        message = JSONRPCRequest(jsonrpc="2.0", id=call.number, method=call.request.method, params=params)
        self._feed(message, self._call_metadata(call, http))

    def notify(self, notification: Notification, http: HttpRequest) -> None:
        """Pass on a notification of the client's; a cancellation ends its call at once."""
        params = notification.params
        if notification.method == "notifications/cancelled":
            params = self._cancel(params or {})
            if params is None:
                return
        elif notification.method == "notifications/initialized" and not self._session.record.initialized:
            self._session.update(initialized=True)
        message = JSONRPCNotification(jsonrpc="2.0", method=notification.method, params=params)
        self._feed(message, self._metadata(http))

    def answer_ask(self, response: Response, http: HttpRequest) -> None:
        """Pass on the client's answer to an ask. Late and unknown ones are dropped: the race is the client's right."""
        if not isinstance(response.id, str) or response.id not in self._asks:
            note(logging.DEBUG, "ask.unknown", "an answer to no open ask was dropped", session=self._session.name)
            return
        self._close_ask(response.id)
        self._feed(_answer_json.validate_python(response.raw, by_name=False), self._metadata(http))

    def give_up_asks(self) -> None:
        """The client has been away for too long: whoever waits for its answer is told."""
        for ask in list(self._asks):
            self._close_ask(ask)
            error = {"code": CLIENT_AWAY, "message": "The client has been away for too long to answer"}
            answer = JSONRPCError.model_validate({"jsonrpc": "2.0", "id": ask, "error": error}, by_name=False)
            self._feed(answer, ServerMessageMetadata())

    def _cancel(self, params: dict[str, Any]) -> dict[str, Any] | None:
        """Answer the call that is cancelled; gives what the runtime is told, or `None` if there is no such call."""
        request_id = params.get("requestId")
        if not isinstance(request_id, str | int) or isinstance(request_id, bool):
            return None
        call = self.calls.running(request_id)
        if call is None:
            self.calls.cancel_early(request_id)
            return None
        if call.request.method == "initialize":
            return None
        self._answer_cancelled(call)
        return {**params, "requestId": call.number}

    def _answer_cancelled(self, call: Call) -> None:
        answer = error_payload(call.request.id, REQUEST_CANCELLED, "Request cancelled")
        if self.calls.answer(call, CallStep.CANCEL, answer):
            self._session.house.counters.calls_cancelled += 1

    def _feed(self, message: JSONRPCMessage, metadata: ServerMessageMetadata) -> None:
        if self._closed:
            return  # a runtime that is loaded now would never be dropped
        self._fed = self._session.house.clock()
        runtime = self._runtime or self._loaded()
        runtime.inbox.feed(contextvars.copy_context(), SessionMessage(message, metadata))

    def _metadata(self, http: HttpRequest) -> ServerMessageMetadata:
        as_json = self._session.house.settings.json_response
        return ServerMessageMetadata(request_context=http, can_send_request=not as_json)

    def _call_metadata(self, call: Call, http: HttpRequest) -> ServerMessageMetadata:
        metadata = self._metadata(http)

        async def unanswered() -> None:
            self.calls.runtime_done(call.number)

        metadata.on_request_unanswered = unanswered
        if self._session.closes_early:
            metadata.close_sse_stream = _closer(call.stream)
            metadata.close_standalone_sse_stream = _closer(self._session.standalone)
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
            return self._emit_ask(message, related)
        return self._emit_answer(message)

    def _emit_notification(
        self, method: str, params: dict[str, Any] | None, related: int | str | None
    ) -> Stream | None:
        call = None if related is None else self.calls.numbered(related)
        if params is not None:
            if method == "notifications/progress" and isinstance(token := params.get("progressToken"), int):
                # A number of ours, which means nothing outside: not after its call has ended, nor without a token.
                call = self.calls.numbered(token)
                if call is None or call.token is None:
                    return None
                params["progressToken"] = call.token
            elif method == "notifications/cancelled":
                self._close_ask(params.get("requestId"))
        if call is None and related is not None:
            return None  # of a call that has ended, or of a repeated sticky request
        stream = self._stream_for(call)
        if stream is not None:
            stream.append(_encode_notification(method, params))
        return stream

    def _emit_ask(self, message: JSONRPCRequest, related: int | str | None) -> Stream:
        stream = self._stream_for(self.calls.numbered(related))
        if stream is None:
            raise anyio.ClosedResourceError  # a cancelled call that does not stop must not wait for an answer for ever
        session = self._session
        payload = _ask_json.dump_json(message, by_alias=True, exclude_unset=True)
        ask = AskRecord(
            session=session.record.id, id=str(message.id), stream=stream.id, request=payload, node=session.house.node
        )
        self._asks[ask.id] = None
        stream.append(payload, also=OpenAsk(record=ask))
        return stream

    def _emit_answer(self, message: JSONRPCResponse | JSONRPCError) -> Stream | None:
        call = self.calls.numbered(message.id)
        if call is None:
            return None  # the answer to a repeated sticky request
        message.id = call.request.id
        # A result that cannot be written as JSON raises here, and the SDK answers the call with that error instead.
        payload = _answer_json.dump_json(message, by_alias=True, exclude_unset=True)
        self.calls.runtime_done(call.number)
        if call.state is not CallState.RUNNING:
            return None
        also = self._session.consequence(call, message.result) if isinstance(message, JSONRPCResponse) else None
        self.calls.answer(call, CallStep.ANSWER, payload, also)
        self._session.house.counters.calls_answered += 1
        return call.stream

    def _stream_for(self, call: Call | None) -> Stream | None:
        # A JSON body has room for the answer only, so there what belongs to a call goes to the standalone stream.
        if call is not None and call.state is not CallState.RUNNING:
            return None
        return self._session.standalone if call is None or self._session.house.settings.json_response else call.stream

    def _close_ask(self, ask: object) -> None:
        if isinstance(ask, str) and ask in self._asks:
            del self._asks[ask]
            self._session.put(CloseAsk(session=self._session.record.id, id=ask))

    # The runtime

    def _loaded(self) -> Runtime:
        with spans.load(self._session.name):
            return self._load()

    def _load(self) -> Runtime:
        house, record = self._session.house, self._session.record
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
        for place, request in enumerate(record.sticky):
            message = JSONRPCRequest.model_validate_json(request, by_name=False)
            message.id = f"sticky-{place}"
            http = _stand_in(record.id)
            runtime.inbox.feed(house.context.copy(), SessionMessage(message, self._metadata(http)))
        return runtime

    def _runtime_ended(self, runtime: Runtime) -> None:
        """A runtime that ends by itself has failed: what it was running gets its answer all the same."""
        if self._runtime is not runtime:
            return
        self._runtime = None
        failure = None if runtime.task.cancelled() else runtime.task.exception()
        name = self._session.name
        note(logging.ERROR, "runtime.failed", f"a session's runtime ended: {failure!r}", session=name)
        self.abandon("its runtime failed")
        self.calls.runtime_gone()

    def interrupted(self, number: object) -> None:
        """The runtime cut a call short, without having been asked to."""
        if (call := self.calls.numbered(number)) is not None:
            self.calls.runtime_done(call.number)
            self._settle(call, "its runtime failed")

    def abandon(self, reason: str) -> None:
        """Nobody will answer the running calls any more: say so (promise 3)."""
        for call in self.calls.all_running():
            self._settle(call, reason)

    def _settle(self, call: Call, reason: str) -> None:
        data = {"outcome": "unknown", "reason": reason, "method": call.request.method}
        payload = error_payload(call.request.id, OUTCOME_UNKNOWN, "Interrupted, outcome unknown", data)
        with spans.settle(self._session.name, call.stream.id, outcome="unknown"):
            if self.calls.answer(call, CallStep.SETTLE, payload):
                self._session.house.counters.calls_settled += 1

    @property
    def loaded(self) -> bool:
        return self._runtime is not None

    def runtime_may_go(self, idle: float) -> bool:
        """It was not used for so long, and nothing would be lost with it that loading it again does not bring back."""
        runtime = self._runtime
        return (
            runtime is not None
            and self._session.house.clock() - self._fed >= idle
            and self.calls.runtime_is_idle
            and not (self._asks or runtime.keeps_state or sticky.subscribes(self._session.record.sticky))
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


def _closer(stream: Stream) -> Callable[[], Awaitable[None]]:
    async def close() -> None:
        if stream.reader is not None:
            stream.reader.stop_here()

    return close


def _encode_notification(method: str, params: dict[str, Any] | None) -> bytes:
    """A notification as JSON. Put together by hand, because progress comes by the tens of thousands a second."""
    if params is None:
        return b'{"jsonrpc":"2.0","method":%b}' % _name(method)
    # JSON has no NaN; the SDK writes null in its place as well.
    return b'{"jsonrpc":"2.0","method":%b,"params":%b}' % (_name(method), to_json(params, inf_nan_mode="null"))


@lru_cache(maxsize=64)
def _name(method: str) -> bytes:
    return to_json(method)


def _stand_in(session_id: str) -> HttpRequest:
    """What a handler sees as its HTTP request when a sticky request is repeated without one."""
    headers = [(b"mcp-session-id", session_id.encode())]
    return HttpRequest({"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": headers})
