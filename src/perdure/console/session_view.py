"""Shows one session: all that the store holds of it, its events a page at a time, and what is new as it is written."""

from perdure._core.ids import SessionId, StreamId
from perdure._core.jsonrpc import JsonObject
from perdure.admin.queries import show_session
from perdure.console.store_view import StoreView
from perdure.store import Store

MAX_STREAMS = 1_000
"""Streams of one session that are shown, and their calls: those that are not over, and the newest of the others. A
session that has run for weeks may have kept more than a browser should draw."""


class SessionView:
    """Reads sessions for the page."""

    def __init__(self, view: StoreView) -> None:
        self._view = view

    async def object(self, session: SessionId) -> JsonObject:
        return await shown(await self._view.current(), session)


async def shown(store: Store, session: SessionId) -> JsonObject:
    """Give all that `perdure sessions show --json` gives, and of each stream how far its readers have got and where its
    earlier writers ended."""
    found, _ = await show_session(store, session)
    records = {record.id: record for record in await store.streams(session)}
    found["left_out"] = max(0, len(found["streams"]) - MAX_STREAMS)
    found["streams"] = _newest(found["streams"])
    kept = {stream["id"] for stream in found["streams"]}
    found["calls"] = [call for call in found["calls"] if call["stream"] in kept]
    for stream in found["streams"]:
        record = records.get(StreamId(stream["id"]))
        stream["delivered"] = record.delivered if record else 0
        stream["unread"] = bool(record and record.unread)
        ends = await store.generations(StreamId(stream["id"])) if stream["generation"] > 1 else ()
        stream["generations"] = [{"generation": one.generation, "end": one.end} for one in ends]
    return found


def _newest(streams: list[JsonObject]) -> list[JsonObject]:
    """The streams that are not over, and the newest of the others, in their order."""
    room = max(0, MAX_STREAMS - sum(not stream["sealed"] for stream in streams))
    over = [place for place, stream in enumerate(streams) if stream["sealed"]]
    dropped = set(over[: max(0, len(over) - room)])
    return [stream for place, stream in enumerate(streams) if place not in dropped]
