"""Lists a store's sessions and single calls in the order of their last activity, a page at a time.

No store keeps its records in that order: an index of all records by activity would make each call write a page more. So
the console keeps short records of all of them in memory, sorted, and reads them again in passes while a page is open.
What is shown of an entry is read when it is shown, so only its place in the list may be some seconds old.
"""

import asyncio
import bisect
import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from perdure._core.ids import RecordKind, SessionId, StreamId
from perdure._core.jsonrpc import JsonObject
from perdure._core.principals import is_called, readable
from perdure._core.states import CallState, SessionState
from perdure.admin.queries import EntryKind, entry_kind, is_clients, list_entries, subject_of
from perdure.console.kept import Kept
from perdure.console.store_view import StoreView
from perdure.store import Store
from perdure.store.records import OpenCall, Outline

MAX_INDEXED = 500_000
"""Records in the index, those without activity for longest left out. Each takes about 350 bytes: a hundred thousand are
35 MB, and the limit is 175 MB."""

MAX_OPEN_CALLS = 10_000
"""Calls that have not ended, in the index: those of ten busy servers. What is beyond is not found by its tool."""

MAX_PAGE = 200
"""Entries of one page: each is read from the store when it is shown, by two queries or more."""

DEFAULT_PAGE = 100

OUTLINES = 1_000
"""Records that are read at a time: a few milliseconds, so that no other read of the console waits for long."""

PAUSE = 1.0
"""Seconds between two passes, at least: people do not read faster."""

