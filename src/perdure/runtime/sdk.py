"""Runs the SDK's server for a session, through the SDK's public parts.

`JSONRPCDispatcher` runs the handlers, `Connection` holds what is known of the client, `ServerRunner` joins them.
The two streams between them and the session are ours: what goes in carries the context of the HTTP request it came
with, and what comes out is passed to the session in the handler's own task.

The SDK takes "8" for 8, so it knows requests under the session's numbers only, and asks under names that do not look
like numbers.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
from anyio.abc import ObjectReceiveStream, ObjectSendStream
from mcp.server.connection import Connection
from mcp.server.lowlevel.server import Server
from mcp.server.runner import ServerRunner, aclose_shielded
from mcp.shared.dispatcher import CallOptions, DispatchContext
from mcp.shared.exceptions import MCPError
from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher
from mcp.shared.message import ServerMessageMetadata, SessionMessage
from mcp_types import (
    CONNECTION_CLOSED,
    ErrorData,
    InitializeRequestParams,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
)
from pydantic import TypeAdapter
from pydantic_core import to_json

from perdure._core.durable_calls import CallClient
from perdure._core.ids import RecordKind
from perdure._core.jsonrpc import Envelope, JsonObject, Notification, Request
from perdure.runtime.base import CallEnded, Outlet, Runtime
from perdure.runtime.own_requests import http_request, list_tools
from perdure.runtime.sdk_call import CallRuntime
from perdure.store.records import SessionRecord

_CLOSE_SECONDS = 1.0
"""How long handlers may take to stop. One that does not stop (a blocked thread, a shield) is left to itself, so that
neither the end of its session nor that of another waits for it."""

_ending: set[asyncio.Task[None]] = set()
"""Keeps the tasks of closed runtimes from being collected while they run."""

_response: TypeAdapter[JSONRPCResponse | JSONRPCError] = TypeAdapter(JSONRPCResponse | JSONRPCError)
_error = TypeAdapter(ErrorData)

_size: contextvars.ContextVar[int] = contextvars.ContextVar("perdure_notification_size", default=0)
"""In the context in which a notification is handled: the size that it was sent with."""

_NOTHING = Exception("nothing to do")
"""A read stream may carry exceptions; the dispatcher only mentions them in its debug log."""


@dataclass(slots=True, eq=False)
class ReadStream(ObjectReceiveStream[SessionMessage | Exception]):
    """The dispatcher's read stream. `last_context` is how the SDK learns in which context to run a handler."""

    last_context: contextvars.Context | None = None
    _items: list[tuple[contextvars.Context, SessionMessage]] = field(default_factory=list)
    _waiter: asyncio.Future[None] | None = None
    _closed: bool = False
    _blank: bool = True

    def feed(self, context: contextvars.Context, message: SessionMessage) -> None:
        self._items.append((context, message))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def receive(self) -> SessionMessage | Exception:
        while not self._items:
            if self._closed:
                raise anyio.EndOfStream
            if not self._blank:
                # The dispatcher's loop holds on to the last thing it got, with the whole HTTP request, until the next.
                self._blank, self.last_context = True, None
                return _NOTHING
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self.last_context, message = self._items.pop(0)
        self._blank = False
        return message

    async def aclose(self) -> None:
        self._closed = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(slots=True, eq=False)
class WriteStream(ObjectSendStream[SessionMessage]):
    """The dispatcher's write stream, which passes messages to the session. Once closed it takes nothing more."""

    _outlet: Outlet
    _closed: bool = False

    async def send(self, item: SessionMessage, /) -> None:
        if self._closed:
            raise anyio.ClosedResourceError
        outlet, message, flow = self._outlet, item.message, None
        call = getattr(item.metadata, "related_request_id", None)
        if isinstance(message, JSONRPCNotification):
            flow = outlet.notify(message.method, message.params, call=call)
        elif isinstance(message, JSONRPCRequest):
            try:
                flow = outlet.ask(str(message.id), message.method, message.params, call=call)
            except CallEnded:
                raise anyio.ClosedResourceError from None
        else:
            self._pass_answer(message)
        if flow is not None:
            await flow.wait_for_room()

    def _pass_answer(self, message: JSONRPCResponse | JSONRPCError) -> None:
        assert isinstance(message.id, int), "the SDK answers under the numbers that it was given"
        task = asyncio.current_task()
        if isinstance(message, JSONRPCResponse):
            # A result that cannot be written as JSON raises here, and the SDK answers the call with that error instead.
            # JSON has no NaN; the SDK writes null in its place as well.
            self._outlet.answer(message.id, to_json(message.result, inf_nan_mode="null"), failed=False)
        elif message.error.code == CONNECTION_CLOSED and task is not None and task.cancelling() > 0:
            # The SDK wrote this in a handler that it cancels because the runtime ends: it is not an answer.
            self._outlet.interrupted(message.id)
        else:
            error = _error.dump_json(message.error, by_alias=True, exclude_unset=True)
            self._outlet.answer(message.id, error, failed=True)

    async def aclose(self) -> None:
        self._closed = True


