"""Decides which clients are answered before their call ends, and what a model reads then.

A rule says after how many seconds a client of this name is answered. It gets a text, and its call goes on; a tool of
Perdure's own then waits for the result. Such a client is shown no output schemas: a text alone would break them.
"""

import functools
import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from perdure._core.durable_calls import progress_text
from perdure._core.jsonrpc import JsonObject
from perdure._core.text import format_duration, parse_duration

CALL = "dev.perdure/call"
"""In `_meta`: the call that an early answer is about, or that a cancellation names."""

RESUMES = "dev.perdure/resumes"
"""A client that declares this experimental capability waits by itself, and is never answered early."""

LEAST, MOST = 1.0, 3_600.0
"""Seconds of a rule. Below, every call would be two; hosts wait no longer than the upper one."""

NAME_MOST = 100
"""Characters of a tool's name that a text quotes."""

UNKNOWN_CALL = (
    "There is no such call, or its result is no longer kept. Check what happened before you call the tool again."
)
STORE_FAILS = "The server cannot look for the call now. Call this again later."
NOT_NOW = "No process of the server runs the call now, so it cannot be cancelled yet. Call this again later."


class OwnTools(NamedTuple):
    """The names of Perdure's own tools, as a server's clients see them."""

    wait: str = "perdure_wait_for_result"
    cancel: str = "perdure_cancel_call"


def parse_answer_rules(rules: Iterable[str]) -> Mapping[str, float]:
    """Read the operator's rules, `CLIENT=TIME`, by the name in lower case. Raises `ValueError`."""
    found: dict[str, float] = {}
    for rule in rules:
        name, _, time = rule.rpartition("=")
        try:
            seconds = parse_duration(time)
        except ValueError:
            seconds = 0.0
        if not LEAST <= seconds <= MOST or (not name and rule.startswith("=")):
            raise ValueError(f"{rule!r} is not CLIENT=TIME, with 1s to 1h as the time and * for all other clients")
        found[(name or "*").lower()] = seconds
    return found


def time_for(rules: Mapping[str, float], client_params: bytes) -> float | None:
    """After how many seconds the client of a session is answered; `None` if it waits for its answers."""
    name, waits = _client(client_params)
    return None if waits else rules.get(name, rules.get("*"))


@functools.lru_cache(maxsize=256)
def _client(params: bytes) -> tuple[str, bool]:
    said = json.loads(params) if params else {}
    info, capabilities = said.get("clientInfo"), said.get("capabilities")
    experimental = capabilities.get("experimental") if isinstance(capabilities, dict) else None
    name = str(info.get("name", "")) if isinstance(info, dict) else ""
    return name.lower(), isinstance(experimental, dict) and RESUMES in experimental


def as_resuming(params: JsonObject) -> JsonObject:
    """The params of `initialize` of a client that waits by itself."""
    capabilities = params.get("capabilities") or {}
    experimental = {**(capabilities.get("experimental") or {}), RESUMES: {}}
    return {**params, "capabilities": {**capabilities, "experimental": experimental}}


def may_be_own(name: object) -> bool:
    """Whether a tool of this name may be one of Perdure's own."""
    return isinstance(name, str) and name.startswith(tuple(OwnTools()))


def is_cancelled_by_id(params: Mapping[str, Any], call: str) -> bool:
    """Whether a cancellation names a call itself, not its request, which may have its early answer."""
    meta = params.get("_meta")
    return isinstance(meta, dict) and meta.get(CALL) == call


def own_tools(taken: Collection[str]) -> OwnTools:
    """The names of Perdure's own tools beside those of a server, which keep theirs."""
    return OwnTools(*(_free(name, taken) for name in OwnTools()))


def _free(name: str, taken: Collection[str]) -> str:
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free


def listed(page: JsonObject, names: OwnTools, seconds: float) -> JsonObject:
    """A page of `tools/list` for a client under a rule: no output schemas, and Perdure's tools on the last page."""
    tools = [_without_schema(tool) for tool in page.get("tools") or []]
    if page.get("nextCursor") is None:
        tools += _own(names, seconds)
    return {**page, "tools": tools}


def _without_schema(tool: Any) -> Any:
    return {name: value for name, value in tool.items() if name != "outputSchema"} if isinstance(tool, dict) else tool


def _own(names: OwnTools, seconds: float) -> list[JsonObject]:
    call = {"call": {"type": "string", "description": 'The id that the answer "still running" contained'}}
    return [
        {
            "name": names.wait,
            "description": "Get the result of an earlier call to a tool of this server that was answered"
            f' "still running". Waits up to {format_duration(seconds)}. Returns that tool\'s result, or says that it'
            " still runs: then call this again. Without `call` it lists the calls of this session that were answered"
            " so.",
            "inputSchema": {"type": "object", "properties": call},
            "annotations": {"readOnlyHint": True, "idempotentHint": True},
        },
        {
            "name": names.cancel,
            "description": "Stop an earlier call to a tool of this server that still runs. What it has already done is"
            " not undone.",
            "inputSchema": {"type": "object", "properties": call, "required": ["call"]},
            "annotations": {"destructiveHint": True, "idempotentHint": True},
        },
    ]


def still_running(
    tool: str, call: str, *, age: float, seconds: float, names: OwnTools, progress: JsonObject | None, asks: bool
) -> JsonObject:
    """The result that takes the place of a call's own, while the call goes on."""
    name, wait = _quoted(tool), format_duration(seconds)
    said = progress_text(progress) if progress is not None else ""
    last = " It waits for an answer from the user." if asks else f" Last progress: {said}." if said else ""
    text = (
        f"{name} is still running after {age:.0f} s, and goes on. To get its result, call the tool {names.wait} with"
        f' {{"call": "{call}"}}. That call waits up to {wait}; if it says "still running", call it again. Do not call'
        f" {name} again for the same thing: that would start a second run.{last}"
    )
    meta = {CALL: {"id": call, "tool": tool, "state": "running"}}
    return {"content": [{"type": "text", "text": text}], "_meta": meta}


def result_for_model(tool: str, response: JsonObject, *, cancelled: bool) -> JsonObject:
    """What the wait tool returns of a call that has ended: the tool's own result, or its error as a text, because many
    hosts show the model nothing of protocol errors."""
    error = response.get("error")
    if error is None:
        result: JsonObject = response["result"]
        return result
    if cancelled:
        return failure(f"{_quoted(tool)} was cancelled; it may have done a part of its work.")
    if isinstance(error.get("data"), dict) and error["data"].get("outcome") == "unknown":
        return failure(str(error.get("message")))
    return failure(f"{_quoted(tool)} failed: {error.get('message')} (code {error.get('code')}).")


def cancelling(tool: str, *, is_over: bool) -> JsonObject:
    text = (
        "has ended already; nothing was cancelled."
        if is_over
        else "is being cancelled; it may have done a part of its work."
    )
    return {"content": [{"type": "text", "text": f"{_quoted(tool)} {text}"}]}


def call_list(lines: Iterable[str]) -> JsonObject:
    text = "\n".join(lines) or "No call of this session was answered early."
    return {"content": [{"type": "text", "text": text}]}


def call_line(tool: str, call: str, *, age: float, state: str) -> str:
    return f"{_quoted(tool)}, begun {age:.0f} s ago, {state}: {call}"


def failure(text: str) -> JsonObject:
    return {"content": [{"type": "text", "text": text}], "isError": True}


def _quoted(tool: str) -> str:
    return json.dumps(tool[:NAME_MOST], ensure_ascii=False)
