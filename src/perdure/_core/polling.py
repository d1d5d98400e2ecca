"""Polling: what a client does next with a task of a server, and when it asks again.

A task is followed by `tasks/get` until its status is an end. The server says how often it wants to be asked
(`pollIntervalMs`), from one request to the next: a server that holds a request until something happens is asked again
as soon as it answers.
"""

import enum
from collections.abc import Mapping

from perdure._core.reconnect import MOST_ASKED

#: Seconds between two requests, where the server does not say.
USUAL_POLL = 1.0
#: Seconds that are the least, whatever the server says: 0 would be a loop without a pause.
LEAST_POLL = 0.1
#: Questions of one task that may be open at once; each is a task of the client.
MAX_QUESTIONS = 100


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
    is_number = isinstance(interval_ms, int | float) and not isinstance(interval_ms, bool)
    wanted = interval_ms / 1000 if is_number else USUAL_POLL  # type: ignore[operator]
    return max(min(max(wanted, LEAST_POLL), MOST_ASKED) - took, 0.0)
