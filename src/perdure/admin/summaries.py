"""A message in few words, for a line on a screen. What cannot be read is shown as it is: the log may hold anything."""

from __future__ import annotations

import json
from typing import Any

from perdure.store.base import CallRecord

SHORT = 8
"""Characters of a stream's or node's id that tell it from others on a screen."""

_NAMES = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}
"""Where a request says what it is about."""

_PROGRESS = "notifications/progress"


def short(name: str) -> str:
    return name[:SHORT] or "-"


def members(payload: bytes) -> dict[str, Any]:
    """The object in a payload; empty if there is none."""
    try:
        value = json.loads(payload)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def call_name(call: CallRecord) -> str | None:
    """The tool, prompt or resource that a call asks for. Forgotten with the request, once the call has ended."""
    name = _params(members(call.request)).get(_NAMES.get(call.method, ""))
    return name if isinstance(name, str) else None


def call_title(call: CallRecord) -> str:
    return " ".join(filter(None, (call.method, call_name(call))))


def summary(payload: bytes) -> str:
    """What a message says: whether it asks, tells or answers, and then the rest as JSON."""
    message = members(payload)
    match message:
        case {"method": str(method), "id": id_}:
            return f"ask {_json(id_)} {method} {_told(message)}".rstrip()
        case {"method": str(method)} if method == _PROGRESS:
            return _progress(_params(message))
        case {"method": str(method)}:
            return f"{method} {_told(message)}".rstrip()
        case {"error": {"code": code, "message": sentence}}:
            return f"error {_json(message.get('id'))}: {sentence} ({code})"
        case {"result": result}:
            return f"answer {_json(message.get('id'))}: {_json(result)}"
    return payload.decode(errors="replace")


def request(payload: bytes) -> str:
    """A request whose id does not matter."""
    message = members(payload)
    return f"{message.get('method', '?')} {_told(message)}".rstrip()


def _progress(params: dict[str, Any]) -> str:
    done = _json(params.get("progress"))
    of = f"/{_json(params['total'])}" if params.get("total") is not None else ""
    token = f"token {_json(params.get('progressToken'))}"
    return " ".join(filter(None, (_PROGRESS, done + of, str(params.get("message") or ""), f"({token})")))


def _told(message: dict[str, Any]) -> str:
    params = {name: value for name, value in _params(message).items() if name != "_meta"}
    return _json(params) if params else ""


def _params(message: dict[str, Any]) -> dict[str, Any]:
    params = message.get("params")
    return params if isinstance(params, dict) else {}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
