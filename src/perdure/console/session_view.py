"""Shows one session: everything that the store holds of it, its events a page at a time, and new events as they are
written."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Callable

from perdure._core.ids import SessionId, StreamId
from perdure._core.jsonrpc import JsonObject
from perdure.admin.queries import NoSuchSession, Tail, appended, show_session, trimmed
from perdure.console.http import HIDDEN, SECRETS, without_secrets
from perdure.console.store_view import StoreView
from perdure.errors import Misuse, StoreUnavailable
from perdure.store import Inspect, Store
from perdure.store.interface import stream_by_id
from perdure.store.records import StreamRecord

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


class NotFound(Misuse):
    """The store has no such session, stream or event."""


class SessionView:
    """Reads sessions for the page."""

    def __init__(self, view: StoreView, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._view = view
        self._monotonic = monotonic

    async def object(self, session: SessionId) -> JsonObject:
        return await session_object(await self._view.current(), session)

    async def events(self, session: SessionId, stream: StreamId, *, after: int, limit: int) -> JsonObject:
        """A page of a stream's retained events after a number, and where the next page begins."""
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
        """One event, whole."""
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
        tail = Tail(store, session)
        await tail.skip(but_events=last, but_streams=MAX_STREAMS)
        stamp: object = None
        sent: object = None
        due = self._monotonic()
        while True:
            began = self._monotonic()
            if await self._view.current() is not store:
                raise StoreUnavailable("the store is another one than before")
            if began >= due:
                with contextlib.suppress(NoSuchSession):  # it is forgotten, which the tail reports
                    now = await session_object(store, session)
                    if (facts := without_moving(now)) != sent:
                        sent = facts
                        yield {"what": "state", "session": now}
                due = began + max(STATE, REST * (self._monotonic() - began))
            before, stamp = stamp, store.stamp()
            if stamp != before:
                async for item in tail.read():
                    yield shown_event(item)
                    if item["what"] == "ended":
                        return
            yield None
            await asyncio.sleep(max(POLL, REST * (self._monotonic() - began)))


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
    """The streams that are not sealed, and the newest of the others, in their order."""
    sealed = [stream["id"] for stream in streams if stream["sealed"]]
    room = max(0, most - len(streams) + len(sealed))
    dropped = set(sealed[: max(0, len(sealed) - room)])
    return [stream for stream in streams if stream["id"] not in dropped]


def without_moving(session: JsonObject) -> object:
    """The parts of a session that are worth a new picture: its state, calls, attempts, streams and readers."""
    parts = {name: [_still(one) for one in session[name]] for name in ("calls", "streams", "asks")}
    return _still(session) | parts


def _still(one: JsonObject) -> JsonObject:
    return {name: value for name, value in one.items() if name not in _MOVING}


def shown_event(item: JsonObject, *, whole: bool = False) -> JsonObject:
    """An object of `perdure tail` as the page gets it: an event with the bytes of its message. A large message is cut
    to the text of its beginning, unless the `whole` message was asked for."""
    if item["what"] != "event":
        return item
    message = without_secrets(item["message"])
    if isinstance(message, str) and any(f'"{name}"' in message for name in SECRETS):
        message = HIDDEN  # Python could not read it as JSON, so the secret cannot be taken out
    data = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    if whole or len(data) <= MAX_SHOWN:
        return item | {"message": message, "bytes": len(data), "cut": False}
    return item | {"message": data[:MAX_SHOWN].decode(errors="replace"), "bytes": len(data), "cut": True}
