"""Limits on what callers may make a process do: the memory of the messages that it handles, and how often each may ask.

The memory of a message is estimated from its bytes before it is parsed: what JSON holds in two bytes (`{}`) is an
object of 64 bytes afterwards. An estimate that is too high costs a refusal near the limit; one that is too low would
cost the process.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

MOST_CALLERS = 10_000
"""Callers that are counted, the last used ones; a caller beyond them begins with a full bucket."""

_VALUE = 72
"""Bytes of one value in memory: an empty dict has 64 and a pointer of 8; a list and a short string have less."""

_MESSAGE = 8 << 10
"""Bytes of one message that is being handled, whatever is in it: its task, its context, its HTTP request."""

_BEGINS_VALUE = (b",", b":", b"{", b"[")


K = TypeVar("K", bound=Hashable)


def weigh(body: bytes) -> int:
    """Estimate the bytes that a message takes in memory while it is handled: as it came, as text, and as values."""
    return _MESSAGE + 2 * len(body) + _VALUE * sum(map(body.count, _BEGINS_VALUE))


class Work:
    """A budget in bytes: what the messages that are being handled take, and the most that they may take."""

    __slots__ = ("_most", "held")

    def __init__(self, most: int) -> None:
        self._most = most
        self.held = 0

    def has_room(self, size: int) -> bool:
        """One message is taken whatever its size: otherwise it could never be handled."""
        return not self.held or self.held + size <= self._most

    def take(self, size: int) -> None:
        self.held += size

    def give(self, size: int) -> None:
        self.held -= size


class RateLimit(Generic[K]):
    """A bucket for each caller: full (`size`) at first, one piece less with each use, filled again by `per_second`."""

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
