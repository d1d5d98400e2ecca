"""Removes what has expired, a little at a time, so that commits get in between.

Events and answers are not deleted: expired ones are hidden (`stream.trimmed`, `stream.forgotten`), and a slot in which
everything has expired is emptied as a whole. Only rows of streams, calls and sessions are deleted, which are small.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from perdure._core.retention import Cutoffs
from perdure.errors import StoreUnavailable
from perdure.store.postgres.connections import Connections

CHUNK = 500
"""Rows changed in one transaction: a few milliseconds' worth."""

EVENT, ANSWER = "event", "answer"

SLOTS = {EVENT: 6, ANSWER: 4}
"""Slots of events and of answers, as `schema_1.sql` makes them. One is written and one may be half expired, so the
others hold what is retained. More slots would take less room, and each read would search more of them."""


def is_slot(table: str, part: str) -> bool:
    """Whether a table is a slot of events, or of answers."""
    return table.startswith(f"{part}_")


SPANS = 60
"""Parts of the time for which something is kept. A statement finds what has expired in one of them: with 3,000
events a second, kept for an hour, that is 180,000 events and a fifth of a second."""

SHORTEST = 1.0
"""Seconds of such a part, at the least: however short the time is, a sweep has a bounded number of statements."""

MARGIN = 60.0
"""Seconds for which a slot stays that has expired, and by which an event may be older or younger than the time in which
its slot is written: clocks of nodes differ a little, and an event is held while the store fails. One that was held for
longer is shown until its slot is emptied."""

_EXPIRED = {EVENT: "expired_events", ANSWER: "expired_answers"}

_IN_THE_WAY = "55P03"
"""The server's code for a lock that was not to be had in time."""


class Sweeper:
    """Removes what has expired before some times, and counts slots."""

    def __init__(self, connections: Connections, queries: Mapping[str, str]) -> None:
        self._connections = connections
        self._queries = queries
        self.emptied = 0
        """Slots that were emptied."""
        self.put_off = 0
        """Slots that were not emptied because a long transaction read them."""

    async def sweep(self, cutoffs: Cutoffs, *, now: float) -> int:
        """Return the number of rows that were hidden or deleted, without those of emptied slots. Several processes
        may do this at once; then each does less."""
        events, answers = cutoffs.events, cutoffs.answers
        await self._rotate(EVENT, events, now)
        await self._rotate(ANSWER, answers, now)
        # A stream whose answer has expired is deleted in most cases, which hides it.
        gone = await self._hide(EVENT, events, now)
        after: tuple[Any, ...] = (-math.inf, 0)
        while found := await self._connections.fetch(self._queries["old_streams"], *after, answers, CHUNK):
            keys = [row[1] for row in found]
            [(count,)] = await self._connections.fetch(self._queries["expire_streams"], keys, answers)
            gone += count
            after = tuple(found[-1])
        gone += await self._hide(ANSWER, answers, now)
        last, times = "", (answers, cutoffs.calls)
        while found := await self._connections.fetch(self._queries["stale_sessions"], *times, last, CHUNK):
            for session, since in found:
                [(count,)] = await self._connections.fetch(self._queries["expire_session"], session, since)
                gone += count
            last = found[-1][0]
        return gone

    async def _rotate(self, part: str, before: float, now: float) -> None:
        """Empty the slots that have expired, and begin the next one if it is time."""
        for (slot,) in await self._connections.fetch(self._queries["expired_slots"], part, before - MARGIN):
            try:
                [(emptied,)] = await self._connections.fetch(self._queries["empty_slot"], part, slot, before - MARGIN)
                self.emptied += emptied
            except StoreUnavailable as failure:
                if getattr(failure.__cause__, "sqlstate", "") != _IN_THE_WAY:
                    raise
                # A dump, or a transaction that was left open, reads it, and the other slots too. The next sweep tries
                # again. Until then the last slot that is empty is written, and when there is none the present one.
                self.put_off += 1
                break
        period = (now - before) / (SLOTS[part] - 2)
        await self._connections.fetch(self._queries["next_slot"], part, now, period)

    async def _hide(self, part: str, before: float, now: float) -> int:
        gone = 0
        [(swept,)] = await self._connections.fetch(self._queries["swept_before"], part)
        for begin, end in spans(swept, before, now=now):
            slots = await self._connections.fetch(self._queries["slots_of_span"], part, begin, end, MARGIN)
            values = (begin, end, [row[0] for row in slots])
            expired = await self._connections.fetch(self._queries[_EXPIRED[part]], *values) if slots else []
            for start in range(0, len(expired), CHUNK):
                some = expired[start : start + CHUNK]
                last = ([row[0] for row in some], [row[1] for row in some])
                await self._connections.fetch(self._queries["hide_expired"], part, *last)
            await self._connections.fetch(self._queries["set_swept"], part, end)
            gone += sum(row[2] for row in expired)
        return gone


def spans(swept: float, before: float, *, now: float) -> Iterator[tuple[float, float]]:
    """Yield the times between two in short spans, after one for all older times, whose slots are empty by now."""
    kept = now - before
    begin, end = swept, before - kept / 2
    while begin < before:
        end = end if end > begin else begin + max(kept / SPANS, SHORTEST)
        yield begin, min(end, before)
        begin = end
