"""Limits how long a store keeps its callers waiting, by what the store did and not by how late this process is.

Three things are not a store that hangs:

- **This process is late** (a busy machine, a long callback, a stopped process). Time is counted in ticks of the event
  loop. A late tick counts as one, and answers that came meanwhile are read before the next.
- **The call waits its turn.** While earlier calls are answered, this one has not begun; each of those answers begins
  its time again. Answers to later calls do not: a call that was passed over is stuck.
- **The store works** on something long. Such a store passes `moves`, which returns another value whenever the store
  has made progress.
"""

import asyncio
import itertools
import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from perdure.errors import StoreUnavailable

T = TypeVar("T")

TICKS = 8
"""Ticks in one limit. A late event loop costs one of them, and an answer needs two turns of the loop to arrive. Eight
allow several late turns, and exceed a limit by an eighth at most."""


class TimeLimit:
    """Raises `StoreUnavailable` for calls that a store has been stuck in for `seconds`. For one event loop."""

    def __init__(self, seconds: float, *, moves: Callable[[], object] = lambda: None) -> None:
        self._seconds = seconds
        self._moves = moves
        self._moved: object = None
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[asyncio.Timeout, int]] = {}
        """The calls in the order in which they were made, each with its first whole tick."""
        self._tick = 0
        self._timer: asyncio.TimerHandle | None = None
        self._answered: float = math.inf
        """The earliest call that was answered in this tick."""
        self._earliest: deque[float] = deque(maxlen=TICKS)
        """The same of the last ticks: a call that is older than all of these has seen nothing move."""

    async def wait(self, asked: Awaitable[T]) -> T:
        """Return the store's answer, however long the call waits its turn."""
        number = next(self._numbers)
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._waiting[number] = scope, self._tick + (self._timer is not None)
                if self._timer is None:
                    self._moved = self._moves()
                    self._wind()
                return await self._answer(number, asked)
        except TimeoutError:
            if not scope.expired():
                raise
            raise StoreUnavailable(f"the store did not answer within {self._seconds:g} s") from None
        finally:
            self._waiting.pop(number, None)
            if not self._waiting and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    async def _answer(self, number: int, asked: Awaitable[T]) -> T:
        try:
            answer = await asked
        except Exception:
            self._answered = min(self._answered, number)
            raise
        self._answered = min(self._answered, number)
        return answer

    def _wind(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._seconds / TICKS, self._count)

    def _count(self) -> None:
        self._tick += 1
        moved = self._moves()
        self._earliest.append(self._answered if moved == self._moved else -1)
        self._moved, self._answered = moved, math.inf
        before = min(self._earliest)
        for number, (scope, since) in list(self._waiting.items()):
            if self._tick - since < TICKS or number > before:
                break  # and so it is with all later ones
            del self._waiting[number]
            scope.reschedule(0)  # at once
        self._wind()
