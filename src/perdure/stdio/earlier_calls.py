"""Reports how calls of an earlier process of the bridge ended, by the bridge's own `logging` capability where need be.

The host forgot these calls when it ended that process, and its ids begin from 0 again, so their results answer no
request of the host. The report is a log message (`notifications/message`, level info). A host that has asked for less
does not get it; the bridge's own log has a line about it in any case.

Only a server that has declared `logging` may send log messages, and most do not. For these the bridge declares it to
the host, and keeps the level that the host sets.
"""

import json

from perdure._core import splice
from perdure._core.codes import INVALID_PARAMS
from perdure.remote.endpoint import Handshake
from perdure.remote.message import Message, encode, error
from perdure.stdio.positions_file import RunningCall

SET_LEVEL = "logging/setLevel"

#: Of the specification, the least important first.
LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")


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


def report(noted: RunningCall, answer: Message) -> str:
    """The message that tells the host how a call ended that it no longer knows."""
    what = "error" if answer.is_error else "result"
    data = f'"message":"A call of an earlier process has ended","method":{encode(noted.method)},"requestId":{noted.id}'
    if noted.name:
        data += f',"tool":{encode(noted.name)}'
    data += f',"{what}":{splice.cut(answer.text, what)}'
    params = f'{{"level":"info","logger":"perdure","data":{{{data}}}}}'
    return f'{{"jsonrpc":"2.0","method":"notifications/message","params":{params}}}'
