"""Applies steps to the tables in memory, and everything else that changes what is stored."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from perdure._core import retention
from perdure._core.chains import Chain
from perdure._core.ids import Fence, Generation, NodeId, RecordKind, SessionId, StreamId
from perdure._core.jsonrpc import coerce_id
from perdure._core.retention import Cutoffs
from perdure._core.states import CallState, SessionState
from perdure.store import records, steps
from perdure.store.codec import PLAIN, Codec
from perdure.store.memory.nodes import MemoryNodes, StreamRow
from perdure.store.records import (
    MAX_FORWARDED,
    MAX_FORWARDED_BYTES,
    MAX_MAIL,
    AskRecord,
    CallRecord,
    Forwarded,
    SessionRecord,
    StreamRecord,
)
from perdure.store.refusals import Why, refusal
from perdure.store.steps import (
    Append,
    ChangeSession,
    CloseAsk,
    DropStream,
    EndSession,
    Forward,
    LeaveReader,
    MailReceived,
    MoveReader,
    OpenAsk,
    OpenStream,
    PutCall,
    PutReader,
    PutSession,
    Reached,
    Refusals,
    Release,
    SendMail,
    Step,
    StepRefusal,
    Stick,
    Trim,
    with_sticky,
)

_OPEN = (CallState.RUNNING, CallState.WAITING)


class MemoryWrites(MemoryNodes):
    """Has the tables of sessions, and changes them."""

    def __init__(self, *, codec: Codec = PLAIN, wall: Callable[[], float] = time.time) -> None:
        super().__init__(codec, wall)
        self._sessions: dict[SessionId, SessionRecord] = {}
        self._of_session: dict[SessionId, dict[StreamId, StreamRow]] = {}
        self._asks: dict[SessionId, dict[str, AskRecord]] = {}
        self._chains: dict[SessionId, Chain] = {}
        self._chain_names: dict[str, SessionId] = {}
        self._secrets: dict[str, bytes] = {}
        self._open_calls: dict[tuple[SessionId, int, int | str], StreamRow] = {}
        """Where each call that has not ended is, by its id as ids are compared."""

    async def commit(self, steps: Sequence[Step]) -> Refusals:
        return self.commit_now(steps)

    def commit_now(self, steps: Sequence[Step]) -> Refusals:
        self._writes += 1
        return [self._apply(step) for step in self._payloads.encode_steps(steps)]

    def _apply(self, step: Step) -> StepRefusal | None:
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
            case MailReceived() if node := self._nodes.get(step.node):
                node.mail = [mail for mail in node.mail if mail.key > step.through]
            case PutSession():
                return self._put_session(step)
            case ChangeSession() if session := self._going_on(step.session):
                self._sessions[session.id] = steps.changed(session, step)
            case Stick() if session := self._going_on(step.session):
                sticky = self._payloads.stick(session.sticky, step.request)
                self._sessions[session.id] = with_sticky(session, sticky)
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
            case MoveReader() | LeaveReader() if found := self._streams.get(step.stream):
                if found.reader is not None and found.reader.reader == step.reader:
                    found.reader = replace(found.reader, seq=step.seq) if isinstance(step, MoveReader) else None
            case Reached() if found := self._streams.get(step.stream):
                found.record = _reached(found, step)
        return None

    # Steps of sessions

    def _put_session(self, step: PutSession) -> StepRefusal | None:
        record, limits = step.record, step.limits
        if record.id in self._sessions:
            return None
        if limits is not None:
            alike = [session for session in self._sessions.values() if session.kind is record.kind]
            going_on = [session for session in alike if session.state is not SessionState.ENDED]
            of_caller = sum(caller(session) == caller(record) for session in going_on)
            if any(caller(record)) and of_caller >= limits.caller:
                return refusal(step, Why.CALLER, of_caller)
            if limits.total is not None and len(going_on) >= limits.total:
                return refusal(step, Why.ALL, len(going_on))
        self._sessions[record.id] = record
        return None

    def _end(self, step: EndSession) -> None:
        if step.unused_since is not None:
            found = self._sessions.get(step.session)
            if found is None or found.active > step.unused_since or self._in_use(found):
                return
        for stream in list(self._of_session.get(step.session, ())):
            self._drop(stream)
        if (record := self._going_on(step.session)) is not None and record.kind is not RecordKind.SESSION:
            del self._sessions[step.session]
        elif record is not None:
            params = record.client_params
            kept = params if retention.keeps_params(step.reason, self._payloads.size(params)) else b""
            ended = replace(
                record,
                state=SessionState.ENDED,
                revision=record.revision + 1,
                client_params=kept,
                result=b"",
                sticky=(),
                active=step.time,
                ended=step.reason,
            )
            self._sessions[step.session] = ended
            self._forget_chain(step.session)
            self._forget_ended(caller(ended))

    def _forget_ended(self, caller_: tuple[str, str]) -> None:
        """Keep no more records of ended sessions than there may be, of the caller and in all."""
        ended = [session for session in self._sessions.values() if session.state is SessionState.ENDED]
        of_caller = [session for session in ended if caller(session) == caller_]
        for sessions, most in ((of_caller, retention.MAX_ENDED_OF_CALLER), (ended, retention.MAX_ENDED)):
            if len(sessions) > most:
                del self._sessions[min(sessions, key=attrgetter("active")).id]
                return  # one has ended, so one was too many

    def _going_on(self, session: SessionId) -> SessionRecord | None:
        record = self._sessions.get(session)
        return None if record is None or record.state is SessionState.ENDED else record

    def _in_use(self, session: SessionRecord) -> bool:
        return any(
            (not stream.record.sealed and stream.record.node in self._nodes)
            or (stream.reader is not None and stream.reader.node in self._nodes)
            for stream in self._of_session.get(session.id, {}).values()
        )

    # Steps of streams

    def _open(self, step: OpenStream) -> StepRefusal | None:
        record = step.record
        if (there := self._streams.get(record.id)) is not None:
            if step.unique and there.record.fence != record.fence:
                return refusal(step, Why.FENCED, there.record.fence)
            return refusal(step, Why.SEALED) if step.unique and there.record.sealed else None
        session = self._going_on(record.session)
        if session is None:
            return refusal(step, Why.ENDED)
        if step.seen not in (None, session.revision):
            return refusal(step, Why.CHANGED, session.revision)
        keys = [call_key(call) for call in step.calls]
        for place, key in enumerate(keys):
            if key in self._open_calls or key in keys[:place]:
                return refusal(step, Why.TAKEN, json.dumps(step.calls[place].request_id))
        if step.most_calls is not None:
            running = sum(session == record.session for session, _, _ in self._open_calls)
            if running + len(keys) > step.most_calls:
                return refusal(step, Why.CALLS, running)
        stream = StreamRow(record, calls={(call.incarnation, call.request_id): call for call in step.calls})
        self._open_calls.update(dict.fromkeys(keys, stream))
        self._streams[record.id] = stream
        self._of_session.setdefault(record.session, {})[record.id] = stream
        return None

    def _append(self, step: Append) -> StepRefusal | None:
        stream = self._streams.get(step.stream)
        if stream is None:
            return refusal(step, Why.GONE)
        before = stream.record
        new = [event for event in step.events if event.seq > before.last]
        if (before.fence != step.fence or new) and (refused := _not_written(stream, step)) is not None:
            return refused
        if new and new[-1].seq != before.last + len(new) and not step.lost:
            return refusal(step, Why.BEHIND, before.last)
        stream.events.extend(new)
        stream.forwarded = [message for message in stream.forwarded if message.key > step.taken]
        last = new[-1].seq if new else before.last
        stream.record = replace(before, last=last, sealed=before.sealed or step.seal)
        for end in step.ends:
            call = stream.calls.get((end.incarnation, end.request_id))
            if call is not None and call.state in _OPEN:
                stream.calls[call.incarnation, call.request_id] = replace(call, state=end.state, request=b"")
                self._open_calls.pop(call_key(call), None)
        return None

    def _put_call(self, step: PutCall) -> StepRefusal | None:
        stream = self._streams.get(step.stream)
        if stream is None or (refused := _not_written(stream, step)) is not None:
            return refusal(step, Why.GONE) if stream is None else refused
        call = stream.calls.get((step.incarnation, step.request_id))
        if call is not None and call.state in _OPEN:
            changed = replace(call, state=step.state, attempt=step.attempt, progress=step.progress)
            stream.calls[call.incarnation, call.request_id] = changed
        return None

    def _release(self, step: Release) -> StepRefusal | None:
        stream = self._streams.get(step.stream)
        if stream is None or (refused := _not_written(stream, step)) is not None:
            return refusal(step, Why.GONE) if stream is None else refused
        stream.record = replace(stream.record, node=NodeId(""))
        return None

    def _drop(self, stream_id: StreamId) -> None:
        if (stream := self._streams.pop(stream_id, None)) is not None:
            session = stream.record.session
            for call in stream.calls.values():
                if call.state in _OPEN:  # another call may have the id of an ended one by now
                    self._open_calls.pop(call_key(call), None)
            del self._of_session[session][stream_id]
            for ask in [ask for ask in self._asks.get(session, {}).values() if ask.stream == stream_id]:
                del self._asks[session][ask.id]
            if not self._of_session[session]:
                del self._of_session[session]
                self._asks.pop(session, None)

    # Mail and forwarded messages

    def _deliver(self, step: SendMail) -> StepRefusal | None:
        if (row := self._nodes.get(step.node)) is None:
            return refusal(step, Why.NOBODY)
        if len(row.mail) >= MAX_MAIL:
            return refusal(step, Why.FULL)
        self._put_mail(step.node, step.message)
        return None

    def _forward(self, step: Forward) -> StepRefusal | None:
        if (row := self._streams.get(step.stream)) is None:
            return refusal(step, Why.GONE)
        sender, last = row.senders.get(step.node, ("", 0))
        last = last if sender == step.sender else 0
        new = step.payloads[max(0, last + 1 - step.first) :]
        if not new:
            return None
        if row.record.node not in self._nodes:
            return refusal(step, Why.NOBODY)
        if step.first > last + 1:
            return refusal(step, Why.BEHIND, last)
        size = sum(map(self._payloads.size, [*new, *(payload for _, payload in row.forwarded)]))
        full = len(row.forwarded) + len(new) > MAX_FORWARDED or size > MAX_FORWARDED_BYTES
        if row.forwarded and full:
            return refusal(step, Why.FULL, len(row.forwarded))
        row.forwarded += [Forwarded(self._next_key(), payload) for payload in new]
        row.senders[step.node] = (step.sender, step.first + len(step.payloads) - 1)
        return None

    # Changes that are not steps

    async def keep_secret(self, name: str, made: bytes) -> bytes:
        self._writes += 1
        return self._secrets.setdefault(name, made)

    async def secrets(self) -> Mapping[str, bytes]:
        return dict(self._secrets)

    async def claim(self, stream: StreamId, *, node: NodeId, held: Fence, known: int = 0) -> StreamRecord | None:
        found = self._streams.get(stream)
        if found is None or found.record.fence != held or found.record.sealed:
            return None
        self._writes += 1
        before = found.record
        found.generations.append(Generation(generation=before.generation, end=before.last))
        del found.generations[: -records.KEPT_GENERATIONS]
        generation = max(before.generation, known) + 1
        found.record = replace(before, node=node, fence=self._new_fence(generation), generation=generation)
        return found.record

    async def reattach(self, session: SessionId) -> SessionRecord | None:
        if (record := self._going_on(session)) is None:
            return None
        self._writes += 1
        self._sessions[session] = replace(record, incarnation=record.incarnation + 1, revision=record.revision + 1)
        return self._payloads.decode(self._sessions[session])

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
        for session in list(self._sessions.values()):
            before = cutoffs.answers if session.kind is RecordKind.SESSION else cutoffs.calls
            if session.active < before and not self._in_use(session):
                self._end(EndSession(session=session.id, time=session.active, reason=""))
                self._sessions.pop(session.id, None)
                rows += 1
        self._writes += 1
        return rows


def caller(session: SessionRecord) -> tuple[str, str]:
    """Give the name that opened a session, or the address."""
    return session.owner, session.address


def call_key(call: CallRecord) -> tuple[SessionId, int, int | str]:
    """Give what no two running calls share (12)."""
    return call.session, call.incarnation, coerce_id(call.request_id)


def _reached(stream: StreamRow, step: Reached) -> StreamRecord:
    record = stream.record
    ends = {ended.generation: ended.end for ended in stream.generations} | {record.generation: record.last}
    through = min(step.through, ends.get(step.generation, 0))
    return replace(record, delivered=max(record.delivered, through), unread=step.unread)


def _not_written(stream: StreamRow, step: Append | PutCall | Release) -> StepRefusal | None:
    """Give the refusal of a step whose writer is not the stream's."""
    record = stream.record
    if record.fence != step.fence:
        return refusal(step, Why.FENCED, record.fence)
    if record.sealed:
        return refusal(step, Why.SEALED)
    return None if record.node or isinstance(step, Release) else refusal(step, Why.RELEASED)
