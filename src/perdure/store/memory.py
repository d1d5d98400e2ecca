"""The store in memory: the promises of `base` in their shortest form, the model that other stores are tested against.

Durable (3) means here: as long as this object lives. It survives a dropped connection, not the process.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Self

from perdure._core.ids import Fence, NodeId, SessionId, StreamId
from perdure._core.retention import Cutoffs
from perdure._core.states import CallState, SessionState
from perdure.errors import StaleFence
from perdure.store.base import (
    Append,
    AskRecord,
    CallRecord,
    CloseAsk,
    DropStream,
    EndSession,
    Event,
    Generation,
    LeaveReader,
    OpenAsk,
    OpenStream,
    PutReader,
    PutSession,
    ReaderRecord,
    Refusals,
    SessionRecord,
    Step,
    StreamRecord,
    Trim,
)

_seq = attrgetter("seq")


@dataclass(slots=True)
class _Stream:
    record: StreamRecord
    events: list[Event] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    calls: dict[tuple[int, int | str], CallRecord] = field(default_factory=dict)
    reader: ReaderRecord | None = None


class MemoryStore:
    """Everything in dictionaries."""

    def __init__(self) -> None:
        self._sessions: dict[SessionId, SessionRecord] = {}
        self._streams: dict[StreamId, _Stream] = {}
        self._of_session: dict[SessionId, dict[StreamId, _Stream]] = {}
        self._asks: dict[SessionId, dict[str, AskRecord]] = {}
        self._mail: dict[NodeId, list[bytes]] = {}
        self._fence = 0

    async def open(self) -> None:
        pass

    async def aclose(self) -> None:
        pass

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # Events

    async def commit(self, steps: Sequence[Step]) -> Refusals:
        return self.commit_now(steps)

    def commit_now(self, steps: Sequence[Step]) -> Refusals:
        return [self._apply(step) for step in steps]

    def _apply(self, step: Step) -> StaleFence | None:
        match step:
            case Append():
                return self._append(step)
            case OpenStream(record=record):
                if record.id not in self._streams:
                    stream = _Stream(record, calls={(c.incarnation, c.request_id): c for c in step.calls})
                    self._streams[record.id] = stream
                    self._of_session.setdefault(record.session, {})[record.id] = stream
            case PutSession(record=record):
                self._sessions[record.id] = record
            case EndSession(session=session):
                self._end(session, step.time)
            case Trim() if found := self._streams.get(step.stream):
                found.events = [e for e in found.events if e.final or e.seq > step.through]
            case DropStream():
                self._drop(step.stream)
            case OpenAsk(record=ask) if ask.stream in self._streams:
                self._asks.setdefault(ask.session, {}).setdefault(ask.id, ask)
            case CloseAsk():
                self._asks.get(step.session, {}).pop(step.id, None)
            case PutReader(record=reader) if found := self._streams.get(reader.stream):
                found.reader = reader
            case LeaveReader() if found := self._streams.get(step.stream):
                if found.reader is not None and found.reader.reader == step.reader:
                    found.reader = None
        return None

    def _append(self, step: Append) -> StaleFence | None:
        stream = self._streams.get(step.stream)
        if stream is None or stream.record.fence != step.fence:
            return StaleFence(f"stream {step.stream} is not written under fence {step.fence}")
        before = stream.record
        new = [event for event in step.events if event.seq > before.last]
        if new and (before.sealed or new[-1].seq != before.last + len(new)):
            return StaleFence(f"stream {step.stream} ends at {before.last}, and event {new[0].seq} cannot follow")
        stream.events.extend(new)
        stream.record = replace(before, last=before.last + len(new), sealed=before.sealed or step.seal)
        for end in step.ends:
            call = stream.calls.get((end.incarnation, end.request_id))
            if call is not None and call.state is CallState.RUNNING:
                stream.calls[call.incarnation, call.request_id] = replace(call, state=end.state, request=b"")
        return None

    def _end(self, session: SessionId, time: float) -> None:
        for stream in list(self._of_session.get(session, ())):
            self._drop(stream)
        if (record := self._sessions.get(session)) is not None:
            self._sessions[session] = replace(record, state=SessionState.ENDED, active=time)

    def _drop(self, stream_id: StreamId) -> None:
        if (stream := self._streams.pop(stream_id, None)) is not None:
            session = stream.record.session
            del self._of_session[session][stream_id]
            for ask in [ask for ask in self._asks.get(session, {}).values() if ask.stream == stream_id]:
                del self._asks[session][ask.id]
            if not self._of_session[session]:
                del self._of_session[session]
                self._asks.pop(session, None)

    async def read(self, stream: StreamId, *, after: int, limit: int) -> Sequence[Event]:
        found = self._streams.get(stream)
        if found is None:
            return ()
        start = bisect.bisect_right(found.events, after, key=_seq)
        return found.events[start : start + limit]

    async def stream(self, stream: StreamId) -> StreamRecord | None:
        found = self._streams.get(stream)
        return found.record if found else None

    async def streams(self, session: SessionId) -> Sequence[StreamRecord]:
        return [stream.record for stream in self._of_session.get(session, {}).values()]

    async def claim(self, stream: StreamId) -> StreamRecord | None:
        found = self._streams.get(stream)
        if found is None:
            return None
        before = found.record
        found.generations.append(Generation(generation=before.generation, end=before.last))
        found.record = replace(before, fence=self._next_fence(), generation=before.generation + 1)
        return found.record

    async def generations(self, stream: StreamId) -> Sequence[Generation]:
        found = self._streams.get(stream)
        return tuple(found.generations) if found else ()

    async def sweep(self, cutoffs: Cutoffs) -> int:
        rows = 0
        for stream in list(self._streams.values()):
            kept = [e for e in stream.events if e.time >= (cutoffs.answers if e.final else cutoffs.events)]
            rows += len(stream.events) - len(kept)
            stream.events = kept
            over = stream.record.sealed or stream.record.session not in self._sessions
            if over and not kept and stream.record.opened < cutoffs.answers:
                self._drop(stream.record.id)
                rows += 1
        for session in [s for s in self._sessions.values() if s.active < cutoffs.answers]:
            self._end(session.id, session.active)
            del self._sessions[session.id]
            rows += 1
        return rows

    # Sessions, ledger, asks, readers

    async def session(self, session: SessionId) -> SessionRecord | None:
        return self._sessions.get(session)

    async def sessions(self, *, after: SessionId | None, limit: int) -> Sequence[SessionRecord]:
        ids = sorted(i for i in self._sessions if after is None or i > after)
        return [self._sessions[i] for i in ids[:limit]]

    async def calls(self, session: SessionId) -> Sequence[CallRecord]:
        return [call for stream in self._of_session.get(session, {}).values() for call in stream.calls.values()]

    async def requests(self, stream: StreamId) -> Sequence[tuple[int | str, str]]:
        found = self._streams.get(stream)
        return [(call.request_id, call.method) for call in found.calls.values()] if found else []

    async def asks(self, session: SessionId) -> Sequence[AskRecord]:
        return list(self._asks.get(session, {}).values())

    async def reader(self, stream: StreamId) -> ReaderRecord | None:
        found = self._streams.get(stream)
        return found.reader if found else None

    # Wake-ups and mail: there is nobody else

    def subscribe(self, listener: Callable[[StreamId], None]) -> Callable[[], None]:
        return lambda: None

    async def join(self, node: NodeId) -> Fence:
        self._mail[node] = []
        return self._next_fence()

    async def post(self, node: NodeId, message: bytes) -> None:
        self._mail.setdefault(node, []).append(message)

    async def collect(self, node: NodeId) -> Sequence[bytes]:
        messages, self._mail[node] = self._mail.get(node, []), []
        return messages

    def _next_fence(self) -> Fence:
        self._fence += 1
        return Fence(self._fence)
