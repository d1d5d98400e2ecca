"""The store in memory: the promises of `base` in their shortest form, the model that other stores are tested against.

Durable (3) means here: as long as this object lives. It survives a dropped connection, not the process. Several nodes
of one process may share the object; opening and closing mean nothing to it.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Self

from perdure._core import retention, sticky
from perdure._core.chains import Chain
from perdure._core.ids import Fence, Generation, NodeId, SessionId, StreamId
from perdure._core.jsonrpc import coerce_id
from perdure._core.retention import Cutoffs
from perdure._core.states import CallState, SessionState
from perdure.errors import IdTaken, SessionEnded, StaleFence, TooManyCalls, TooManySessions
from perdure.store._memory_nodes import MemoryNodes, StreamRow
from perdure.store.base import (
    KEPT_GENERATIONS,
    READ_BYTES,
    Append,
    AskRecord,
    CallRecord,
    ChangeSession,
    CloseAsk,
    DropStream,
    EndSession,
    Event,
    Forward,
    KeptRecord,
    LeaveReader,
    MailReceived,
    MoveReader,
    OpenAsk,
    OpenStream,
    PutCall,
    PutReader,
    PutSession,
    Reached,
    ReaderRecord,
    Refusals,
    Refused,
    Release,
    SendMail,
    SessionRecord,
    Step,
    Stick,
    StreamRecord,
    Trim,
)

_seq = attrgetter("seq")
_OPEN = (CallState.RUNNING, CallState.WAITING)


class MemoryStore(MemoryNodes):
    """Everything in dictionaries."""

    shared = False
    keeps_time = False

    def __init__(self, *, wall: Callable[[], float] = time.time) -> None:
        super().__init__(wall)
        self._sessions: dict[SessionId, SessionRecord] = {}
        self._of_session: dict[SessionId, dict[StreamId, StreamRow]] = {}
        self._asks: dict[SessionId, dict[str, AskRecord]] = {}
        self._chains: dict[SessionId, Chain] = {}
        self._chain_names: dict[str, SessionId] = {}
        self._open_calls: dict[tuple[SessionId, int, int | str], StreamRow] = {}
        """Where each call that has not ended is, by its id as ids are compared."""

    async def open(self) -> None:
        pass

    async def probe(self, size: int) -> None:
        bytes(size)

    async def aclose(self) -> None:
        pass

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # Steps

    async def commit(self, steps: Sequence[Step]) -> Refusals:
        return self.commit_now(steps)

    def commit_now(self, steps: Sequence[Step]) -> Refusals:
        self._writes += 1
        return [self._apply(step) for step in steps]

    def _apply(self, step: Step) -> Refused | None:
        match step:
            case Append():
                return self._append(step)
            case OpenStream():
                return self._open(step)
            case Forward():
                return self._forward(step)
            case PutCall():
                return self._put_call(step)
            case Release():
                return self._release(step)
            case SendMail():
                return self._deliver(step)
            case MailReceived():
                self._take_away(step)
            case PutSession():
                return self._put_session(step)
            case ChangeSession() | Stick() if session := self._going_on(step.session):
                self._sessions[session.id] = _changed(session, step)
            case EndSession():
                self._end(step)
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
            case MoveReader() if found := self._streams.get(step.stream):
                if found.reader is not None and found.reader.reader == step.reader:
                    found.reader = replace(found.reader, seq=step.seq)
            case LeaveReader() if found := self._streams.get(step.stream):
                if found.reader is not None and found.reader.reader == step.reader:
                    found.reader = None
            case Reached() if found := self._streams.get(step.stream):
                found.record = _reached(found, step)
        return None

    def _put_session(self, step: PutSession) -> TooManySessions | None:
        record, limits = step.record, step.limits
        if record.id in self._sessions:
            return None
        if limits is not None:
            going_on = [s for s in self._sessions.values() if s.state is not SessionState.ENDED]
            of_caller = sum(_caller(session) == _caller(record) for session in going_on)
            if any(_caller(record)) and of_caller >= limits.caller:
                return TooManySessions(f"the caller has {of_caller} sessions", of_caller=True)
            if len(going_on) >= limits.total:
                return TooManySessions(f"there are {len(going_on)} sessions", of_caller=False)
        self._sessions[record.id] = record
        return None

    def _open(self, step: OpenStream) -> IdTaken | SessionEnded | TooManyCalls | None:
        record = step.record
        if record.id in self._streams:
            return None
        if not self._going_on(record.session):
            return SessionEnded(f"session {record.session[:8]} has ended")
        names = [_name(call) for call in step.calls]
        if len(set(names)) < len(names) or not self._open_calls.keys().isdisjoint(names):
            return IdTaken(f"a request of session {record.session[:8]} runs already under one of the ids {names}")
        if step.most_calls is not None:
            running = sum(session == record.session for session, _, _ in self._open_calls)
            if running + len(names) > step.most_calls:
                return TooManyCalls(f"session {record.session[:8]} has {running} calls running")
        stream = StreamRow(record, calls={(call.incarnation, call.request_id): call for call in step.calls})
        self._open_calls.update(dict.fromkeys(names, stream))
        self._streams[record.id] = stream
        self._of_session.setdefault(record.session, {})[record.id] = stream
        return None

    def _append(self, step: Append) -> StaleFence | None:
        stream = self._written(step.stream, step.fence)
        if stream is None:
            return _stale(step)
        before = stream.record
        new = [event for event in step.events if event.seq > before.last]
        if new and (before.sealed or not before.node or new[-1].seq != before.last + len(new)):
            return StaleFence(f"stream {step.stream} ends at {before.last}, and event {new[0].seq} cannot follow")
        stream.events.extend(new)
        stream.forwarded = [message for message in stream.forwarded if message.key > step.taken]
        stream.record = replace(before, last=before.last + len(new), sealed=before.sealed or step.seal)
        for end in step.ends:
            call = stream.calls.get((end.incarnation, end.request_id))
            if call is not None and call.state in _OPEN:
                stream.calls[call.incarnation, call.request_id] = replace(call, state=end.state, request=b"")
                self._open_calls.pop(_name(call), None)
        return None

    def _put_call(self, step: PutCall) -> StaleFence | None:
        stream = self._written(step.stream, step.fence)
        if stream is None or stream.record.sealed or not stream.record.node:
            return _stale(step)
        call = stream.calls.get((step.incarnation, step.request_id))
        if call is not None and call.state in _OPEN:
            changed = replace(call, state=step.state, attempt=step.attempt, progress=step.progress)
            stream.calls[call.incarnation, call.request_id] = changed
        return None

    def _release(self, step: Release) -> StaleFence | None:
        stream = self._written(step.stream, step.fence)
        if stream is None or stream.record.sealed:
            return _stale(step)
        stream.record = replace(stream.record, node=NodeId(""))
        return None

    def _written(self, stream: StreamId, fence: Fence) -> StreamRow | None:
        """The stream, if that is its fence."""
        found = self._streams.get(stream)
        return found if found is not None and found.record.fence == fence else None

    def _end(self, step: EndSession) -> None:
        if step.unused_since is not None:
            found = self._sessions.get(step.session)
            if found is None or found.active > step.unused_since or self._in_use(found):
                return
        for stream in list(self._of_session.get(step.session, ())):
            self._drop(stream)
        if (record := self._going_on(step.session)) is not None:
            params = record.client_params
            kept = params if retention.keeps_params(step.reason, len(params)) else b""
            ended = replace(
                record,
                state=SessionState.ENDED,
                client_params=kept,
                result=b"",
                sticky=(),
                active=step.time,
                ended=step.reason,
            )
            self._sessions[step.session] = ended
            self._forget_chain(step.session)
            self._forget_ended(_caller(ended))

    def _forget_ended(self, caller: tuple[str, str]) -> None:
        """Keep no more records of ended sessions than there may be, of the caller and in all."""
        ended = [session for session in self._sessions.values() if session.state is SessionState.ENDED]
        of_caller = [session for session in ended if _caller(session) == caller]
        for sessions, most in ((of_caller, retention.MAX_ENDED_OF_CALLER), (ended, retention.MAX_ENDED)):
            if len(sessions) > most:
                del self._sessions[min(sessions, key=attrgetter("active")).id]
                return  # one has ended, so one was too many

    def _in_use(self, session: SessionRecord) -> bool:
        return any(
            (not stream.record.sealed and stream.record.node in self._nodes)
            or (stream.reader is not None and stream.reader.node in self._nodes)
            for stream in self._of_session.get(session.id, {}).values()
        )

    def _drop(self, stream_id: StreamId) -> None:
        if (stream := self._streams.pop(stream_id, None)) is not None:
            session = stream.record.session
            for call in stream.calls.values():
                if call.state in _OPEN:  # an ended one's id may be another's by now
                    self._open_calls.pop(_name(call), None)
            del self._of_session[session][stream_id]
            for ask in [ask for ask in self._asks.get(session, {}).values() if ask.stream == stream_id]:
                del self._asks[session][ask.id]
            if not self._of_session[session]:
                del self._of_session[session]
                self._asks.pop(session, None)

    # Events

    async def read(self, stream: StreamId, *, after: int, limit: int) -> Sequence[Event]:
        found = self._streams.get(stream)
        if found is None:
            return ()
        start = bisect.bisect_right(found.events, after, key=_seq)
        sizes = itertools.accumulate(len(event.payload) for event in found.events[start : start + limit])
        return found.events[start : start + 1 + sum(1 for size in sizes if size < READ_BYTES)][:limit]

    async def streams(self, session: SessionId) -> Sequence[StreamRecord]:
        return [stream.record for stream in self._of_session.get(session, {}).values()]

    async def streams_by_id(self, streams: Sequence[StreamId]) -> Mapping[StreamId, StreamRecord]:
        return {stream: self._streams[stream].record for stream in streams if stream in self._streams}

    async def unread(self, session: SessionId) -> Sequence[StreamRecord]:
        return [stream for stream in await self.streams(session) if stream.unread]

    async def kept(self, session: SessionId) -> Sequence[KeptRecord]:
        return [_kept(stream) for stream in self._of_session.get(session, {}).values() if stream.record.sealed]

    async def claim(self, stream: StreamId, *, node: NodeId, held: Fence) -> StreamRecord | None:
        found = self._written(stream, held)
        if found is None or found.record.sealed:
            return None
        self._writes += 1
        before = found.record
        found.generations.append(Generation(generation=before.generation, end=before.last))
        del found.generations[:-KEPT_GENERATIONS]
        found.record = replace(before, node=node, fence=self._next_fence(), generation=before.generation + 1)
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
        for session in [s for s in self._sessions.values() if s.active < cutoffs.answers and not self._in_use(s)]:
            self._end(EndSession(session=session.id, time=session.active, reason=""))
            del self._sessions[session.id]
            rows += 1
        self._writes += 1
        return rows

    # Sessions

    async def session(self, session: SessionId) -> SessionRecord | None:
        return self._sessions.get(session)

    async def sessions(self, *, after: SessionId | None, limit: int) -> Sequence[SessionRecord]:
        ids = sorted(i for i in self._sessions if after is None or i > after)
        return [self._sessions[i] for i in ids[:limit]]

    async def reattach(self, session: SessionId) -> SessionRecord | None:
        if (record := self._going_on(session)) is None:
            return None
        self._writes += 1
        self._sessions[session] = replace(record, incarnation=record.incarnation + 1)
        return self._sessions[session]

    async def count_states(self) -> Mapping[SessionState, int]:
        return Counter(session.state for session in self._sessions.values())

    async def longest_dormant(self, owner: str | None = None, address: str = "") -> SessionRecord | None:
        dormant = (session for session in self._sessions.values() if session.state is SessionState.DORMANT)
        wanted = (session for session in dormant if owner is None or _caller(session) == (owner, address))
        return min((session for session in wanted if not self._in_use(session)), key=attrgetter("active"), default=None)

    # Chains

    async def chain(self, name: str) -> Chain | None:
        session = self._chain_names.get(name)
        return None if session is None else self._chains[session]

    async def chain_of(self, session: SessionId) -> Chain | None:
        return self._chains.get(session)

    async def put_chain(self, chain: Chain) -> bool:
        if self._going_on(chain.session) is None:
            return False
        self._writes += 1
        self._forget_chain(chain.session)
        self._chains[chain.session] = chain
        self._chain_names[chain.name] = chain.session
        return True

    async def change_chain(self, seen: Chain, chain: Chain | None) -> bool:
        if self._chains.get(seen.session) != seen:
            return False
        self._writes += 1
        if chain is None:
            self._forget_chain(seen.session)
        else:
            self._chains[seen.session] = chain
        return True

    def _forget_chain(self, session: SessionId) -> None:
        if (chain := self._chains.pop(session, None)) is not None:
            del self._chain_names[chain.name]

    def _going_on(self, session: SessionId) -> SessionRecord | None:
        record = self._sessions.get(session)
        return None if record is None or record.state is SessionState.ENDED else record

    # Ledger, asks, readers

    async def calls(self, session: SessionId) -> Sequence[CallRecord]:
        return [call for stream in self._of_session.get(session, {}).values() for call in stream.calls.values()]

    async def calls_on(self, stream: StreamId) -> Sequence[CallRecord]:
        found = self._streams.get(stream)
        return list(found.calls.values()) if found else []

    async def open_call(self, session: SessionId, *, incarnation: int, request_id: int | str) -> CallRecord | None:
        name = (session, incarnation, coerce_id(request_id))
        stream = self._open_calls.get(name)
        return next((call for call in stream.calls.values() if _name(call) == name), None) if stream else None

    async def asks(self, session: SessionId) -> Sequence[AskRecord]:
        return list(self._asks.get(session, {}).values())

    async def reader(self, stream: StreamId) -> ReaderRecord | None:
        found = self._streams.get(stream)
        return found.reader if found else None


def _changed(session: SessionRecord, step: ChangeSession | Stick) -> SessionRecord:
    if isinstance(step, Stick):
        return replace(session, sticky=sticky.after(session.sticky, step.request))
    return replace(
        session,
        active=session.active if step.active is None else max(session.active, step.active),
        state=step.state or session.state,
        version=session.version if step.version is None else step.version,
        result=session.result if step.result is None else step.result,
        initialized=session.initialized if step.initialized is None else step.initialized,
    )


def _caller(session: SessionRecord) -> tuple[str, str]:
    """Whose session it is: a name, or an address."""
    return session.owner, session.address


def _reached(stream: StreamRow, step: Reached) -> StreamRecord:
    record = stream.record
    ends = {ended.generation: ended.end for ended in stream.generations} | {record.generation: record.last}
    through = min(step.through, ends.get(step.generation, 0))
    return replace(record, delivered=max(record.delivered, through), unread=step.unread)


def _name(call: CallRecord) -> tuple[SessionId, int, int | str]:
    return call.session, call.incarnation, coerce_id(call.request_id)


def _kept(stream: StreamRow) -> KeptRecord:
    sizes: dict[bool, list[int]] = {False: [], True: []}
    for event in stream.events:
        sizes[event.final].append(len(event.payload))
    return KeptRecord(
        stream=stream.record.id,
        opened=stream.record.opened,
        events=len(sizes[False]),
        answers=len(sizes[True]),
        event_bytes=sum(sizes[False]),
        answer_bytes=sum(sizes[True]),
    )


def _stale(step: Append | PutCall | Release) -> StaleFence:
    return StaleFence(f"stream {step.stream} is not written under fence {step.fence}")
