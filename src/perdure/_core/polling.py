"""Polling: what a client does next with a task of a server, and when it asks again.

A task is followed by `tasks/get` until its status is an end. The server says how often it wants to be asked
(`pollIntervalMs`), from one request to the next: a server that holds a request until something happens is asked again
as soon as it answers.
"""

import enum
import math
import re
from collections.abc import Mapping

from perdure._core.codes import INVALID_PARAMS, UNREACHABLE, UNSUPPORTED_VERSION
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

METHOD_NOT_FOUND, HEADER_MISMATCH, MISSING_CAPABILITY = -32601, -32020, -32021
GONE = frozenset(
    {INVALID_PARAMS, METHOD_NOT_FOUND, HEADER_MISMATCH, MISSING_CAPABILITY, UNSUPPORTED_VERSION, UNREACHABLE}
)
"""Codes of errors to `tasks/get` behind which the task will not be found: the server does not know it, or does not
understand the question, or has not answered within the limits. Other errors may pass."""


class Status(enum.Enum):
    """The status of a task, as the extension names it."""

    WORKING = "working"
    INPUT_REQUIRED = "input_required"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Next(enum.Enum):
    """What a client does with a task that it has seen in a status."""

    POLL = "ask again after a pause"
    ANSWER = "answer the questions that have no answer yet, and ask again"
    RESULT = "its result is the result of the call"
    ERROR = "its error is the answer to the call"
    CANCELLED = "the call was cancelled"


NEXT: Mapping[Status, Next] = {
    Status.WORKING: Next.POLL,
    Status.INPUT_REQUIRED: Next.ANSWER,
    Status.COMPLETED: Next.RESULT,
    Status.FAILED: Next.ERROR,
    Status.CANCELLED: Next.CANCELLED,
}


def next_of(status: object) -> Next | None:
    """What to do; None for a status that the extension does not have."""
    try:
        return NEXT[Status(status)]
    except ValueError:
        return None


def pause(interval_ms: object, *, took: float) -> float:
    """Seconds until the next request, where the last one took `took` seconds."""
    wanted = USUAL_POLL
    if isinstance(interval_ms, int | float) and not isinstance(interval_ms, bool) and interval_ms == interval_ms:
        wanted = min(max(interval_ms, LEAST_POLL * 1000), MOST_ASKED * 1000) / 1000
    return max(wanted - took, 0.0)


_PROGRESS = re.compile(r"([\d.e+-]{1,32})(?: of ([\d.e+-]{1,32}))?(?:: (.*))?", re.DOTALL)


def progress_in(status_message: object) -> JsonObject | None:
    """The progress that a task's `statusMessage` tells, as Perdure's servers write it (`_core/tasks.py`)."""
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
