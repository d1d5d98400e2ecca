"""Tasks: what a client is shown of a single call whose handle it has.

There is no state beside the ledger's: a task's status is that of its call's row, looked up in a table.
"""

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from perdure._core.codes import POSITION_LOST
from perdure._core.jsonrpc import JsonObject
from perdure._core.states import CallState

POLL_LEAST = 0.5
POLL_MOST = 5.0
"""Seconds between two polls that a client is asked for: a tenth of the task's age, within these. A poll of
Perdure's own clients is held until something changes; any other client learns of the end with its next poll."""

_POLLS_OF_AGE = 10


class TaskStatus(enum.Enum):
    """The protocol's words."""

    WORKING = "working"
    INPUT_REQUIRED = "input_required"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Standing(enum.Enum):
    """What matters of a call beside its state."""

    PLAIN = "plain"
    ASKING = "asking"
    """Its client has to answer something."""
    RESULT = "result"
    """The answer is a result."""
    ERROR = "error"


_GOES_ON = {Standing.PLAIN: TaskStatus.WORKING, Standing.ASKING: TaskStatus.INPUT_REQUIRED}
STATUS: Mapping[CallState, Mapping[Standing, TaskStatus]] = {
    CallState.RUNNING: _GOES_ON,
    CallState.WAITING: {Standing.PLAIN: TaskStatus.WORKING, Standing.ASKING: TaskStatus.WORKING},
    CallState.ANSWERED: {Standing.RESULT: TaskStatus.COMPLETED, Standing.ERROR: TaskStatus.FAILED},
    CallState.SETTLED: {Standing.ERROR: TaskStatus.FAILED},
    CallState.CANCELLED: {Standing.ERROR: TaskStatus.CANCELLED},
}

_WAITS = "Interrupted; it goes on with the next request of its principal"
_GONE: JsonObject = {"code": POSITION_LOST, "message": "The answer to this request is no longer retained"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskFacts:
    """All that is shown of a task, as it was read at one moment."""

    id: str
    created: float
    updated: float
    state: CallState
    asks: Mapping[str, bytes]
    """Requests that wait for the client's answer, by their ids."""
    progress: JsonObject | None = None
    """The params of the last progress."""
    answer: bytes | None = None
    """The response, once there is one."""

    @property
    def is_over(self) -> bool:
        return self.state not in (CallState.RUNNING, CallState.WAITING)


def task_view(facts: TaskFacts, *, now: float, ttl: float) -> JsonObject:
    """A task as `tasks/get` shows it. The times serve the client; nothing is decided by them."""
    age = max(0.0, now - facts.created)
    # It is kept for `ttl` after its end; a client counts from its creation.
    kept = ttl + (facts.updated - facts.created if facts.is_over else age if age > ttl / 2 else 0.0)
    view: JsonObject = {
        "taskId": facts.id,
        "status": "",
        "createdAt": _iso(facts.created),
        "lastUpdatedAt": _iso(max(facts.updated, facts.created)),
        "ttlMs": round(kept * 1000),
        "pollIntervalMs": round(1000 * min(POLL_MOST, max(POLL_LEAST, age / _POLLS_OF_AGE))),
    }
    response: JsonObject = {} if facts.answer is None else json.loads(facts.answer)
    if facts.is_over and not response:
        response = {"error": _GONE}  # only its row is left
    if facts.is_over:
        standing = Standing.RESULT if "result" in response else Standing.ERROR
    else:
        standing = Standing.ASKING if facts.asks else Standing.PLAIN
    status = STATUS[facts.state][standing]
    view["status"] = status.value
    match status:
        case TaskStatus.COMPLETED:
            view["result"] = response["result"]
        case TaskStatus.FAILED:
            view["error"] = response["error"]
            view["statusMessage"] = str(response["error"].get("message", "failed"))
        case TaskStatus.INPUT_REQUIRED:
            view["inputRequests"] = input_requests(facts.asks)
        case TaskStatus.WORKING if facts.state is CallState.WAITING:
            view["statusMessage"] = _WAITS
        case TaskStatus.WORKING if facts.progress is not None:
            view["statusMessage"] = _progress_text(facts.progress)
    return view


def handle_view(view: JsonObject) -> JsonObject:
    """A task as it is handed out: without what came of it."""
    left_out = ("result", "error", "inputRequests")
    return {name: value for name, value in view.items() if name not in left_out}


def input_requests(asks: Mapping[str, bytes]) -> JsonObject:
    """What a client is asked, as `inputRequests` have it."""
    requests = {name: json.loads(ask) for name, ask in asks.items()}
    return {name: {"method": ask["method"], "params": ask.get("params") or {}} for name, ask in requests.items()}


def _progress_text(params: JsonObject) -> str:
    done, total, message = (params.get(name) for name in ("progress", "total", "message"))
    text = f"{done:.15g}" if isinstance(done, int | float) else ""
    if text and isinstance(total, int | float) and total:
        text += f" of {total:.15g}"
    said = str(message) if message else ""
    return f"{text}: {said}" if text and said else text or said


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
