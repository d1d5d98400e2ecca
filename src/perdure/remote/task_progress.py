"""Makes progress notifications of what a task says of itself.

A task has no notifications of its own: Perdure's servers say in words how far it is (`statusMessage`).
"""

import math

from perdure._core.jsonrpc import JsonObject
from perdure._core.polling import progress_in
from perdure.remote.message import Message

PROGRESS = "notifications/progress"


class TaskProgress:
    """How far one call is. What its program has seen is not told again, nor anything below it."""

    def __init__(self) -> None:
        self._last = -math.inf

    def heard(self, message: Message) -> None:
        """A notification came before the call became a task."""
        done = message.params.get("progress")
        if message.method == PROGRESS and isinstance(done, int | float):
            self._last = max(self._last, done)

    def further(self, said: object) -> JsonObject | None:
        """The params of a progress notification, without its token, if the task is further than before."""
        found = progress_in(said)
        if found is None or found["progress"] <= self._last:
            return None
        self._last = found["progress"]
        return found
