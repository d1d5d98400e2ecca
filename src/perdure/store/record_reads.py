"""Reads the records that every database keeps alike, by the names of its queries."""

import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from perdure._core.ids import Generation, NodeId, RecordKind, SessionId, StreamId
from perdure._core.states import SessionState
from perdure.store import rows
from perdure.store.codec import Payloads
from perdure.store.interface import Inspect
from perdure.store.records import (
    FORWARDED_AT_ONCE,
    MAIL_AT_ONCE,
    AskRecord,
    CallRecord,
    Forwarded,
    Mail,
    NodeRecord,
    OpenCall,
    Outline,
    ReaderRecord,
    StreamRecord,
    UsageRecord,
)

T = TypeVar("T")


class RecordReads(Inspect):
    """Answers what a store is asked without writing, as far as a query and a kind of record say it all.

    A database adds `_all`, and what it keeps in a form of its own: sessions, events.
    """

    _payloads: Payloads

    @abstractmethod
    async def _all(self, query: str, record: Callable[[Any], T], *values: Any) -> Sequence[T]:
        """Give the records that a query finds. All payloads are decoded here, at the edge."""

    async def _one(self, query: str, record: Callable[[Any], T], *values: Any) -> T | None:
        found = await self._all(query, record, *values)
        return found[0] if found else None

    # Streams

    async def streams(self, session: SessionId) -> Sequence[StreamRecord]:
        return await self._all("streams_of_session", rows.stream_record, session)

    async def written_by(self, node: NodeId) -> Sequence[StreamRecord]:
        return await self._all("streams_of_node", rows.stream_record, node)

    async def unread(self, session: SessionId) -> Sequence[StreamRecord]:
        return await self._all("unread_streams", rows.stream_record, session)

    async def kept(self, session: SessionId) -> Sequence[UsageRecord]:
        return await self._all("kept_of_session", rows.kept_record, session, self._payloads.overhead)

    async def generations(self, stream: StreamId) -> Sequence[Generation]:
        return await self._all("generations_of_stream", rows.generation, stream)

    async def forwarded(self, stream: StreamId, *, after: int = 0) -> Sequence[Forwarded]:
        return await self._all("read_forwarded", Forwarded._make, stream, after, FORWARDED_AT_ONCE)

    async def forwarded_to(self, node: NodeId) -> Sequence[StreamRecord]:
        return await self._all("forwarded_to", rows.stream_record, node)

    async def reader(self, stream: StreamId) -> ReaderRecord | None:
        return await self._one("reader_of_stream", rows.reader_record, stream)

    # Sessions, their calls and asks

    async def count_states(self, kind: RecordKind = RecordKind.SESSION) -> Mapping[SessionState, int]:
        return dict(await self._all("count_states", lambda row: (SessionState(row[0]), row[1]), kind.value))

    async def newest(self, *, limit: int, prefix: str = "") -> Sequence[Outline]:
        if prefix:
            return await self._all("newest_with_prefix", rows.outline, limit, prefix, f"{prefix}{chr(sys.maxunicode)}")
        return await self._all("newest", rows.outline, limit)

    async def open_calls(self, *, limit: int) -> Sequence[OpenCall]:
        return await self._all("open_calls", rows.open_call, limit)

    async def calls(self, session: SessionId) -> Sequence[CallRecord]:
        return await self._all("calls_of_session", rows.call_record, session)

    async def calls_on(self, stream: StreamId) -> Sequence[CallRecord]:
        return await self._all("calls_of_stream", rows.call_record, stream)

    async def asks(self, session: SessionId) -> Sequence[AskRecord]:
        return await self._all("asks_of_session", rows.ask_record, session)

    # Notes and nodes

    async def notes(self, prefix: str) -> Mapping[str, bytes]:
        decode = self._payloads.decode_one
        bounds = (prefix, prefix + chr(sys.maxunicode))
        return dict(await self._all("notes", lambda row: (str(row[0]), decode(bytes(row[1]))), *bounds))

    async def nodes(self) -> Sequence[NodeRecord]:
        return await self._all("all_nodes", rows.node_record)

    async def mail(self, node: NodeId, *, after: int = 0) -> Sequence[Mail]:
        return await self._all("read_mail", Mail._make, node, after, MAIL_AT_ONCE)
