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
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import anyio
from mcp.shared.message import ServerMessageMetadata, SessionMessage
from mcp_types import JSONRPCError, JSONRPCMessage, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse
from pydantic import TypeAdapter
from pydantic_core import to_json
from starlette.requests import Request as HttpRequest

from perdure import spans
from perdure._core import mail, sticky
from perdure._core.ids import NodeId
from perdure._core.jsonrpc import Notification, Response
from perdure._core.states import CallState, CallStep
from perdure.errors import NodeGone
from perdure.ledger import REQUEST_CANCELLED, Call, Calls, error_payload, unknown_outcome
from perdure.observe import note
from perdure.runtime.sdk import Runtime
from perdure.store.base import AskRecord, CloseAsk, OpenAsk, Post, Step
from perdure.streams import Stream

if TYPE_CHECKING:
    from perdure.session import Session

CLIENT_AWAY = -31007
"""The answer that an ask gets when its client has been away for too long."""

_answer_json: TypeAdapter[JSONRPCResponse | JSONRPCError] = TypeAdapter(JSONRPCResponse | JSONRPCError)
_ask_json = TypeAdapter(JSONRPCRequest)

_ASK = re.compile(r"ask-([A-Za-z0-9_-]{22})-[0-9]+")
"""The id of an ask names the node that waits."""


class _Ask:
    """An ask that waits: the id under which the runtime knows it, and what was asked."""

    __slots__ = ("call", "inner", "request")

    def __init__(self, inner: str, request: JSONRPCRequest, call: Call | None) -> None:
        self.inner = inner
        self.request = request
        self.call = call


_private_ids = itertools.count(1)

_OWN_SECONDS = 10.0
"""How long a server may take to tell which tools it has."""


