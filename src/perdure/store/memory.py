"""The store in memory: the promises of `store.interface` in their shortest form, and the model that other stores are
tested against.

Durable (3) means here: as long as this object lives. It survives a dropped connection, not the process. Several nodes
of one process may share the object; opening and closing mean nothing to it.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from perdure._core import retention
from perdure._core.ids import Fence, Generation, NodeId, RecordKind, SessionId, StreamId, new_fence
from perdure._core.jsonrpc import coerce_id
from perdure._core.leases import Leases
from perdure._core.limits import Caller
from perdure._core.retention import Cutoffs
from perdure._core.states import TOOL_STEP, UNENDED, ClaimState, SessionState
from perdure.store import records, steps
from perdure.store.interface import HintListener, Store
from perdure.store.records import (
    FORWARDED_AT_ONCE,
    MAIL_AT_ONCE,
    MAX_FORWARDED,
    MAX_FORWARDED_BYTES,
    MAX_MAIL,
    READ_BYTES,
    AnsweredPage,
    AskRecord,
    CallRecord,
    Event,
    Followed,
    Forwarded,
    Mail,
    NodeRecord,
    Overview,
    ReaderRecord,
    SessionRecord,
    StreamRecord,
    ToolStepRecord,
    UsageRecord,
    next_key,
)
from perdure.store.steps import Refusals, Step, StepRejected, Why, changed, refusal

_seq = attrgetter("seq")

CallKey = tuple[SessionId, int, int | str]
"""What no two calls share that have not ended (12): the id is in the form in which ids are compared."""


@dataclass(slots=True)
class StreamRow:
    """A stream with all that is deleted with it."""

    record: StreamRecord
    events: list[Event] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    calls: dict[tuple[int, int | str], CallRecord] = field(default_factory=dict)
    steps: dict[tuple[int, int | str, int], ToolStepRecord] = field(default_factory=dict)
    """The steps of its calls' tools, by incarnation, request id and number."""
    reader: ReaderRecord | None = None
    forwarded: list[Forwarded] = field(default_factory=list)
    senders: dict[NodeId, tuple[str, int]] = field(default_factory=dict)
    """The sender of each node, and the number of its last message."""


@dataclass(slots=True)
class NodeRow:
    record: NodeRecord
    left: bool = False
    holding: bool = False
    mail: list[Mail] = field(default_factory=list)


