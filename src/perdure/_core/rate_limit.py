"""Limits how often each caller may do something.

Each caller has a bucket: full at first, one piece less with each use, filled again at a steady pace.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

MOST_CALLERS = 10_000
"""Callers that are counted, the last used ones; a caller beyond them begins with a full bucket."""

K = TypeVar("K", bound=Hashable)


class RateLimit(Generic[K]):
    """A bucket of `size` for each caller, filled by `per_second`."""

    def __init__(self, size: int, *, per_second: float) -> None:
        self._size = float(size)
        self._per_second = per_second
        self._left: dict[K, tuple[float, float]] = {}
        """What was left in a bucket, and when that was; the bucket used last is the last one."""

    def take(self, caller: K, *, now: float) -> bool:
        """Take a piece out of the caller's bucket; false, and nothing is taken, if there is none."""
        left, then = self._left.pop(caller, (self._size, now))
        left = min(self._size, left + (now - then) * self._per_second)
        has_piece = left >= 1
        self._left[caller] = (left - 1 if has_piece else left, now)
        if len(self._left) > MOST_CALLERS:
            del self._left[next(iter(self._left))]
        return has_piece
