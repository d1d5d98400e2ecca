"""Shows one session: all that the store holds of it, its events a page at a time, and what is new as it is written."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable

from perdure._core.ids import SessionId, StreamId
from perdure._core.jsonrpc import JsonObject
from perdure._core.principals import readable
from perdure.admin.queries import NoSuchSession, Tail, appended, show_session, trimmed
from perdure.console.payloads import fit, without_secrets
from perdure.console.store_view import StoreView
from perdure.errors import Misuse, StoreUnavailable
from perdure.store import Store
from perdure.store.interface import stream_by_id
from perdure.store.records import StreamRecord

MAX_STREAMS = 1_000
"""Streams of one session that are shown, and their calls: those that are not over, and the newest of the others. A
session that has run for weeks may have kept more than a browser should draw."""

MAX_EVENTS = 500
"""Events of one page."""

DEFAULT_EVENTS = 100

MAX_BEHIND = 1_000
"""Events of each stream with which a live view may begin: what is older is read in pages."""

LOOK = 0.2
"""Seconds between two looks at a session that is followed: soon enough for a person's eye."""

REST = 4
"""A pause is at least so many times as long as the last look, so that following a large session costs others little."""

STATE = 1.0
"""Seconds between two looks at all that is known of a session, which takes several queries; at least."""


class NotFound(Misuse):
    """There is no such thing in the store."""


class SessionView:
    """Reads sessions for the page."""

    def __init__(self, view: StoreView, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._view = view
        self._monotonic = monotonic

    async def object(self, session: SessionId) -> JsonObject:
        return await shown(await self._view.current(), session)

    async def events(self, session: SessionId, stream: StreamId, *, after: int, limit: int) -> JsonObject:
        """A page of a stream's retained events behind a number, and where the next page begins."""
        store = await self._view.current()
        record = await self._stream(store, session, stream)
        found = await store.read(stream, after=after, limit=limit)
        items: list[JsonObject] = []
        at = after
        for event in found:
            if event.seq > at + 1:
                items.append(trimmed(record, at + 1, event.seq - 1))
            items.append(fit(appended(record, event)))
            at = event.seq
        if not found and at < record.last:
            items.append(trimmed(record, at + 1, record.last))
        return {"items": items, "next": at if found and at < record.last else None}

    async def event(self, session: SessionId, stream: StreamId, seq: int) -> JsonObject:
        """One event, whole."""
        store = await self._view.current()
        record = await self._stream(store, session, stream)
        found = await store.read(stream, after=seq - 1, limit=1)
        if not found or found[0].seq != seq:
            raise NotFound(f"stream {stream[:8]} has no event {seq}: it was forgotten, or it is not written yet")
        return fit(appended(record, found[0]), whole=True)

    async def _stream(self, store: Store, session: SessionId, stream: StreamId) -> StreamRecord:
        if not stream:
            raise Misuse("stream is missing; give the id of one of the session's streams")
        record = await stream_by_id(store, stream) if stream.isprintable() else None  # PostgreSQL takes no zero byte
        if record is None or record.session != session:
            raise NotFound(f"the session has no stream {stream[:8]}")
        return record

    async def follow(self, session: SessionId, *, behind: int) -> AsyncGenerator[JsonObject | None]:
        """How the session is, then what is new, as long as it lasts; `None` where there is nothing new. `behind`: it
        begins with so many of the newest events of each stream."""
        store = await self._view.current()
        tail = Tail(store, session)
        await tail.skip(but_events=behind, but_streams=MAX_STREAMS)
        stamp: object = None
        last: object = None
        due = self._monotonic()
        while True:
            began = self._monotonic()
            if await self._view.current() is not store:
                raise StoreUnavailable("the store is another one than before")
            if began >= due:
                with contextlib.suppress(NoSuchSession):  # it is forgotten, which the tail tells
                    now = await shown(store, session)
                    if (facts := still(now)) != last:
                        last = facts
                        yield {"what": "state", "session": now}
                due = began + max(STATE, REST * (self._monotonic() - began))
            before, stamp = stamp, store.stamp()
            if stamp != before:
                async for item in tail.read():
                    yield fit(item)
                    if item["what"] == "ended":
                        return
            yield None
            await asyncio.sleep(max(LOOK, REST * (self._monotonic() - began)))


async def shown(store: Store, session: SessionId) -> JsonObject:
    """Give all that `perdure sessions show --json` gives, and of each stream how far its readers have got and where its
    earlier writers ended."""
    found, _ = await show_session(store, session)
    records = {record.id: record for record in await store.streams(session)}
    found = named(dict(without_secrets(found)))
    streams = found["streams"]
    found["streams"] = newest(streams)
    found["left_out"] = len(streams) - len(found["streams"])
    kept = {stream["id"] for stream in found["streams"]}
    found["calls"] = [call for call in found["calls"] if call["stream"] in kept]
    for stream in found["streams"]:
        record = records.get(StreamId(stream["id"]))
        stream["delivered"] = record.delivered if record else 0
        stream["unread"] = bool(record and record.unread)
        ends = await store.generations(StreamId(stream["id"])) if stream["generation"] > 1 else ()
        stream["generations"] = [{"generation": one.generation, "end": one.end} for one in ends]
    return found


def named(session: JsonObject) -> JsonObject:
    """With the owner as people know it."""
    return session | {"owner_name": readable(session["owner"])}


def newest(streams: list[JsonObject], *, most: int = MAX_STREAMS) -> list[JsonObject]:
    """The streams that are not over, and the newest of the others, in their order."""
    room = max(0, most - sum(not stream["sealed"] for stream in streams))
    over = [place for place, stream in enumerate(streams) if stream["sealed"]]
    dropped = set(over[: max(0, len(over) - room)])
    return [stream for place, stream in enumerate(streams) if place not in dropped]


_MOVING = frozenset({"active", "last", "delivered", "events", "answers", "seq", "progress"})
"""Members that move with each event, which is shown by itself."""


def still(session: JsonObject) -> object:
    """What of a session is worth a new picture: its state, its calls and their attempts, its streams and readers."""

    def of_all(objects: list[JsonObject]) -> list[JsonObject]:
        return [{name: item for name, item in one.items() if name not in _MOVING} for one in objects]

    parts = {name: of_all(session[name]) for name in ("calls", "streams", "asks")}
    return {name: item for name, item in session.items() if name not in _MOVING} | parts