class Exchange:
    """One session's way to its runtime and back."""

    __slots__ = ("_asks", "_closed", "_fed", "_private", "_runtime", "_session", "_subscribed", "calls")

    def __init__(self, session: Session) -> None:
        self.calls = Calls()
        self._session = session
        self._runtime: Runtime | None = None
        self._asks: dict[str, _Ask] = {}
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
        self._feed(message, self._call_metadata(call, http))

    def notify(self, notification: Notification, http: HttpRequest | None) -> None:
        """Pass on a notification of the client's."""
        if notification.method == "notifications/initialized":
            if self._session.record.initialized:
                return  # of a reattach: the server has seen it
            self._session.update(initialized=True)
        message = JSONRPCNotification(jsonrpc="2.0", method=notification.method, params=notification.params)
        self._feed(message, self._metadata(http))

    def answer_ask(self, response: Response, http: HttpRequest | None) -> bool:
        """Pass on the client's answer to an ask; tells whether somebody here waits for it."""
        ask = self._asks.get(response.id) if isinstance(response.id, str) else None
        if ask is None:
            return False
        assert isinstance(response.id, str)
        self._close_ask(response.id)
        raw = {**response.raw, "id": ask.inner}
        self._feed(_answer_json.validate_python(raw, by_name=False), self._metadata(http))
        return True

    async def hear(self, message: Notification | Response, http: HttpRequest | None) -> None:
        """What the client says beside its requests, wherever it is to be heard.

        Late and unknown answers and cancellations are dropped: the race is the client's right.
        """
        session = self._session
        if isinstance(message, Response):
            if not self.answer_ask(message, http) and not await self._answer_elsewhere(message):
                note(logging.DEBUG, "ask.unknown", "an answer to no open ask was dropped", session=session.name)
        elif message.method == "notifications/cancelled":
            await self._hear_cancelled(message.params or {})
        elif (node := _waiting_node(message)) not in (None, session.house.node):
            assert node is not None
            await self._tell(node, mail.Notified(session=session.id, method=message.method, params=message.params))
        else:
            self.notify(message, http)

    async def _answer_elsewhere(self, response: Response) -> bool:
        session = self._session
        node = _node_of_ask(response.id)
        if node is None or node == session.house.node:
            return False
        assert isinstance(response.id, str)
        store = session.house.store
        if await session.house.journal.within_time(store.ask(session.id, response.id)) is None:
            return False
        return await self._tell(node, mail.AskAnswered(session=session.id, response=response.raw))

    async def _hear_cancelled(self, params: dict[str, Any]) -> None:
        session = self._session
        request_id = params.get("requestId")
        if not isinstance(request_id, str | int) or isinstance(request_id, bool):
            return
        incarnation = session.record.incarnation
        if self.cancel(request_id, incarnation=incarnation, params=params):
            return
        house = session.house
        if house.neighbours.alone and not session.waits:
            return
        row = await house.journal.within_time(
            house.store.open_call(session.id, incarnation=incarnation, request_id=request_id)
        )
        stream = None if row is None else await house.journal.within_time(house.store.stream(row.stream))
        if stream is None or not stream.node:
            return
        cancelled = mail.Cancelled(session=session.id, incarnation=incarnation, request_id=request_id, params=params)
        if stream.node == house.node:
            await house.neighbours.cancel_waiting(cancelled)
        else:
            await self._tell(stream.node, cancelled)

    async def _tell(self, node: NodeId, message: mail.Message) -> bool:
        """Send mail; tells whether the node is still there."""
        try:
            await self._session.house.journal.write(Post(node=node, message=mail.encode(message)))
        except NodeGone:
            return False
        return True

    def give_up_asks(self) -> None:
        """The client has been away for too long: whoever waits for its answer is told."""
        for name, ask in list(self._asks.items()):
            self._close_ask(name)
            error = {"code": CLIENT_AWAY, "message": "The client has been away for too long to answer"}
            answer = JSONRPCError.model_validate({"jsonrpc": "2.0", "id": ask.inner, "error": error}, by_name=False)
            self._feed(answer, ServerMessageMetadata())

    def ask_again(self) -> None:
        """The client began anew and has forgotten what it was asked: the old ids are cancelled, new ones asked."""
        session = self._session
        for name, ask in list(self._asks.items()):
            del self._asks[name]
            before = CloseAsk(session=session.id, id=name)
            params = {"requestId": name, "reason": "the client began anew; it is asked again"}
            self._append(ask.call, _encode_notification("notifications/cancelled", params), also=before)
            again = f"ask-{session.house.node}-{next(session.house.ask_ids)}"
            self._ask(ask.request.model_copy(update={"id": again}), ask.inner, ask.call)

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
            self._feed(message, ServerMessageMetadata())

    def _answer_cancelled(self, call: Call) -> None:
        answer = error_payload(call.request.id, REQUEST_CANCELLED, "Request cancelled")
        if self.calls.answer(call, CallStep.CANCEL, answer):
            self._session.house.counters.calls_cancelled += 1

    def _feed(self, message: JSONRPCMessage, metadata: ServerMessageMetadata) -> None:
        if self._closed:
            return  # a runtime that is loaded now would never be dropped
        self._fed = self._session.house.clock()
        runtime = self._runtime or self._load()
        runtime.inbox.feed(contextvars.copy_context(), SessionMessage(message, metadata))

    def _metadata(self, http: HttpRequest | None) -> ServerMessageMetadata:
        as_json = self._session.house.settings.json_response
        return ServerMessageMetadata(request_context=http or _stand_in(self._session.id), can_send_request=not as_json)

    def _call_metadata(self, call: Call, http: HttpRequest | None) -> ServerMessageMetadata:
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
                if call is None or call.token is None or _is_repeated(call, params):
                    return None
                params["progressToken"] = self._token(call)
            elif method == "notifications/cancelled":
                params = self._withdraw(params)
        if call is None and related is not None:
            return None  # of a call that has ended, or of a repeated sticky request
        return self._append(call, _encode_notification(method, params))

    def _token(self, call: Call) -> int | str | None:
        """The progress token as the client may know it: it means something within one incarnation only."""
        if call.incarnation == self._session.record.incarnation:
            return call.token
        return f"{call.incarnation}:{call.token}"

    def _withdraw(self, params: dict[str, Any]) -> dict[str, Any]:
        """The runtime no longer waits for an ask, which the client may know under a later id."""
        for name, ask in self._asks.items():
            if ask.inner == params.get("requestId"):
                self._close_ask(name)
                return {**params, "requestId": name}
        return params

    def _append(self, call: Call | None, payload: bytes, also: Step | None = None) -> Stream | None:
        """Append a message to the stream where it belongs, which is given back if it is written here.

        What belongs to a call goes to the call's stream, unless nobody reads that and its client has begun anew (R5);
        and a JSON body has room for the answer only.
        """
        if call is not None and call.state is not CallState.RUNNING:
            return None
        if call is None or self._goes_standalone(call):
            return self._session.home.say(payload, also)
        call.stream.append(payload, also=also)
        return call.stream

    def _goes_standalone(self, call: Call) -> bool:
        stream = call.stream
        return self._session.house.settings.json_response or (stream.reader is None and self._session.is_orphan(stream))

    def _emit_ask(self, message: JSONRPCRequest, related: int | str | None) -> Stream | None:
        call = self.calls.numbered(related)
        if related is not None and (call is None or call.state is not CallState.RUNNING):
            raise anyio.ClosedResourceError  # a cancelled call that does not stop must not wait for an answer for ever
        return self._ask(message, str(message.id), call)

    def _ask(self, message: JSONRPCRequest, inner: str, call: Call | None) -> Stream | None:
        session = self._session
        stream = session.standalone if call is None or self._goes_standalone(call) else call.stream
        payload = _ask_json.dump_json(message, by_alias=True, exclude_unset=True)
        ask = AskRecord(
            session=session.id, id=str(message.id), stream=stream.id, request=payload, node=session.house.node
        )
        self._asks[ask.id] = _Ask(inner, message, call)
        return self._append(call, payload, also=OpenAsk(record=ask))

    def _emit_answer(self, message: JSONRPCResponse | JSONRPCError) -> Stream | None:
        call = self.calls.numbered(message.id)
        if call is None:
            self._answer_private(message)
            return None
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

    def _close_ask(self, ask: object) -> None:
        if isinstance(ask, str) and ask in self._asks:
            del self._asks[ask]
            self._session.put(CloseAsk(session=self._session.id, id=ask))

    @property
    def open_asks(self) -> set[str]:
        return set(self._asks)

    # The runtime

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
        subscriptions = sticky.subscriptions(record.sticky)
        self._subscribed = subscriptions if self._session.home.here else ()
        for request in record.sticky:
            if self._session.home.here or request not in subscriptions:
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
        runtime.inbox.feed(self._session.house.context.copy(), SessionMessage(message, self._metadata(None)))

    def came_home(self) -> None:
        """This node is the session's home now: what the session has subscribed to lives here."""
        subscriptions = sticky.subscriptions(self._session.record.sticky)
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
        self._feed(message, self._metadata(http))
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
        name = self._session.name
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
        result = b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (to_json(call.request.id), self._session.record.result)
        self.calls.runtime_done(call.number)
        self.calls.answer(call, CallStep.ANSWER, result)
        self._session.house.counters.calls_answered += 1

    def abandon(self, reason: str) -> None:
        """Nobody will answer the running calls any more: say so (promise 3)."""
        for call in self.calls.all_running():
            self.answer_unknown(call, reason)

    def answer_unknown(self, call: Call, reason: str) -> None:
        request = call.request
        payload = unknown_outcome(request.id, method=request.method, reason=reason, params=request.params)
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
            and not self._private
            and not (self._asks or runtime.keeps_state)
            and not (self._session.home.here and sticky.subscriptions(self._session.record.sticky))
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


def _is_repeated(call: Call, params: dict[str, Any]) -> bool:
    """Progress of a call that runs again, which its client has seen already."""
    progress = params.get("progress")
    return call.progress is not None and isinstance(progress, int | float) and progress <= call.progress


def _node_of_ask(ask: object) -> NodeId | None:
    match = _ASK.fullmatch(ask) if isinstance(ask, str) else None
    return None if match is None else NodeId(match[1])


def _waiting_node(notification: Notification) -> NodeId | None:
    """The node that a notification is for: progress of an ask is for the one that waits for it."""
    if notification.method != "notifications/progress":
        return None
    return _node_of_ask((notification.params or {}).get("progressToken"))


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