class MemoryStore(Store):
    """Keeps everything in dictionaries."""

    shared = False
    lapses = False
    """Its nodes are in one process, and die together."""

    def __init__(self, *, wall: Callable[[], float] = time.time) -> None:
        self._offset = wall() - time.monotonic()
        self._sessions: dict[SessionId, SessionRecord] = {}
        self._streams: dict[StreamId, StreamRow] = {}
        self._of_session: dict[SessionId, dict[StreamId, StreamRow]] = {}
        self._open_calls: set[CallKey] = set()
        """The calls that have not ended."""
        self._asks: dict[SessionId, dict[str, AskRecord]] = {}
        self._notes: dict[str, tuple[str, bytes]] = {}
        """By name: the session, or nothing, and the value."""
        self._nodes: dict[NodeId, NodeRow] = {}
        self._subscriptions: dict[object, tuple[NodeId, HintListener, asyncio.AbstractEventLoop]] = {}
        self._views: list[MemoryLiveness] = []
        self._key = 0
        self._writes = 0

    async def open(self) -> None:
        pass

    async def aclose(self) -> None:
        pass

    # Events

    async def read(self, stream: StreamId, *, after: int, limit: int) -> Sequence[Event]:
        found = self._streams.get(stream)
        if found is None:
            return ()
        start = bisect.bisect_right(found.events, after, key=_seq)
        events = found.events[start : start + limit]
        sizes = itertools.accumulate(len(event.payload) for event in events)
        return events[: 1 + sum(1 for size in sizes if size < READ_BYTES)]

    async def streams(self, whose: SessionId | AnsweredPage, *, only_unread: bool = False) -> Sequence[StreamRecord]:
        if not isinstance(whose, AnsweredPage):
            records = [stream.record for stream in self._of_session.get(whose, {}).values()]
            return [record for record in records if record.unread or not only_unread]
        own = [
            stream.record
            for session in self._sessions.values()
            if caller_of(session) == whose.caller
            and session.kind is RecordKind.SESSION
            and session.state is not SessionState.ENDED
            for stream in self._of_session.get(session.id, {}).values()
        ]
        found = [record for record in own if record.answered and (record.opened, record.id) > whose.after]
        return sorted(found, key=lambda record: (record.opened, record.id))[: whose.limit]

    async def follow(self, after: Mapping[StreamId, int], *, limit: int) -> Mapping[StreamId, Followed]:
        found = {stream: self._streams[stream] for stream in after if stream in self._streams}
        return {stream: Followed(row.record, reader=row.reader) for stream, row in found.items()}

    async def kept(self, session: SessionId) -> Sequence[UsageRecord]:
        found: list[UsageRecord] = []
        for stream in self._of_session.get(session, {}).values():
            if stream.record.sealed:
                events, answers = (
                    [len(event.payload) for event in stream.events if event.final is final] for final in (False, True)
                )
                kept = UsageRecord(
                    stream=stream.record.id,
                    opened=stream.record.opened,
                    events=len(events),
                    answers=len(answers),
                    event_bytes=sum(events),
                    answer_bytes=sum(answers),
                )
                found.append(kept)
        return found

    async def generations(self, stream: StreamId) -> Sequence[Generation]:
        found = self._streams.get(stream)
        return tuple(found.generations) if found else ()

    # Sessions

    async def session(self, session: SessionId) -> SessionRecord | None:
        return self._sessions.get(session)

    async def count_states(
        self, kind: RecordKind = RecordKind.SESSION, caller: Caller | None = None
    ) -> Mapping[SessionState, int]:
        records = [session for session in self._sessions.values() if session.kind is kind]
        if caller is not None:
            unended = (record for record in records if record.state is not SessionState.ENDED)
            records = [record for record in unended if caller_of(record) == caller]
        return Counter(record.state for record in records)

    async def longest_dormant(
        self, caller: Caller | None = None, *, kind: RecordKind = RecordKind.SESSION, delivered: bool = False
    ) -> SessionRecord | None:
        dormant = [s for s in self._sessions.values() if s.state is SessionState.DORMANT and s.kind is kind]
        unused = [session for session in dormant if not self._in_use(session)]
        wanted = [session for session in unused if caller in (None, caller_of(session))]
        if delivered:
            wanted = [session for session in wanted if not await self.streams(session.id, only_unread=True)]
        return min(wanted, key=attrgetter("active"), default=None)

    async def newest_of(self, caller: Caller, *, kind: RecordKind, limit: int) -> Sequence[SessionRecord]:
        own = [s for s in self._sessions.values() if s.kind is kind and caller_of(s) == caller]
        kept = [s for s in own if s.state is not SessionState.ENDED and (s.is_task or kind is not RecordKind.CALL)]
        return sorted(kept, key=attrgetter("active"), reverse=True)[:limit]

    async def bytes_of(self, caller: Caller) -> int:
        calls = [s for s in self._sessions.values() if s.kind is RecordKind.CALL and s.state is SessionState.DORMANT]
        own = [session for session in calls if caller_of(session) == caller]
        streams = [row for session in own for row in self._of_session.get(session.id, {}).values()]
        answers = sum(len(event.payload) for stream in streams for event in stream.events if event.final)
        return answers + sum(len(session.client_params) for session in own)

    # Ledger, asks, readers

    async def calls(
        self, session: SessionId, *, stream: StreamId | None = None, only_open: bool = False
    ) -> Sequence[CallRecord]:
        streams = [row for id_, row in self._of_session.get(session, {}).items() if stream in (None, id_)]
        return [call for row in streams for call in row.calls.values() if call.state in UNENDED or not only_open]

    async def tool_steps(self, stream: StreamId, *, values: bool = True) -> Sequence[ToolStepRecord]:
        row = self._streams.get(stream)
        found = sorted(row.steps.values(), key=lambda s: (s.number, json.dumps(s.request_id))) if row else []
        return found if values else [replace(record, value=b"") for record in found]

    async def asks(self, session: SessionId) -> Sequence[AskRecord]:
        return list(self._asks.get(session, {}).values())

    # Notes

    async def notes(self, prefix: str) -> Mapping[str, bytes]:
        return {name: value for name, (_, value) in self._notes.items() if name.startswith(prefix)}

    async def change_note(self, name: str, *, seen: bytes | None, value: bytes | None, session: str = "") -> bool:
        _, there = self._notes.get(name, ("", None))
        if there != seen or (session and self._going_on(SessionId(session)) is None):
            return False
        self._writes += 1
        if value is None:
            self._notes.pop(name, None)
        else:
            self._notes[name] = (self._notes[name][0] if name in self._notes else session, value)
        return True

    # Steps

    async def commit(self, steps: Sequence[Step]) -> Refusals:
        return self.commit_now(steps)

    def commit_now(self, steps: Sequence[Step]) -> Refusals:
        self._writes += 1
        return [self._apply(step) for step in steps]

    def _apply(self, step: Step) -> StepRejected | None:
        match step:
            case steps.Append():
                return self._append(step)
            case steps.OpenStream():
                return self._open(step)
            case steps.Forward():
                return self._forward(step)
            case steps.PutCall() | steps.PutToolStep() | steps.Release():
                return self._change_stream(step)
            case steps.SendMail():
                node = self._nodes.get(step.node)
                if node is None or len(node.mail) >= MAX_MAIL:
                    return refusal(step, Why.NO_NODE if node is None else Why.FULL)
                self._put_mail(step.node, step.message)
            case steps.MailReceived() if node := self._nodes.get(step.node):
                node.mail = [mail for mail in node.mail if mail.key > step.through]
            case steps.PutSession():
                return self._put_session(step)
            case steps.ChangeSession() if session := self._going_on(step.session):
                self._sessions[session.id] = changed(session, step)
            case steps.EndSession():
                self._end(step)
            case steps.Trim() if found := self._streams.get(step.stream):
                found.events = [e for e in found.events if e.final or e.seq > step.through]
            case steps.DropStream():
                self._drop(step.stream)
            case steps.OpenAsk(record=ask) if ask.stream in self._streams:
                self._asks.setdefault(ask.session, {}).setdefault(ask.id, ask)
            case steps.CloseAsk():
                self._asks.get(step.session, {}).pop(step.id, None)
            case steps.PutReader(record=reader) if found := self._streams.get(reader.stream):
                if step.attaches or _is_read_by(found, reader.reader):
                    found.reader = reader
            case steps.LeaveReader() if (found := self._streams.get(step.stream)) and _is_read_by(found, step.reader):
                found.reader = None
            case steps.Reached() if found := self._streams.get(step.stream):
                record = found.record
                ends = {ended.generation: ended.end for ended in found.generations} | {record.generation: record.last}
                delivered = max(record.delivered, min(step.through, ends.get(step.generation, 0)))
                found.record = replace(record, delivered=delivered, unread=step.unread)
        return None

    # Steps of sessions

    def _put_session(self, step: steps.PutSession) -> StepRejected | None:
        record, limits = step.record, step.limits
        if record.id in self._sessions:
            return None
        if limits is not None:
            alike = [session for session in self._sessions.values() if session.kind is record.kind]
            going_on = [session for session in alike if session.state is not SessionState.ENDED]
            of_caller = sum(caller_of(session) == caller_of(record) for session in going_on)
            if any(caller_of(record)) and of_caller >= limits.caller:
                return refusal(step, Why.CALLER, of_caller)
            if limits.total is not None and len(going_on) >= limits.total:
                return refusal(step, Why.ALL, len(going_on))
        self._sessions[record.id] = record
        return None

    def _end(self, step: steps.EndSession) -> None:
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
            kept = params if retention.keeps_params(step.reason, len(params)) else b""
            ended = replace(
                record,
                state=SessionState.ENDED,
                revision=record.revision + 1,
                client_params=kept,
                result=b"",
                upstream=b"",
                sticky=(),
                active=step.time,
                ended=step.reason,
            )
            self._sessions[step.session] = ended
            self._notes = {name: note for name, note in self._notes.items() if note[0] != step.session}
            # Of the caller's ended sessions, and of all, no more than may be kept.
            over = [session for session in self._sessions.values() if session.state is SessionState.ENDED]
            of_caller = [session for session in over if caller_of(session) == caller_of(ended)]
            for sessions, most in ((of_caller, retention.MAX_ENDED_OF_CALLER), (over, retention.MAX_ENDED)):
                if len(sessions) > most:
                    del self._sessions[min(sessions, key=attrgetter("active")).id]
                    break  # one has ended, so one was too many

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

    def _open(self, step: steps.OpenStream) -> StepRejected | None:
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
        self._open_calls.update(keys)
        self._streams[record.id] = stream
        self._of_session.setdefault(record.session, {})[record.id] = stream
        return None

    def _append(self, step: steps.Append) -> StepRejected | None:
        if (stream := self._streams.get(step.stream)) is None:
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
        sealed, answered = before.sealed or step.seal, before.answered or step.answered
        stream.record = replace(before, last=last, sealed=sealed, answered=answered)
        for end in step.ends:
            call = stream.calls.get((end.incarnation, end.request_id))
            if call is not None and call.state in UNENDED:
                ended = replace(call, state=end.state, request=b"", upstream=b"")
                stream.calls[call.incarnation, call.request_id] = ended
                self._open_calls.discard(call_key(call))
            for key, done in stream.steps.items() if end.stepped else ():
                if key[:2] == (end.incarnation, end.request_id):
                    stream.steps[key] = replace(done, value=b"")
        return None

    def _change_stream(self, step: steps.PutCall | steps.PutToolStep | steps.Release) -> StepRejected | None:
        if (stream := self._streams.get(step.stream)) is None:
            return refusal(step, Why.GONE)
        if (refused := _not_written(stream, step)) is not None:
            return refused
        if isinstance(step, steps.Release):
            stream.record = replace(stream.record, node=NodeId(""))
        elif isinstance(step, steps.PutToolStep):
            record = step.record
            call = stream.calls.get((record.incarnation, record.request_id))
            before = stream.steps.get((record.incarnation, record.request_id, step.after))
            if step.after and (before is None or (step.after_ended and TOOL_STEP[before.state])):
                return refusal(step, Why.BEHIND)
            known = stream.steps.get(key := (record.incarnation, record.request_id, record.number))
            if call is not None and call.state in UNENDED and (known is None or TOOL_STEP[known.state]):
                stream.steps[key] = record
        elif (call := stream.calls.get((step.incarnation, step.request_id))) is not None and call.state in UNENDED:
            upstream = call.upstream if step.upstream is None else step.upstream
            put = replace(call, state=step.state, attempt=step.attempt, progress=step.progress, upstream=upstream)
            stream.calls[call.incarnation, call.request_id] = put
        return None

    def _drop(self, stream_id: StreamId) -> None:
        if (stream := self._streams.pop(stream_id, None)) is not None:
            session = stream.record.session
            for call in stream.calls.values():
                if call.state in UNENDED:  # another call may have the id of an ended one by now
                    self._open_calls.discard(call_key(call))
            del self._of_session[session][stream_id]
            for ask in [ask for ask in self._asks.get(session, {}).values() if ask.stream == stream_id]:
                del self._asks[session][ask.id]
            if not self._of_session[session]:
                del self._of_session[session]
                self._asks.pop(session, None)

    def _forward(self, step: steps.Forward) -> StepRejected | None:
        if (row := self._streams.get(step.stream)) is None:
            return refusal(step, Why.GONE)
        sender, last = row.senders.get(step.node, ("", 0))
        last = last if sender == step.sender else 0
        new = step.payloads[max(0, last + 1 - step.first) :]
        if not new:
            return None
        if row.record.node not in self._nodes:
            return refusal(step, Why.NO_NODE)
        if step.first > last + 1:
            return refusal(step, Why.BEHIND, last)
        size = sum(map(len, [*new, *(payload for _, payload in row.forwarded)]))
        full = len(row.forwarded) + len(new) > MAX_FORWARDED or size > MAX_FORWARDED_BYTES
        if row.forwarded and full:
            return refusal(step, Why.FULL, len(row.forwarded))
        row.forwarded += [Forwarded(self._next_key(), payload) for payload in new]
        row.senders[step.node] = (step.sender, step.first + len(step.payloads) - 1)
        return None

    # Changes that are not steps

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
        return self._sessions[session]

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
                self._end(steps.EndSession(session=session.id, time=session.active, reason=""))
                self._sessions.pop(session.id, None)
                rows += 1
        self._writes += 1
        return rows

    # Nodes

    def _new_fence(self, generation: int) -> Fence:
        return new_fence(generation, secrets.token_bytes)

    async def join(self, node: NodeId) -> Fence:
        self._writes += 1
        self._nodes[node] = NodeRow(NodeRecord(id=node, beat=0, facts=b"{}"))
        self._look_at_claims()
        return self._new_fence(1)

    async def leave(self, node: NodeId) -> None:
        if (row := self._nodes.get(node)) is not None:
            self._writes += 1
            row.left = True
            self._forget_sender(node)
            if not (row.mail or self._read_by(node) or await self.written_by(node)):
                del self._nodes[node]
            self._look_at_claims()

    async def nodes(self) -> Sequence[NodeRecord]:
        return [row.record for row in self._nodes.values()]

    async def written_by(self, node: NodeId, *, forwarded: bool = False) -> Sequence[StreamRecord]:
        if forwarded:
            waited_for = [row.record for row in self._streams.values() if row.forwarded]
            return [record for record in waited_for if record.node == node or record.node not in self._nodes]
        return [row.record for row in self._streams.values() if row.record.node == node and not row.record.sealed]

    async def bury(self, node: NodeId, *, heir: NodeId, beat: int | None = None) -> Sequence[StreamRecord] | None:
        row = self._nodes.get(node)
        if row is not None and beat not in (None, row.record.beat):
            return None
        self._writes += 1
        if (row := self._nodes.pop(node, None)) is not None:
            # Under new keys: a `MailReceived` of the heir may be on its way, and must not take what it has not seen.
            for mail in row.mail:
                self._put_mail(heir, mail.message)
            self._look_at_claims()
        self._forget_sender(node)
        read = self._read_by(node)
        for stream in read:
            stream.reader = None
        return [stream.record for stream in read]

    def _read_by(self, node: NodeId) -> list[StreamRow]:
        return [row for row in self._streams.values() if row.reader is not None and row.reader.node == node]

    # Mail

    async def mail(self, node: NodeId, *, after: int = 0) -> Sequence[Mail]:
        row = self._nodes.get(node)
        mail = [mail for mail in row.mail if mail.key > after] if row else []
        return mail[:MAIL_AT_ONCE]

    def _put_mail(self, node: NodeId, message: bytes) -> None:
        if (row := self._nodes.get(node)) is not None:
            row.mail.append(Mail(self._next_key(), message))
            self.hint(node, ())

    def _next_key(self) -> int:
        self._key = next_key(self._key, now=time.time())
        return self._key

    # Forwarded messages

    async def forwarded(self, stream: StreamId, *, after: int = 0) -> Sequence[Forwarded]:
        row = self._streams.get(stream)
        messages = [message for message in row.forwarded if message.key > after] if row else []
        return messages[:FORWARDED_AT_ONCE]

    def _forget_sender(self, node: NodeId) -> None:
        for row in self._streams.values():
            row.senders.pop(node, None)

    # Wake-ups

    def subscribe(self, node: NodeId, listener: HintListener) -> Callable[[], None]:
        key = object()
        self._subscriptions[key] = (node, listener, asyncio.get_running_loop())
        return lambda: self._subscriptions.pop(key, None) and None

    def hint(self, node: NodeId, streams: Sequence[StreamId]) -> None:
        for key, (whose, _, loop) in self._subscriptions.items():
            if whose == node and not loop.is_closed():
                loop.call_soon(self._tell, key, tuple(streams))

    def _tell(self, key: object, streams: Sequence[StreamId]) -> None:
        if (subscription := self._subscriptions.get(key)) is not None:
            subscription[1](streams)

    def stamp(self) -> object:
        return self._writes

    def clock(self) -> float:
        return time.monotonic() + self._offset

    # Liveness

    def liveness(self, node: NodeId, *, lease: float, monotonic: Callable[[], float]) -> MemoryLiveness:
        return MemoryLiveness(self, node, lease=lease, monotonic=monotonic)

    def _look_at_claims(self) -> None:
        for view in self._views:
            view.look_at_claim()

    def _living(self) -> dict[NodeId, NodeRow]:
        """Return the nodes that have not left by themselves."""
        return {node: row for node, row in self._nodes.items() if not row.left}

    def _beat(self, node: NodeId, facts: bytes) -> None:
        self._writes += 1
        row = self._nodes[node]
        row.record = replace(row.record, beat=row.record.beat + 1, facts=facts)


