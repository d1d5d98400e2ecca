"""Decides which clients are answered before their call ends, and with which text.

A rule says after how many seconds a client of this name is answered. It gets a text, and its call continues; a tool of
Perdure's own then waits for the result. Such a client is shown no output schemas: a text alone would break them.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from perdure._core import heartbeats
from perdure._core.codes import REQUEST_CANCELLED
from perdure._core.durable_calls import CallClient, client_of, progress_text, tools_on
from perdure._core.jsonrpc import JsonObject, meta_of
from perdure._core.settling import as_progress
from perdure._core.states import CallState
from perdure._core.text import parse_duration, spoken_duration

CALL = "dev.perdure/call"
"""In `_meta`: the call that an early answer is about, or that a cancellation names."""

RESUMES = "dev.perdure/resumes"
"""A client that declares this experimental capability waits by itself, and is never answered early."""

LEAST, MOST = 1.0, 3_600.0
"""Seconds of a rule. Below, every call would be two; hosts wait no longer than the upper one."""

NAME_MOST = 100
"""Characters of a tool's name that a text quotes."""

GIVE_ID = 'Give the id that the answer "still running" contained.'
"""To a caller that is not known: no list of its calls can be made."""
STORE_FAILS = "The server cannot look for the call now. Call this again later."
STOPPING = "The server is stopping. Call this again."
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


def time_at_call(rules: Mapping[str, float], client: CallClient, *, for_host: bool = False) -> float | None:
    """After how many seconds a client is answered; `None` if it waits for its answers, as one does that takes tasks or
    gives its calls keys. `for_host`: a host waits for the answer, in a session or behind a bridge that does these."""
    if _resumes(client) or (not for_host and (client.takes_tasks or client.repeats)):
        return None
    return rules.get(client.name.lower(), rules.get("*"))


def resumes(client_params: bytes) -> bool:
    """Whether the client of a session waits by itself, and sends again what breaks, as Perdure's own do."""
    return _resumes(client_of(client_params))


def _resumes(client: CallClient) -> bool:
    experimental = client.capabilities.get("experimental") if isinstance(client.capabilities, Mapping) else None
    return isinstance(experimental, Mapping) and RESUMES in experimental


def as_resuming(params: JsonObject) -> JsonObject:
    """The params of `initialize` of a client that waits by itself."""
    capabilities = params.get("capabilities") or {}
    experimental = {**(capabilities.get("experimental") or {}), RESUMES: {}}
    return {**params, "capabilities": {**capabilities, "experimental": experimental}}


def call_named(params: JsonObject | None) -> object:
    """The id that a call of one of Perdure's own tools gives, unchecked; `None` without one."""
    arguments = (params or {}).get("arguments")
    return arguments.get("call") if isinstance(arguments, dict) else None


def may_be_own(name: object) -> bool:
    """Whether a tool of this name may be one of Perdure's own."""
    return isinstance(name, str) and name.startswith(tuple(OwnTools()))


def is_cancelled_by_id(params: Mapping[str, Any], call: str) -> bool:
    """Whether a cancellation names a call itself, not its request, which may have its early answer."""
    return meta_of(params).get(CALL) == call


