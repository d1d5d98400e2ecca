"""Finds the low-level server of an `MCPServer`, a low-level `Server` or a FastMCP server.

This uses public names whose structure no release promises to keep; `tests/runtime/test_seams.py` names the one that
moved.
"""

import contextlib
import copy
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.lowlevel.server import Server
from mcp.server.mcpserver import MCPServer
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from pydantic import BaseModel
from starlette.applications import Starlette

from perdure._core.durable_calls import CallClient
from perdure._core.early_answers import OwnTools, listed, names_of, own_tools, parse_answer_rules, time_at_call
from perdure._core.envelope import CALLS, CAPABILITIES, CLIENT, KEPT, TASKS, VERSION
from perdure._core.jsonrpc import JsonObject
from perdure.errors import BadTarget
from perdure.runtime.base import CALLER, Tools
from perdure.runtime.hosted import Hosted, Started, endpoint_of
from perdure.runtime.own_requests import SdkChanges, ToolCatalog
from perdure.runtime.request_state import share_request_state
from perdure.runtime.sdk import SdkRuntimes
from perdure.settings import Settings

_MADE_UP = re.compile(r"FastMCP\w*-[0-9a-f]{4}")
"""The name of a FastMCP server without one."""


def is_server(found: object) -> bool:
    return isinstance(found, Server | MCPServer) or _is_fastmcp(found)


def _is_fastmcp(found: object) -> bool:
    bases = {base.__module__.partition(".")[0] for base in type(found).__mro__}
    return "fastmcp" in bases and hasattr(found, "http_app")


def host(server: Any, settings: Settings, *, path: str) -> Hosted:
    """Prepare a server to be run. Raises `BadTarget` if the object is not one."""
    if isinstance(server, Server):
        return Hosted(web=None, start=lambda: _enter(server, settings), name=server.name)
    if isinstance(server, MCPServer):
        web = server.streamable_http_app(streamable_http_path=path)
        name = "" if server.name == MCPServer().name else server.name
        return Hosted(web=web, start=lambda: _enter(server.session_manager.app, settings), name=name)
    if _is_fastmcp(server):
        own: Starlette = server.http_app(path=path)

        @asynccontextmanager
        async def start() -> AsyncIterator[Started]:
            # FastMCP makes its session manager in the web application's lifespan, and counts who has entered its own.
            app = own.router.lifespan_context(own)
            async with app, _enter(endpoint_of(own).session_manager.app, settings, may_be_silent=True) as started:
                yield replace(started, asks_in_session=True)

        # FastMCP makes up another name for each process.
        name = "" if _MADE_UP.fullmatch(server.name) else server.name
        return Hosted(web=own, start=start, name=name)
    raise BadTarget(
        f"the object to serve is a {type(server).__module__}.{type(server).__name__}, not an MCP server; "
        "give an MCPServer, a low-level Server (mcp 2.3 or newer) or a FastMCP 4 server"
    )


@asynccontextmanager
async def _enter(server: Server[Any], settings: Settings, *, may_be_silent: bool = False) -> AsyncIterator[Started]:
    async with server.lifespan(server) as state:
        # The SDK's own handler for 2026-07-28, on the same handlers and the lifespan that was entered already.
        twin = copy.copy(server)
        twin.lifespan = lambda _: contextlib.nullcontext(state)
        state_keys = share_request_state(twin) if settings.request_state == "shared" else None
        sessionless = StreamableHTTPSessionManager(
            app=twin, stateless=True, json_response=settings.json_response, max_request_body_size=settings.max_body
        )
        tools = ToolCatalog(twin, state)
        twin.middleware = [partial(announce_extensions, settings), *with_own_tools(settings, tools), *twin.middleware]
        runtimes = SdkRuntimes(server, twin, state, can_ask=not settings.json_response)
        changes = SdkChanges(server=twin, lifespan_state=state, may_be_silent=may_be_silent)
        yield Started(
            runtimes=runtimes,
            sessionless=sessionless,
            tools=tools,
            state_keys=state_keys,
            changes=None if settings.eras == "session" else changes,
        )


async def announce_extensions(
    settings: Settings, ctx: ServerRequestContext[Any, Any], call_next: CallNext
) -> HandlerResult:
    """Add Perdure's extensions to `server/discover`. The server's own entries win."""
    result = await call_next(ctx)
    if ctx.method != "server/discover":
        return result
    if (result := _as_dict(result)) is None or not isinstance(result, dict):
        return result
    capabilities: JsonObject = result.get("capabilities") or {}
    kept = {KEPT: int(min(settings.task_ttl, settings.replay_window) * 1000)}
    extensions = {TASKS: {}, CALLS: kept, **(capabilities.get("extensions") or {})}
    return {**result, "capabilities": {**capabilities, "extensions": extensions}}


def _as_dict(result: HandlerResult) -> HandlerResult:
    # FastMCP's are models; as the SDK itself would write it
    return result.model_dump(by_alias=True, mode="json", exclude_none=True) if isinstance(result, BaseModel) else result


@dataclass(frozen=True, kw_only=True)
class ToolShow:
    """The middleware that shows a client of 2026-07-28 under a rule of `answer_within` Perdure's own tools."""

    rules: Mapping[str, float]
    tools: Tools

    async def __call__(self, ctx: ServerRequestContext[Any, Any], call_next: CallNext) -> HandlerResult:
        result = await call_next(ctx)
        meta = (ctx.params or {}).get("_meta")
        if ctx.method != "tools/list" or not isinstance(meta, Mapping) or VERSION not in meta:
            return result
        client = CallClient(version=str(meta.get(VERSION)), info=meta.get(CLIENT), capabilities=meta.get(CAPABILITIES))
        if (within := time_at_call(self.rules, client)) is None or not isinstance(page := _as_dict(result), dict):
            return result
        names = OwnTools()
        if page.get("nextCursor") is None and ctx.request is not None:
            owner = ctx.request.scope[CALLER].owner
            names = own_tools(names_of(await self.tools.tools(owner, client, ctx.request)))
        return listed(page, names, within)


def with_own_tools(settings: Settings, tools: Tools) -> list[Any]:
    """The middleware of a server whose settings have rules of `answer_within`."""
    return [ToolShow(rules=rules, tools=tools)] if (rules := parse_answer_rules(settings.answer_within)) else []
