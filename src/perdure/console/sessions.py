"""Shows the sessions and durable calls of a store: the list of those that were active last, and one of them whole.

The store returns the newest records, which are read again while a page is open. What is shown of an entry is read when
it is shown, so only its place in the list may be some seconds old. Others are found by their ids. Of one session the
page gets everything that the store holds, its events a page at a time, and new events as they are written.
"""

import asyncio
import contextlib
import json
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Generic, TypeVar

from perdure._core.ids import RecordKind, SessionId, StreamId
from perdure._core.jsonrpc import JsonObject
from perdure._core.states import CallState, SessionState
from perdure.admin.queries import (
    EntryKind,
    NoSuchSession,
    SessionTail,
    appended,
    fits,
    list_entries,
    show_session,
    subject_of,
    trimmed,
)
from perdure.console.http import HIDDEN, SECRETS, choice_of, moment_of, number_of, refuse_unknown, without_secrets
from perdure.errors import Misuse, StoreError, StoreUnavailable
from perdure.store import Inspect, Store, existing_store, maintenance_of
from perdure.store.interface import stream_by_id
from perdure.store.records import OpenCall, Outline, StreamRecord

T = TypeVar("T")

PATIENCE = 5.0
"""Seconds that one read may take: a person waits for it, and no client."""

MAX_LISTED = 1_000
"""Records in the list: more than a person reads. Older records are found by the beginning of their ids."""

MAX_OPEN_CALLS = 10_000
"""Calls that have not ended: those of ten busy servers. Sessions of further calls are not found by their tool."""

MAX_PAGE = 200
"""Entries of one page: each is read from the store when it is shown, by two queries or more."""

DEFAULT_PAGE = 100

LIST_PAUSE = 1.0
"""Seconds between two reads of the list, at least: people do not read faster."""

LIST_REST = 9.0
"""A pause is at least so many times as long as the last read: the store looks through all its records for the newest
ones, and servers keep nine tenths of a processor."""

_STATES: dict[str, SessionState | CallState] = {state.value: state for state in (*SessionState, *CallState)}
_KINDS = {kind.value: kind for kind in EntryKind}
_PARAMETERS = frozenset({"kind", "state", "owner", "tool", "active_after", "active_before", "offset", "limit", "q"})

MAX_STREAMS = 1_000
"""Streams of one session that are shown, and their calls: those that are not over, and the newest of the others. A
session that has run for weeks may have kept more than a browser should draw."""

MAX_EVENTS = 500
"""Events of one page."""

DEFAULT_EVENTS = 100

MAX_BEGINNING = 1_000
"""Events of each stream with which a live view may begin: what is older is read in pages."""

MAX_SHOWN = 64 << 10
"""Bytes of a message in a list of events: a page of a hundred is then a few megabytes at the most. A whole message is
read by its number."""

POLL = 0.2
"""Seconds between two reads of a session that is followed: soon enough for a person's eye."""

REST = 4
"""A pause is at least so many times as long as the last read, so that following a large session costs others little."""

STATE = 1.0
"""Seconds between two reads of everything about a session, which takes several queries; at least."""

_MOVING = frozenset({"active", "last", "delivered", "events", "answers", "seq", "progress"})
"""Members that change with each event, which is shown by itself."""


# --- The store ------------------------------------------------------------------------------------------------------


