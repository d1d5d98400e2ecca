"""Decides whether one more durable call may be kept, or one more key without its answer.

Counting takes longer the more rows exist, so the store counts now and then, and a process relies on its last count in
between. Several processes may therefore exceed a limit together, by as much as each begins between two counts. If the
store checked a limit with each call, all calls would wait for one row.
"""

import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from perdure._core.limits import Caller

CHECK_SHARE = 100
"""A count that found room is trusted for a hundredth of the limit: as much as is given up at once when there is no
room. However high the limit is, a call pays for a hundred rows of the count, on average. With a limit below a hundred,
the store counts with each call."""

MAX_CALLERS = 10_000
"""Callers whose last count is remembered: as many as there may be tasks by default, a few hundred bytes each. The calls
of a caller that is forgotten are counted at once."""

FULL_SECONDS = 0.5
"""Seconds for which a count that found no room is trusted: calls end, and their time passes. A flood of refused
requests causes no more counts than this."""

ALL = Caller("", "*")
"""All callers together."""


class CallQuota:
    """Remembers for each caller how many calls it may begin here before the store counts them again."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self.limit = limit
        self._share = limit // CHECK_SHARE
        self._clock = clock
        self._left: OrderedDict[Caller, int] = OrderedDict()
        self._full: dict[Caller, float] = {}
        """When a count found no room for a caller."""

    def is_due(self, caller: Caller) -> bool:
        """Whether the calls of a caller have to be counted with its next one. If not, that one is spent."""
        left = self._left.get(caller, 0)
        if left:
            self._left[caller] = left - 1
            self._left.move_to_end(caller)
        return not left

    def found_room(self, caller: Caller) -> None:
        if self._share:
            self._left[caller] = self._share
            self._left.move_to_end(caller)
            if len(self._left) > MAX_CALLERS:
                self._left.popitem(last=False)

    def made_room(self, caller: Caller) -> None:
        """One call is no longer kept: count again, even if the last count found no room."""
        self._full.pop(caller, None)

    async def has_room(self, caller: Caller, count: Callable[[], Awaitable[int]]) -> bool:
        """Whether one more may be kept. `count` asks the store."""
        if not self.is_due(caller):
            return True
        now = self._clock()
        if now - self._full.get(caller, -math.inf) < FULL_SECONDS:
            return False
        self._full = {full: at for full, at in self._full.items() if now - at < FULL_SECONDS}
        if await count() < self.limit:
            self.found_room(caller)
            return True
        self._full[caller] = now
        return False
