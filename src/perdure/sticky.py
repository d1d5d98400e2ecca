"""Requests whose effect belongs to the session: a log level, subscriptions. They are repeated when a runtime is
loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from perdure._core.jsonrpc import Request

if TYPE_CHECKING:
    from perdure.ledger import Call

METHODS = frozenset({"logging/setLevel", "resources/subscribe", "resources/unsubscribe"})

MAX_STICKY = 1_000
"""Subscriptions of one session that are remembered: the record is written whole, so it must stay small."""

MAX_BYTES = 256 << 10
"""Of all of them together: room for 1,000 subscriptions to addresses of a usual length."""

_SUBSCRIBE = b'"resources/subscribe"'


def after(sticky: tuple[bytes, ...], request: Request) -> tuple[bytes, ...]:
    """The requests to repeat once this one has succeeded: the last level, and what is subscribed."""
    key = _key(request.method, request.params or {})
    kept = [earlier for earlier in sticky if _key_of(earlier) != key]
    if request.method != "resources/unsubscribe":
        kept.append(_encoded(request))
    return tuple(kept) if _fit(kept) else sticky


def subscribes(sticky: tuple[bytes, ...]) -> bool:
    """Whether any of them is a subscription, which lives in the runtime."""
    return any(_SUBSCRIBE in request for request in sticky)


def is_full(sticky: tuple[bytes, ...], running: Iterable[Call], requests: Iterable[Request]) -> bool:
    """Whether there is no room for what these requests would add to those that run already."""
    added = [request for request in requests if request.method in METHODS]
    if not added:
        return False
    for request in (*(call.request for call in running if call.request.method in METHODS), *added):
        sticky = after(sticky, request)
        if request.method != "resources/unsubscribe" and _encoded(request) not in sticky:
            return True
    return False


def _fit(requests: list[bytes]) -> bool:
    return len(requests) <= MAX_STICKY and sum(map(len, requests)) <= MAX_BYTES


def _encoded(request: Request) -> bytes:
    params = {name: value for name, value in (request.params or {}).items() if name != "_meta"}
    body = {"jsonrpc": "2.0", "id": 0, "method": request.method, "params": params}
    return json.dumps(body, separators=(",", ":")).encode()


def _key(method: str, params: dict[str, Any]) -> tuple[str, Any]:
    if method == "logging/setLevel":
        return method, None
    return "subscription", params.get("uri")


def _key_of(sticky: bytes) -> tuple[str, Any]:
    request = json.loads(sticky)
    return _key(request["method"], request["params"])
