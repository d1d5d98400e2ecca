"""Limits the memory and the work that callers may cost a process: in all, for each, and how often each may ask.

The memory of a message is estimated from its bytes before it is parsed: what JSON holds in two bytes (`{}`) is an
object of 64 bytes afterwards. An estimate that is too high costs a refusal near the limit; one that is too low would
cost the process.
"""

import enum
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar

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


class Caller(NamedTuple):
    """The caller that something is counted for: its name or, if it does not authenticate, its address; the other is
    empty."""

    owner: str
    address: str = ""


class Full(enum.Enum):
    """The reason why there is no room."""

    FOR_ALL = "for all"
    FOR_CALLER = "for this caller"


class Quota:
    """Something that callers share: how much of it they hold, in all and each, and the most that they may hold. Without
    the second limit one caller could take what all others need."""

    __slots__ = ("_held_by", "each", "held", "most")

    def __init__(self, most: int, *, each: int) -> None:
        self.most = most
        self.each = each
        self.held = 0
        self._held_by: dict[Caller, int] = {}

    def held_by(self, caller: Caller) -> int:
        return self._held_by.get(caller, 0)

    def lacks(self, caller: Caller, size: int = 1) -> Full | None:
        """The reason why a caller may not have so much more. The first piece is given whatever its size: otherwise one
        that is larger than the limit could never be handled."""
        if self.held and self.held + size > self.most:
            return Full.FOR_ALL
        own = self._held_by.get(caller, 0)
        return Full.FOR_CALLER if own and own + size > self.each else None

    def take(self, caller: Caller, size: int = 1) -> None:
        """Take an amount, or return it where it is less than 0."""
        self.held += size
        own = self._held_by.get(caller, 0) + size
        if own:
            self._held_by[caller] = own
        else:
            self._held_by.pop(caller, None)

    @contextmanager
    def holding(self, caller: Caller, size: int = 1) -> Iterator[None]:
        self.take(caller, size)
        try:
            yield
        finally:
            self.take(caller, -size)


def share_of(limit: int, percent: int) -> int:
    """The part of a limit that one caller may hold."""
    return max(1, limit * percent // 100)


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
