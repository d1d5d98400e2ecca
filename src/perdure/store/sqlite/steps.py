"""Applies steps to the writing connection, within a transaction that the caller holds."""

import secrets
import sqlite3
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from perdure._core import retention, sticky
from perdure._core.ids import Fence, NodeId, SessionId, StreamId, new_fence
from perdure._core.states import TOOL_STEP, UNENDED, ToolStepState
from perdure.store import records, rows, steps
from perdure.store.records import (
    MAX_FORWARDED,
    MAX_FORWARDED_BYTES,
    MAX_MAIL,
    SessionRecord,
    StreamRecord,
)
from perdure.store.sqlite import sql_files as _sql
from perdure.store.steps import Refusals, Step, StepRejected, Why, refusal

_SQL = _sql.queries()
_EXTEND = _SQL["extend_stream"]
_SEAL = _SQL["seal_stream"]
_APPEND = _SQL["append_event"]
_END_CALL = _SQL["end_call"]
_OPEN_STREAM = _SQL["open_stream"]
_OPEN_CALL = _SQL["open_call"]
_PUT_TOOL_STEP = _SQL["put_tool_step"]


MAX_INLINE_EVENTS = 512
MAX_INLINE_BYTES = 1 << 20
"""What may be written, or forgotten, in the event loop: one or two milliseconds' worth."""

MAX_KEYS = 20_000
"""Streams whose keys are remembered: about 3 MiB, and more than are written at a time."""


_STATEMENTS: Mapping[type[Step], str] = {
    steps.Trim: "trim",
    steps.CloseAsk: "close_ask",
    steps.PutReader: "put_reader",
    steps.LeaveReader: "leave_reader",
    steps.Reached: "reach",
    steps.MailReceived: "take_mail",
}
"""The steps that are one statement and are never refused."""


