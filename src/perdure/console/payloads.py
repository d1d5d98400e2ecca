"""Makes messages fit to be shown: without secrets, and cut where they are large."""

import json
from typing import Any

from perdure._core.jsonrpc import JsonObject

MAX_SHOWN = 64 << 10
"""Bytes of a message in a list of events: a page of a hundred is then a few megabytes at the most. The whole message is
given when it is asked for by its number."""

HIDDEN = "(not shown)"

SECRETS = frozenset({"requestState"})
"""Members whose value lets a caller act in place of the client: the sealed state of a call that asks its client."""


def without_secrets(value: Any) -> Any:
    """Give a copy of JSON in which no member has a secret. Without recursion, because a peer may nest as it likes."""
    if not isinstance(value, dict | list):
        return value
    top: list[Any] = [value]
    waiting: list[Any] = [top]
    while waiting:
        holder = waiting.pop()
        items = enumerate(holder) if isinstance(holder, list) else list(holder.items())
        for place, item in items:
            if isinstance(holder, dict) and place in SECRETS:
                holder[place] = HIDDEN
            elif isinstance(item, dict | list):
                holder[place] = copied = item.copy()
                waiting.append(copied)
    return top[0]


def fit(seen: JsonObject, *, whole: bool = False) -> JsonObject:
    """Give an object of `perdure tail` as the page gets it: an event with the bytes of its message, of which only the
    beginning is there, as text, if it is large and the whole was not asked for."""
    if seen["what"] != "event":
        return seen
    message = without_secrets(seen["message"])
    text = json.dumps(message, ensure_ascii=False, separators=(",", ":"))
    data = text.encode("utf-8", "surrogatepass")
    if whole or len(data) <= MAX_SHOWN:
        return seen | {"message": message, "bytes": len(data), "cut": False}
    return seen | {"message": data[:MAX_SHOWN].decode(errors="replace"), "bytes": len(data), "cut": True}
