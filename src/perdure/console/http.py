"""Reads the parameters of the console's requests, and writes its answers: JSON, refusals, and live event streams."""

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import Any

from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from perdure._core.jsonrpc import JsonObject
from perdure._core.text import printable
from perdure.errors import Misuse, StoreError

API = "/api/"
"""Paths below this one show the store. The files of the page hold nothing of it."""

MAX_TEXT = 200
"""Characters of a parameter: names of owners and tools are shorter, and so are ids."""

MAX_VIEWS = 32
"""Live views at the same time: each reads the store five times a second. A page has two, so sixteen people can have one
open."""

KEEP_ALIVE = 15.0
"""Seconds of silence after which a comment is sent: proxies end connections that are silent for 30 or 60."""

AGAIN = 1.0
"""Seconds until the console tries again to read a store that was lost."""

RETRY = 2_000
"""Milliseconds until a browser comes again when a view has ended."""

TOO_MANY = f"{MAX_VIEWS} live views are open already; close one of them"

MAX_LEVELS = 200
"""Levels of a message that are shown: Python writes fewer than a thousand, and some are taken by its callers. Clients
may send 64."""

HIDDEN = "(not shown)"

SECRETS = frozenset({"requestState"})
"""Members whose value lets a caller act in place of the client: the sealed state of a call that asks its client."""


# --- Parameters: a bad one is refused with a sentence that says what is allowed ---------------------------------------


def refuse_unknown(query: Mapping[str, str], known: frozenset[str]) -> None:
    for name, value in query.items():
        if name not in known:
            raise Misuse(f"{printable(name, 40)!r} is not a parameter; known are {', '.join(sorted(known))}")
        if len(value) > MAX_TEXT:
            raise Misuse(f"{name} has {len(value)} characters; allowed are {MAX_TEXT}")


def number_of(query: Mapping[str, str], name: str, *, default: int, low: int, high: int) -> int:
    text = query.get(name, "")
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 18 or not low <= int(text) <= high:
        raise Misuse(f"{name} is {printable(text, 40)!r}; allowed is a whole number from {low} to {high}")
    return int(text)


def choice_of(query: Mapping[str, str], name: str, choices: Iterable[str]) -> str:
    """Return one of the choices, or ""."""
    text = query.get(name, "")
    if text and text not in choices:
        raise Misuse(f"{name} is {printable(text, 40)!r}; allowed are {', '.join(choices)}")
    return text


def moment_of(query: Mapping[str, str], name: str, *, default: float) -> float:
    text = query.get(name, "")
    if not text:
        return default
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise Misuse(f"{name} is {printable(text, 40)!r}; allowed are seconds since 1970")
    return found


# --- Answers ----------------------------------------------------------------------------------------------------------


def refuse(scope: Scope, status: int, sentence: str) -> Response:
    """Answer with one sentence: as JSON to a program, as text to a person."""
    if scope["path"].startswith(API):
        return JSONResponse({"error": sentence}, status_code=status)
    return PlainTextResponse(f"{sentence}\n", status_code=status)


def without_secrets(value: Any) -> Any:
    """Return a copy of JSON without secrets and without numbers that JSON cannot hold. Without recursion, because a
    peer may nest its messages deeply."""
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


def encode_json(value: JsonObject) -> str:
    """Write JSON that a browser reads, whatever messages of peers it holds."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(without_secrets(value), separators=(",", ":"), allow_nan=False)


class LiveResponse(StreamingResponse):
    """Sends the objects of an iterator as server-sent events; `None` means that there is nothing new. A client that
    reads nothing holds the iterator up, and nothing else: no queue is kept for it."""

    def __init__(self, begin: Callable[[], AsyncGenerator[JsonObject | None]], views: asyncio.Semaphore) -> None:
        """`begin` returns the iterator; it is called again when the store is back. `views` counts the live views."""
        super().__init__(_event_lines(begin), media_type="text/event-stream", headers={"x-accel-buffering": "no"})
        self._views = views

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._views.locked():
            await refuse(scope, 429, TOO_MANY)(scope, receive, send)
            return
        async with self._views:
            await super().__call__(scope, receive, send)


async def _event_lines(begin: Callable[[], AsyncGenerator[JsonObject | None]]) -> AsyncGenerator[str]:
    """Yield the lines of the objects. A failing store is reported once. The iterator begins again when the store is
    back."""
    yield f"retry: {RETRY}\n\n"
    loop = asyncio.get_running_loop()
    is_lost = False
    while True:
        try:
            async with contextlib.aclosing(begin()) as objects:
                written = loop.time()
                async for one in objects:
                    if one is not None or loop.time() - written >= KEEP_ALIVE:
                        is_lost = False
                        yield ": still here\n\n" if one is None else f"data: {encode_json(one)}\n\n"
                        written = loop.time()
            return
        except StoreError as error:
            if not is_lost:
                yield f"data: {encode_json({'what': 'lost', 'error': ' '.join(str(error).split())})}\n\n"
            is_lost = True
            await asyncio.sleep(AGAIN)
