"""Perdure makes MCP sessions last."""

from __future__ import annotations

from importlib.metadata import version as _version

from mcp.server.auth.provider import TokenVerifier as _TokenVerifier

from perdure.errors import (
    BadSetting,
    BadTarget,
    Misuse,
    PerdureError,
    StoreError,
    StoreTooNew,
    StoreUnavailable,
)
from perdure.http.app import App
from perdure.settings import Settings
from perdure.store import open_store
from perdure.store.base import Store

__version__ = _version("perdure")

__all__ = [
    "App",
    "BadSetting",
    "BadTarget",
    "Misuse",
    "PerdureError",
    "Settings",
    "Store",
    "StoreError",
    "StoreTooNew",
    "StoreUnavailable",
    "asgi",
    "open_store",
]


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
    return App(server, store=store, settings=settings or Settings(), auth=auth, path=path)
