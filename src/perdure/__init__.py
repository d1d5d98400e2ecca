"""Perdure makes MCP sessions last."""

from __future__ import annotations

import typing as _typing

if _typing.TYPE_CHECKING:
    from mcp.server.auth.provider import TokenVerifier as _TokenVerifier
    from mcp.server.auth.settings import AuthSettings as _AuthSettings

    from perdure._core.losses import Gap
    from perdure._core.reconnect import Patience
    from perdure.client.connect import Client, connect
    from perdure.client.memory import StateStore
    from perdure.client.pending import PendingCall
    from perdure.errors import (
        BadSetting,
        BadTarget,
        ClientError,
        EventsLost,
        Misuse,
        NodeBuried,
        OutcomeUnknown,
        PerdureError,
        StateError,
        StateInUse,
        StateUnusable,
        StepFailed,
        StoreError,
        StoreLost,
        StoreReplaced,
        StoreTooNew,
        StoreUnavailable,
        Unreachable,
    )
    from perdure.http.app import App
    from perdure.settings import Settings
    from perdure.steps import NOT_DONE, RESUMABLE, sleep, step, step_key, step_sync
    from perdure.store import open_store
    from perdure.store.interface import Store

__all__ = [
    "NOT_DONE",
    "RESUMABLE",
    "App",
    "BadSetting",
    "BadTarget",
    "Client",
    "ClientError",
    "EventsLost",
    "Gap",
    "Misuse",
    "NodeBuried",
    "OutcomeUnknown",
    "Patience",
    "PendingCall",
    "PerdureError",
    "Settings",
    "StateError",
    "StateInUse",
    "StateStore",
    "StateUnusable",
    "StepFailed",
    "Store",
    "StoreError",
    "StoreLost",
    "StoreReplaced",
    "StoreTooNew",
    "StoreUnavailable",
    "Unreachable",
    "asgi",
    "connect",
    "open_store",
    "sleep",
    "step",
    "step_key",
    "step_sync",
]


def asgi(
    server: object,
    *,
    store: Store | str = "sqlite:perdure.db",
    settings: Settings | None = None,
    auth: _TokenVerifier | _AuthSettings | None = None,
    token_verifier: _TokenVerifier | None = None,
    path: str = "/mcp",
) -> App:
    """An ASGI application that serves an MCP server so that its sessions last.

    `server` is an `MCPServer` or a low-level `Server` of the official SDK, or a FastMCP server. To mount the
    application in another one, hand that one its lifespan: `Starlette(routes=[Mount("/", app)],
    lifespan=app.lifespan)`.

    `auth` lets only callers in that show a good bearer token. It is the SDK's `TokenVerifier`, or the SDK's
    `AuthSettings`: then clients are told where to get a token (RFC 9728), and Perdure verifies the JSON Web Tokens of
    `issuer_url` for the audience `resource_server_url`, unless `token_verifier` verifies the tokens.
    """
    from perdure.http.app import App
    from perdure.settings import Settings

    settings = settings or Settings()
    return App(server, store=store, settings=settings, auth=auth, token_verifier=token_verifier, path=path)


#: The module of each name, imported when the name is first used: the SDK alone takes most of a second, and neither the
#: operator's commands nor the parent of worker processes need it.
_HOMES = {
    "App": "perdure.http.app",
    "Client": "perdure.client.connect",
    "NOT_DONE": "perdure.steps",
    "RESUMABLE": "perdure.steps",
    "Gap": "perdure._core.losses",
    "Patience": "perdure._core.reconnect",
    "PendingCall": "perdure.client.pending",
    "Settings": "perdure.settings",
    "StateStore": "perdure.client.memory",
    "Store": "perdure.store.interface",
    "connect": "perdure.client.connect",
    "open_store": "perdure.store",
    "sleep": "perdure.steps",
    "step": "perdure.steps",
    "step_key": "perdure.steps",
    "step_sync": "perdure.steps",
}


def __getattr__(name: str) -> _typing.Any:
    from importlib import import_module
    from importlib.metadata import version

    if name == "__version__":
        value: _typing.Any = version("perdure")
    elif name in __all__:
        value = getattr(import_module(_HOMES.get(name, "perdure.errors")), name)
    else:
        raise AttributeError(f"module 'perdure' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
