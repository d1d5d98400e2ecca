"""Runs the SDK's server for a durable call, through the SDK's public `serve_one`.

It has no dispatcher and no streams: each request is one task, and what its handler says goes to the session at once.
The protocol has no requests from server to client there. A handler may ask its client all the same: the session shows
the ask as input that the call requires.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import anyio
from mcp.server.connection import Connection
from mcp.server.runner import serve_one
from mcp.shared.dispatcher import CallOptions
from mcp.shared.exceptions import MCPError
from mcp.shared.jsonrpc_dispatcher import progress_token_from_params
from mcp.shared.message import ServerMessageMetadata
from mcp.shared.transport_context import TransportContext
from mcp_types import (
    CLIENT_CAPABILITIES_META_KEY,
    CLIENT_INFO_META_KEY,
    CONNECTION_CLOSED,
    INTERNAL_ERROR,
    INVALID_PARAMS,
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    PROTOCOL_VERSION_META_KEY,
    SERVER_INFO_META_KEY,
    ErrorData,
    InitializeRequestParams,
)
from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json
from starlette.requests import Request as HttpRequest

from perdure._core.durable_calls import CallClient
from perdure._core.jsonrpc import Envelope, JsonObject, Notification, Request, Response
from perdure._core.revisions import is_sessionless
from perdure.runtime.base import CallEnded, Flow, Outlet
from perdure.runtime.own_requests import http_request
from perdure.store.records import SessionRecord

if TYPE_CHECKING:
    from perdure.runtime.sdk import SdkRuntimes

_CLOSE_SECONDS = 1.0
"""How long handlers may take to stop, as for sessions."""

MOST_ROUNDS = 10
"""Rounds of one task in which its tool asks for input: as many as clients go by themselves."""

_error = TypeAdapter(ErrorData)
_logger = logging.getLogger("perdure")


@dataclass(slots=True, eq=False)
class CallContext:
    """The SDK's `DispatchContext` of one request: the handler's way to the session."""

    _runtime: CallRuntime
    request_id: int
    transport: TransportContext
    message_metadata: ServerMessageMetadata
    _token: int | str | None
    can_send_request: bool
    cancel_requested: anyio.Event = field(default_factory=anyio.Event)

    async def notify(self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None) -> None:
        await self._runtime.notify(method, params, call=self.request_id)

    async def send_raw_request(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> dict[str, Any]:
        return await self._runtime.ask(method, params, opts or {}, call=self.request_id)

    async def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        if self._token is not None:
            said = {"progressToken": self._token, "progress": progress, "total": total, "message": message}
            given = {name: value for name, value in said.items() if value is not None}
            await self.notify("notifications/progress", given)


@dataclass(slots=True, eq=False)
class _Outbound:
    """The connection's own channel: what a handler says without naming its request belongs to the call all the same."""

    _context: CallContext | None = None

    async def notify(self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None) -> None:
        """Nothing: changes reach clients by `subscriptions/listen` alone."""

    async def send_raw_request(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> dict[str, Any]:
        if self._context is None:
            raise MCPError(code=CONNECTION_CLOSED, message="Connection closed")
        return await self._context.send_raw_request(method, params, opts)

    def belongs_to(self, context: CallContext) -> None:
        self._context = context


class CallRuntime:
    """Answers a durable call, and what this process asks on the call's behalf."""

    __slots__ = ("_asks", "_client", "_closed", "_outlet", "_running", "_runtimes")

    def __init__(self, runtimes: SdkRuntimes, record: SessionRecord, outlet: Outlet) -> None:
        told = json.loads(record.client_params)
        self._client = CallClient(
            version=record.version, info=told.get("clientInfo"), capabilities=told["capabilities"]
        )
        self._runtimes = runtimes
        self._outlet = outlet
        self._closed = False
        self._running: dict[int, tuple[asyncio.Task[None], CallContext]] = {}
        self._asks: dict[str, asyncio.Future[dict[str, Any]]] = {}

    @property
    def keeps_state(self) -> bool:
        return False

    def send(self, message: Envelope, *, origin: object, size: int = 0) -> None:
        match message:
            case Request():
                self._begin(message, http_request(origin))
            case Response():
                self._take_answer(message)
            case Notification(method="notifications/cancelled", params=params):
                if (running := self._running.get((params or {}).get("requestId", 0))) is not None:
                    running[1].cancel_requested.set()
                    running[0].cancel()

    def mark_initialized(self) -> None:
        """There is no handshake."""

    async def aclose(self) -> None:
        self._closed = True
        for future in self._asks.values():
            future.cancel()
        if tasks := {task for task, _ in self._running.values()}:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)

    # Requests

    def _begin(self, request: Request, origin: HttpRequest) -> None:
        assert isinstance(request.id, int), "the session numbers its requests"
        context = CallContext(
            self,
            request.id,
            TransportContext(kind="streamable-http", can_send_request=True, headers=origin.headers),
            ServerMessageMetadata(request_context=origin, can_send_request=True),
            progress_token_from_params(request.params),
            can_send_request=True,
        )
        serving = self._serve(request, context)
        task = asyncio.create_task(serving, name="perdure-call", context=contextvars.copy_context())
        self._running[request.id] = task, context

    async def _serve(self, request: Request, context: CallContext) -> None:
        number, outlet = context.request_id, self._outlet
        try:
            result = await self._last_result(request, context)
            body, failed = to_json(result, inf_nan_mode="null"), False
        except asyncio.CancelledError:
            if not self._closed:
                outlet.interrupted(number)
            return
        except Exception as failure:
            body, failed = _error.dump_json(_error_of(failure), by_alias=True, exclude_none=True), True
        finally:
            del self._running[number]
        if not self._closed:
            outlet.answer(number, body, failed=failed)

    async def _last_result(self, request: Request, context: CallContext) -> JsonObject:
        """Run a handler, and once more for each round in which it wants its client's input. Such a result goes to the
        client as it is, unless a handle may be out: then the client is asked as by the handler itself."""
        result = await self._result(request, context)
        for _ in range(MOST_ROUNDS):
            is_round = result.get("resultType") == "input_required"
            if not (is_round and self._client.takes_tasks and self._outlet.is_task):
                return result
            wanted: JsonObject = result.get("inputRequests") or {}
            answers = await asyncio.gather(
                *(self.ask(ask["method"], ask.get("params"), {}, call=context.request_id) for ask in wanted.values())
            )
            params = {**(request.params or {}), "inputResponses": dict(zip(wanted, answers, strict=True))}
            if "requestState" in result:
                params["requestState"] = result["requestState"]
            result = await self._result(replace(request, params=params), context)
        raise MCPError(code=INTERNAL_ERROR, message=f"The tool asked for input in more than {MOST_ROUNDS} rounds")

    async def _result(self, request: Request, context: CallContext) -> JsonObject:
        runtimes, client, params = self._runtimes, self._client, request.params
        outbound = _Outbound(context)
        as_session = not is_sessionless(client.version)
        if as_session:
            told = {"protocolVersion": client.version, "capabilities": client.capabilities}
            info = client.info or {"name": "unknown", "version": ""}
            opened = InitializeRequestParams.model_validate({**told, "clientInfo": info}, by_name=False)
            connection = Connection(outbound, protocol_version=client.version, client_params=opened)
            connection.initialized.set()
        else:
            if "_meta" not in (params or {}):  # a request of this process itself
                params = {**(params or {}), "_meta": _envelope_of(client)}
            connection = Connection.from_envelope(client.version, client.info, client.capabilities, outbound=outbound)
        result = await serve_one(
            runtimes.sessionless,
            context,
            request.method,
            params,
            connection=connection,
            lifespan_state=runtimes.lifespan_state,
        )
        if as_session:  # what the newer revision adds to each result
            stamp = {SERVER_INFO_META_KEY: runtimes.sessionless.server_info_stamp}
            result = {"resultType": "complete", **result, "_meta": {**stamp, **(result.get("_meta") or {})}}
        return result

    # What handlers say

    async def notify(self, method: str, params: Mapping[str, Any] | None, *, call: int) -> None:
        if not self._closed:
            await _room(self._outlet.notify(method, None if params is None else dict(params), call=call))

    async def ask(
        self, method: str, params: Mapping[str, Any] | None, options: CallOptions, *, call: int
    ) -> dict[str, Any]:
        """Ask the client; raises what it answers in place of a result."""
        if self._closed:
            raise MCPError(code=CONNECTION_CLOSED, message="Connection closed")
        if (needed := self._client.lacks(method, params)) is not None:
            raise MCPError(
                code=MISSING_REQUIRED_CLIENT_CAPABILITY,
                message=f"The client cannot be asked {method}: it does not declare {', '.join(needed)}",
                data={"requiredCapabilities": needed},
            )
        name = self._outlet.new_ask_id()
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._asks[name] = future
        try:
            await _room(self._outlet.ask(name, method, None if params is None else dict(params), call=call))
            async with asyncio.timeout(options.get("timeout")):
                return await future
        except CallEnded:
            raise MCPError(code=CONNECTION_CLOSED, message="Connection closed") from None
        except (TimeoutError, asyncio.CancelledError):
            if not self._closed:
                self._outlet.notify("notifications/cancelled", {"requestId": name}, call=call)
            raise
        finally:
            self._asks.pop(name, None)

    def _take_answer(self, response: Response) -> None:
        future = self._asks.get(str(response.id))
        if future is None or future.done():
            return
        if (error := response.raw.get("error")) is not None:
            future.set_exception(MCPError(error["code"], error["message"], error.get("data")))
        else:
            future.set_result(response.raw["result"])


def _envelope_of(client: CallClient) -> JsonObject:
    """What every request of this revision says of its client, in `_meta`."""
    meta: JsonObject = {PROTOCOL_VERSION_META_KEY: client.version, CLIENT_CAPABILITIES_META_KEY: client.capabilities}
    return meta if client.info is None else {**meta, CLIENT_INFO_META_KEY: client.info}


async def _room(flow: Flow | None) -> None:
    if flow is not None:
        await flow.wait_for_room()


def _error_of(failure: Exception) -> ErrorData:
    """What the SDK's own handler of this revision answers: nothing of a server's insides reaches its clients."""
    if isinstance(failure, MCPError):
        return failure.error
    if isinstance(failure, ValidationError):
        return ErrorData(code=INVALID_PARAMS, message="Invalid request parameters", data="")
    _logger.error("a request failed", exc_info=failure, extra={"action": "call.failed"})
    return ErrorData(code=INTERNAL_ERROR, message="Internal server error")