class MemoryLiveness:
    """Decides by leases which nodes are alive, because no operating system frees a lock for a dead one here."""

    def __init__(self, store: MemoryStore, node: NodeId, *, lease: float, monotonic: Callable[[], float]) -> None:
        self._store = store
        self._node = node
        self._monotonic = monotonic
        self._leases = Leases(node, lease=lease, now=monotonic())
        self.node_claim = self._leases.claim
        store._views.append(self)
        self.look_at_claim()
        if self.node_claim.at(monotonic()) is not ClaimState.BURIED:
            store._beat(node, b"{}")

    def look_at_claim(self) -> None:
        """A node has joined, left or been buried."""
        now, row = self._monotonic(), self._store._nodes.get(self._node)
        if row is None or row.left:
            self.node_claim.bury()
        elif len(self._store._nodes) == 1:
            self._leases.alone(now=now)
        else:
            self._leases.joined(now=now)

    async def beat(self, facts: bytes) -> None:
        sent = self._monotonic()
        if self.node_claim.at(sent) is not ClaimState.BURIED:
            self._store._beat(self._node, facts)
            self._leases.beaten(sent=sent, now=self._monotonic())

    async def overview(self, *, mail_after: int) -> Overview:
        asked = self._monotonic()
        beats = {node: row.record.beat for node, row in self._store._nodes.items()}
        silent, living = self._leases.observe(beats, asked=asked, now=self._monotonic()), self._store._living()
        dead = {node: beats[node] for node in beats if (node in silent or node not in living) and node != self._node}
        return Overview([row.record for row in self._store._nodes.values()], dead)

    def hold(self, holding: bool) -> None:
        if self._node in self._store._living():
            self._store._nodes[self._node].holding = holding

    async def holders(self) -> Sequence[NodeId]:
        """A silent node is one of them until it is buried: it may still live."""
        return [node for node, row in self._store._living().items() if row.holding and node != self._node]

    def ages(self) -> dict[NodeId, float]:
        return self._leases.ages(now=self._monotonic())


def caller_of(session: SessionRecord) -> Caller:
    return Caller(session.owner, session.address)


def call_key(call: CallRecord) -> CallKey:
    return call.session, call.incarnation, coerce_id(call.request_id)


def _is_read_by(stream: StreamRow, reader: str) -> bool:
    return stream.reader is not None and stream.reader.reader == reader


def _not_written(
    stream: StreamRow, step: steps.Append | steps.PutCall | steps.PutToolStep | steps.Release
) -> StepRejected | None:
    """Return the refusal of a step whose writer is not the stream's."""
    record = stream.record
    if record.fence != step.fence:
        return refusal(step, Why.FENCED, record.fence)
    if record.sealed:
        return refusal(step, Why.SEALED)
    return None if record.node or isinstance(step, steps.Release) else refusal(step, Why.RELEASED)
