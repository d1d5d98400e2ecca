"""Sticky requests set something for the whole session: a log level, a subscription.

They are kept with the session's record and repeated when a runtime is loaded.
"""

import json
from collections.abc import Iterable
from typing import Any

from perdure._core.jsonrpc import JsonObject, Request

METHODS = frozenset({"logging/setLevel", "resources/subscribe", "resources/unsubscribe"})

MAX_STICKY = 1_000
"""Subscriptions of one session that are remembered: the record is written whole, so it must stay small."""

MAX_BYTES = 256 << 10
"""Of all of them together: room for 1,000 subscriptions to addresses of a usual length."""

_SUBSCRIBE = b'"resources/subscribe"'


def encode(method: str, params: JsonObject | None) -> bytes:
    """A sticky request as it is kept: without the id and the progress token of its time."""
    kept = {name: value for name, value in (params or {}).items() if name != "_meta"}
    return json.dumps({"jsonrpc": "2.0", "id": 0, "method": method, "params": kept}, separators=(",", ":")).encode()


def after(sticky: tuple[bytes, ...], request: bytes) -> tuple[bytes, ...]:
    """The requests to repeat once this one has succeeded: the last level, and what is subscribed."""
    method, key = _key(request)
    kept = [earlier for earlier in sticky if _key(earlier)[1] != key]
    if method != "resources/unsubscribe":
        kept.append(request)
    return tuple(kept) if len(kept) <= MAX_STICKY and sum(map(len, kept)) <= MAX_BYTES else sticky


def subscriptions(sticky: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """The sticky requests that are active in one runtime only."""
    return tuple(request for request in sticky if _SUBSCRIBE in request)


def changed_log_level(before: tuple[bytes, ...], now: tuple[bytes, ...]) -> bytes | None:
    """The log level, if it has changed: unlike a subscription it concerns every runtime."""
    levels = [request for request in now if _SUBSCRIBE not in request and request not in before]
    return levels[0] if levels else None


def unsubscribe(subscription: bytes) -> bytes:
    """The request that undoes a subscription."""
    return json.dumps({**json.loads(subscription), "method": "resources/unsubscribe"}, separators=(",", ":")).encode()


def is_full(sticky: tuple[bytes, ...], running: Iterable[Request], requests: Iterable[Request]) -> bool:
    """Whether these requests, added to those that run, would exceed the limits."""
    added = [request for request in requests if request.method in METHODS]
    if not added:
        return False
    for request in (*(earlier for earlier in running if earlier.method in METHODS), *added):
        kept = encode(request.method, request.params)
        sticky = after(sticky, kept)
        if request.method != "resources/unsubscribe" and kept not in sticky:
            return True
    return False


def _key(request: bytes) -> tuple[str, tuple[str, Any]]:
    """Its method and its subject: a later request about the same subject replaces it."""
    body = json.loads(request)
    method: str = body["method"]
    return method, (method, None) if method == "logging/setLevel" else ("subscription", body["params"].get("uri"))
