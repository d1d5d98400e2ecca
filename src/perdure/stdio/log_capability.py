"""The bridge's own `logging` capability, for servers that have none.

How the calls of an earlier process ended is reported in log messages, and only a server that has declared `logging` may
send them. Most servers do not. For these the bridge declares it to the host, and keeps the level that the host sets.
"""

from __future__ import annotations

import json

from perdure._core import splice
from perdure._core.codes import INVALID_PARAMS
from perdure.remote.endpoint import Handshake
from perdure.remote.message import encode, error

SET_LEVEL = "logging/setLevel"

LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")
"""Of the specification, the least important first."""


def is_own(handshake: Handshake | None) -> bool:
    """Whether the bridge does the logging."""
    if handshake is None:
        return False
    capabilities = handshake.result.get("capabilities")
    return not isinstance(capabilities, dict) or "logging" not in capabilities


def with_logging(answer: str, handshake: Handshake) -> str:
    """The server's answer to `initialize`, as the host gets it."""
    if not is_own(handshake):
        return answer
    given = splice.cut(answer, "result", "capabilities")
    if given is None or not isinstance(splice.decode(given), dict):
        return answer  # the host judges a server that says so little
    rest = given.strip()[1:].lstrip()
    return splice.replaced(answer, '{"logging":{}' + ("" if rest == "}" else ",") + rest, "result", "capabilities")


def is_set_level(request: str) -> bool:
    return bool(json.loads(request)["method"] == SET_LEVEL)


def wants_info(requests: list[str]) -> bool:
    """Whether the host wants messages of level info, by its sticky requests. It does until it sets another level."""
    levels = [_level(request) for request in requests if is_set_level(request)]
    return not levels or levels[-1] in ("debug", "info")


def answer_set_level(request_id: str, request: str) -> str:
    """The answer to a host that sets the level of the bridge's own logging."""
    seen = _level(request)
    if seen in LEVELS:
        return f'{{"jsonrpc":"2.0","id":{request_id},"result":{{}}}}'
    return error(request_id, INVALID_PARAMS, f"The level {encode(seen)} is none of {', '.join(LEVELS)}").text


def _level(request: str) -> object:
    return json.loads(request)["params"].get("level")