class StoreView:
    """Opens the store at an address. No server waits for a lock of it, because it is opened without write access."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._store: Inspect | None = None
        self._turn = asyncio.Lock()
        self.maintenance = maintenance_of(address)

    async def current(self) -> Inspect:
        """Return the store, open. Raises `StoreError` if it does not exist or cannot be read.

        A SQLite file that was deleted or replaced is closed, and the file in its place is opened."""
        async with self._turn:
            if self._store is not None:
                try:
                    self._store.stamp()
                except StoreError:
                    await self._close()
            if self._store is None:
                store = existing_store(self._address, writes=False, busy_timeout=PATIENCE)
                await store.open()
                self._store = store
            return self._store

    def writing(self) -> Inspect:
        """Return the same store with write access, not opened yet, for ending a session."""
        return existing_store(self._address, writes=True, busy_timeout=PATIENCE)

    async def aclose(self) -> None:
        async with self._turn:
            await self._close()

    async def _close(self) -> None:
        if self._store is not None:
            store, self._store = self._store, None
            with contextlib.suppress(StoreError):
                await store.aclose()


@dataclass(eq=False)
class CachedRead(Generic[T]):
    """Caches a value that is read again when a caller wants it and it is due; nothing is read while no page is open.

    `pause`: seconds between the end of a read and the next one, at least. `rest`: as many times the last read's own
    time, at least, so that reading takes a bounded share of the time. A failure is raised to the caller whose read it
    was; the next caller reads again.
    """

    _read: Callable[[], Awaitable[T]]
    _: KW_ONLY
    pause: float
    rest: float
    monotonic: Callable[[], float] = time.monotonic
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _value: T | None = None
    _due: float = -math.inf

    async def get(self) -> T:
        async with self._turn:
            began = self.monotonic()
            if self._value is None or began >= self._due:
                self._value = None
                self._value = await self._read()
                now = self.monotonic()
                self._due = now + max(self.pause, self.rest * (now - began))
            return self._value


# --- The list -------------------------------------------------------------------------------------------------------


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
        """Read the parameters. One that is given and empty counts as not given."""
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
        is_active = self.active_after <= outline.active <= self.active_before
        return is_active and fits(outline, kind=self.kind, state=self.state, owner=self.owner)


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

    def __init__(self, view: StoreView) -> None:
        self._view = view
        self.snapshot = CachedRead(self._read, pause=LIST_PAUSE, rest=LIST_REST).get
        self._stamp: object = None
        self._last: ListSnapshot | None = None
        self._tools: dict[StreamId, frozenset[str]] = {}
        self.version = 0
        """Rises with each read that has found a change."""

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
        return {
            "items": await list_entries(store, [one.id for one in found[query.offset : end]]),
            "next": end if len(found) > end else None,
            "total": len(found),
            "left_out": len(outlines) > MAX_LISTED,
        }

    async def _running(
        self, store: Store, calls: Sequence[OpenCall], listed: set[SessionId], tool: str
    ) -> set[SessionId]:
        """Return the listed sessions that have a call of a tool that has not ended. The name of a call's tool is read
        once."""
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


# --- One session ----------------------------------------------------------------------------------------------------


class NotFound(Misuse):
    """The store has no such session, stream or event."""


class SessionView:
    """Reads sessions for the page."""

    def __init__(self, view: StoreView) -> None:
        self._view = view

    async def events(self, session: SessionId, stream: StreamId, *, after: int, limit: int) -> JsonObject:
        """Return a page of a stream's retained events after a number, and where the next page begins."""
        store = await self._view.current()
        record = await self._stream(store, session, stream)
        found = await store.read(stream, after=after, limit=limit)
        items: list[JsonObject] = []
        at = after
        for event in found:
            if event.seq > at + 1:
                items.append(trimmed(record, at + 1, event.seq - 1))
            items.append(shown_event(appended(record, event)))
            at = event.seq
        if not found and at < record.last:
            items.append(trimmed(record, at + 1, record.last))
        return {"items": items, "next": at if found and at < record.last else None}

    async def event(self, session: SessionId, stream: StreamId, seq: int) -> JsonObject:
        """Return one event, whole."""
        store = await self._view.current()
        record = await self._stream(store, session, stream)
        found = await store.read(stream, after=seq - 1, limit=1)
        if not found or found[0].seq != seq:
            raise NotFound(f"stream {stream[:8]} has no event {seq}: it was forgotten, or it is not written yet")
        return shown_event(appended(record, found[0]), whole=True)

    async def _stream(self, store: Store, session: SessionId, stream: StreamId) -> StreamRecord:
        if not stream:
            raise Misuse("stream is missing; give the id of one of the session's streams")
        record = await stream_by_id(store, stream) if stream.isprintable() else None  # PostgreSQL takes no zero byte
        if record is None or record.session != session:
            raise NotFound(f"the session has no stream {stream[:8]}")
        return record

    async def follow(self, session: SessionId, *, last: int) -> AsyncGenerator[JsonObject | None]:
        """Yield the session's state, then what is new, until the session ends; `None` where there is nothing new. It
        begins with the `last` events of each stream."""
        store = await self._view.current()
        tail = SessionTail(store, session)
        await tail.skip(but_events=last, but_streams=MAX_STREAMS)
        stamp: object = None
        sent: object = None
        due = time.monotonic()
        while True:
            began = time.monotonic()
            if await self._view.current() is not store:
                raise StoreUnavailable("the store is another one than before")
            if began >= due:
                with contextlib.suppress(NoSuchSession):  # it is forgotten, which the tail reports
                    now = await session_object(store, session)
                    if (facts := without_moving(now)) != sent:
                        sent = facts
                        yield {"what": "state", "session": now}
                due = began + max(STATE, REST * (time.monotonic() - began))
            before, stamp = stamp, store.stamp()
            if stamp != before:
                async for item in tail.read():
                    yield shown_event(item)
                    if item["what"] == "ended":
                        return
            yield None
            await asyncio.sleep(max(POLL, REST * (time.monotonic() - began)))


