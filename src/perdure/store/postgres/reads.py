"""Reads records and events from a PostgreSQL database."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from perdure._core.ids import RecordKind, SessionId, StreamId
from perdure._core.limits import Caller
from perdure._core.states import SessionState
from perdure.store import rows
from perdure.store.postgres.commits import MAX_SEQ, caller_key
from perdure.store.postgres.connections import Connections
from perdure.store.records import (
    READ_BYTES,
    CallRecord,
    CallSnapshot,
    Event,
    Followed,
    Loaded,
    ReaderRecord,
    SessionRecord,
    StreamRecord,
    Usage,
)
from perdure.store.rows import RecordReads

T = TypeVar("T")

MAX_READ = 500
"""Events in one read: the server would size more of them for an answer that is full."""

STREAM_COLUMNS = len(fields(StreamRecord))
FOLLOWED_COLUMNS = STREAM_COLUMNS + rows.READER_COLUMNS
SESSION_COLUMNS = len(fields(SessionRecord))
CALL_COLUMNS = len(fields(CallRecord))

session_record = rows.record_maker(
    SessionRecord,
    owner=rows.strict,
    state=SessionState,
    sticky=tuple,
    address=rows.strict,
    kind=RecordKind,
)


class PostgresReads(RecordReads):
    """Reads what this database keeps in its own form, and the rest as every database does."""

    _readers: Connections
    _queries: Mapping[str, str]
    _session_record = staticmethod(session_record)

    async def read(self, stream: StreamId, *, after: int, limit: int) -> Sequence[Event]:
        followed = await self.follow({stream: after}, limit=limit)
        return followed[stream].events or [] if stream in followed else []

    async def follow(self, after: Mapping[StreamId, int], *, limit: int) -> Mapping[StreamId, Followed]:
        after = {stream: number for stream, number in after.items() if "\0" not in stream}  # as `_all` does
        if not limit:
            streams = await self._all("streams_by_id", rows.followed, list(after)) if after else []
            return {followed.record.id: followed for followed in streams}
        numbers = [min(max(number, 0), MAX_SEQ) for number in after.values()]
        bounds = (min(limit, MAX_READ), READ_BYTES)
        found = await self._all("follow_streams", self._followed, list(after), numbers, *bounds)
        return {followed.record.id: followed for followed in found}

    def _followed(self, row: Any) -> Followed:
        """A stream's events come as columns, because each of many rows would repeat its record."""
        found = rows.followed(row[:FOLLOWED_COLUMNS])
        revision, *columns = row[FOLLOWED_COLUMNS:]
        events = [] if columns[0] is None else [Event._make(event) for event in zip(*columns, strict=True)]
        return found._replace(events=events, revision=revision)

    async def load(self, session: SessionId) -> Loaded | None:
        def loaded(row: Any) -> Loaded:
            record, stream = session_record(row[:SESSION_COLUMNS]), row[SESSION_COLUMNS:]
            return Loaded(record, None if stream[0] is None else rows.stream_record(stream))

        return await self._one("load_session", loaded, session)

    async def durable_call(self, session: SessionId, *, recent: int) -> CallSnapshot | None:
        """Events and asks come as columns, as in `_followed`."""
        found = await self._readers.fetch(self._queries["durable_call"], session, min(recent, MAX_READ), READ_BYTES)
        if not found:
            return None
        row = found[0]
        record = session_record(row[:SESSION_COLUMNS])
        call, rest = row[SESSION_COLUMNS : SESSION_COLUMNS + CALL_COLUMNS], row[SESSION_COLUMNS + CALL_COLUMNS :]
        if call[0] is None:
            return CallSnapshot(record, None)
        events = [Event._make(event) for event in zip(*(column or () for column in rest[:4]), strict=True)]
        asks = [rows.ask_record(ask) for ask in zip(*(column or () for column in rest[4:]), strict=True)]
        return CallSnapshot(record, rows.call_record(call), events, asks)

    def _columns_of(self, caller: Caller) -> tuple[object, ...]:
        return (caller_key(*caller),)

    async def usage(self, sessions: Sequence[SessionId]) -> Mapping[SessionId, tuple[SessionRecord, Usage]]:
        ids = list(sessions)
        streams: dict[SessionId, list[StreamRecord]] = {}
        for stream in await self._all("streams_of_sessions", rows.stream_record, ids):
            streams.setdefault(stream.session, []).append(stream)
        readers: dict[SessionId, list[ReaderRecord]] = {}
        for session, *row in await self._readers.fetch(self._queries["readers_of_sessions"], ids):
            readers.setdefault(session, []).append(rows.reader_record(tuple(row)))
        newest = {row[0]: row[1] for row in await self._readers.fetch(self._queries["newest_of_sessions"], ids)}
        found = {record.id: record for record in await self._all("sessions_by_id", session_record, ids)}
        return {
            id_: (record, Usage(streams.get(id_, ()), newest.get(id_, 0.0), readers.get(id_, ())))
            for id_, record in found.items()
        }

    async def _all(self, query: str, record: Callable[[Any], T], *values: Any) -> Sequence[T]:
        if any(type(value) is str and "\0" in value for value in values):
            return []  # no text in the database has a NUL, so nothing has such a name
        return [record(row) for row in await self._readers.fetch(self._queries[query], *values)]
