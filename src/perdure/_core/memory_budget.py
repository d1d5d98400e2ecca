"""Counts the memory that messages take while they are handled, for one process.

The memory of a message is estimated from its bytes before it is parsed: what JSON holds in two bytes (`{}`) is an
object of 64 bytes afterwards. An estimate that is too high costs a refusal near the limit; one that is too low would
cost the process.
"""

from __future__ import annotations

_VALUE = 72
"""Bytes of one value in memory: an empty dict has 64 and a pointer of 8; a list and a short string have less."""

_MESSAGE = 8 << 10
"""Bytes of one message that is being handled, whatever is in it: its task, its context, its HTTP request."""

_BEGINS_VALUE = (b",", b":", b"{", b"[")


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
