"""Translates messages between the two eras of the protocol: revisions with sessions, and 2026-07-28, which has none.

*Down*: a client with a session in front of a server of 2026-07-28. The recorded `initialize` params become the envelope
of each request, and what the session set (log level, subscriptions) goes along with requests or with
`subscriptions/listen`.

*Up*: a client of 2026-07-28 in front of a server with sessions. The envelope becomes `initialize` params, and results
get the members that the newer revision requires.

Only members that one era has and the other lacks are added and removed. All others pass: unknown methods, members,
capabilities, and `_meta`. Results are translated as texts, because numbers may be larger than a program can hold
(`_core/splice.py`).
"""

import enum
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from perdure._core import splice
from perdure._core.durable_calls import STATE_PREFIX, CallClient
from perdure._core.envelope import (
    CALLS,
    CAPABILITIES,
    CLIENT,
    DISCOVER,
    KEY,
    LISTEN,
    LOG_LEVEL,
    SERVER,
    TASKS,
    VERSION,
)
from perdure._core.jsonrpc import JsonObject, mapping, meta_of
from perdure._core.listening import LISTS, UPDATED
from perdure._core.polling import MAX_QUESTIONS
from perdure._core.revisions import FIRST_SESSIONLESS, LATEST_SESSION, REVISIONS

LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")
"""The levels of log messages, the least first."""

CACHEABLE = frozenset(
    {DISCOVER, "tools/list", "prompts/list", "resources/list", "resources/templates/list", "resources/read"}
)
"""Methods whose results carry `ttlMs` and `cacheScope` at 2026-07-28."""

ADDED_REQUESTS = frozenset({DISCOVER, LISTEN})
"""Requests of 2026-07-28 that the session era does not have."""

REMOVED_NOTIFICATIONS = frozenset(
    {"notifications/initialized", "notifications/progress", "notifications/roots/list_changed"}
)
"""Notifications of a client with a session that 2026-07-28 does not have."""

_ENVELOPE = (VERSION, CLIENT, CAPABILITIES, LOG_LEVEL)
_STALE = {"ttlMs": "0", "cacheScope": '"private"'}
"""Says that a result must not be kept: a server with sessions does not say how long it holds."""
_HOP = (TASKS, CALLS)
"""Extensions between a gateway and its neighbour, which the side beyond the gateway does not see."""


# --- Which era


class Era(enum.Enum):
    """The two eras, by the names that a configuration gives them."""

    SESSION = "session"
    MODERN = "2026-07-28"


def eras_to_try(*, pinned: Era | None, known: Era | None, front: Era) -> tuple[Era, ...]:
    """The eras in which a server is tried, in this order: by the configuration, by what was learnt, else the one that
    the clients in front speak, because then nothing is translated."""
    if pinned is not None:
        return (pinned,)
    first = known or front
    return (first, other_era(first))


def other_era(era: Era) -> Era:
    return Era.SESSION if era is Era.MODERN else Era.MODERN


def modern_version(discovered: Mapping[str, Any]) -> str | None:
    """The revision without sessions that both sides speak, by a result of `server/discover`."""
    supported = discovered.get("supportedVersions")
    return FIRST_SESSIONLESS if isinstance(supported, list) and FIRST_SESSIONLESS in supported else None


# --- Down: a client with a session, a server of 2026-07-28


def initialize_result(discovered: Mapping[str, Any], requested: object) -> JsonObject:
    """The `initialize` result that a result of `server/discover` comes to, for a client that requested a version."""
    meta = meta_of(discovered)
    kept = {
        name: value
        for name, value in discovered.items()
        if name not in ("supportedVersions", "resultType", "capabilities", "_meta", *_STALE)
    }
    if left := {name: value for name, value in meta.items() if name != SERVER}:
        kept["_meta"] = left
    return {
        "protocolVersion": requested if isinstance(requested, str) and requested in REVISIONS else LATEST_SESSION,
        "capabilities": _without_hop(discovered.get("capabilities")),
        "serverInfo": meta.get(SERVER) or {"name": "unknown", "version": ""},
        **kept,
    }


