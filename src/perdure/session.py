"""One session: its record, its streams, its calls and the runtime that answers them."""

from __future__ import annotations

import contextvars
import itertools
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mcp.server.lowlevel.server import Server
from mcp.shared.message import ServerMessageMetadata, SessionMessage
from mcp_types import JSONRPCError, JSONRPCMessage, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse
from pydantic import TypeAdapter
from pydantic_core import to_json

from perdure._core.ids import Fence, Kind, NodeId, RandomBytes, StreamId, new_stream_id
from perdure._core.jsonrpc import Notification, Request, Response
from perdure._core.retention import Limits
from perdure._core.revisions import REVISIONS, Revision
from perdure._core.states import SESSION, CallState, CallStep, SessionState, SessionStep, StreamStep, advance
from perdure.hub import Hub
from perdure.journal import Journal
from perdure.ledger import (
    OUTCOME_UNKNOWN,
    POSITION_LOST,
    REQUEST_CANCELLED,
    STICKY_METHODS,
    Call,
    Calls,
    error_payload,
    rows,
)
from perdure.observe import Counters, note
from perdure.retained import Retained
from perdure.runtime.sdk import Runtime
from perdure.settings import Settings
from perdure.store.base import (
    AskRecord,
    CloseAsk,
    EndSession,
    OpenAsk,
    OpenStream,
    PutSession,
    SessionRecord,
    Step,
    Store,
    StreamRecord,
)
from perdure.streams import Stream

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

MAX_STICKY = 1_000
"""Subscriptions of one session that are remembered: the record is written whole, so it must stay small."""

_response = TypeAdapter(JSONRPCResponse)
_error = TypeAdapter(JSONRPCError)
_request = TypeAdapter(JSONRPCRequest)


@dataclass(frozen=True, kw_only=True)
class House:
    """What all sessions of one process share."""

    server: Server[Any]
    lifespan_state: object
    store: Store
    journal: Journal
    hub: Hub
    settings: Settings
    counters: Counters
    node: NodeId
    fence: Fence
    clock: Callable[[], float]
    random: RandomBytes
    ask_ids: itertools.count[int]
    context: contextvars.Context
    limits: Limits

    def stream(self, record: StreamRecord, *, owed: int = 0) -> Stream:
        return Stream(record, self.journal, clock=self.clock, limit=self.settings.max_stream_events, owed=owed)


