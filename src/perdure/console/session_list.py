"""Lists the sessions and durable calls that were active last, a page at a time, and finds others by their ids.

The store returns the newest records, which are read again while a page is open. What is shown of an entry is read when
it is shown, so only its place in the list may be some seconds old.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from perdure._core.ids import RecordKind, SessionId, StreamId
from perdure._core.jsonrpc import JsonObject
from perdure._core.principals import is_called
from perdure._core.states import CallState, SessionState
from perdure.admin.queries import EntryKind, entry_kind, list_entries, subject_of
from perdure.console.http import choice_of, moment_of, number_of, refuse_unknown
from perdure.console.store_view import CachedRead, StoreView
from perdure.store import Store
from perdure.store.records import OpenCall, Outline

MAX_LISTED = 1_000
"""Records in the list: more than a person reads. Older records are found by the beginning of their ids."""

MAX_OPEN_CALLS = 10_000
"""Calls that have not ended: those of ten busy servers. Sessions of further calls are not found by their tool."""

MAX_PAGE = 200
"""Entries of one page: each is read from the store when it is shown, by two queries or more."""

DEFAULT_PAGE = 100

PAUSE = 1.0
"""Seconds between two reads of the list, at least: people do not read faster."""

REST = 9.0
"""A pause is at least so many times as long as the last read: the store looks through all its records for the newest
ones, and servers keep nine tenths of a processor."""

_STATES: dict[str, SessionState | CallState] = {state.value: state for state in (*SessionState, *CallState)}
_KINDS = {kind.value: kind for kind in EntryKind}
_PARAMETERS = frozenset({"kind", "state", "owner", "tool", "active_after", "active_before", "offset", "limit", "q"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ListQuery:
    """The filters of a list, and the place of a page in it."""

    kind: EntryKind | None = None
    state: SessionState | CallState | None = None
    owner: str | None = None
    tool: str | None = None
    prefix: str = ""
    active_after: float = -math.inf
    active_before: float = math.inf
    offset: int = 0
    """Entries of the list before those of the page."""
    limit: int = DEFAULT_PAGE

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> "ListQuery":
        """A parameter that is given and empty is as one that is not given."""
        refuse_unknown(query, _PARAMETERS)
        return cls(
            kind=_KINDS.get(choice_of(query, "kind", _KINDS)),
            state=_STATES.get(choice_of(query, "state", _STATES)),
            owner=query.get("owner") or None,
            tool=query.get("tool") or None,
            prefix=query.get("q", ""),
            active_after=moment_of(query, "active_after", default=-math.inf),
            active_before=moment_of(query, "active_before", default=math.inf),
            offset=number_of(query, "offset", default=0, low=0, high=MAX_LISTED),
            limit=number_of(query, "limit", default=DEFAULT_PAGE, low=1, high=MAX_PAGE),
        )

    def fits(self, outline: Outline) -> bool:
        """Whether a record passes the filters that its outline decides."""
        state = outline.state if outline.call is None else outline.call
        return (
            self.active_after <= outline.active <= self.active_before
            and self.kind in (None, entry_kind(outline))
            and (self.state is None or self.state.value == state.value)
            and (self.owner is None or is_called(outline.owner, self.owner))
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ListSnapshot:
    """The list as of one read."""

    outlines: Sequence[Outline]
    """One more than the list has, if the store has more."""
    calls: Sequence[OpenCall]
    """Calls that have not ended."""
    counts: Mapping[str, int]
    """How many records of each kind the store has; `ended` sessions apart."""


class SessionList:
    """Keeps the list, and returns pages of it."""

    def __init__(self, view: StoreView, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._view = view
        self._cached = CachedRead(self._read, pause=PAUSE, rest=REST, monotonic=monotonic)
        self._stamp: object = None
        self._last: ListSnapshot | None = None
        self._tools: dict[StreamId, frozenset[str]] = {}
        self.version = 0
        """Rises with each read that has found a change."""

    async def snapshot(self) -> ListSnapshot:
        return await self._cached.get()

    async def page(self, query: ListQuery) -> JsonObject:
        """Return the entries of a page, how many entries there are in all, and where the next page begins."""
        store = await self._view.current()
        snapshot = await self.snapshot()
        outlines = snapshot.outlines
        if query.prefix:  # PostgreSQL takes no zero byte
            is_id = query.prefix.isprintable()
            outlines = await store.newest(limit=MAX_LISTED + 1, prefix=query.prefix) if is_id else ()
        listed = outlines[:MAX_LISTED]
        if query.tool is not None:
            running = await self._running(store, snapshot.calls, {one.id for one in listed}, query.tool)
            listed = [one for one in listed if one.id in running]
        found = [one for one in listed if query.fits(one)]
        end = query.offset + query.limit
        shown = found[query.offset : end]
        records = [record for one in shown if (record := await store.session(one.id)) is not None]
        return {
            "items": await list_entries(store, records),
            "next": end if len(found) > end else None,
            "total": len(found),
            "left_out": len(outlines) > MAX_LISTED,
        }

    async def _running(
        self, store: Store, calls: Sequence[OpenCall], listed: set[SessionId], tool: str
    ) -> set[SessionId]:
        """The listed sessions that have a call of a tool that has not ended. The name of a call's tool is read once."""
        calls = [call for call in calls if call.session in listed]
        self._tools = {call.stream: self._tools[call.stream] for call in calls if call.stream in self._tools}
        for call in calls:
            if call.stream not in self._tools:
                rows = await store.calls(call.session, stream=call.stream)
                self._tools[call.stream] = frozenset(name for row in rows if (name := subject_of(row)) is not None)
        return {call.session for call in calls if tool in self._tools[call.stream]}

    async def _read(self) -> ListSnapshot:
        store = await self._view.current()
        stamp, before = store.stamp(), self._last
        if before is not None and stamp == self._stamp:
            return before
        calls = await store.open_calls(limit=MAX_OPEN_CALLS)
        sessions = await store.count_states(RecordKind.SESSION)
        counts = {
            "sessions": sum(sessions.get(state, 0) for state in (SessionState.ACTIVE, SessionState.DORMANT)),
            "ended": sessions.get(SessionState.ENDED, 0),
            "calls": sum((await store.count_states(RecordKind.CALL)).values()),
            "running": len(calls),
        }
        outlines = await store.newest(limit=MAX_LISTED + 1)
        snapshot = ListSnapshot(outlines=outlines, calls=calls, counts=counts)
        self.version += snapshot != before
        self._stamp, self._last = stamp, snapshot
        return snapshot
