"""Perdure makes MCP sessions last."""

from __future__ import annotations

from importlib.metadata import version as _version

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

__version__ = _version("perdure")

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
