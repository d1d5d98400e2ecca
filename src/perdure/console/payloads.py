"""Makes messages fit to be shown: without secrets, cut where they are large, and always JSON that a browser reads."""

import json
import math
from typing import Any

from perdure._core.jsonrpc import JsonObject

MAX_SHOWN = 64 << 10
"""Bytes of a message in a list of events: a page of a hundred is then a few megabytes at the most. The whole message is
given when it is asked for by its number."""

MAX_LEVELS = 200
"""Levels of a message that are shown: Python writes fewer than a thousand, and some are taken by what calls it. Clients
may send 64."""

HIDDEN = "(not shown)"

SECRETS = frozenset({"requestState"})
"""Members whose value lets a caller act in place of the client: the sealed state of a call that asks its client."""


def without_secrets(value: Any) -> Any:
    """Give a copy of JSON in which no member has a secret, and nothing that JSON cannot hold. Without recursion,
    because a peer may nest as it likes."""
    top: list[Any] = [value]
    waiting: list[tuple[Any, int]] = [(top, 0)]
    while waiting:
        holder, level = waiting.pop()
        items = enumerate(holder) if isinstance(holder, list) else list(holder.items())
        for place, item in items:
            if isinstance(holder, dict) and place in SECRETS:
                holder[place] = HIDDEN
            elif isinstance(item, dict | list):
                holder[place] = copied = HIDDEN if level >= MAX_LEVELS else item.copy()
                if not isinstance(copied, str):
                    waiting.append((copied, level + 1))
            elif isinstance(item, float) and not math.isfinite(item):
                holder[place] = str(item)
    return top[0]


def encoded(value: JsonObject) -> str:
    """Write JSON, whatever peers have said: half characters and numbers without an end break neither it nor a page."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(without_secrets(value), separators=(",", ":"), allow_nan=False)


def fit(seen: JsonObject, *, whole: bool = False) -> JsonObject:
    """Give an object of `perdure tail` as the page gets it: an event with the bytes of its message, of which only the
    beginning is there, as text, if it is large and the whole was not asked for."""
    if seen["what"] != "event":
        return seen
    message = without_secrets(seen["message"])
    if isinstance(message, str) and any(f'"{name}"' in message for name in SECRETS):
        message = HIDDEN  # Python could not read it as JSON, so the secret cannot be taken out
    text = json.dumps(message, ensure_ascii=False, separators=(",", ":"))
    data = text.encode("utf-8", "surrogatepass")
    if whole or len(data) <= MAX_SHOWN:
        return seen | {"message": message, "bytes": len(data), "cut": False}
    return seen | {"message": data[:MAX_SHOWN].decode(errors="replace"), "bytes": len(data), "cut": True}
