"""Makes messages fit to be shown: without secrets, and cut where they are large."""

import json
from typing import Any

from perdure._core.jsonrpc import JsonObject

MAX_SHOWN = 64 << 10
"""Bytes of a message in a list of events: a page of a hundred is then a few megabytes at the most. The whole message is
given when it is asked for by its number."""

BEGINNING = 1_024
"""Characters that are shown of a message that is cut."""

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


def fit(seen: JsonObject) -> JsonObject:
    """Give an object of `perdure tail` as the page gets it: an event with the size of its message, which is cut if that
    is large."""
    if seen["what"] != "event":
        return seen
    message = without_secrets(seen["message"])
    text = json.dumps(message, ensure_ascii=False, separators=(",", ":"))
    size = len(text.encode("utf-8", "surrogatepass"))
    if size <= MAX_SHOWN:
        return seen | {"message": message, "size": size, "cut": False}
    return seen | {"message": text[:BEGINNING], "size": size, "cut": True}
