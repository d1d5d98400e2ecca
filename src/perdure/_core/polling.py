"""Polling: decides what follows from the answer to one `tasks/get`, and when a client asks again.

A client follows a task by `tasks/get` until the task ends. The server says how often it wants to be asked
(`pollIntervalMs`), counted from one request to the next: a server that holds a request until something happens is asked
again as soon as it answers. `clients/browser/src/polling.ts` has the same rules; `tests/vectors/polling.json` tests
both.
"""

import enum
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from perdure._core.codes import (
    HEADER_MISMATCH,
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    MISSING_CAPABILITY,
    REQUEST_CANCELLED,
    UNREACHABLE,
    UNSUPPORTED_VERSION,
)
from perdure._core.jsonrpc import JsonObject
from perdure._core.reconnect import MOST_ASKED

#: Seconds between two requests, where the server does not say.
USUAL_POLL = 1.0
#: Seconds that are the least, whatever the server says: 0 would be a loop without a pause.
LEAST_POLL = 0.1
#: Questions of one task that may be open at once; each is a task of the client.
MAX_QUESTIONS = 100
#: Keys of answered questions that are remembered. A server shows open questions only, and an answered one for a moment
#: at most; a task that asks a thousand times has forgotten its first questions.
MAX_ANSWERED = 1_000

GONE = frozenset(
    {INVALID_PARAMS, METHOD_NOT_FOUND, HEADER_MISMATCH, MISSING_CAPABILITY, UNSUPPORTED_VERSION, UNREACHABLE}
)
"""Codes of errors to `tasks/get` after which the task will not be found: the server does not know the task, or does not
understand the request, or has not answered within the client's limits. Other errors may pass."""


class Next(enum.Enum):
    """The next step of a client after one poll."""

    POLL = "ask again after a pause"
    ANSWER = "put the open questions to the user, and ask again after a pause"
    RESULT = "the task's result is the result of the call"
    ERROR = "the error is the answer to the call"
    RETRY = "the request failed: ask again with growing pauses, while patience lasts"
    UNKNOWN = "the outcome of the call is unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The consequence of one poll."""

    next: Next
    pause: float = 0.0
    """Seconds until the next poll, for POLL and ANSWER."""
    value: JsonObject | None = None
    """The result, the error or the open questions."""
    progress: JsonObject | None = None
    """The params of a progress notification, without a token."""
    reason: str = ""
    """For RETRY and UNKNOWN."""


def after_poll(answer: Mapping[str, Any], *, answered: Collection[str] = (), took: float = 0.0) -> Decision:
    """Decide on the JSON-RPC response to `tasks/get`, which took so many seconds.

    `answered` are the keys of questions whose answers the server has: a server may show them for a moment longer.
    """
    error = answer.get("error")
    if isinstance(error, Mapping):
        reason = f"the server does not say what became of the task: {error.get('message') or 'no reason given'}"
        return Decision(next=Next.UNKNOWN if error.get("code") in GONE else Next.RETRY, reason=reason)
    found = answer.get("result")
    task: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    status, said = task.get("status"), task.get("statusMessage")
    wait = pause(task.get("pollIntervalMs"), took=took)
    match status:
        case "working":
            return Decision(next=Next.POLL, pause=wait, progress=progress_in(said))
        case "input_required":
            found = task.get("inputRequests")
            questions: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
            left = {key: ask for key, ask in questions.items() if key not in answered}
            return Decision(next=Next.ANSWER if left else Next.POLL, pause=wait, value=left or None)
        case "completed" if isinstance(task.get("result"), Mapping):
            # A task's result is what the call would have returned; some servers leave out `resultType`.
            return Decision(next=Next.RESULT, value={"resultType": "complete", **task["result"]})
        case "failed" if isinstance(task.get("error"), Mapping) and isinstance(task["error"].get("code"), int):
            return Decision(next=Next.ERROR, value={"message": "", **task["error"]})
        case "cancelled":
            sentence = said if isinstance(said, str) else "The task was cancelled"
            return Decision(next=Next.ERROR, value={"code": REQUEST_CANCELLED, "message": sentence})
    return Decision(next=Next.UNKNOWN, reason=f"the task is {status!r}, and has no answer")


def pause(interval_ms: object, *, took: float) -> float:
    """Seconds until the next request, where the last one took `took` seconds."""
    wanted = USUAL_POLL
    if isinstance(interval_ms, int | float) and not isinstance(interval_ms, bool) and interval_ms == interval_ms:
        wanted = min(max(interval_ms, LEAST_POLL * 1000), MOST_ASKED * 1000) / 1000
    return max(wanted - took, 0.0)


_PROGRESS = re.compile(r"([\d.e+-]{1,32})(?: of ([\d.e+-]{1,32}))?(?:: (.*))?", re.DOTALL)


def progress_in(status_message: object) -> JsonObject | None:
    """The progress that a task's `statusMessage` reports, as Perdure's servers write it (`_core/durable_calls.py`)."""
    found = _PROGRESS.fullmatch(status_message) if isinstance(status_message, str) else None
    if found is None:
        return None
    done, total, message = found.groups()
    try:
        numbers = {"progress": float(done), **({"total": float(total)} if total else {})}
    except ValueError:
        return None
    if not all(map(math.isfinite, numbers.values())):
        return None
    return {**numbers, **({"message": message} if message else {})}
