"""The store in memory, which is also the model that other stores are tested against.

Durable (3) means here: as long as this object lives. It survives a dropped connection, not the process. Several nodes
of one process may share the object; opening and closing mean nothing to it.
"""

import bisect
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter

from perdure._core.chains import Chain
from perdure._core.ids import Generation, RecordKind, SessionId, StreamId
from perdure._core.jsonrpc import coerce_id
from perdure._core.states import SessionState
from perdure.store.interface import Opens, load_apart, single_call_apart
from perdure.store.memory.writes import MemoryWrites, call_key, caller
from perdure.store.records import (
    READ_BYTES,
    AskRecord,
    CallRecord,
    CallSnapshot,
    Event,
    Extent,
    Followed,
    KeptRecord,
    Loaded,
    OpenCall,
    Outline,
    ReaderRecord,
    SessionRecord,
    StreamRecord,
)

_seq = attrgetter("seq")


class MemoryStore(MemoryWrites, Opens):
    """Keeps everything in dictionaries. This part reads; `MemoryWrites` and `MemoryNodes` have the rest."""

    shared = False
    keeps_time = False

    async def probe(self, size: int) -> None:
        bytes(size)

    # Events

    async def read(self, stream: StreamId, *, after: int, limit: int) -> Sequence[Event]:
        found = self._streams.get(stream)
        if found is None:
            return ()
        start = bisect.bisect_right(found.events, after, key=_seq)
        events = self._payloads.decode_all(found.events[start : start + limit])
        sizes = itertools.accumulate(len(event.payload) for event in events)
        return events[: 1 + sum(1 for size in sizes if size < READ_BYTES)]

    async def streams(self, session: SessionId) -> Sequence[StreamRecord]:
        return [stream.record for stream in self._of_session.get(session, {}).values()]

    async def streams_by_id(self, streams: Sequence[StreamId]) -> Mapping[StreamId, StreamRecord]:
        return {stream: self._streams[stream].record for stream in streams if stream in self._streams}

    async def follow(self, after: Mapping[StreamId, int], *, limit: int) -> Mapping[StreamId, Followed]:
        """Without the events: to read them later costs little here."""
        return {stream: Followed(record) for stream, record in (await self.streams_by_id(list(after))).items()}

    async def unread(self, session: SessionId) -> Sequence[StreamRecord]:
        return [stream for stream in await self.streams(session) if stream.unread]

    async def kept(self, session: SessionId) -> Sequence[KeptRecord]:
        found: list[KeptRecord] = []
        for stream in self._of_session.get(session, {}).values():
            if stream.record.sealed:
                events, answers = (
                    [self._payloads.size(event.payload) for event in stream.events if event.final is final]
                    for final in (False, True)
                )
                kept = KeptRecord(
                    stream=stream.record.id,
                    opened=stream.record.opened,
                    events=len(events),
                    answers=len(answers),
                    event_bytes=sum(events),
                    answer_bytes=sum(answers),
                )
                found.append(kept)
        return found

    async def extent(self) -> Extent:
        events = [event for stream in self._streams.values() for event in stream.events]
        return Extent(None, len(events), True, min((event.time for event in events), default=None))

    async def generations(self, stream: StreamId) -> Sequence[Generation]:
        found = self._streams.get(stream)
        return tuple(found.generations) if found else ()

    # Sessions

    async def session(self, session: SessionId) -> SessionRecord | None:
        return self._payloads.decode(self._sessions.get(session))

    async def load(self, session: SessionId) -> Loaded | None:
        return await load_apart(self, session)

    async def single_call(self, session: SessionId, *, recent: int) -> CallSnapshot | None:
        return await single_call_apart(self, session, recent)

    async def sessions(self, *, after: SessionId | None, limit: int) -> Sequence[SessionRecord]:
        ids = sorted(i for i in self._sessions if after is None or i > after)
        return self._payloads.decode_all([self._sessions[i] for i in ids[:limit]])

    async def newest(self, *, limit: int, prefix: str = "") -> Sequence[Outline]:
        kinds = (RecordKind.SESSION, RecordKind.CALL)
        found = [row for row in self._sessions.values() if row.kind in kinds and row.id.startswith(prefix)]
        found.sort(key=lambda row: (-row.active, row.id))
        return [await self._outline(row) for row in self._payloads.decode_all(found[:limit])]

    async def _outline(self, record: SessionRecord) -> Outline:
        calls = await self.calls(record.id) if record.kind is RecordKind.CALL else ()
        return Outline(
            *(record.id, record.owner, record.state, record.initialized, record.active, record.kind),
            calls[0].state if calls else None,
        )

    async def count_states(self, kind: RecordKind = RecordKind.SESSION) -> Mapping[SessionState, int]:
        return Counter(session.state for session in self._sessions.values() if session.kind is kind)

    async def longest_dormant(
        self,
        owner: str | None = None,
        address: str = "",
        *,
        kind: RecordKind = RecordKind.SESSION,
        delivered: bool = False,
    ) -> SessionRecord | None:
        dormant = [s for s in self._sessions.values() if s.state is SessionState.DORMANT and s.kind is kind]
        unused = [session for session in dormant if not self._in_use(session)]
        wanted = [session for session in unused if owner is None or caller(session) == (owner, address)]
        if delivered:
            wanted = [session for session in wanted if not await self.unread(session.id)]
        return self._payloads.decode(min(wanted, key=attrgetter("active"), default=None))

    async def count_of(self, owner: str, address: str, *, kind: RecordKind) -> int:
        alike = (s for s in self._sessions.values() if s.kind is kind and s.state is not SessionState.ENDED)
        return sum(caller(session) == (owner, address) for session in alike)

    async def bytes_of(self, owner: str, address: str) -> int:
        calls = [s for s in self._sessions.values() if s.kind is RecordKind.CALL and s.state is SessionState.DORMANT]
        own = [session for session in calls if caller(session) == (owner, address)]
        streams = [row for session in own for row in self._of_session.get(session.id, {}).values()]
        answers = sum(len(event.payload) for stream in streams for event in stream.events if event.final)
        return answers + sum(len(session.client_params) for session in own)

    # Chains

    async def chain(self, name: str) -> Chain | None:
        session = self._chain_names.get(name)
        return None if session is None else self._chains[session]

    async def chain_of(self, session: SessionId) -> Chain | None:
        return self._chains.get(session)

    # Ledger, asks, readers

    async def calls(self, session: SessionId) -> Sequence[CallRecord]:
        streams = self._of_session.get(session, {}).values()
        return self._payloads.decode_all([call for stream in streams for call in stream.calls.values()])

    async def calls_on(self, stream: StreamId) -> Sequence[CallRecord]:
        found = self._streams.get(stream)
        return self._payloads.decode_all(list(found.calls.values())) if found else []

    async def open_call(self, session: SessionId, *, incarnation: int, request_id: int | str) -> CallRecord | None:
        key = (session, incarnation, coerce_id(request_id))
        stream = self._open_calls.get(key)
        calls = stream.calls.values() if stream else ()
        return self._payloads.decode(next((call for call in calls if call_key(call) == key), None))

    async def open_calls(self, *, limit: int) -> Sequence[OpenCall]:
        found: list[OpenCall] = []
        for key, row in sorted(self._open_calls.items(), key=lambda item: item[0][0])[:limit]:
            call = next(call for call in row.calls.values() if call_key(call) == key)
            writer = row.record.node
            found.append(OpenCall(call.session, call.stream, call.method, call.state, call.attempt, writer))
        return found

    async def asks(self, session: SessionId) -> Sequence[AskRecord]:
        return self._payloads.decode_all(list(self._asks.get(session, {}).values()))

    async def reader(self, stream: StreamId) -> ReaderRecord | None:
        found = self._streams.get(stream)
        return found.reader if found else None
