"""Requests whose effect belongs to the session: a log level, subscriptions. They are repeated when a runtime is
loaded."""

from __future__ import annotations

import json
from typing import Any

from perdure._core.jsonrpc import Request

METHODS = frozenset({"logging/setLevel", "resources/subscribe", "resources/unsubscribe"})

MAX_STICKY = 1_000
"""Subscriptions of one session that are remembered: the record is written whole, so it must stay small."""

_SUBSCRIBE = b'"resources/subscribe"'


def after(sticky: tuple[bytes, ...], request: Request) -> tuple[bytes, ...]:
    """The requests to repeat once this one has succeeded: the last level, and what is subscribed."""
    key = _key(request.method, request.params or {})
    kept = [earlier for earlier in sticky if _key_of(earlier) != key]
    if request.method != "resources/unsubscribe" and len(kept) < MAX_STICKY:
        params = {name: value for name, value in (request.params or {}).items() if name != "_meta"}
        body = {"jsonrpc": "2.0", "id": 0, "method": request.method, "params": params}
        kept.append(json.dumps(body, separators=(",", ":")).encode())
    return tuple(kept)


def subscribes(sticky: tuple[bytes, ...]) -> bool:
    """Whether any of them is a subscription, which lives in the runtime."""
    return any(_SUBSCRIBE in request for request in sticky)


def is_full(sticky: tuple[bytes, ...], request: Request) -> bool:
    """Whether there is no room for what this request would add."""
    return request.method == "resources/subscribe" and len(sticky) >= MAX_STICKY and after(sticky, request) == sticky


def _key(method: str, params: dict[str, Any]) -> tuple[str, Any]:
    if method == "logging/setLevel":
        return method, None
    return "subscription", params.get("uri")


def _key_of(sticky: bytes) -> tuple[str, Any]:
    request = json.loads(sticky)
    return _key(request["method"], request["params"])
