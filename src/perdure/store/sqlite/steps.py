"""Steps, applied to the writing connection within a transaction that the caller holds.

The key of a stream is remembered although another process may drop the stream, and SQLite may then give the key to
another one. So a remembered key serves only steps that show a fence: no stream of another process has a fence of ours.
And if the key comes back to this process it is not higher than one that was seen before, which ends all remembering.
"""

from __future__ import annotations

import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from perdure._core import retention, sticky
from perdure._core.chains import Chain
from perdure._core.ids import Fence, NodeId, SessionId, StreamId
from perdure._core.states import CallState
from perdure.errors import (
    IdTaken,
    MailFull,
    NodeGone,
    SessionEnded,
    StaleFence,
    TooManyCalls,
    TooManySessions,
)
from perdure.store.base import (
    KEPT_GENERATIONS,
    MAX_FORWARDED,
    MAX_FORWARDED_BYTES,
    MAX_MAIL,
    RECORD_VERSION,
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
    SessionLimits,
    SessionRecord,
    Step,
    StepRefusal,
    Stick,
    StreamRecord,
    Trim,
)
from perdure.store.sqlite import rows
from perdure.store.sqlite import sql_files as _sql

_SQL = _sql.queries()
_EXTEND = _SQL["extend_stream"]
_SEAL = _SQL["seal_stream"]
_APPEND = _SQL["append_event"]
_END_CALL = _SQL["end_call"]
_OPEN_STREAM = _SQL["open_stream"]
_OPEN_CALL = _SQL["open_call"]

_OPEN = (CallState.RUNNING, CallState.WAITING)

MAX_INLINE_EVENTS = 512
MAX_INLINE_BYTES = 1 << 20
"""What may be written, or forgotten, in the event loop: one or two milliseconds' worth."""

MAX_KEYS = 20_000
"""Streams whose keys are remembered: about 3 MiB, and more than are written at a time."""