def envelope(client_params: Mapping[str, Any], *, level: str | None = None) -> JsonObject:
    """The `_meta` by which 2026-07-28 describes the client of a session, with its log level.

    Capabilities that the revision does not have are left out: tasks of 2025-11-25, and changes of roots.
    """
    capabilities = {
        name: value for name, value in mapping(client_params.get("capabilities")).items() if name != "tasks"
    }
    if isinstance(roots := capabilities.get("roots"), Mapping):
        capabilities["roots"] = {name: value for name, value in roots.items() if name != "listChanged"}
    made: JsonObject = {VERSION: FIRST_SESSIONLESS, CAPABILITIES: capabilities}
    if isinstance(info := client_params.get("clientInfo"), Mapping):
        made[CLIENT] = dict(info)
    return made if level is None else {**made, LOG_LEVEL: level}


def request_down(params: Mapping[str, Any] | None, envelope: Mapping[str, Any]) -> JsonObject:
    """The params of a request of a session with the envelope of its client."""
    return {**(params or {}), "_meta": {**meta_of(params), **envelope}}


def result_down(method: str, text: str) -> str:
    """A result of 2026-07-28 as a session has it, as JSON."""
    members = splice.members(text)
    for name in ("resultType", *(_STALE if method in CACHEABLE else ())):
        members.pop(name, None)
    meta = splice.members(members.get("_meta", "{}"))
    if meta.pop(SERVER, None) is not None:
        members["_meta"] = splice.object_of(meta)
        if not meta:
            del members["_meta"]
    return splice.object_of(members)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One input that a result of 2026-07-28 requires: a request to the client."""

    method: str
    params: JsonObject | None


class BadQuestions(ValueError):
    """The input that a result requires cannot be asked for; the message says why."""


def questions_in(result: Mapping[str, Any]) -> dict[str, Question]:
    """The input that a result requires, by its keys. Raises `BadQuestions`."""
    found = result.get("inputRequests")
    if found is not None and not isinstance(found, Mapping):
        raise BadQuestions("its inputRequests are not an object")
    if found and len(found) > MAX_QUESTIONS:
        raise BadQuestions(f"it asks {len(found)} things at once; {MAX_QUESTIONS} are allowed")
    questions = {}
    for key, asked in (found or {}).items():
        method, params = (asked.get("method"), asked.get("params")) if isinstance(asked, Mapping) else (None, None)
        if not isinstance(method, str) or not isinstance(params, dict | None):
            raise BadQuestions(f"its input request {key[:60]!r} is not a request")
        questions[key] = Question(method=method, params=params)
    if not questions and not isinstance(result.get("requestState"), str):
        raise BadQuestions("it requires input, and has neither inputRequests nor requestState")
    return questions


def next_round(params: Mapping[str, Any], result: Mapping[str, Any], answers: Mapping[str, Any]) -> JsonObject:
    """The params of a request that brings the answers to a result that requires input."""
    kept = {name: value for name, value in params.items() if name not in ("inputResponses", "requestState")}
    state = {"requestState": result["requestState"]} if "requestState" in result else {}
    return {**kept, **({"inputResponses": dict(answers)} if answers else {}), **state}


# --- Neither: a client and a server of 2026-07-28


def request_through(params: Mapping[str, Any] | None, envelope: Mapping[str, Any]) -> JsonObject:
    """The params of a request of 2026-07-28, for the server. `envelope`: for requests that the gateway makes itself.
    The key of a call is the gateway's, and so are its tasks."""
    meta = {**envelope, **meta_of(params)}
    meta.pop(KEY, None)
    passed = {**(params or {}), "_meta": meta}
    if isinstance(state := passed.get("requestState"), str) and _is_marked(state):
        passed["requestState"] = state[1:]
    return passed


def round_through(text: str) -> str:
    """A result that requires input, for the client, as JSON. A state that looks like one of the gateway's own is
    marked: the server is a Perdure server, too."""
    given = splice.cut(text, "requestState") or ""
    marked = "=" + json.loads(given) if given.startswith('"') else ""
    return splice.replaced(text, json.dumps(marked), "requestState") if _is_marked(marked) else text


def _is_marked(state: str) -> bool:
    return state.startswith("=") and state.lstrip("=").startswith(STATE_PREFIX)


# --- Up: a client of 2026-07-28, a server with sessions


