"""Forgets what has expired, a little at a time, so that commits get in between.

Events are not deleted: expired ones are hidden (`stream.trimmed`), and their rows go when everything in their slot has
expired and the slot is emptied as a whole. What is deleted is small: answers, streams, sessions.
"""

from collections.abc import Mapping

from perdure._core.retention import Cutoffs
from perdure.errors import StoreUnavailable
from perdure.store.postgres.connections import Connections

CHUNK = 500
"""Rows changed in one transaction: a few milliseconds' worth."""

SLOTS = 6
"""Parts of the table of events, as `tables_1.sql` makes them."""

_MARGIN = 60.0
"""Seconds for which a slot stays that has expired: clocks of nodes differ a little, and an event that was held while
the store failed is older than its row."""


async def sweep(connections: Connections, queries: Mapping[str, str], cutoffs: Cutoffs, *, now: float) -> int:
    """Give the number of rows that went. Several nodes may do this at once; then each does less."""
    gone = await _trim(connections, queries, cutoffs.events)
    while count := (await connections.fetch(queries["expire_answers"], cutoffs.answers, CHUNK))[0][0]:
        gone += count
    after = 0
    while found := await connections.fetch(queries["old_streams"], after, cutoffs.answers, CHUNK):
        keys = [row[0] for row in found]
        gone += (await connections.fetch(queries["expire_streams"], keys, cutoffs.answers))[0][0]
        after = keys[-1]
    last = ""
    times = (cutoffs.answers, cutoffs.calls)
    while found := await connections.fetch(queries["stale_sessions"], *times, last, CHUNK):
        for session, since in found:
            gone += (await connections.fetch(queries["expire_session"], session, since))[0][0]
        last = found[-1][0]
    await _rotate(connections, queries, cutoffs.events, now=now)
    return int(gone)


async def _trim(connections: Connections, queries: Mapping[str, str], before: float) -> int:
    [(swept,)] = await connections.fetch(queries["swept_before"])
    expired = await connections.fetch(queries["expired_events"], swept, before)
    for start in range(0, len(expired), CHUNK):
        some = expired[start : start + CHUNK]
        await connections.fetch(queries["trim_expired"], [row[0] for row in some], [row[1] for row in some])
    await connections.fetch(queries["set_swept"], before)
    return sum(row[2] for row in expired)


async def _rotate(connections: Connections, queries: Mapping[str, str], expired: float, *, now: float) -> None:
    """Empty the slots that have expired, and begin the next one if it is time.

    One slot is written and one may be half expired, so the others hold what is retained.
    """
    period = (now - expired) / (SLOTS - 2)
    try:
        while (await connections.fetch(queries["rotate"], now, expired - _MARGIN, period))[0][0]:
            pass
    except StoreUnavailable as failure:
        # A long replay reads the slot. The next sweep tries again; there is a slot in reserve.
        if getattr(failure.__cause__, "sqlstate", "") != "55P03":
            raise
