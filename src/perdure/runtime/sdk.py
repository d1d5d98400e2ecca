"""Runs the SDK's server for a session or for a durable call, through the SDK's public parts.

Each message is one task, in a copy of the sender's context: `ServerRunner` and `serve_one` run the handler on a
dispatch context of ours. The handler's messages go to the session at once, in the handler's own task.

The SDK takes "8" for 8, so it knows requests by the session's numbers only, and asks by names that are no numbers.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import anyio
from mcp.server.connection import Connection
from mcp.server.lowlevel.server import Server
from mcp.server.runner import ServerRunner, aclose_shielded, serve_one
from mcp.shared.dispatcher import CallOptions, ProgressFnT
from mcp.shared.exceptions import MCPError, NoBackChannelError
from mcp.shared.jsonrpc_dispatcher import handler_exception_to_error_data, progress_token_from_params
from mcp.shared.message import ServerMessageMetadata
from mcp.shared.transport_context import TransportContext
from mcp_types import (
    CONNECTION_CLOSED,
    INTERNAL_ERROR,
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    REQUEST_TIMEOUT,
    SERVER_INFO_META_KEY,
    ErrorData,
    InitializeRequestParams,
)
from pydantic import TypeAdapter
from pydantic_core import to_json

from perdure._core.durable_calls import CallClient
from perdure._core.ids import RecordKind
from perdure._core.jsonrpc import Envelope, JsonObject, Notification, Request, Response
from perdure._core.limits import Caller
from perdure._core.revisions import is_sessionless
from perdure.runtime.base import CallEnded, Outlet, Runtime
from perdure.runtime.own_requests import connect_session, http_request, initialize_params, list_tools
from perdure.steps import handler_task
from perdure.store.records import SessionRecord
from perdure.telemetry import tracing as spans

_CLOSE_SECONDS = 1.0
"""Seconds for handlers to stop. No session's end waits longer for one that does not (a blocked thread, a shield)."""

MOST_ROUNDS = 10
"""Rounds of one task in which its tool asks for input: as many as clients allow by default."""

_ending: set[asyncio.Task[None]] = set()
"""Keeps the tasks that end runtimes from being collected while they run."""

_error = TypeAdapter(ErrorData)
_logger = logging.getLogger("perdure")