def handshake_params(client: CallClient) -> JsonObject:
    """The `initialize` params with which the client of a request would have opened a session."""
    info = dict(client.info) if isinstance(client.info, Mapping) else {"name": "unknown", "version": ""}
    return {"protocolVersion": LATEST_SESSION, "capabilities": _without_hop(client.capabilities), "clientInfo": info}


def discover_result(initialized: Mapping[str, Any]) -> JsonObject:
    """The result of `server/discover` that an `initialize` result comes to.

    Changes of lists come by `subscriptions/listen`, which the gateway serves for each list that the server has.
    """
    capabilities = {name: value for name, value in mapping(initialized.get("capabilities")).items() if name != "tasks"}
    for name in ("tools", "prompts", "resources"):
        if isinstance(declared := capabilities.get(name), Mapping):
            capabilities[name] = {**declared, "listChanged": True}
    kept = {
        name: value
        for name, value in initialized.items()
        if name not in ("protocolVersion", "serverInfo", "capabilities", "_meta")
    }
    stamp = {SERVER: initialized["serverInfo"]} if "serverInfo" in initialized else {}
    return {
        "resultType": "complete",
        "supportedVersions": [FIRST_SESSIONLESS],
        "capabilities": capabilities,
        "ttlMs": 0,
        "cacheScope": "private",
        **kept,
        "_meta": {**meta_of(initialized), **stamp},
    }


def request_up(params: Mapping[str, Any] | None) -> JsonObject | None:
    """The params of a request of 2026-07-28 without their envelope; `None` if nothing else was in them."""
    return _without_meta(params, (*_ENVELOPE, KEY)) or None


def request_along(params: JsonObject | None) -> JsonObject | None:
    """The params of a request of a session, for a server with sessions: the key of a call is the gateway's, because
    callers whom the gateway tells apart may be one to the server."""
    return params if KEY not in meta_of(params) else _without_meta(params, (KEY,))


def _without_meta(params: Mapping[str, Any] | None, names: Collection[str]) -> JsonObject:
    kept = dict(params or {})
    if isinstance(meta := kept.get("_meta"), Mapping):
        kept["_meta"] = {name: value for name, value in meta.items() if name not in names}
        if not kept["_meta"]:
            del kept["_meta"]
    return kept


def result_up(method: str, text: str, server_info: Mapping[str, Any]) -> str:
    """A result of a session as 2026-07-28 wants it, as JSON."""
    members = {"resultType": '"complete"', **(_STALE if method in CACHEABLE else {}), **splice.members(text)}
    if method == "tools/list" and (tools := members.get("tools", "")).startswith("["):
        members["tools"] = f"[{','.join(map(_without_execution, splice.items(tools)))}]"
    meta = {**splice.members(members.get("_meta", "{}")), SERVER: json.dumps(server_info, separators=(",", ":"))}
    return splice.object_of({**members, "_meta": splice.object_of(meta)})


def _without_execution(tool: str) -> str:
    members = splice.members(tool)
    return tool if members.pop("execution", None) is None else splice.object_of(members)


def log_level_in(params: Mapping[str, Any] | None) -> str | None:
    """The least level of log messages that a request of 2026-07-28 wants; `None` if it wants none."""
    level = meta_of(params).get(LOG_LEVEL)
    return level if level in LEVELS else None


def passes_up(method: str, params: Mapping[str, Any] | None, *, level: str | None) -> bool:
    """Whether a notification of a session's server may stand on the response to a request of 2026-07-28.

    Log messages need the request's consent, and changes have a stream of their own.
    """
    if method in _NOT_ON_RESPONSES:
        return False
    if method != "notifications/message":
        return True
    sent = (params or {}).get("level")
    return level is not None and sent in LEVELS and LEVELS.index(sent) >= LEVELS.index(level)


_NOT_ON_RESPONSES = frozenset({*LISTS.values(), UPDATED, "notifications/elicitation/complete"})


def _without_hop(capabilities: object) -> JsonObject:
    """Capabilities without the extensions that a gateway speaks for itself."""
    kept = dict(mapping(capabilities))
    if isinstance(extensions := kept.get("extensions"), Mapping):
        kept["extensions"] = {name: value for name, value in extensions.items() if name not in _HOP}
    return kept