class Session:
    """A session that this process serves."""

    __slots__ = (
        "_asks",
        "_ending",
        "_fed",
        "_written_active",
        "active",
        "calls",
        "house",
        "record",
        "retained",
        "runtime",
        "standalone",
        "streams",
    )

    def __init__(self, house: House, record: SessionRecord, standalone: StreamRecord) -> None:
        self.house = house
        self.record = record
        self.active = record.active
        self.standalone = house.stream(standalone)
        self.streams: dict[StreamId, Stream] = {}
        self.calls = Calls()
        self.runtime: Runtime | None = None
        self._asks: set[str] = set()
        self.retained = Retained(house.limits)
        self._written_active = record.active
        self._ending = False
        self._fed = record.active

    @property
    def revision(self) -> Revision:
        return REVISIONS[self.record.version]

    @property
    def connected(self) -> bool:
        return self.standalone.reader is not None or any(s.reader is not None for s in self.streams.values())

    @property
    def busy(self) -> bool:
        return bool(len(self.calls)) or self.connected

    @property
    def tells_by_log(self) -> bool:
        """The server declared logging, so a log message may tell of a gap."""
        return b'"logging"' in self.record.result

    def touch(self) -> None:
        """The client is here."""
        self.active = self.house.clock()
        if self.record.state is SessionState.DORMANT:
            self._put(state=advance(SESSION, self.record.state, SessionStep.CLIENT_CAME_BACK))

    # Requests come in

    async def accept(self, requests: Sequence[Request], bodies: Sequence[bytes], *steps: Step) -> list[Call]:
        """Write the ledger rows and the stream that will carry the answers; their ids are reserved already.

        Only then may the runtime see them.
        """
        house = self.house
        record = StreamRecord(
            id=new_stream_id(house.random),
            session=self.record.id,
            kind=Kind.CALL,
            fence=house.fence,
            opened=house.clock(),
        )
        try:
            calls = rows(requests, bodies, session=self.record, stream=record.id)
            await house.journal.write(*steps, OpenStream(record=record, calls=calls))
        except BaseException:
            self.calls.release(requests)
            raise
        stream = house.stream(record, owed=len(requests))
        stream.on_settled = self._settled
        self.streams[stream.id] = stream
        house.counters.call_streams += 1
        house.counters.calls_accepted += len(requests)
        return self.calls.open(requests, incarnation=self.record.incarnation, stream=stream)

    def start(self, call: Call, http: HttpRequest) -> None:
        """Hand a call to the runtime, in the context of the HTTP request that brought it."""
        request = call.request
        params = request.params
        if call.token is not None:
            params = {**(params or {}), "_meta": {**(params or {})["_meta"], "progressToken": call.number}}
        message = JSONRPCRequest(jsonrpc="2.0", id=call.number, method=request.method, params=params)
        self._feed(message, self._metadata(http, call))

    def notify(self, notification: Notification, http: HttpRequest) -> None:
        """Pass on a notification of the client's; a cancellation ends its call at once."""
        params = notification.params
        if notification.method == "notifications/cancelled":
            params = self._cancel(params or {})
            if params is None:
                return
        elif notification.method == "notifications/initialized" and not self.record.initialized:
            self._put(initialized=True)
        message = JSONRPCNotification(jsonrpc="2.0", method=notification.method, params=params)
        self._feed(message, self._metadata(http))

    def answer_ask(self, response: Response, http: HttpRequest) -> None:
        """Pass on the client's answer to an ask. Late and unknown ones are dropped: the race is the client's right."""
        if not isinstance(response.id, str) or response.id not in self._asks:
            note(logging.DEBUG, "ask.unknown", "an answer to no open ask was dropped", session=self.record.id)
            return
        self._close_ask(response.id)
        model = JSONRPCError if "error" in response.raw else JSONRPCResponse
        self._feed(model.model_validate(response.raw, by_name=False), self._metadata(http))

    def _cancel(self, params: dict[str, Any]) -> dict[str, Any] | None:
        request_id = params.get("requestId")
        if not isinstance(request_id, str | int) or isinstance(request_id, bool):
            return None
        call = self.calls.running(request_id)
        if call is None or call.request.method == "initialize":
            return None
        answer = error_payload(call.request.id, REQUEST_CANCELLED, "Request cancelled")
        self.calls.answer(call, CallStep.CANCEL, answer)
        self.house.counters.calls_cancelled += 1
        return {**params, "requestId": call.number}

    # The runtime

    def _feed(self, message: JSONRPCMessage, metadata: ServerMessageMetadata) -> None:
        if self.runtime is None:
            self._load()
            assert self.runtime is not None
        self._fed = self.house.clock()
        self.runtime.inbox.feed(contextvars.copy_context(), SessionMessage(message, metadata))

    def _load(self) -> None:
        house = self.house
        runtime = Runtime(
            house.server,
            house.lifespan_state,
            self,
            self.record,
            ask_ids=house.ask_ids,
            node=house.node,
            context=house.context.copy(),
        )
        runtime.task.add_done_callback(lambda _: self._runtime_ended(runtime))
        self.runtime = runtime
        for place, sticky in enumerate(self.record.sticky):
            request = JSONRPCRequest.model_validate_json(sticky, by_name=False)
            request.id = f"sticky-{place}"
            runtime.inbox.feed(house.context.copy(), SessionMessage(request))

    def _runtime_ended(self, runtime: Runtime) -> None:
        """A runtime that ends by itself has failed: what it was running gets its answer all the same."""
        if self.runtime is not runtime:
            return
        self.runtime = None
        failure = None if runtime.task.cancelled() else runtime.task.exception()
        note(logging.ERROR, "runtime.failed", f"a session's runtime ended: {failure!r}", session=self.record.id)
        self.abandon("its runtime failed")

    def abandon(self, reason: str) -> None:
        """Nobody will answer the running calls any more: say so."""
        for call in self.calls.all_running():
            data = {"outcome": "unknown", "reason": reason, "method": call.request.method}
            payload = error_payload(call.request.id, OUTCOME_UNKNOWN, "Interrupted, outcome unknown", data)
            if self.calls.answer(call, CallStep.SETTLE, payload):
                self.house.counters.calls_settled += 1
        self.calls.runtime_gone()

    @property
    def runtime_may_go(self) -> bool:
        """Nothing would be lost with the runtime that loading it again does not bring back."""
        subscribed = any(b'"resources/subscribe"' in sticky for sticky in self.record.sticky)
        runtime = self.runtime
        return (
            runtime is not None and self.calls.runtime_is_idle and not (self._asks or subscribed or runtime.keeps_state)
        )

    @property
    def runtime_idle_for(self) -> float:
        return self.house.clock() - self._fed

    async def drop_runtime(self) -> None:
        """Let the runtime go; the next message loads it again."""
        runtime, self.runtime = self.runtime, None
        if runtime is not None:
            await runtime.aclose()

    def _metadata(self, http: HttpRequest, call: Call | None = None) -> ServerMessageMetadata:
        as_json = self.house.settings.json_response
        if call is None:
            return ServerMessageMetadata(request_context=http, can_send_request=not as_json)

        async def unanswered() -> None:
            self.calls.runtime_done(call.number)

        closes = self.record.version != "" and self.revision.closes_early and not as_json
        return ServerMessageMetadata(
            request_context=http,
            can_send_request=not as_json,
            on_request_unanswered=unanswered,
            close_sse_stream=_closer(call.stream) if closes else None,
            close_standalone_sse_stream=_closer(self.standalone) if closes else None,
        )

    # Messages go out

    async def emit(self, message: JSONRPCMessage, related: int | str | None) -> None:
        """Append what the runtime sends to the stream where it belongs (R2): it never fails, it may have to wait.

        A call that has its answer already, because it was cancelled, says nothing more.
        """
        if self._ending:
            return
        if isinstance(message, JSONRPCNotification):
            stream = self._emit_notification(message, related)
        elif isinstance(message, JSONRPCRequest):
            stream = self._emit_ask(message, related)
        else:
            stream = self._emit_answer(message)
        if stream is not None and stream.crowded:
            await stream.flow()

    def _emit_notification(self, message: JSONRPCNotification, related: int | str | None) -> Stream | None:
        method, params = message.method, message.params
        call = None if related is None else self.calls.numbered(related)
        if params is not None:
            if method == "notifications/progress":
                call = call or self.calls.numbered(params.get("progressToken"))
                if call is not None:
                    params["progressToken"] = call.token
            elif method == "notifications/cancelled":
                self._close_ask(params.get("requestId"))
        if call is not None and call.state is not CallState.RUNNING:
            return None
        stream = self._stream_for(call)
        stream.append(_encode_notification(method, params))
        self.house.counters.events_appended += 1
        return stream

    def _emit_ask(self, message: JSONRPCRequest, related: int | str | None) -> Stream | None:
        call = self.calls.numbered(related)
        if call is not None and call.state is not CallState.RUNNING:
            return None
        stream = self._stream_for(call)
        payload = _request.dump_json(message, by_alias=True, exclude_unset=True)
        ask = AskRecord(
            session=self.record.id, id=str(message.id), stream=stream.id, request=payload, node=self.house.node
        )
        self._asks.add(ask.id)
        stream.append(payload, also=OpenAsk(record=ask))
        self.house.counters.events_appended += 1
        return stream

    def _emit_answer(self, message: JSONRPCResponse | JSONRPCError) -> Stream | None:
        call = self.calls.numbered(message.id)
        if call is None:
            return None  # the answer to a repeated sticky request
        self.calls.runtime_done(call.number)
        message.id = call.request.id
        adapter: TypeAdapter[Any] = _response if isinstance(message, JSONRPCResponse) else _error
        also = self._consequence(call, message.result) if isinstance(message, JSONRPCResponse) else None
        payload = adapter.dump_json(message, by_alias=True, exclude_unset=True)
        if self.calls.answer(call, CallStep.ANSWER, payload, also):
            self.house.counters.calls_answered += 1
            self.house.counters.events_appended += 1
        return call.stream

    def _consequence(self, call: Call, result: dict[str, Any]) -> Step | None:
        """What a successful answer changes in the record."""
        method = call.request.method
        if method == "initialize" and self.record.state is SessionState.OPENING:
            return PutSession(
                record=self._update(
                    state=advance(SESSION, self.record.state, SessionStep.HANDSHAKE_DONE),
                    version=result["protocolVersion"],
                    result=to_json(result),
                )
            )
        if method in STICKY_METHODS:
            return PutSession(record=self._update(sticky=_with_sticky(self.record.sticky, call.request)))
        return None

    def _stream_for(self, call: Call | None) -> Stream:
        # A JSON body has room for the answer only, so what belongs to the call goes to the standalone stream.
        return self.standalone if call is None or self.house.settings.json_response else call.stream

    def _close_ask(self, ask_id: object) -> None:
        if isinstance(ask_id, str) and ask_id in self._asks:
            self._asks.discard(ask_id)
            self.house.journal.put(_Steps((CloseAsk(session=self.record.id, id=ask_id),)))

    # The record

    def _update(self, **changes: Any) -> SessionRecord:
        self.record = replace(self.record, active=self.active, **changes)
        self._written_active = self.active
        return self.record

    def _put(self, **changes: Any) -> None:
        self.house.journal.put(_Steps((PutSession(record=self._update(**changes)),)))

    def keep_record_fresh(self) -> None:
        """Write the time of the last activity if it has moved; retention goes by it."""
        if self.busy:
            self.active = self.house.clock()
        if self.active > self._written_active:
            self._put()

    def go_dormant(self) -> None:
        self._put(state=advance(SESSION, self.record.state, SessionStep.GRACE_PASSED))

    async def end(self, step: SessionStep, reason: str) -> None:
        """End the session: running calls get their answer, readers their end, and everything stored goes."""
        state = advance(SESSION, self.record.state, step)
        for call in self.calls.all_running():
            self.calls.answer(call, CallStep.CANCEL, error_payload(call.request.id, REQUEST_CANCELLED, reason))
        self._ending = True
        self.record = replace(self.record, state=state)
        await self.drop_runtime()
        self.calls.runtime_gone()
        self.standalone.advance(StreamStep.SESSION_ENDED)
        if self.standalone.reader is not None:
            self.standalone.reader.end()
        self.house.journal.put(_Steps((EndSession(session=self.record.id, time=self.house.clock()),)))
        self.house.counters.sessions_ended += 1

    # Retention

    def _settled(self, stream: Stream) -> None:
        """A call's stream is over and nobody reads: from now on the store alone knows it."""
        self.streams.pop(stream.id, None)
        if not self._ending:
            self.retained.add(stream.kept, time=self.house.clock())
            self.enforce_limits()

    def enforce_limits(self) -> None:
        if steps := self.retained.enforce([self.standalone, *self.streams.values()]):
            self.house.journal.put(_Steps(steps))

    # Resuming a stream that is over

    async def find_stream(self, stream_id: StreamId) -> Stream | None:
        """A call's stream of this session, from memory or from the store."""
        if (stream := self.streams.get(stream_id)) is not None:
            return stream
        record = await self.house.store.stream(stream_id)
        if record is None or record.session != self.record.id or record.kind is not Kind.CALL:
            return None
        if (stream := self.streams.get(stream_id)) is not None:
            return stream  # somebody else was faster
        stream = self.house.stream(record)
        stream.on_settled = self._let_go
        self.streams[stream_id] = stream
        return stream

    def _let_go(self, stream: Stream) -> None:
        self.streams.pop(stream.id, None)

    async def lost_answers(self, stream: Stream) -> Sequence[bytes]:
        """Error responses for the calls of a stream whose answers are no longer retained."""
        answered = {json.loads(e.payload).get("id") for e in await self._finals(stream)}
        lost = [c for c in await self.house.store.calls(self.record.id) if c.stream == stream.id]
        message = "The answer to this request is no longer retained"
        return [
            error_payload(c.request_id, POSITION_LOST, message, {"method": c.method})
            for c in lost
            if c.request_id not in answered
        ]

    async def _finals(self, stream: Stream) -> list[Any]:
        finals: list[Any] = []
        after = 0
        while events := await self.house.journal.read(stream.id, after=after, limit=1_000):
            finals += [event for event in events if event.final]
            after = events[-1].seq
        return finals


