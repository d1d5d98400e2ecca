"""From what a user has (an `MCPServer`, a low-level `Server`, a FastMCP server) to what we run.

Everything here leans on public names whose structure nobody promised for ever; `tests/runtime/test_seams.py` fails
clearly when a release moves one.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from mcp.server.lowlevel.server import Server
from mcp.server.mcpserver import MCPServer
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from starlette.applications import Starlette
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.routing import BaseRoute, Route

from perdure.errors import BadTarget


@dataclass(frozen=True, kw_only=True)
class Hosted:
    """A server ready to be run: its low-level server, and the web application it brings along."""

    web: Starlette | None
    """Auth, OAuth routes and custom routes of the server's own; its MCP endpoint is replaced by ours."""
    start: Callable[[], AbstractAsyncContextManager[tuple[Server[Any], Any]]]
    """Enters the server's lifespan, once; gives the low-level server and the lifespan's state."""


def host(server: object, *, path: str) -> Hosted:
    """Find the low-level server behind whatever a user gives us, or raise `BadTarget`."""
    if isinstance(server, Server):
        return Hosted(web=None, start=lambda: _enter(server))
    if isinstance(server, MCPServer):
        web = server.streamable_http_app(streamable_http_path=path)
        return Hosted(web=web, start=lambda: _enter(server.session_manager.app))
    if _is_fastmcp(server):
        return _host_fastmcp(server, path)
    raise BadTarget(
        f"the object to serve is a {type(server).__module__}.{type(server).__name__}, not an MCP server; "
        "give an MCPServer, a low-level Server (mcp 2.3 or newer) or a FastMCP 4 server"
    )


def endpoint_of(web: Starlette) -> Any:
    """The endpoint of a web application that holds a session manager, behind whatever auth wraps it."""
    found = [inner for route in web.routes if (inner := _manager_holder(route)) is not None]
    if len(found) != 1:
        raise BadTarget(f"expected one MCP endpoint in the server's web application, found {len(found)}")
    return found[0]


def is_bare(web: Starlette) -> bool:
    """Whether nothing stands between a request and the MCP endpoint, neither auth nor any other middleware."""
    return not web.user_middleware and not _is_wrapped(web)


def authenticates(web: Starlette) -> bool:
    """Whether the web application checks by itself who is calling."""
    middleware: list[object] = [entry.cls for entry in web.user_middleware]
    return _is_wrapped(web) or AuthenticationMiddleware in middleware


def _is_wrapped(web: Starlette) -> bool:
    """The SDK and FastMCP wrap the endpoint in what requires a token, and in nothing else."""
    own = endpoint_of(web)
    return not any(isinstance(route, Route) and route.endpoint is own for route in web.routes)


def sessionless(server: Server[Any], state: Any, *, json_response: bool, max_body: int) -> StreamableHTTPSessionManager:
    """The SDK's own handler for 2026-07-28, on the same handlers and the lifespan that was entered already."""
    twin = copy.copy(server)
    twin.lifespan = lambda _: contextlib.nullcontext(state)
    return StreamableHTTPSessionManager(
        app=twin, stateless=True, json_response=json_response, max_request_body_size=max_body
    )


@asynccontextmanager
async def _enter(server: Server[Any]) -> AsyncIterator[tuple[Server[Any], Any]]:
    async with server.lifespan(server) as state:
        yield server, state


def _manager_holder(route: BaseRoute) -> Any:
    endpoint: Any = route.endpoint if isinstance(route, Route) else None
    while endpoint is not None and not hasattr(endpoint, "session_manager"):
        endpoint = getattr(endpoint, "app", None)
    return endpoint


def _is_fastmcp(server: object) -> bool:
    return any(base.__module__.partition(".")[0] == "fastmcp" for base in type(server).__mro__) and hasattr(
        server, "http_app"
    )


def _host_fastmcp(server: Any, path: str) -> Hosted:
    web: Starlette = server.http_app(path=path)

    @asynccontextmanager
    async def start() -> AsyncIterator[tuple[Server[Any], Any]]:
        # FastMCP makes its session manager in the web application's lifespan, and counts who has entered its own.
        async with web.router.lifespan_context(web):
            low_level = endpoint_of(web).session_manager.app
            async with _enter(low_level) as entered:
                yield entered

    return Hosted(web=web, start=start)
