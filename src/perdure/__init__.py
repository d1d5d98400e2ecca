"""Perdure makes MCP sessions last.

The names below are loaded when they are first used: `perdure stdio` is started by desktop hosts again and again, and
needs neither the SDK nor a web server, which take seconds to import on a busy machine.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcp.server.auth.provider import TokenVerifier as _TokenVerifier

    from perdure._core.gap import Gap
    from perdure._core.reconnect import Patience
    from perdure.client.client import Client
    from perdure.client.connect import connect
    from perdure.client.pending import PendingCall
    from perdure.client.store import StateStore
    from perdure.errors import (
        BadSetting,
        BadTarget,
        ClientError,
        EventsLost,
        Misuse,
        OutcomeUnknown,
        PerdureError,
        StateError,
        StateInUse,
        StateUnusable,
        StoreError,
        StoreTooNew,
        StoreUnavailable,
        Unreachable,
    )
    from perdure.http.app import App
    from perdure.settings import Settings
    from perdure.store import open_store
    from perdure.store.base import Store

    __version__: str

__all__ = [
    "App",
    "BadSetting",
    "BadTarget",
    "Client",
    "ClientError",
    "EventsLost",
    "Gap",
    "Misuse",
    "OutcomeUnknown",
    "Patience",
    "PendingCall",
    "PerdureError",
    "Settings",
    "StateError",
    "StateInUse",
    "StateStore",
    "StateUnusable",
    "Store",
    "StoreError",
    "StoreTooNew",
    "StoreUnavailable",
    "Unreachable",
    "asgi",
    "connect",
    "open_store",
]

_HOMES = {
    "App": "perdure.http.app",
    "BadSetting": "perdure.errors",
    "BadTarget": "perdure.errors",
    "Client": "perdure.client.client",
    "ClientError": "perdure.errors",
    "EventsLost": "perdure.errors",
    "Gap": "perdure._core.gap",
    "Misuse": "perdure.errors",
    "OutcomeUnknown": "perdure.errors",
    "Patience": "perdure._core.reconnect",
    "PendingCall": "perdure.client.pending",
    "PerdureError": "perdure.errors",
    "Settings": "perdure.settings",
    "StateError": "perdure.errors",
    "StateInUse": "perdure.errors",
    "StateStore": "perdure.client.store",
    "StateUnusable": "perdure.errors",
    "Store": "perdure.store.base",
    "StoreError": "perdure.errors",
    "StoreTooNew": "perdure.errors",
    "StoreUnavailable": "perdure.errors",
    "Unreachable": "perdure.errors",
    "connect": "perdure.client.connect",
    "open_store": "perdure.store",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        found: Any = version("perdure")
    elif name in _HOMES:
        found = getattr(_import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'perdure' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def asgi(
    server: object,
    *,
    store: Store | str = "sqlite:perdure.db",
    settings: Settings | None = None,
    auth: _TokenVerifier | None = None,
    path: str = "/mcp",
) -> App:
    """An ASGI application that serves an MCP server so that its sessions last.

    `server` is an `MCPServer` or a low-level `Server` of the official SDK, or a FastMCP server. To mount the
    application in another one, hand that one its lifespan: `Starlette(routes=[Mount("/", app)],
    lifespan=app.lifespan)`.
    """
    from perdure.http.app import App
    from perdure.settings import Settings

    return App(server, store=store, settings=settings or Settings(), auth=auth, path=path)
