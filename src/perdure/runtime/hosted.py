"""Describes a server that is ready to be run, as the HTTP edge gets it.

This module does not import the SDK, which takes a second: a gateway starts without it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from starlette.applications import Starlette
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from perdure.errors import BadTarget
from perdure.runtime.base import Runtimes, ServerChanges, Tools
from perdure.runtime.health import Health

if TYPE_CHECKING:
    from perdure.runtime.request_state import SharedKeys


class SessionlessHandler(Protocol):
    """Answers requests of 2026-07-28, as the SDK's `StreamableHTTPSessionManager` does."""

    def run(self) -> AbstractAsyncContextManager[None]:
        """Serve during a block."""

    async def handle_request(self, scope: Scope, receive: Receive, send: Send) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Started:
    """A server whose lifespan was entered."""

    runtimes: Runtimes
    sessionless: SessionlessHandler | None
    """Answers the requests of 2026-07-28; `None` where nothing does."""
    tools: Tools | None = None
    """The server's descriptions of its tools; `None` where no durable calls are served."""
    asks_in_session: bool = False
    """Its tools ask their client in a session alone: a durable call that may ask runs as in one."""
    state_keys: SharedKeys | None = None
    """Seal the request state of multi-round calls; the caller loads them from the store."""
    changes: ServerChanges | None = None
    """The server as a source of changes; `None` where no client listens."""


@dataclass(frozen=True, kw_only=True)
class Hosted:
    """A server ready to be run, and the web application it brings along."""

    web: Starlette | None
    """The server's own auth, OAuth routes and custom routes; its MCP endpoint is replaced by ours."""
    start: Callable[[], AbstractAsyncContextManager[Started]]
    """Enters the server's lifespan, once."""
    name: str = ""
    """The name that its author gave the server, or empty."""
    health: Health | None = None
    """How a server that is not in this process is doing."""
    passes_tokens: bool = False
    """Whether such a server gets the tokens of callers, and may refuse them (`runtime.token_check`)."""


def endpoint_of(web: Starlette) -> Any:
    """The endpoint of a web application that holds a session manager, inside any auth that wraps it."""
    found = []
    for route in web.routes:
        endpoint: Any = route.endpoint if isinstance(route, Route) else None
        while endpoint is not None and not hasattr(endpoint, "session_manager"):
            endpoint = getattr(endpoint, "app", None)
        if endpoint is not None:
            found.append(endpoint)
    if len(found) != 1:
        raise BadTarget(f"expected one MCP endpoint in the server's web application, found {len(found)}")
    return found[0]


def is_bare(web: Starlette) -> bool:
    """Whether nothing stands between a request and the MCP endpoint, neither auth nor any other middleware."""
    return not web.user_middleware and not _is_wrapped(web)


def authenticates(web: Starlette) -> bool:
    """Whether the web application authenticates callers by itself."""
    middleware: list[object] = [entry.cls for entry in web.user_middleware]
    return _is_wrapped(web) or AuthenticationMiddleware in middleware


def _is_wrapped(web: Starlette) -> bool:
    """Whether the endpoint requires a token: the SDK and FastMCP wrap it for nothing else."""
    own = endpoint_of(web)
    return not any(isinstance(route, Route) and route.endpoint is own for route in web.routes)