class Dispatcher(JSONRPCDispatcher):
    """Names asks as the session chooses."""

    def __init__(self, read_stream: ReadStream, write_stream: WriteStream, outlet: Outlet) -> None:
        super().__init__(read_stream, write_stream, inline_methods=frozenset({"initialize"}))
        self._outlet = outlet

    async def send_raw_request(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        named: CallOptions = {**(opts or {}), "request_id": self._outlet.new_ask_id()}
        return await super().send_raw_request(method, params, named, **kwargs)


@dataclass(slots=True, eq=False)
class Outbound:
    """The connection's own channel. Notifications reach the session also after the runtime was dropped (a tool may have
    kept its session object); requests need a runtime that waits for the answer."""

    _outlet: Outlet
    dispatcher: Dispatcher | None

    async def notify(self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None) -> None:
        flow = self._outlet.notify(method, None if params is None else dict(params), call=None)
        if flow is not None:
            await flow.wait_for_room()

    async def send_raw_request(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> dict[str, Any]:
        if self.dispatcher is None:
            raise MCPError(code=CONNECTION_CLOSED, message="Connection closed")
        return await self.dispatcher.send_raw_request(method, params, opts)


class SdkRuntime:
    """One session's server, running."""

    __slots__ = ("_can_ask", "_closed", "_connection", "_outbound", "_outlet", "_read", "_task", "_write")

    def __init__(self, runtimes: SdkRuntimes, record: SessionRecord, outlet: Outlet) -> None:
        self._outlet = outlet
        self._can_ask = runtimes.can_ask
        self._closed = False
        self._read = ReadStream()
        self._write = WriteStream(outlet)
        dispatcher = Dispatcher(self._read, self._write, outlet)
        self._outbound = Outbound(outlet, dispatcher)
        if record.version:
            params = InitializeRequestParams.model_validate_json(record.client_params, by_name=False)
            self._connection = Connection(
                self._outbound, protocol_version=record.version, session_id=record.id, client_params=params
            )
            if record.initialized:
                self._connection.initialized.set()
        else:  # it is still opening, and has no client params yet
            self._connection = Connection.for_loop(self._outbound, session_id=record.id)
        runner = ServerRunner(runtimes.server, self._connection, runtimes.lifespan_state)
        serving, context = self._serve(runner, dispatcher), runtimes.context.copy()
        self._task = asyncio.create_task(serving, name="perdure-runtime", context=context)
        self._task.add_done_callback(self._ended)

    @property
    def keeps_state(self) -> bool:
        return bool(self._connection.state)

    def send(self, message: Envelope, *, origin: object, size: int = 0) -> None:
        context, outlet = contextvars.copy_context(), self._outlet
        if size:
            context.run(_size.set, size)
        origin = http_request(origin, self._connection.session_id or "")
        # What a handler sees beside a message, and what it calls.
        metadata = ServerMessageMetadata(request_context=origin, can_send_request=self._can_ask)
        sent: JSONRPCMessage
        match message:
            case Request():
                sent = JSONRPCRequest(jsonrpc="2.0", id=message.id, method=message.method, params=message.params)
                metadata.on_request_unanswered = partial(self._tell, outlet.interrupted, message.id)
                if outlet.closes_early:
                    metadata.close_sse_stream = partial(self._tell, outlet.close_reader, message.id)
                    metadata.close_standalone_sse_stream = partial(self._tell, outlet.close_reader, None)
            case Notification():
                sent = JSONRPCNotification(jsonrpc="2.0", method=message.method, params=message.params)
            case _:
                sent = _response.validate_python(message.raw, by_name=False)
        self._read.feed(context, SessionMessage(sent, metadata))

    async def _tell(self, tell: Callable[[Any], None], call: object) -> None:
        if not self._closed:
            tell(call)

    def mark_initialized(self) -> None:
        self._connection.initialized.set()

    async def aclose(self) -> None:
        """End it: first the way to the session, then the handlers, so that what the SDK says about a closed connection
        does not get into the log."""
        self._closed = True
        await self._write.aclose()
        self._outbound.dispatcher = None
        await self._read.aclose()
        _ending.add(self._task)
        self._task.add_done_callback(_ending.discard)
        await asyncio.wait({self._task}, timeout=_CLOSE_SECONDS)

    async def _serve(self, runner: ServerRunner[Any], dispatcher: Dispatcher) -> None:
        """Do what the SDK's `serve_connection` does, with an end that leaves nothing for the garbage collector: the
        runner caches methods of its own on itself, and would keep the connection until a full collection."""
        handle = runner.on_notify

        async def on_notify(dctx: DispatchContext[Any], method: str, params: Mapping[str, Any] | None) -> None:
            """Handle a notification, and report that it is handled: the SDK runs them all at once."""
            size = _size.get()
            try:
                await handle(dctx, method, params)
            finally:
                if size and not self._closed:
                    self._outlet.handled(size)

        try:
            await dispatcher.run(runner.on_request, on_notify)
        finally:
            await aclose_shielded(runner.connection)
            del runner.on_request, runner.on_notify

    def _ended(self, task: asyncio.Task[None]) -> None:
        failure = None if task.cancelled() else task.exception()  # of a closed one too, or asyncio would complain
        if not self._closed:
            self._outlet.failed(failure)


@dataclass(frozen=True)
class SdkRuntimes:
    """Starts runtimes of one server whose lifespan was entered. Must be made in the context of the start: runtimes run
    in that, not in the context of the request that loads one."""

    server: Server[Any]
    sessionless: Server[Any]
    """The same server for durable calls: request state is sealed with keys that all processes share."""
    lifespan_state: object
    can_ask: bool
    """Whether handlers may ask the client something: a JSON response has no room for it. (Durable calls always may.)"""
    context: contextvars.Context = field(default_factory=contextvars.copy_context)

    def load(self, record: SessionRecord, outlet: Outlet) -> Runtime:
        return (CallRuntime if record.kind is RecordKind.CALL else SdkRuntime)(self, record, outlet)

    async def tools(self, record: SessionRecord, origin: object) -> Mapping[str, JsonObject]:
        told = json.loads(record.client_params)
        client = CallClient(version="", info=told.get("clientInfo"), capabilities=told.get("capabilities"))
        session = "" if record.kind is RecordKind.CALL else record.id
        return await list_tools(self.server, self.lifespan_state, client, http_request(origin, session))
