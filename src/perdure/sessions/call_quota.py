"""Decides whether one more durable call may be kept: of all calls (`max_tasks`), of one caller's
(`max_principal_tasks`), and as a key without its answer (`max_keys`).

To count takes longer the more rows there are, so the store counts now and then and a process goes by its last count in
between. Several processes may therefore exceed a limit together, by as much as each begins between two counts. A limit
that the store checked with each call would make all of them wait for one row.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable

from perdure._core.ids import RecordKind
from perdure._core.limits import Caller
from perdure._core.states import SessionState
from perdure.errors import StoreError
from perdure.store.interface import Store

CHECK_SHARE = 100
"""A count that found room is trusted for a hundredth of the limit: as much as is given up at once when there is no
room. However high the limit is, a call pays for a hundred rows of the count, on average. With a limit below a hundred,
the store counts with each call."""

MAX_CALLERS = 10_000
"""Callers whose last count is remembered: as many as there may be tasks by default, a few hundred bytes each. The calls
of a caller that is forgotten are counted at once."""

COUNT_SECONDS = 5.0
"""Seconds after which the store counts all calls again, because other processes begin calls as well."""

FULL_SECONDS = 0.5
"""The same while there is no room: calls end, and their time passes. A flood of refused requests causes no more counts
than this."""

KEY_SHARE = 10
"""A caller may have a tenth of all keys, so that no caller uses up the room of all others."""

NO_ROOM_SECONDS = 1.0
"""Seconds for which a count of keys that found no room is trusted, so that a flood of refused requests causes no more
counts."""

_ALL = Caller("", "*")


class TaskCount:
    """Estimates how many calls the store keeps."""

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


class CallerChecks:
    """Counts down how many calls each caller may begin here before the store counts them again."""

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


class KeyRoom:
    """Decides whether one more key may be kept without its answer. A key that is forgotten before its time lets its
    call run twice, so no key is: where there is no room, new calls are refused."""

    def __init__(self, store: Store, limit: int, clock: Callable[[], float]) -> None:
        self.of_caller = max(1, limit // KEY_SHARE)
        self._store = store
        self._limit = limit
        self._clock = clock
        self._checks = {True: CallerChecks(limit), False: CallerChecks(self.of_caller)}
        self._full: dict[Caller, float] = {}
        """When a caller had no room; the newest is the last."""

    async def take(self, caller: Caller) -> bool:
        """Whether one more key of the caller's may be kept. Raises `StoreError`."""
        return await self._has_room(caller, self.of_caller) and await self._has_room(_ALL, self._limit)

    async def _has_room(self, whose: Caller, limit: int) -> bool:
        checks = self._checks[whose is _ALL]
        if not checks.is_due(whose):
            return True
        now = self._clock()
        if now - self._full.get(whose, -NO_ROOM_SECONDS) < NO_ROOM_SECONDS:
            return False
        self._full = {caller: at for caller, at in self._full.items() if now - at < NO_ROOM_SECONDS}
        if await self._count(whose) < limit:
            checks.found_room(whose)
            return True
        self._full[whose] = now
        return False

    async def _count(self, whose: Caller) -> int:
        if whose is _ALL:
            return sum((await self._store.count_states(RecordKind.KEY)).values())
        return await self._store.count_of(*whose, kind=RecordKind.KEY)