class StreamSteps:
    """Applies the steps of streams. Remembers the keys of streams written lately; `forget` them when a transaction is
    undone.

    A key is remembered although another process may drop its stream, and SQLite may then give the key to another one.
    So a remembered key serves only steps that show a fence: no stream of another process has a fence of this one. If
    the key comes back to this process it is not higher than one that was seen before, which ends all remembering.
    """

    def __init__(self, cursor: sqlite3.Cursor) -> None:
        self._cursor = cursor
        self._keys: OrderedDict[StreamId, int] = OrderedDict()
        self._newest = 0

    def forget(self) -> None:
        self._keys.clear()

    def _key(self, stream: StreamId) -> int | None:
        key = self._keys.get(stream)
        if key is not None:
            self._keys.move_to_end(stream)
            return key
        row = self._cursor.execute(_SQL["stream_key"], (stream,)).fetchone()
        return None if row is None else self._remember(stream, row[0])

    def _remember(self, stream: StreamId, key: int) -> int:
        self._keys[stream] = key
        if len(self._keys) > MAX_KEYS:
            self._keys.popitem(last=False)
        return key

    def drop_all_of(self, session: SessionId) -> None:
        for (stream,) in self._cursor.execute(_SQL["drop_streams"], (session,)).fetchall():
            self._keys.pop(stream, None)

    def open_stream(self, step: steps.OpenStream) -> StepRejected | None:
        cursor, record = self._cursor, step.record
        listed = not any(call.state in UNENDED for call in step.calls)
        cursor.execute(_OPEN_STREAM, rows.stream_row(record, listed=listed, seen=step.seen))
        if cursor.rowcount != 1:
            if (there := cursor.execute(_SQL["fence_of"], (record.id,)).fetchone()) is not None:
                fence, sealed = there
                if step.unique and fence != record.fence:
                    return refusal(step, Why.FENCED, fence)
                return refusal(step, Why.SEALED) if step.unique and sealed else None
            revision = cursor.execute(_SQL["revision_of"], (record.session,)).fetchone()
            return refusal(step, Why.ENDED) if revision is None else refusal(step, Why.CHANGED, *revision)
        key = cursor.lastrowid or 0
        if key <= self._newest:
            self.forget()
        self._newest = key
        for place, call in enumerate(step.calls):
            cursor.execute(_OPEN_CALL, rows.call_row(key, place, call))
            if cursor.rowcount != 1:
                cursor.execute(_SQL["close_stream"], (key,))
                return refusal(step, Why.TAKEN, rows.request_id_text(call.request_id))
        if step.most_calls is not None:
            (running,) = cursor.execute(_SQL["count_calls"], (record.session,)).fetchone()
            if running > step.most_calls:
                cursor.execute(_SQL["close_stream"], (key,))
                return refusal(step, Why.CALLS, running - len(step.calls))
        self._remember(record.id, key)
        return None

    def append(self, step: steps.Append) -> StepRejected | None:
        key = self._key(step.stream)
        if key is None or not self._append_next(key, step):
            self._keys.pop(step.stream, None)
            key = self._key(step.stream)  # the stream may be gone, and another one may have its key
            if key is None:
                return refusal(step, Why.GONE)
            if (refused := self._append_new(key, step)) is not None:
                return refused
        if step.taken:
            self._cursor.execute(_SQL["take_forwarded"], (key, step.taken))
        if step.answered:
            self._cursor.execute(_SQL["answer_stream"], (step.answered, key))
        if step.seal:
            self._keys.pop(step.stream, None)  # it will not be written again
        for end in step.ends:
            request_id = rows.request_id_text(end.request_id)
            self._cursor.execute(_END_CALL, (end.state.value, key, end.incarnation, request_id))
            if end.stepped:
                self._cursor.execute(_SQL["empty_tool_steps"], (key, end.incarnation, request_id))
        if step.ends and not step.seal:
            self._cursor.execute(_SQL["list_stream"], {"stream": key})
        return None

    def _append_next(self, key: int, step: steps.Append) -> bool:
        """Append in the plain case, with one statement: our fence, and the events follow the stream's end."""
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

    def _append_new(self, key: int, step: steps.Append) -> StepRejected | None:
        """Append in any other case: read the stream's end, and append the events after it."""
        fence, last, sealed, node = self._cursor.execute(_SQL["stream_end"], (key,)).fetchone()
        if fence != step.fence:
            return refusal(step, Why.FENCED, fence)
        new = [event for event in step.events if event.seq > last]
        if new and (sealed or not node):
            return refusal(step, Why.SEALED if sealed else Why.RELEASED)
        if new and new[-1].seq - last != len(new) and not step.lost:
            return refusal(step, Why.BEHIND, last)
        if new:
            self._cursor.executemany(_APPEND, [(key, *event) for event in new])
            last = new[-1].seq
        self._cursor.execute(_SQL["set_stream_end"], (last, sealed or step.seal, key))
        return None

    def put_call(self, step: steps.PutCall) -> StepRejected | None:
        key = self._key(step.stream)
        if (refused := self._not_written(key, step)) is not None:
            return refused
        row = (step.state.value, step.attempt, step.progress, step.upstream)
        request_id = rows.request_id_text(step.request_id)
        self._cursor.execute(_SQL["put_call"], (*row, key, step.incarnation, request_id))
        return None

    def put_tool_step(self, step: steps.PutToolStep) -> StepRejected | None:
        key, row = self._key(step.stream), rows.tool_step_row(step.record)
        self._cursor.execute(_PUT_TOOL_STEP, (key, *row, step.fence, step.after, step.after_ended))
        if self._cursor.rowcount == 1:
            return None
        # Where nothing was written, the call or the step may have ended, which is no refusal.
        if (refused := self._not_written(key, step)) is not None or not step.after:
            return refused
        before = self._cursor.execute(_SQL["tool_step_state"], (key, *row[:2], step.after)).fetchone()
        is_there = before is not None and not (step.after_ended and TOOL_STEP[ToolStepState(before[0])])
        return None if is_there else refusal(step, Why.BEHIND)

    def release(self, step: steps.Release) -> StepRejected | None:
        key = self._key(step.stream)
        if (refused := self._not_written(key, step)) is not None:
            return refused
        self._cursor.execute(_SQL["release_stream"], (key,))
        return None

    def _not_written(
        self, key: int | None, step: steps.PutCall | steps.PutToolStep | steps.Release
    ) -> StepRejected | None:
        row = None if key is None else self._cursor.execute(_SQL["stream_end"], (key,)).fetchone()
        if row is None:
            return refusal(step, Why.GONE)
        fence, _, sealed, node = row
        if fence != step.fence:
            return refusal(step, Why.FENCED, fence)
        if sealed:
            return refusal(step, Why.SEALED)
        return None if node or isinstance(step, steps.Release) else refusal(step, Why.RELEASED)

    def drop(self, step: steps.DropStream) -> None:
        self._keys.pop(step.stream, None)
        self._cursor.execute(_SQL["drop_stream"], (step.stream,))

    def forward(self, step: steps.Forward) -> StepRejected | None:
        cursor = self._cursor
        found = cursor.execute(_SQL["stream_writer"], (step.stream,)).fetchone()
        if found is None:
            return refusal(step, Why.GONE)
        key, is_written = found
        sender, last = cursor.execute(_SQL["sender_to"], (key, step.node)).fetchone() or ("", 0)
        last = last if sender == step.sender else 0
        new = step.payloads[max(0, last + 1 - step.first) :]
        if not new:
            return None
        if not is_written:
            return refusal(step, Why.NO_NODE)
        if step.first > last + 1:
            return refusal(step, Why.BEHIND, last)
        count, size = cursor.execute(_SQL["count_forwarded"], (key,)).fetchone()
        full = count + len(new) > MAX_FORWARDED or size + sum(map(len, new)) > MAX_FORWARDED_BYTES
        if count and full:
            return refusal(step, Why.FULL, count)
        numbered = enumerate(new, next_key(cursor, "forward"))
        cursor.executemany(_SQL["forward"], [(number, key, payload) for number, payload in numbered])
        cursor.execute(_SQL["put_sender"], (key, step.node, step.sender, step.first + len(step.payloads) - 1))
        return None

    def claim(self, stream: StreamId, *, node: NodeId, held: Fence, known: int) -> StreamRecord | None:
        self._cursor.execute(_SQL["end_generation"], (stream, held))
        if self._cursor.rowcount != 1:
            return None
        (ended,) = self._cursor.execute(_SQL["generation_of"], (stream,)).fetchone()
        generation = max(ended, known) + 1
        fence = new_fence(generation, secrets.token_bytes)
        self._cursor.execute(_SQL["next_generation"], (node, fence, generation, stream))
        self._cursor.execute(_SQL["forget_generations"], {"stream": stream, "kept": records.KEPT_GENERATIONS})
        return rows.stream_record(self._cursor.execute(_SQL["stream_by_id"], (stream,)).fetchone())

    def forgets_little(self, group: Sequence[Step]) -> bool:
        """Whether the steps delete few events, and empty few values."""
        room = MAX_INLINE_EVENTS
        for step in group:
            match step:
                case steps.EndSession():
                    return False
                case steps.Append() if any(end.stepped for end in step.ends):
                    count, size = self._cursor.execute(_SQL["size_of_tool_steps"], (step.stream,)).fetchone()
                    room -= count
                    if room < 0 or size > MAX_INLINE_BYTES:
                        return False
                case steps.Trim() | steps.DropStream():
                    through = step.through if isinstance(step, steps.Trim) else sys.maxsize
                    found = self._cursor.execute(_SQL["events_through"], (step.stream, through, room + 1))
                    room -= len(found.fetchall())
                    if room < 0:
                        return False
        return True


