"""Decides which of a caller's new calls have the store count how many it keeps (`max_principal_tasks`).

To count takes longer the more there are. So a process has them counted now and then: a count that found room vouches
for a hundredth of the limit. A caller that uses several processes may go beyond its limit by that much in each of them;
with a limit below a hundred they are counted with each call.
"""

from collections import OrderedDict

from perdure._core.limits import Caller

CHECK_SHARE = 100
"""A hundredth of the limit may begin between two counts: as much as is given up at once when there is no room. However
high the limit is, a call pays for a hundred rows of the count, on average."""

MAX_CALLERS = 10_000
"""Callers whose last count is remembered: as many as there may be tasks by default, a few hundred bytes each. The calls
of one that is forgotten are counted at once."""


class CallerChecks:
    """How many calls each caller may begin here before they are counted again."""

    def __init__(self, limit: int) -> None:
        self._share = limit // CHECK_SHARE
        self._left: OrderedDict[Caller, int] = OrderedDict()

    def is_due(self, caller: Caller) -> bool:
        """Whether the calls of a caller have to be counted with its next one. If not, that one is spent."""
        left = self._left.get(caller, 0)
        if left:
            self._left[caller] = left - 1
            self._left.move_to_end(caller)
        return not left

    def found_room(self, caller: Caller) -> None:
        """They were counted, and there was room."""
        if self._share:
            self._left[caller] = self._share
            self._left.move_to_end(caller)
            if len(self._left) > MAX_CALLERS:
                self._left.popitem(last=False)
