"""Reads records and events from a PostgreSQL database."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from perdure._core.ids import RecordKind, SessionId, StreamId
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


class Reads(RecordReads):
    """Reads what this database keeps in its own form, and the rest as every database does."""

    _readers: Connections
    _queries: Mapping[str, str]
    _session_record = staticmethod(session_record)

    async def read(self, stream: StreamId, *, after: int, limit: int) -> Sequence[Event]:
        followed = await self.follow({stream: after}, limit=limit)
        return followed[stream].events or [] if stream in followed else []

    async def streams_by_id(self, streams: Sequence[StreamId]) -> Mapping[StreamId, StreamRecord]:
        if not streams:
            return {}
        found = await self._all("streams_by_id", rows.stream_record, list(streams))
        return {record.id: record for record in found}

    async def follow(self, after: Mapping[StreamId, int], *, limit: int) -> Mapping[StreamId, Followed]:
        numbers = [min(max(number, 0), MAX_SEQ) for number in after.values()]
        bounds = (min(limit, MAX_READ), READ_BYTES, self._payloads.overhead)
        found = await self._all("follow_streams", self._followed, list(after), numbers, *bounds)
        return {followed.record.id: followed for followed in found}

    def _followed(self, row: Any) -> Followed:
        """A stream's events come as columns, because each of many rows would repeat its record."""
        revision, *columns = row[STREAM_COLUMNS:]
        events = [] if columns[0] is None else [Event._make(event) for event in zip(*columns, strict=True)]
        return Followed(rows.stream_record(row[:STREAM_COLUMNS]), self._payloads.decode_all(events), revision)

    async def load(self, session: SessionId) -> Loaded | None:
        return await self._one("load_session", self._loaded, session)

    def _loaded(self, row: Any) -> Loaded:
        record = self._payloads.decode(session_record(row[:SESSION_COLUMNS]))
        has_standalone = row[SESSION_COLUMNS] is not None
        return Loaded(record, rows.stream_record(row[SESSION_COLUMNS:]) if has_standalone else None)

    async def single_call(self, session: SessionId, *, recent: int) -> CallSnapshot | None:
        """Events and asks come as columns, as in `_followed`."""
        found = await self._readers.fetch(self._queries["single_call"], session, min(recent, MAX_READ), READ_BYTES)
        if not found:
            return None
        row, decode = found[0], self._payloads
        record = decode.decode(session_record(row[:SESSION_COLUMNS]))
        call, rest = row[SESSION_COLUMNS : SESSION_COLUMNS + CALL_COLUMNS], row[SESSION_COLUMNS + CALL_COLUMNS :]
        if call[0] is None:
            return CallSnapshot(record, None)
        events = [Event._make(event) for event in zip(*(column or () for column in rest[:4]), strict=True)]
        asks = [rows.ask_record(ask) for ask in zip(*(column or () for column in rest[4:]), strict=True)]
        return CallSnapshot(
            record, decode.decode(rows.call_record(call)), decode.decode_all(events), decode.decode_all(asks)
        )

    def _caller(self, owner: str, address: str) -> tuple[object, ...]:
        return (caller_key(owner, address),)

    async def usage(self, sessions: Sequence[SessionId]) -> Mapping[SessionId, Usage]:
        streams: dict[SessionId, list[StreamRecord]] = {}
        for stream in await self._all("streams_of_sessions", rows.stream_record, list(sessions)):
            streams.setdefault(stream.session, []).append(stream)
        readers: dict[SessionId, list[ReaderRecord]] = {}
        for session, *row in await self._readers.fetch(self._queries["readers_of_sessions"], list(sessions)):
            readers.setdefault(session, []).append(rows.reader_record(tuple(row)))
        newest = await self._readers.fetch(self._queries["newest_of_sessions"], list(sessions))
        found = {session: (streams.get(session, ()), time, readers.get(session, ())) for session, time in newest}
        return {session: Usage(*usage) for session, usage in found.items()}

    async def _all(self, query: str, record: Callable[[Any], T], *values: Any) -> Sequence[T]:
        if any(type(value) is str and "\0" in value for value in values):
            return []  # no text in the database has a NUL, so nothing has such a name
        found = await self._readers.fetch(self._queries[query], *values)
        return self._payloads.decode_all([record(row) for row in found])
