"""Decides whether the key of one more call may be kept behind its answer (`max_keys`).

A key that is forgotten before its time lets its call run twice, so none is: where there is no room, new calls are
refused. To count takes longer the more there are, so a count that found room vouches for a hundredth of the limit, as
`CallerChecks` has it.
"""

from collections.abc import Callable

from perdure._core.ids import RecordKind
from perdure._core.limits import Caller
from perdure.sessions.caller_checks import CallerChecks
from perdure.store.interface import Store

KEY_SHARE = 10
"""A caller may have a tenth of all keys: nobody uses up the room of all others."""

FULL_SECONDS = 1.0
"""Seconds for which a count that found no room is believed: a flood of refused requests causes no more counts."""

_ALL = Caller("", "*")


class KeyRoom:
    """How many keys there are, as far as this process knows."""

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
        if now - self._full.get(whose, -FULL_SECONDS) < FULL_SECONDS:
            return False
        self._full = {caller: at for caller, at in self._full.items() if now - at < FULL_SECONDS}
        if await self._count(whose) < limit:
            checks.found_room(whose)
            return True
        self._full[whose] = now
        return False

    async def _count(self, whose: Caller) -> int:
        if whose is _ALL:
            return sum((await self._store.count_states(RecordKind.KEY)).values())
        return await self._store.count_of(*whose, kind=RecordKind.KEY)