async def session_object(store: Inspect, session: SessionId) -> JsonObject:
    """Return the object of `perdure sessions show --json`; of each stream also how far its readers have got and where
    its earlier writers ended."""
    found, _ = await show_session(store, session)
    records = {record.id: record for record in await store.streams(session)}
    streams = newest(found["streams"])
    shown = {stream["id"] for stream in streams}
    found |= {
        "left_out": len(found["streams"]) - len(streams),
        "streams": streams,
        "calls": [call for call in found["calls"] if call["stream"] in shown],
    }
    for stream in streams:
        record = records.get(StreamId(stream["id"]))
        stream["delivered"] = record.delivered if record else 0
        stream["unread"] = bool(record and record.unread)
        ends = await store.generations(StreamId(stream["id"])) if stream["generation"] > 1 else ()
        stream["generations"] = [{"generation": one.generation, "end": one.end} for one in ends]
    return dict(without_secrets(found))


def newest(streams: list[JsonObject], *, most: int = MAX_STREAMS) -> list[JsonObject]:
    """Return the streams that are not sealed, and the newest of the others, in their order."""
    sealed = [stream["id"] for stream in streams if stream["sealed"]]
    room = max(0, most - len(streams) + len(sealed))
    dropped = set(sealed[: max(0, len(sealed) - room)])
    return [stream for stream in streams if stream["id"] not in dropped]


def without_moving(session: JsonObject) -> object:
    """Return the parts of a session that are worth a new picture: its state, calls, attempts, streams and readers."""

    def still(one: JsonObject) -> JsonObject:
        return {name: value for name, value in one.items() if name not in _MOVING}

    return still(session) | {name: [still(one) for one in session[name]] for name in ("calls", "streams", "asks")}


def shown_event(item: JsonObject, *, whole: bool = False) -> JsonObject:
    """Return an object of `perdure tail` as the page gets it: an event with the bytes of its message. A large message
    is cut to the text of its beginning, unless the `whole` message was asked for."""
    if item["what"] != "event":
        return item
    message = without_secrets(item["message"])
    if isinstance(message, str) and any(f'"{name}"' in message for name in SECRETS):
        message = HIDDEN  # Python could not read it as JSON, so the secret cannot be taken out
    data = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    if whole or len(data) <= MAX_SHOWN:
        return item | {"message": message, "bytes": len(data), "cut": False}
    return item | {"message": data[:MAX_SHOWN].decode(errors="replace"), "bytes": len(data), "cut": True}