def names_of(tools: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    return frozenset(str(tool.get("name")) for tool in tools)


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
    if (given := tools_on(page)) is None:
        return page
    tools = [
        {name: value for name, value in tool.items() if name != "outputSchema"} if isinstance(tool, dict) else tool
        for tool in given
    ]
    if page.get("nextCursor") is None:
        tools += _own(names, seconds)
    # At 2026-07-28 a result says who may share it: this one is for clients of one name.
    scope = {"cacheScope": "private"} if "cacheScope" in page else {}
    return {**page, **scope, "tools": tools}


def _own(names: OwnTools, seconds: float) -> list[JsonObject]:
    call = {"call": {"type": "string", "description": 'The id that the answer "still running" contained'}}
    return [
        {
            "name": names.wait,
            "description": "Get the result of an earlier call to a tool of this server that was answered"
            f' "still running". Waits up to {spoken_duration(seconds)}. Returns that tool\'s result, or says that it'
            " still runs: then call this again. If a call to this server failed because the connection broke, call this"
            " without `call` to see what became of it.",
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
    tool: str,
    call: str,
    *,
    age: float,
    seconds: float,
    names: OwnTools,
    progress: JsonObject | None,
    asks: bool,
    is_elsewhere: bool = False,
) -> JsonObject:
    """The result in place of a call's own, while the call continues. `asks`: it waits for an answer, which only its own
    client can give. `is_elsewhere`: another client reads this."""
    name, wait = _quoted(tool), spoken_duration(seconds)
    said = _said(progress) if progress is not None else ""
    last = f" Last progress: {said}." if said else ""
    if asks:
        last = " It waits for an answer from the user."
    if asks and is_elsewhere:
        last = (
            " It waits for an answer from the user, who is asked only by the client that called it. If that is gone,"
            f" stop it with the tool {names.cancel}."
        )
    text = (
        f"{name} is still running after {age:.0f} s, and goes on. To get its result, call the tool {names.wait} with"
        f' {{"call": "{call}"}}. That call waits up to {wait}; if it says "still running", call it again. Do not call'
        f" {name} again for the same thing: that would start a second run.{last}"
    )
    meta = {CALL: {"id": call, "tool": tool, "state": "running"}}
    return {**_text(text), "_meta": meta}


def _said(progress: JsonObject) -> str:
    """The progress that a tool has reported; none where it is Perdure's own."""
    if heartbeats.is_first(progress):
        return ""
    value = as_progress(progress.get("progress"))
    if value is not None and heartbeats.FIRST <= value <= heartbeats.BEHIND_FIRST:
        progress = {**progress, "progress": 0}
    return progress_text(progress)


def error_for_model(tool: str, error: JsonObject) -> JsonObject:
    """The wait tool's result for a call that has ended with an error: a text, because many hosts show the model
    nothing of protocol errors."""
    if error.get("code") == REQUEST_CANCELLED:
        return failure(f"{_quoted(tool)} was cancelled; it may have done a part of its work.")
    if isinstance(error.get("data"), dict) and error["data"].get("outcome") == "unknown":
        return failure(str(error.get("message")))
    return failure(f"{_quoted(tool)} failed: {error.get('message')} (code {error.get('code')}).")


def unanswered_round(tool: str) -> JsonObject:
    """The wait tool's result for a tool that has ended with a round: only a call of the tool can answer that."""
    return failure(f"{_quoted(tool)} has ended with a question that it asks only a call of its own. Call it again.")


def unknown_call(kept: float) -> JsonObject:
    """For an id that was never issued, another caller's call, and a call whose time has passed. `kept`: seconds
    for which results are kept."""
    return failure(
        f"There is no such call, or its result is no longer kept ({spoken_duration(kept)}). Check what happened before"
        " you call the tool again."
    )


def cancelling(tool: str, *, is_over: bool) -> JsonObject:
    text = (
        "has ended already; nothing was cancelled."
        if is_over
        else "is being cancelled; it may have done a part of its work."
    )
    return _text(f"{_quoted(tool)} {text}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedCall:
    """A call that its caller can ask for."""

    tool: str
    id: str
    began: float
    ended: float | None
    """`None` if it runs."""
    state: CallState
    waits: bool = False
    """It waits for an answer from the user."""

    def line(self, now: float) -> str:
        took = "" if self.ended is None else f" after {max(0.0, self.ended - self.began):.0f} s"
        match self.state:
            case CallState.RUNNING | CallState.WAITING:
                state = "waits for an answer from the user" if self.waits else "still running"
            case CallState.ANSWERED:
                state = f"has ended{took}; its result is kept"
            case CallState.CANCELLED:
                state = f"cancelled{took}, may have done a part of its work"
            case CallState.SETTLED:
                state = f"interrupted{took}, outcome unknown"
        return f"{_quoted(self.tool)}, begun {max(0.0, now - self.began):.0f} s ago, {state}: {self.id}"


def call_list(calls: Sequence[ListedCall], now: float) -> JsonObject:
    """The wait tool's result without an id."""
    lines = [call.line(now) for call in calls]
    return _text("\n".join(lines) or "No call of yours runs, or has ended with a result that you have not seen.")


def _text(text: str) -> JsonObject:
    return {"content": [{"type": "text", "text": text}]}


def failure(text: str) -> JsonObject:
    return {**_text(text), "isError": True}


def _quoted(tool: str) -> str:
    return json.dumps(tool[:NAME_MOST], ensure_ascii=False)
