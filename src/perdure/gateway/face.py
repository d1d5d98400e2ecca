"""Answers requests of 2026-07-28 that need no log, by an upstream behind the SDK's own handler.

The SDK runs a middleware before it looks a method up, and takes the result of one that does not call the next as it
is. So a server without handlers and with one middleware that relays has the SDK's headers, statuses and error codes.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.lowlevel.server import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPError
from mcp_types import LoggingMessageNotification, methods
from mcp_types.jsonrpc import INVALID_PARAMS, METHOD_NOT_FOUND
from pydantic import ValidationError

from perdure._core import splice
from perdure._core.codes import OUTCOME_UNKNOWN
from perdure._core.durable_calls import CallClient
from perdure._core.envelope import CAPABILITIES, CLIENT, DISCOVER, VERSION
from perdure._core.eras import discover_result, log_level_in, passes_up, request_up, result_up
from perdure._core.jsonrpc import JsonObject
from perdure._core.settling import READS
from perdure._core.unknown_outcome import unknown_error
from perdure.gateway.lane import LOG_MESSAGE, Retries, Rising, UpstreamUnavailable, unavailable_error
from perdure.gateway.pool import Gone, LanePool, RequestRefused
from perdure.gateway.watched_lane import caller_of
from perdure.runtime.base import Flow, Tools
from perdure.runtime.server import announce_extensions, with_own_tools
from perdure.runtime.token_check import end_check
from perdure.settings import Settings

_RUN_AHEAD = 256
"""Notifications of a request that wait to be sent: beyond, its upstream waits or, where that would hold up other
requests, the oldest are dropped. A plain call has no log from which its client could read them later."""

_MOST_RUNS = 2
"""A request that was interrupted by the end of its server runs again, if it may, once."""


def manager_of(pool: LanePool, tools: Tools, settings: Settings) -> StreamableHTTPSessionManager:
    """The SDK's handler of a server that relays to an upstream."""
    server: Server[Any] = Server(pool.upstream.name)
    server.middleware = [
        partial(announce_extensions, settings),
        *with_own_tools(settings, tools),
        Relay(pool),
    ]
    return StreamableHTTPSessionManager(
        app=server, stateless=True, json_response=settings.json_response, max_request_body_size=settings.max_body
    )


@dataclass(frozen=True, slots=True)
class Relay:
    _pool: LanePool

    async def __call__(self, ctx: ServerRequestContext[Any, Any], call_next: CallNext) -> HandlerResult:
        if ctx.request_id is None:
            return None  # a notification: none of this revision concerns a server without a stream
        if ctx.method in methods.SPEC_CLIENT_METHODS:
            try:
                methods.validate_client_request(ctx.method, ctx.protocol_version, ctx.params)
            except KeyError:
                raise MCPError(code=METHOD_NOT_FOUND, message="Method not found", data=ctx.method) from None
            except ValidationError as error:
                raise MCPError(code=INVALID_PARAMS, message="Invalid request parameters", data=str(error)) from None
        outgoing, runs, retries = _Outgoing(ctx, waits=self._pool.names_asks), 0, Retries()
        while True:
            try:
                return await self._relay(ctx, outgoing)
            except UpstreamUnavailable as failure:
                raise self._unavailable(ctx, failure, has_run=bool(runs)) from None
            except RequestRefused as refused:
                raise _error(refused.error) from None
            except Gone as gone:
                lost = gone.lost
                runs += lost.ran
                may_run_again = self._may_run_again(ctx, outgoing.may_run_again)
                if lost.ran and (lost.is_final or runs == _MOST_RUNS or not may_run_again):
                    raise _unknown(ctx, lost.why) from None
                if lost.unavailable is not None and not retries.take(lost, self._pool.upstream.patience):
                    raise self._unavailable(ctx, lost.unavailable, has_run=bool(runs)) from None

    def _unavailable(
        self, ctx: ServerRequestContext[Any, Any], failure: UpstreamUnavailable, *, has_run: bool
    ) -> MCPError:
        if has_run:  # an earlier try did
            return _unknown(ctx, str(failure))
        failure.report_to(ctx.request)
        return _error(json.loads(unavailable_error(self._pool.upstream.name, failure)))

    def _may_run_again(self, ctx: ServerRequestContext[Any, Any], at_start: bool | None) -> bool | None:
        if ctx.method != "tools/call":
            return ctx.method in READS
        return self._pool.tools.may_still_run_again(str((ctx.params or {}).get("name")), at_start)

    async def _relay(self, ctx: ServerRequestContext[Any, Any], outgoing: _Outgoing) -> JsonObject:
        meta = (ctx.params or {}).get("_meta") or {}
        # What may ask in a session runs on the log, so the handshake declares no capability to be asked.
        client = CallClient(version=str(meta.get(VERSION)), info=meta.get(CLIENT), capabilities=_silent(meta))
        async with self._pool.lane(caller_of(ctx.request), client, ctx.request) as lane:
            if ctx.method == DISCOVER:
                return discover_result(lane.result)
            if outgoing.may_run_again is None:
                outgoing.may_run_again = self._may_run_again(ctx, None)
            try:
                params = dict(ctx.params or {}) if lane.passes else request_up(ctx.params)
                text = (await lane.call(ctx.method, params, outgoing.take)).decode()
            except asyncio.CancelledError:
                outgoing.cancel()  # the client has left
                raise
            finally:
                await outgoing.wait_for_room()
            result: JsonObject = splice.decode(
                text if lane.passes else result_up(ctx.method, text, self._pool.server_info)
            )
            if ctx.method == "tools/list":
                self._pool.tools.learn_page(ctx.params, result)
            return result