@dataclass(slots=True, eq=False)
class HandlerContext:
    """The SDK's `DispatchContext` of one message: sends the handler's messages to the session."""

    _runtime: HandlerRuntime
    request_id: int | None
    """`None` for a notification."""
    transport: TransportContext
    message_metadata: ServerMessageMetadata
    _token: int | str | None = None
    cancel_requested: anyio.Event = field(default_factory=anyio.Event)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    has_ended: bool = False
    """The handler has returned: later messages are dropped."""

    @property
    def can_send_request(self) -> bool:
        return self.transport.can_send_request and not self.has_ended

    async def notify(self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None) -> None:
        runtime = self._runtime
        if not self.has_ended and not runtime.is_closed:
            flow = runtime.outlet.notify(method, None if params is None else dict(params), call=self.request_id)
            if flow is not None:
                await flow.wait_for_room()

    async def send_raw_request(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> dict[str, Any]:
        if not self.can_send_request:
            raise NoBackChannelError(method)
        return await self._runtime.ask(method, params, opts or {}, call=self.request_id)

    async def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        if self._token is not None:
            said: JsonObject = {"progressToken": self._token, "progress": progress}
            if total is not None:
                said["total"] = total
            if message is not None:
                said["message"] = message
            await self.notify("notifications/progress", said)


class _Ask(NamedTuple):
    answer: asyncio.Future[dict[str, Any]]
    on_progress: ProgressFnT | None


class HandlerRuntime(Runtime):
    """Runs handlers, each in a task of its own."""

    __slots__ = ("_asks", "_runtimes", "_tasks", "is_closed", "outlet")

    def __init__(self, runtimes: SdkRuntimes, outlet: Outlet) -> None:
        self._runtimes = runtimes
        self.outlet = outlet
        self.is_closed = False
        self._tasks: dict[asyncio.Task[None], HandlerContext] = {}
        self._asks: dict[str, _Ask] = {}

    def follow(self, call: Request, state: JsonObject, *, origin: object) -> None:
        raise NotImplementedError  # a server in this process dies with it, so nothing is kept to follow

    async def aclose(self, *, ended: bool) -> None:
        """Close the way to the session first, then end the handlers, so that their end is not logged in the stream."""
        self.is_closed = True
        for ask in self._asks.values():
            if not ask.answer.done():
                ask.answer.set_exception(_closed())
        for context in self._tasks.values():
            context.scope.cancel()
        ending = asyncio.create_task(self._end(), context=self._runtimes.context.copy())
        _ending.add(ending)
        ending.add_done_callback(_ending.discard)
        await asyncio.wait({ending}, timeout=_CLOSE_SECONDS)

    async def _end(self) -> None:
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    # Requests

    def _start(self, task: Coroutine[Any, Any, None], context: HandlerContext) -> None:
        started = asyncio.create_task(task, name="perdure-handler")
        self._tasks[started] = context
        started.add_done_callback(self._tasks.pop)

    async def _serve(
        self, request: Request, context: HandlerContext, run: Callable[[], Awaitable[JsonObject]], *, hides: bool
    ) -> None:
        """Answer a request with the result of a handler. `hides`: its client does not see the message of an unexpected
        exception. Of that the SDK's own handlers of the two eras answer differently."""
        assert isinstance(request.id, int), "the session numbers its requests"
        body, failed = b"", False
        own = handler_task.set(asyncio.current_task())
        try:
            with context.scope:
                try:
                    result = await run()
                finally:
                    context.has_ended = True
                    handler_task.reset(own)  # a task that its own context holds would wait for the garbage collector
                body = to_json(result, inf_nan_mode="null")  # JSON has no NaN; the SDK writes null in its place as well
        except Exception as failure:
            failed, error = True, handler_exception_to_error_data(failure)
            if error is None:
                _log_failure(failure, request.method)
                error = ErrorData(code=0, message=str(failure))
                error = ErrorData(code=INTERNAL_ERROR, message="Internal server error") if hides else error
            body = _error.dump_json(error, by_alias=True, exclude_none=hides, exclude_unset=not hides)
        except (KeyboardInterrupt, SystemExit):
            if not self.is_closed:  # the process ends in good order: the next ones would run it again, and end as well
                self.outlet.interrupted(request.id, "its tool ended the process")
            raise
        except BaseException as failure:  # cut short from within
            if not isinstance(failure, asyncio.CancelledError):
                _log_failure(failure, request.method)
        if self.is_closed:
            return
        if not body or context.cancel_requested.is_set():
            self.outlet.interrupted(request.id)
        else:
            self.outlet.answer(request.id, body, failed=failed)

    def _cancel(self, number: object) -> None:
        for context in self._tasks.values():
            if number is not None and context.request_id == number:
                context.cancel_requested.set()
                context.scope.cancel()

    # What handlers say

    async def ask(
        self, method: str, params: Mapping[str, Any] | None, options: CallOptions, *, call: int | None
    ) -> dict[str, Any]:
        """Ask the client; raises what it answers in place of a result."""
        if self.is_closed:
            raise _closed()
        name, given = self.outlet.new_ask_id(), dict(params or {})
        meta = dict(given.pop("_meta", None) or {})
        if (on_progress := options.get("on_progress")) is not None:
            meta["progressToken"] = name
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._asks[name] = _Ask(answer, on_progress)
        timeout = options.get("timeout")
        try:
            with spans.ask(method, name, meta):
                if meta:
                    given["_meta"] = meta
                flow = self.outlet.ask(name, method, given or None, call=call)
                if flow is not None:
                    await flow.wait_for_room()
                async with asyncio.timeout(timeout):
                    return await answer
        except CallEnded:
            raise _closed() from None
        except TimeoutError:
            self._withdraw(name, f"timed out after {timeout}s", options, call)
            raise MCPError(code=REQUEST_TIMEOUT, message=f"Request {method!r} timed out") from None
        except asyncio.CancelledError:
            self._withdraw(name, "caller cancelled", options, call)
            raise
        finally:
            del self._asks[name]

    def _withdraw(self, name: str, reason: str, options: CallOptions, call: int | None) -> None:
        if not self.is_closed and options.get("cancel_on_abandon", True):
            self.outlet.notify("notifications/cancelled", {"requestId": name, "reason": reason}, call=call)

    def _take_answer(self, response: Response) -> None:
        if (ask := self._asks.get(str(response.id))) is None or ask.answer.done():
            return
        if (error := response.raw.get("error")) is not None:
            ask.answer.set_exception(MCPError(error["code"], error["message"], error.get("data")))
        else:
            ask.answer.set_result(response.raw["result"])

    def _take_progress(self, params: JsonObject, context: HandlerContext) -> None:
        """Report the client's progress with an ask to the handler that asked."""
        ask, progress = self._asks.get(str(params.get("progressToken"))), params.get("progress")
        if ask is None or ask.on_progress is None or not isinstance(progress, int | float):
            return
        total, message = params.get("total"), params.get("message")
        given = total if isinstance(total, int | float) else None, message if isinstance(message, str) else None
        on_progress = partial(ask.on_progress, float(progress), *given)

        async def report() -> None:
            try:
                await on_progress()
            except Exception:
                _logger.exception("a progress callback failed", extra={"action": "call.failed"})

        self._start(report(), context)


def _closed() -> MCPError:
    return MCPError(code=CONNECTION_CLOSED, message="Connection closed")


def _log_failure(failure: BaseException, method: str) -> None:
    _logger.error("the handler of %s failed", method, exc_info=failure, extra={"action": "call.failed"})


# --- Sessions


class SdkRuntime(HandlerRuntime):
    """Runs the server of one session, and is the SDK's `Outbound` of the session's connection."""

    __slots__ = ("_connection", "_runner")

    def __init__(self, runtimes: SdkRuntimes, record: SessionRecord, outlet: Outlet) -> None:
        super().__init__(runtimes, outlet)
        if record.version:
            params = InitializeRequestParams.model_validate_json(record.client_params, by_name=False)
            self._connection = Connection(
                self, protocol_version=record.version, session_id=record.id, client_params=params
            )
            if record.initialized:
                self._connection.initialized.set()
        else:  # it is still opening, and has no client params yet
            self._connection = Connection.for_loop(self, session_id=record.id)
        self._runner = ServerRunner(runtimes.server, self._connection, runtimes.lifespan_state)

    async def notify(self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None) -> None:
        """Also after the runtime was dropped, because a tool may have kept its session object."""
        flow = self.outlet.notify(method, None if params is None else dict(params), call=None)
        if flow is not None:
            await flow.wait_for_room()

    async def send_raw_request(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> dict[str, Any]:
        return await self.ask(method, params, opts or {}, call=None)

    @property
    def keeps_state(self) -> bool:
        return bool(self._connection.state)

    def mark_initialized(self) -> None:
        self._connection.initialized.set()

    def send(self, message: Envelope, *, origin: object, size: int = 0) -> None:
        if isinstance(message, Response):
            self._take_answer(message)
            return
        context = self._context(message, origin)
        if isinstance(message, Request):
            run = partial(self._runner.on_request, context, message.method, message.params)
            self._start(self._serve(message, context, run, hides=False), context)
            return
        if message.method == "notifications/cancelled":
            self._cancel((message.params or {}).get("requestId"))
        elif message.method == "notifications/progress":
            self._take_progress(message.params or {}, context)
        self._start(self._handle(message, context, size), context)

    def _context(self, message: Request | Notification, origin: object) -> HandlerContext:
        origin = http_request(origin, self._connection.session_id or "")
        can_ask, outlet = self._runtimes.can_ask, self.outlet
        metadata = ServerMessageMetadata(request_context=origin, can_send_request=can_ask)
        transport = TransportContext(kind="jsonrpc", can_send_request=can_ask)
        if isinstance(message, Notification):
            return HandlerContext(self, None, transport, metadata)
        number = int(message.id)
        if outlet.closes_early:
            metadata.close_sse_stream = partial(self._close_reader, number)
            metadata.close_standalone_sse_stream = partial(self._close_reader, None)
        return HandlerContext(self, number, transport, metadata, progress_token_from_params(message.params))

    async def _close_reader(self, call: int | None) -> None:
        if not self.is_closed:
            self.outlet.close_reader(call)

    async def _handle(self, message: Notification, context: HandlerContext, size: int) -> None:
        try:
            with context.scope:
                await self._runner.on_notify(context, message.method, message.params)
        finally:
            if size and not self.is_closed:
                self.outlet.handled(size)

    async def _end(self) -> None:
        await super()._end()
        await aclose_shielded(self._connection)
        # The runner caches methods of its own on itself, and would keep the connection until a full collection.
        for name in ("on_request", "on_notify"):
            vars(self._runner).pop(name, None)


# --- Durable calls


@dataclass(slots=True, eq=False)
class _CallOutbound:
    """The connection's own channel: what a handler asks without naming its request belongs to the call all the same."""

    _context: HandlerContext

    async def notify(self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None) -> None:
        """Nothing: changes reach clients by `subscriptions/listen` alone."""

    async def send_raw_request(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> dict[str, Any]:
        return await self._context.send_raw_request(method, params, opts)


class CallRuntime(HandlerRuntime):
    """Answers a durable call. Its protocol has no requests from server to client, but a handler may ask its client all
    the same: the session shows the ask as input that the call requires."""

    __slots__ = ("_client",)

    def __init__(self, runtimes: SdkRuntimes, record: SessionRecord, outlet: Outlet) -> None:
        super().__init__(runtimes, outlet)
        self._client = CallClient.from_params(json.loads(record.client_params), version=record.version)

    def send(self, message: Envelope, *, origin: object, size: int = 0) -> None:
        match message:
            case Request():
                http = http_request(origin)
                transport = TransportContext(kind="streamable-http", can_send_request=True, headers=http.headers)
                metadata = ServerMessageMetadata(request_context=http, can_send_request=True)
                token = progress_token_from_params(message.params)
                context = HandlerContext(self, int(message.id), transport, metadata, token)
                run = partial(self._run_rounds, message, context)
                self._start(self._serve(message, context, run, hides=True), context)
            case Response():
                self._take_answer(message)
            case Notification(method="notifications/cancelled", params=params):
                self._cancel((params or {}).get("requestId"))

    async def ask(
        self, method: str, params: Mapping[str, Any] | None, options: CallOptions, *, call: int | None
    ) -> dict[str, Any]:
        if (needed := self._client.lacks(method, params)) is not None:
            raise MCPError(
                code=MISSING_REQUIRED_CLIENT_CAPABILITY,
                message=f"The client cannot be asked {method}: it does not declare {', '.join(needed)}",
                data={"requiredCapabilities": needed},
            )
        return await super().ask(method, params, options, call=call)

    async def _run_rounds(self, request: Request, context: HandlerContext) -> JsonObject:
        """Run a handler, and again for each round in which it wants input. A result that wants input goes to the client
        as it is, unless the client may have a handle, or has had an early answer meanwhile: then the client is asked as
        by the handler itself."""
        had_key = self.outlet.is_task
        result = await self._run(request, context)
        for _ in range(MOST_ROUNDS):
            is_round = result.get("resultType") == "input_required"
            if not (is_round and self.outlet.is_task and (self._client.takes_tasks or not had_key)):
                return result
            wanted: JsonObject = result.get("inputRequests") or {}
            answers = await asyncio.gather(
                *(self.ask(ask["method"], ask.get("params"), {}, call=context.request_id) for ask in wanted.values())
            )
            params = {**(request.params or {}), "inputResponses": dict(zip(wanted, answers, strict=True))}
            if "requestState" in result:
                params["requestState"] = result["requestState"]
            await self.outlet.begin_round(int(request.id))
            result = await self._run(replace(request, params=params), context)
        raise MCPError(code=INTERNAL_ERROR, message=f"The tool asked for input in more than {MOST_ROUNDS} rounds")

    async def _run(self, request: Request, context: HandlerContext) -> JsonObject:
        runtimes, client = self._runtimes, self._client
        outbound = _CallOutbound(context)
        as_session = not is_sessionless(client.version)
        if as_session:
            connection = connect_session(outbound, initialize_params(client, client.version))
        else:
            connection = Connection.from_envelope(client.version, client.info, client.capabilities, outbound=outbound)
        result = await serve_one(
            runtimes.sessionless,
            context,
            request.method,
            request.params,
            connection=connection,
            lifespan_state=runtimes.lifespan_state,
        )
        if as_session:  # what the newer revision adds to each result
            stamp = {SERVER_INFO_META_KEY: runtimes.sessionless.server_info_stamp}
            result = {"resultType": "complete", **result, "_meta": {**stamp, **(result.get("_meta") or {})}}
        return result


@dataclass(frozen=True)
class SdkRuntimes:
    """Starts runtimes of one server whose lifespan was entered. Must be made in the context of the start, because
    runtimes end in it, not in the context of a request."""

    server: Server[Any]
    sessionless: Server[Any]
    """The same server for durable calls: request state is sealed with keys that all processes share."""
    lifespan_state: object
    can_ask: bool
    """Whether handlers may ask the client: a JSON response has no room for it. (Durable calls always may.)"""
    context: contextvars.Context = field(default_factory=contextvars.copy_context)

    needs_principal = waits_for_readers = True
    runs_at_home = repeats_sticky = outlives_runtimes = False
    answers_within = 10.0

    def may_run_again(self, record: SessionRecord, tool: str) -> None:
        """Only the server's handler knows."""

    def load(self, record: SessionRecord, outlet: Outlet) -> Runtime:
        return (CallRuntime if record.kind is RecordKind.CALL else SdkRuntime)(self, record, outlet)

    def admitting(self, caller: Caller) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def tools(self, record: SessionRecord, origin: object) -> Mapping[str, JsonObject]:
        client = CallClient.from_params(json.loads(record.client_params))
        session = "" if record.kind is RecordKind.CALL else record.id
        return await list_tools(self.server, self.lifespan_state, client, http_request(origin, session))