class _Steps:
    """A source for steps that nobody waits for."""

    __slots__ = ("_steps",)

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps

    def take(self) -> Sequence[Step]:
        return self._steps

    def accepted(self, steps: Sequence[Step]) -> None:
        pass

    def written(self, steps: Sequence[Step]) -> None:
        pass

    def refused(self, steps: Sequence[Step], reason: Exception) -> None:
        note(logging.ERROR, "journal.refused", f"the store refused steps: {reason}")


def _closer(stream: Stream) -> Callable[[], Any]:
    async def close() -> None:
        if stream.reader is not None:
            stream.reader.stop_here()

    return close


def _encode_notification(method: str, params: dict[str, Any] | None) -> bytes:
    """A notification as JSON. Put together by hand, because progress comes by the tens of thousands a second."""
    if params is None:
        return b'{"jsonrpc":"2.0","method":%b}' % to_json(method)
    return b'{"jsonrpc":"2.0","method":%b,"params":%b}' % (to_json(method), to_json(params))


def _with_sticky(sticky: tuple[bytes, ...], request: Request) -> tuple[bytes, ...]:
    """The requests to repeat, after this one succeeded: the last level, and what is subscribed."""
    params = request.params or {}
    method = "resources/subscribe" if request.method == "resources/unsubscribe" else request.method
    kept = []
    for earlier in sticky:
        before = json.loads(earlier)
        same = before["method"] == method
        if not (same and (method == "logging/setLevel" or before["params"].get("uri") == params.get("uri"))):
            kept.append(earlier)
    if request.method != "resources/unsubscribe" and len(kept) < MAX_STICKY:
        body = {"jsonrpc": "2.0", "id": 0, "method": request.method, "params": _without_meta(params)}
        kept.append(json.dumps(body, separators=(",", ":")).encode())
    return tuple(kept)


def _without_meta(params: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name != "_meta"}