class _Outgoing(Flow):
    """Sends the notifications of one request to its client, in their order."""

    def __init__(self, ctx: ServerRequestContext[Any, Any], *, waits: bool) -> None:
        """`waits`: the request has a connection of its own to the upstream, which may wait."""
        self._ctx = ctx
        self._waits = waits
        self._level = log_level_in(ctx.params)
        self._progress = Rising()
        """Of all runs: a second one repeats what the first has sent."""
        self._waiting: deque[tuple[str, JsonObject]] = deque()
        self._task: asyncio.Task[None] | None = None
        self.may_run_again: bool | None = None
        """Whether the request may run again, as it was known when it was sent first; `None` if it was not known."""

    def take(self, method: str, params: JsonObject | None) -> Flow | None:
        if params is None or not passes_up(method, params, level=self._level):
            return None
        is_progress = method == "notifications/progress"
        if is_progress and ("progress" not in params or not self._progress.takes(params["progress"])):
            return None
        if not self._waits and len(self._waiting) >= _RUN_AHEAD:
            self._waiting.popleft()
        end_check(self._ctx.request)
        self._waiting.append((method, params))
        if self._task is None:
            self._task = asyncio.create_task(self._send())
        return self if self._waits and len(self._waiting) >= _RUN_AHEAD else None

    async def _send(self) -> None:
        session = self._ctx.session
        try:
            while self._waiting:
                method, params = self._waiting.popleft()
                if method == "notifications/progress":
                    await session.report_progress(params["progress"], params.get("total"), params.get("message"))
                elif method == LOG_MESSAGE:
                    message = LoggingMessageNotification.model_validate({"method": method, "params": params})
                    await session.send_notification(message, related_request_id=self._ctx.request_id)
        except Exception:  # the connection broke, or the message is none of the protocol; the answer is what counts
            self._waiting.clear()
        finally:
            self._task = None

    def cancel(self) -> None:
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()

    async def wait_for_room(self) -> None:
        if self._task is not None:
            await asyncio.wait({self._task})


def _silent(meta: JsonObject) -> JsonObject:
    capabilities = meta.get(CAPABILITIES) or {}
    return {name: value for name, value in capabilities.items() if name in ("extensions", "experimental")}


def _unknown(ctx: ServerRequestContext[Any, Any], why: str) -> MCPError:
    name = (ctx.params or {}).get("name")
    message, data = unknown_error(ctx.method, name if isinstance(name, str) else None, why)
    return MCPError(code=OUTCOME_UNKNOWN, message=message, data=data)


def _error(error: JsonObject) -> MCPError:
    return MCPError(code=error.get("code", 0), message=str(error.get("message")), data=error.get("data"))