class Steps:
    """Applies steps. Holds the keys of streams written lately; `forget` them when a transaction is undone."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._cursor = connection.cursor()
        self._keys: OrderedDict[StreamId, int] = OrderedDict()
        self._newest = 0
        self._apply: dict[type[Any], Callable[[Any], StepRefusal | None]] = {
            Append: self._append,
            OpenStream: self._open_stream,
            Forward: self._forward,
            PutCall: self._put_call,
            Release: self._release,
            PutSession: self._put_session,
            ChangeSession: self._change_session,
            Stick: self._stick,
            EndSession: self._end_session,
            Trim: self._trim,
            DropStream: self._drop_stream,
            OpenAsk: self._open_ask,
            CloseAsk: self._close_ask,
            PutReader: self._put_reader,
            MoveReader: self._move_reader,
            LeaveReader: self._leave_reader,
            Reached: self._reached,
            SendMail: self._post,
            MailReceived: self._received,
        }

    def apply(self, steps: Sequence[Step]) -> Refusals:
        apply = self._apply
        return [apply[type(step)](step) for step in steps]

    def forget(self) -> None:
        self._keys.clear()

    def _key(self, stream: StreamId) -> int | None:
        key = self._keys.get(stream)
        if key is not None:
            self._keys.move_to_end(stream)
            return key
        key = self._look_up(stream)
        return None if key is None else self._remember(stream, key)

    def _look_up(self, stream: StreamId) -> int | None:
        row = self._cursor.execute(_SQL["stream_key"], (stream,)).fetchone()
        return None if row is None else int(row[0])

    def _remember(self, stream: StreamId, key: int) -> int:
        self._keys[stream] = key
        if len(self._keys) > MAX_KEYS:
            self._keys.popitem(last=False)
        return key

    # Streams and events

    def _open_stream(self, step: OpenStream) -> IdTaken | SessionEnded | TooManyCalls | None:
        cursor, record = self._cursor, step.record
        listed = not any(call.state in _OPEN for call in step.calls)
        cursor.execute(_OPEN_STREAM, rows.stream_row(record, listed=listed))
        if cursor.rowcount != 1:
            there = self._look_up(record.id) is not None
            return None if there else SessionEnded(f"session {record.session[:8]} has ended")
        key = cursor.lastrowid or 0
        if key <= self._newest:
            self.forget()
        self._newest = key
        for place, call in enumerate(step.calls):
            cursor.execute(_OPEN_CALL, rows.call_row(key, place, call))
            if cursor.rowcount != 1:
                cursor.execute(_SQL["close_stream"], (key,))
                return IdTaken(f"request {call.request_id!r} of session {call.session[:8]} runs already")
        if step.most_calls is not None:
            (running,) = cursor.execute(_SQL["count_calls"], (record.session,)).fetchone()
            if running > step.most_calls:
                cursor.execute(_SQL["close_stream"], (key,))
                return TooManyCalls(f"session {record.session[:8]} has {running - len(step.calls)} calls running")
        self._remember(record.id, key)
        return None

    def _append(self, step: Append) -> StaleFence | None:
        key = self._key(step.stream)
        if key is None:
            return _stale(step, "is not there")
        if not self._append_next(key, step) and (refusal := self._append_new(key, step)) is not None:
            return refusal
        if step.taken:
            self._cursor.execute(_SQL["take_forwarded"], (key, step.taken))
        if step.seal:
            self._keys.pop(step.stream, None)  # it will not be written again
        for end in step.ends:
            request_id = rows.request_id_text(end.request_id)
            self._cursor.execute(_END_CALL, (end.state.value, key, end.incarnation, request_id))
        if step.ends and not step.seal:
            self._cursor.execute(_SQL["list_stream"], {"stream": key})
        return None

    def _append_next(self, key: int, step: Append) -> bool:
        """The plain case, with one look at the stream: our fence, and the events follow what is there."""
        events = step.events
        if not events or events[-1].seq - events[0].seq + 1 != len(events):
            return False
        cursor = self._cursor
        # Two statements: to mention "sealed" costs the partial index on it an entry each time.
        cursor.execute(_SEAL if step.seal else _EXTEND, (events[-1].seq, key, step.fence, events[0].seq - 1))
        if cursor.rowcount != 1:
            return False
        if len(events) == 1:
            cursor.execute(_APPEND, (key, *events[0]))
        else:
            cursor.executemany(_APPEND, [(key, *event) for event in events])
        return True

    def _append_new(self, key: int, step: Append) -> StaleFence | None:
        """Any other case: find out what is there, and append what is not."""
        row = self._cursor.execute(_SQL["stream_end"], (key,)).fetchone()
        if row is None:
            return _stale(step, "is not there")
        fence, last, sealed, node = row
        if fence != step.fence:
            return _stale(step, f"is written under fence {fence}")
        new = [event for event in step.events if event.seq > last]
        if new and (sealed or not node):
            return _stale(step, "is sealed" if sealed else "was let go of")
        if new and new[-1].seq - last != len(new):
            return _stale(step, f"ends at {last}, and event {new[0].seq} does not follow")
        if new:
            self._cursor.executemany(_APPEND, [(key, *event) for event in new])
            last = new[-1].seq
        self._cursor.execute(_SQL["set_stream_end"], (last, sealed or step.seal, key))
        return None

    def _put_call(self, step: PutCall) -> StaleFence | None:
        key = self._key(step.stream)
        if (refusal := self._not_written(key, step)) is not None:
            return refusal
        row = (RECORD_VERSION, step.state.value, step.attempt, step.progress)
        request_id = rows.request_id_text(step.request_id)
        self._cursor.execute(_SQL["put_call"], (*row, key, step.incarnation, request_id))
        return None

    def _release(self, step: Release) -> StaleFence | None:
        key = self._key(step.stream)
        if (refusal := self._not_written(key, step)) is not None:
            return refusal
        self._cursor.execute(_SQL["release_stream"], (key,))
        return None

    def _not_written(self, key: int | None, step: PutCall | Release) -> StaleFence | None:
        row = None if key is None else self._cursor.execute(_SQL["stream_end"], (key,)).fetchone()
        if row is None:
            return _stale(step, "is not there")
        fence, _, sealed, node = row
        if fence != step.fence:
            return _stale(step, f"is written under fence {fence}")
        if sealed:
            return _stale(step, "is sealed")
        return None if node or isinstance(step, Release) else _stale(step, "was let go of")

    def _trim(self, step: Trim) -> None:
        self._cursor.execute(_SQL["trim"], (step.stream, step.through))

    def _drop_stream(self, step: DropStream) -> None:
        self._keys.pop(step.stream, None)
        self._cursor.execute(_SQL["drop_stream"], (step.stream,))

    # Sessions, asks, readers

    def _put_session(self, step: PutSession) -> TooManySessions | None:
        cursor, record = self._cursor, step.record
        cursor.execute(_SQL["put_session"], rows.session_row(record))
        if cursor.rowcount != 1 or step.limits is None:
            return None
        refusal = self._beyond(record, step.limits)
        if refusal is not None:
            cursor.execute(_SQL["unput_session"], (record.id,))
        return refusal

    def _beyond(self, record: SessionRecord, limits: SessionLimits) -> TooManySessions | None:
        """The session is there already; was it one too many?"""
        caller = rows.loose(record.owner), record.address
        if any(caller):
            (count,) = self._cursor.execute(_SQL["count_sessions_at"], caller).fetchone()
            if count > limits.caller:
                return TooManySessions(f"the caller has {count - 1} sessions", of_caller=True)
        (count,) = self._cursor.execute(_SQL["count_sessions"]).fetchone()
        return TooManySessions(f"there are {count - 1} sessions", of_caller=False) if count > limits.total else None

    def _change_session(self, step: ChangeSession) -> None:
        self._cursor.execute(_SQL["change_session"], rows.change_values(step))

    def _stick(self, step: Stick) -> None:
        row = self._cursor.execute(_SQL["read_sticky"], (step.session,)).fetchone()
        if row is not None:
            requests = sticky.after(rows.sticky_requests(row[0]), step.request)
            self._cursor.execute(_SQL["set_sticky"], (RECORD_VERSION, rows.sticky_text(requests), step.session))

    def _end_session(self, step: EndSession) -> None:
        if step.unused_since is not None:
            unused = self._cursor.execute(_SQL["is_unused"], (step.session, step.unused_since)).fetchone()
            if unused is None:
                return
        self.forget()
        cursor = self._cursor
        cursor.execute(_SQL["drop_streams"], (step.session,))
        row = cursor.execute(_SQL["params_of"], (step.session,)).fetchone()
        if row is None:
            return
        keeps = retention.keeps_params(step.reason, row[0])
        values = {"session": step.session, "time": step.time, "reason": step.reason, "keeps": keeps}
        cursor.execute(_SQL["end_session"], values)
        of_caller = {"session": step.session, "most": retention.MAX_ENDED_OF_CALLER}
        cursor.execute(_SQL["forget_ended_of"], of_caller)
        cursor.execute(_SQL["forget_ended"], {"most": retention.MAX_ENDED})

    def _open_ask(self, step: OpenAsk) -> None:
        self._cursor.execute(_SQL["open_ask"], rows.ask_row(step.record))

    def _close_ask(self, step: CloseAsk) -> None:
        self._cursor.execute(_SQL["close_ask"], (step.session, step.id))

    def _put_reader(self, step: PutReader) -> None:
        self._cursor.execute(_SQL["put_reader"], rows.reader_row(step.record))

    def _move_reader(self, step: MoveReader) -> None:
        self._cursor.execute(_SQL["move_reader"], (step.seq, step.stream, step.reader))

    def _leave_reader(self, step: LeaveReader) -> None:
        self._cursor.execute(_SQL["leave_reader"], (step.stream, step.reader))

    def _reached(self, step: Reached) -> None:
        values = {"stream": step.stream, "generation": step.generation, "through": step.through, "unread": step.unread}
        self._cursor.execute(_SQL["reach"], values)

    # Mail

    def _post(self, step: SendMail) -> NodeGone | MailFull | None:
        # With few messages there this look is short; with many the node does not deal with its mail.
        if self._cursor.execute(_SQL["much_mail"], (step.node, MAX_MAIL - 1)).fetchone() is not None:
            return MailFull(f"{MAX_MAIL} messages wait for node {step.node}")
        self._cursor.execute(_SQL["post_mail"], (step.message, step.node))
        return None if self._cursor.rowcount == 1 else NodeGone(f"there is no node {step.node}")

    def _received(self, step: MailReceived) -> None:
        self._cursor.execute(_SQL["take_mail"], (step.node, step.through))

    def _forward(self, step: Forward) -> SessionEnded | NodeGone | MailFull | None:
        cursor = self._cursor
        found = cursor.execute(_SQL["stream_writer"], (step.stream,)).fetchone()
        if found is None:
            return SessionEnded(f"stream {step.stream} is not there")
        key, is_written = found
        sender, last = cursor.execute(_SQL["sender_to"], (key, step.node)).fetchone() or ("", 0)
        last = last if sender == step.sender else 0
        new = step.payloads[max(0, last + 1 - step.first) :]
        if not new:
            return None
        if not is_written:
            return NodeGone(f"no node writes stream {step.stream}")
        count, size = cursor.execute(_SQL["count_forwarded"], (key,)).fetchone()
        full = count + len(new) > MAX_FORWARDED or size + sum(map(len, new)) > MAX_FORWARDED_BYTES
        if step.first > last + 1 or (count and full):
            return MailFull(f"{count} messages wait for stream {step.stream}")
        cursor.executemany(_SQL["forward"], [(key, payload) for payload in new])
        cursor.execute(_SQL["put_sender"], (key, step.node, step.sender, step.first + len(step.payloads) - 1))
        return None

    # What is not a step

    def next_fence(self) -> Fence:
        self._cursor.execute(_SQL["raise_fence"])
        (fence,) = self._cursor.execute(_SQL["read_fence"]).fetchone()
        return Fence(fence)

    def claim(self, stream: StreamId, *, node: NodeId, held: Fence) -> StreamRecord | None:
        self._cursor.execute(_SQL["end_generation"], (stream, held))
        if self._cursor.rowcount != 1:
            return None
        self._cursor.execute(_SQL["next_generation"], (node, self.next_fence(), stream))
        self._cursor.execute(_SQL["forget_generations"], {"stream": stream, "kept": KEPT_GENERATIONS})
        return rows.stream_record(self._cursor.execute(_SQL["stream_by_id"], (stream,)).fetchone())

    def reattach(self, session: SessionId) -> SessionRecord | None:
        self._cursor.execute(_SQL["next_incarnation"], (session,))
        if self._cursor.rowcount != 1:
            return None
        return rows.session_record(self._cursor.execute(_SQL["session_by_id"], (session,)).fetchone())

    def put_chain(self, chain: Chain) -> bool:
        self._cursor.execute(_SQL["put_chain"], rows.chain_row(chain))
        return self._cursor.rowcount == 1

    def change_chain(self, seen: Chain, chain: Chain | None) -> bool:
        where = seen.name, seen.current, seen.next
        if chain is None:
            self._cursor.execute(_SQL["drop_chain"], where)
        else:
            self._cursor.execute(_SQL["change_chain"], (RECORD_VERSION, chain.current, chain.next, *where))
        return self._cursor.rowcount == 1

    def forgets_little(self, steps: Sequence[Step]) -> bool:
        """Whether what the steps forget is soon done."""
        if any(isinstance(step, EndSession) for step in steps):
            return False
        return sum(self._forgets(step) for step in steps if isinstance(step, Trim | DropStream)) <= MAX_INLINE_EVENTS

    def _forgets(self, step: Trim | DropStream) -> int:
        """How many events a step forgets, at most."""
        key = self._look_up(step.stream)
        oldest = None if key is None else self._cursor.execute(_SQL["oldest_event"], (key,)).fetchone()
        if oldest is None:
            return 0
        if isinstance(step, Trim):
            return int(max(0, step.through - oldest[0] + 1))
        end = self._cursor.execute(_SQL["stream_end"], (key,)).fetchone()
        return 0 if end is None else int(end[1] - oldest[0] + 1)


def _stale(step: Append | PutCall | Release, why: str) -> StaleFence:
    return StaleFence(f"fence {step.fence} may not write stream {step.stream}: it {why}")