REST = 9.0
"""A pause is so many times as long as what was read before it. So passes take a tenth of a processor at the most,
however many records there are, and the servers keep the rest. A pass that a person waits for does not rest: the page
was just opened."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Says which entries of the list are asked for."""

    kind: EntryKind | None = None
    state: SessionState | CallState | None = None
    owner: str | None = None
    tool: str | None = None
    prefix: str = ""
    active_after: float = -math.inf
    active_before: float = math.inf
    cursor: tuple[float, str] | None = None
    """The activity and the id of the last entry of the page before."""
    limit: int = DEFAULT_PAGE


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The list as of one pass."""

    outlines: Sequence[Outline] = ()
    """The last active one first; of several of one moment, by id."""
    calls: Sequence[OpenCall] = ()
    """Those that have not ended."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """How many there are of each kind; `ended` sessions apart."""
    owners: frozenset[str] = frozenset()
    left_out: bool = False
    """There are more records than the index takes."""


def order(outline: Outline) -> tuple[float, str]:
    return -outline.active, outline.id


def arrange(outlines: Sequence[Outline], calls: Sequence[OpenCall], *, most: int = MAX_INDEXED) -> Snapshot:
    """Sort a list, and count it; `most` of it is kept."""
    counts = Counter(
        "ended" if one.state is SessionState.ENDED else f"{entry_kind(one).value}s"
        for one in outlines
        if one.kind is RecordKind.CALL or one.state is not SessionState.OPENING
    )
    found = {name: counts[name] for name in ("sessions", "tasks", "calls", "ended")}
    return Snapshot(
        outlines=sorted(outlines, key=order)[:most],
        calls=calls,
        counts=found | {"running": len(calls)},
        owners=frozenset(one.owner for one in outlines),
        left_out=len(outlines) > most,
    )


def select(snapshot: Snapshot, wanted: Wanted, running: frozenset[SessionId] | None) -> tuple[Sequence[Outline], int]:
    """Give one entry more than a page has, if there is one, and how many entries there are on all pages.

    `running`: the sessions that run the tool that is asked for; `None` if none is. Only filters that are given cost
    anything; each takes some milliseconds for a hundred thousand records, so this runs in a thread.
    """
    found = snapshot.outlines
    if wanted.active_before < math.inf:
        found = found[bisect.bisect_left(found, -wanted.active_before, key=_since) :]
    if wanted.active_after > -math.inf:
        found = found[: bisect.bisect_right(found, -wanted.active_after, key=_since)]
    if running is not None:
        found = [one for one in found if one.id in running]
    if wanted.owner is not None:
        name = wanted.owner
        owners = {owner for owner in snapshot.owners if is_called(owner, name)}
        found = [one for one in found if one.owner in owners]
    if (state := wanted.state) is not None:
        found = [one for one in found if (one.state if one.call is None else one.call).value == state.value]
    if wanted.kind is not None:
        found = [one for one in found if entry_kind(one) is wanted.kind]
    if wanted.prefix:
        found = [one for one in found if one.id.startswith(wanted.prefix)]
    first = 0
    if wanted.cursor is not None:
        active, last = wanted.cursor
        first = bisect.bisect_right(found, (-active, last), key=order)
    return found[first : first + wanted.limit + 1], len(found)


def _since(outline: Outline) -> float:
    return -outline.active


def trim(outlines: list[Outline], *, most: int = MAX_INDEXED) -> list[Outline]:
    """Leave out what is too much for the index, now and then: one more than it takes tells that there was more."""
    return heapq.nsmallest(most + 1, outlines, key=order) if len(outlines) > most + most // 4 + 1 else outlines


class SessionIndex:
    """Keeps the list, and gives pages of it."""

    def __init__(self, view: StoreView, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._view = view
        self._monotonic = monotonic
        self._kept = Kept(self._pass, pause=PAUSE, monotonic=monotonic)
        self._stamp: object = None
        self._last: Snapshot | None = None
        self._tools: dict[StreamId, frozenset[str]] = {}
        self.version = 0
        """Rises with each pass that has found a change."""

    async def snapshot(self) -> Snapshot:
        return await self._kept.get()

    async def aclose(self) -> None:
        await self._kept.aclose()

    async def page(self, wanted: Wanted) -> JsonObject:
        """Give the entries of a page, how many there are in all, and where the next page begins."""
        store = await self._view.current()
        snapshot = await self.snapshot()
        running = None if wanted.tool is None else await self._running(store, snapshot, wanted.tool)
        found, total = await asyncio.to_thread(select, snapshot, wanted, running)
        shown = found[: wanted.limit]
        records = await asyncio.gather(*(store.session(one.id) for one in shown))
        items = await list_entries(store, [record for record in records if record is not None])
        more = len(found) > len(shown)
        return {
            "items": [item | {"owner_name": readable(item["owner"])} for item in items],
            "next": f"{shown[-1].active!r}:{shown[-1].id}" if more else None,
            "total": total,
            "left_out": snapshot.left_out,
        }

    async def _running(self, store: Store, snapshot: Snapshot, tool: str) -> frozenset[SessionId]:
        """The sessions that have a call of a tool that has not ended. What a call asks for is read once."""
        there = {call.stream for call in snapshot.calls}
        self._tools = {stream: names for stream, names in self._tools.items() if stream in there}
        for stream in there - self._tools.keys():
            asked = await store.calls_on(stream)
            self._tools[stream] = frozenset(name for call in asked if (name := subject_of(call)) is not None)
        return frozenset(call.session for call in snapshot.calls if tool in self._tools[call.stream])

    async def _pass(self) -> Snapshot:
        store = await self._view.current()
        stamp, before = store.stamp(), self._last
        if before is not None and stamp == self._stamp:
            return before
        outlines: list[Outline] = []
        after: SessionId | None = None
        while True:
            began = self._monotonic()
            page = await store.outlines(after=after, limit=OUTLINES)
            if not page:
                break
            after = page[-1].id
            outlines += (one for one in page if is_clients(one))
            outlines = trim(outlines)
            if not self._kept.is_awaited:
                await asyncio.sleep(REST * (self._monotonic() - began))
        calls = await store.open_calls(limit=MAX_OPEN_CALLS)
        snapshot = await asyncio.to_thread(arrange, outlines, calls)
        if before is None or await asyncio.to_thread(lambda: snapshot != before):
            self.version += 1
        self._stamp, self._last = stamp, snapshot
        return snapshot
