"""Decides when the reads of an event stream are put together.

Most servers write each event by itself, and a read costs its receiver as much as five events: a wake-up, a commit and a
write. So a stream that sends without a pause is read each `GATHER` seconds only.
"""

#: Seconds between two reads of a stream in a rush. An event is later by that at most, which no user notices.
GATHER = 0.002
#: Seconds within which the next read of a stream in a rush brings something.
SOON = 0.001
#: Events of one read that need not be gathered further: a read costs less than they do.
ENOUGH = 16
#: Reads that make a rush. Most calls have fewer events, and none of theirs is delayed.
RUSH = 8


class Rush:
    """Counts the reads of one stream that came soon and brought little. The count is halved where a read was waited
    for, so a server that was held up once is still in a rush, and one that pauses twice is not."""

    __slots__ = ("_count",)

    def __init__(self) -> None:
        self._count = 0

    def gathers(self, *, waited: float, events: int) -> bool:
        """Whether to gather before the next read, after one that was `waited` for and brought so many events."""
        if waited >= SOON:
            self._count //= 2
        elif events < ENOUGH:
            self._count = min(self._count + 1, 2 * RUSH)
        return self._count >= RUSH
