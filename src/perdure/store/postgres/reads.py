"""Reads records and events from a PostgreSQL database."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from perdure._core.chains import Chain
from perdure._core.ids import NodeId, SessionId, StreamId
from perdure._core.states import SessionState
from perdure.store import base, rows
from perdure.store.codec import Payloads
from perdure.store.postgres.connections import Connections
from perdure.store.postgres.steps import MAX_SEQ, caller_key, id_key

T = TypeVar("T")

MAX_READ = 500
"""Events read in one go: more would be sized by the server for an answer that is full."""

session_record = rows.record_maker(
    base.SessionRecord, "session {id}", owner=rows.strict, state=SessionState, sticky=tuple, address=rows.strict
)
_chain_record = rows.record_maker(Chain, "the chain of session {session}", holder=rows.strict)


class Reads:
    """Answers what a store is asked without writing. All payloads are decoded here, at the edge."""

    _readers: Connections
    _payloads: Payloads
    _queries: Mapping[str, str]

    async def read(self, stream: StreamId, *, after: int, limit: int) -> Sequence[base.Event]:
        bounds = (min(max(after, 0), MAX_SEQ), min(limit, MAX_READ), base.READ_BYTES, self._payloads.overhead)
        return await self._all("read_events", base.Event._make, stream, *bounds)

    # Streams

    async def streams(self, session: SessionId) -> Sequence[base.StreamRecord]:
        return await self._all("streams_of_session", rows.stream_record, session)

    async def streams_by_id(self, streams: Sequence[StreamId]) -> Mapping[StreamId, base.StreamRecord]:
        if not streams:
            return {}
        found = await self._all("streams_by_id", rows.stream_record, list(streams))
        return {record.id: record for record in found}

    async def written_by(self, node: NodeId) -> Sequence[base.StreamRecord]:
        return await self._all("streams_of_node", rows.stream_record, node)

    async def unread(self, session: SessionId) -> Sequence[base.StreamRecord]:
        return await self._all("unread_streams", rows.stream_record, session)

    async def kept(self, session: SessionId) -> Sequence[base.KeptRecord]:
        return await self._all("kept_of_session", rows.kept_record, session, self._payloads.overhead)

    async def generations(self, stream: StreamId) -> Sequence[base.Generation]:
        return await self._all("generations_of_stream", rows.generation, stream)

    # Sessions

    async def session(self, session: SessionId) -> base.SessionRecord | None:
        return await self._one("session_by_id", session_record, session)

    async def sessions(self, *, after: SessionId | None, limit: int) -> Sequence[base.SessionRecord]:
        return await self._all("sessions_after", session_record, after or "", limit)

    async def count_states(self) -> Mapping[SessionState, int]:
        return dict(await self._all("count_states", lambda row: (SessionState(row[0]), row[1])))

    async def longest_dormant(self, owner: str | None = None, address: str = "") -> base.SessionRecord | None:
        if owner is None:
            return await self._one("longest_dormant", session_record)
        return await self._one("longest_dormant_of", session_record, caller_key(owner, address))

    # Chains

    async def chain(self, name: str) -> Chain | None:
        return await self._one("chain_by_name", _chain_record, name)

    async def chain_of(self, session: SessionId) -> Chain | None:
        return await self._one("chain_of_session", _chain_record, session)

    # Ledger, asks, readers, nodes

    async def calls(self, session: SessionId) -> Sequence[base.CallRecord]:
        return await self._all("calls_of_session", rows.call_record, session)

    async def calls_on(self, stream: StreamId) -> Sequence[base.CallRecord]:
        return await self._all("calls_of_stream", rows.call_record, stream)

    async def open_call(self, session: SessionId, *, incarnation: int, request_id: int | str) -> base.CallRecord | None:
        return await self._one("call_by_id", rows.call_record, session, incarnation, id_key(request_id))

    async def asks(self, session: SessionId) -> Sequence[base.AskRecord]:
        return await self._all("asks_of_session", rows.ask_record, session)

    async def reader(self, stream: StreamId) -> base.ReaderRecord | None:
        return await self._one("reader_of_stream", rows.reader_record, stream)

    async def nodes(self) -> Sequence[base.NodeRecord]:
        return await self._all("all_nodes", rows.node_record)

    async def mail(self, node: NodeId, *, after: int = 0) -> Sequence[base.Mail]:
        return await self._all("read_mail", base.Mail._make, node, after, base.MAIL_AT_ONCE)

    async def forwarded(self, stream: StreamId, *, after: int = 0) -> Sequence[base.Forwarded]:
        return await self._all("read_forwarded", base.Forwarded._make, stream, after, base.FORWARDED_AT_ONCE)

    async def forwarded_to(self, node: NodeId) -> Sequence[base.StreamRecord]:
        return await self._all("forwarded_to", rows.stream_record, node)

    async def _one(self, query: str, record: Callable[[Any], T], *values: Any) -> T | None:
        found = await self._all(query, record, *values)
        return found[0] if found else None

    async def _all(self, query: str, record: Callable[[Any], T], *values: Any) -> Sequence[T]:
        if any(type(value) is str and "\0" in value for value in values):
            return []  # no text in the database has a NUL, so nothing has such a name
        found = await self._readers.fetch(self._queries[query], *values)
        return self._payloads.decode_all([record(row) for row in found])