class StepWriter:
    """Applies steps of all kinds; `StreamSteps` has those of streams."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._cursor = connection.cursor()
        self.streams = StreamSteps(self._cursor)
        self._apply: dict[type[Any], Callable[[Any], StepRejected | None]] = {
            steps.Append: self.streams.append,
            steps.OpenStream: self.streams.open_stream,
            steps.Forward: self.streams.forward,
            steps.PutCall: self.streams.put_call,
            steps.PutToolStep: self.streams.put_tool_step,
            steps.Release: self.streams.release,
            steps.DropStream: self.streams.drop,
            steps.PutSession: self._put_session,
            steps.ChangeSession: self._change_session,
            steps.EndSession: self._end_session,
            steps.SendMail: self._send_mail,
            steps.OpenAsk: self._open_ask,
        }
        for kind, query in _STATEMENTS.items():
            self._apply[kind] = partial(self._execute, _SQL[query])

    def apply(self, group: Sequence[Step]) -> Refusals:
        apply = self._apply
        return [apply[type(step)](step) for step in group]

    def _execute(self, query: str, step: Any) -> None:
        """A statement names the fields of the step, and of its record if it has one."""
        record = getattr(step, "record", None)
        self._cursor.execute(query, rows.named_values(step) | ({} if record is None else rows.named_values(record)))

    def _open_ask(self, step: steps.OpenAsk) -> None:
        self._cursor.execute(_SQL["open_ask"], rows.ask_values(step.record))

    def _put_session(self, step: steps.PutSession) -> StepRejected | None:
        """Put the session first, and take it away again if it was one too many."""
        cursor, record = self._cursor, step.record
        cursor.execute(_SQL["put_session"], rows.session_values(record))
        if cursor.rowcount != 1 or step.limits is None:
            return None
        refused: StepRejected | None = None
        caller, kind = (rows.loose(record.owner), record.address), record.kind.value
        (of_caller,) = cursor.execute(_SQL["count_of_caller"], (*caller, kind)).fetchone() if any(caller) else (0,)
        if of_caller > step.limits.caller:
            refused = refusal(step, Why.CALLER, of_caller - 1)
        elif step.limits.total is not None:
            (total,) = cursor.execute(_SQL["count_sessions"]).fetchone()
            refused = refusal(step, Why.ALL, total - 1) if total > step.limits.total else None
        if refused is not None:
            cursor.execute(_SQL["unput_session"], (record.id,))
        return refused

    def _change_session(self, step: steps.ChangeSession) -> None:
        values = rows.named_values(step) | {"sticky": None}
        if step.stick is not None:
            row = self._cursor.execute(_SQL["read_sticky"], (step.session,)).fetchone()
            if row is None:
                return
            values["sticky"] = rows.sticky_text(sticky.after(rows.sticky_requests(row[0]), step.stick))
        self._cursor.execute(_SQL["change_session"], values)

    def _end_session(self, step: steps.EndSession) -> None:
        cursor = self._cursor
        if step.unused_since is not None:
            unused = cursor.execute(_SQL["is_unused"], (step.session, step.unused_since)).fetchone()
            if unused is None:
                return
        self.streams.drop_all_of(step.session)
        cursor.execute(_SQL["end_call_record"], (step.session,))
        if cursor.rowcount == 1:
            return
        row = cursor.execute(_SQL["params_of"], (step.session,)).fetchone()
        if row is None:
            return
        keeps = retention.keeps_params(step.reason, row[0])
        values = {"session": step.session, "time": step.time, "reason": step.reason, "keeps": keeps}
        cursor.execute(_SQL["end_session"], values)
        of_caller = {"session": step.session, "most": retention.MAX_ENDED_OF_CALLER}
        cursor.execute(_SQL["forget_ended_of"], of_caller)
        cursor.execute(_SQL["forget_ended"], {"most": retention.MAX_ENDED})

    def _send_mail(self, step: steps.SendMail) -> StepRejected | None:
        # Short while few messages wait; with many the node does not read its mail.
        if self._cursor.execute(_SQL["much_mail"], (step.node, MAX_MAIL - 1)).fetchone() is not None:
            return refusal(step, Why.FULL)
        self._cursor.execute(_SQL["post_mail"], (next_key(self._cursor, "mail"), step.message, step.node))
        return None if self._cursor.rowcount == 1 else refusal(step, Why.NO_NODE)

    # Changes that are not steps

    def reattach(self, session: SessionId) -> SessionRecord | None:
        self._cursor.execute(_SQL["next_incarnation"], (session,))
        if self._cursor.rowcount != 1:
            return None
        row = self._cursor.execute(_SQL["session_by_id"], (session,)).fetchone()
        return rows.session_record(row)

    def change_note(self, name: str, *, seen: bytes | None, value: bytes | None, session: str) -> bool:
        found = self._cursor.execute(_SQL["note"], (name,)).fetchone()
        if seen != (None if found is None else bytes(found[0])):
            return False
        if session and self._cursor.execute(_SQL["revision_of"], (session,)).fetchone() is None:
            return False
        if value is None:
            self._cursor.execute(_SQL["drop_note"], (name,))
        else:
            self._cursor.execute(_SQL["put_note"], (name, session, value))
        return True


def next_key(cursor: sqlite3.Cursor | sqlite3.Connection, table: str) -> int:
    """Return the key of the next message in one of the two tables of messages."""
    (given,) = cursor.execute(_SQL["last_key"], (table,)).fetchone()
    return records.next_key(given, now=time.time())
