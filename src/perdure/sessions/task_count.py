"""Estimates how many single calls the store keeps, so that their number has a bound (`max_tasks`).

The store counts them now and then; in between, each process adds those that it has begun itself. So several processes
may go beyond the bound together, by what they begin between two counts: a bound that the store keeps with each call
would make all of them wait for one row.
"""

import contextlib
from collections.abc import Callable

from perdure._core.ids import RecordKind
from perdure._core.states import SessionState
from perdure.errors import StoreError
from perdure.store.interface import Store

COUNT_SECONDS = 5.0
"""Seconds after which the store is asked again, because other processes begin calls as well."""

FULL_SECONDS = 0.5
"""The same while there is no room: calls end, and their time passes. A flood of refused requests causes no more counts
than this."""


class TaskCount:
    """How many there are, as far as this process knows."""

    def __init__(self, store: Store, limit: int, clock: Callable[[], float]) -> None:
        self._store = store
        self._limit = limit
        self._clock = clock
        self._known = 0
        self._counted: float | None = None
        """When the store was last asked."""

    def begun(self) -> None:
        """One more is kept."""
        self._known += 1

    def gone(self) -> None:
        """One is not kept any more."""
        self._known -= 1

    async def is_full(self) -> bool:
        """Whether as many are kept as may be."""
        now, full = self._clock(), self._known >= self._limit
        if self._counted is None or now - self._counted >= (FULL_SECONDS if full else COUNT_SECONDS):
            self._counted = now  # others that come meanwhile go by what is known
            with contextlib.suppress(StoreError):  # while the store fails, too
                states = await self._store.count_states(RecordKind.CALL)
                self._known = sum(count for state, count in states.items() if state is not SessionState.ENDED)
        return self._known >= self._limit
