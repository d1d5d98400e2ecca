"""Steps, applied to the writing connection within a transaction that the caller holds."""

from __future__ import annotations

import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from perdure._core.ids import Fence, NodeId, StreamId
from perdure.errors import StaleFence
from perdure.store import _sql
from perdure.store import _sqlite_rows as rows
from perdure.store.base import (
    Append,
    CloseAsk,
    DropStream,
    EndSession,
    LeaveReader,
    OpenAsk,
    OpenStream,
    PutReader,
    PutSession,
    Refusals,
    Step,
    StreamRecord,
    Trim,
)

_SQL = _sql.queries()
_EXTEND = _SQL["extend_stream"]
_APPEND = _SQL["append_event"]
_END_CALL = _SQL["end_call"]
_OPEN_STREAM = _SQL["open_stream"]
_OPEN_CALL = _SQL["open_call"]

MAX_KEYS = 20_000
"""Streams whose keys are remembered: about 3 MiB, and more than are written at a time."""

MAX_INLINE_EVENTS = 512
MAX_INLINE_BYTES = 1 << 20
"""What may be written, or forgotten, in the event loop: one or two milliseconds' worth."""


class Steps:
    """Applies steps. Holds the keys of streams written lately; `forget` them when a transaction is undone."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._cursor = connection.cursor()
        self._keys: OrderedDict[StreamId, int] = OrderedDict()
        self._apply: dict[type[Any], Callable[[Any], StaleFence | None]] = {
            Append: self._append,
            OpenStream: self._open_stream,
            PutSession: self._put_session,
            EndSession: self._end_session,
            Trim: self._trim,
            DropStream: self._drop_stream,
            OpenAsk: self._open_ask,
            CloseAsk: self._close_ask,
            PutReader: self._put_reader,
            LeaveReader: self._leave_reader,
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
        row = self._cursor.execute(_SQL["stream_key"], (stream,)).fetchone()
        return None if row is None else self._remember(stream, row[0])

    def _remember(self, stream: StreamId, key: int) -> int:
        self._keys[stream] = key
        if len(self._keys) > MAX_KEYS:
            self._keys.popitem(last=False)
        return key

    # Streams and events

    def _open_stream(self, step: OpenStream) -> None:
        cursor = self._cursor
        cursor.execute(_OPEN_STREAM, rows.stream_row(step.record))
        if cursor.rowcount == 1:
            key = self._remember(step.record.id, cursor.lastrowid or 0)
            for place, call in enumerate(step.calls):
                cursor.execute(_OPEN_CALL, rows.call_row(key, place, call))

    def _append(self, step: Append) -> StaleFence | None:
        key = self._key(step.stream)
        if key is None:
            return _stale(step, "is not there")
        if not self._append_next(key, step) and (refusal := self._append_new(key, step)) is not None:
            return refusal
        if step.seal:
            self._keys.pop(step.stream, None)  # it will not be written again
        for end in step.ends:
            request_id = rows.request_id_text(end.request_id)
            self._cursor.execute(_END_CALL, (end.state.value, key, end.incarnation, request_id))
        return None

    def _append_next(self, key: int, step: Append) -> bool:
        """The plain case, with one look at the stream: our fence, and the events follow what is there."""
        events = step.events
        if not events or events[-1].seq - events[0].seq + 1 != len(events):
            return False
        cursor = self._cursor
        cursor.execute(_EXTEND, (events[-1].seq, step.seal, key, step.fence, events[0].seq - 1))
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
        fence, last, sealed = row
        if fence != step.fence:
            return _stale(step, f"is written under fence {fence}")
        new = [event for event in step.events if event.seq > last]
        if new and sealed:
            return _stale(step, "is sealed")
        if new and new[-1].seq - last != len(new):
            return _stale(step, f"ends at {last}, and event {new[0].seq} does not follow")
        if new:
            self._cursor.executemany(_APPEND, [(key, *event) for event in new])
            last = new[-1].seq
        self._cursor.execute(_SQL["set_stream_end"], (last, sealed or step.seal, key))
        return None

    def _trim(self, step: Trim) -> None:
        if (key := self._key(step.stream)) is not None:
            self._cursor.execute(_SQL["trim"], (key, step.through))

    def _drop_stream(self, step: DropStream) -> None:
        self._keys.pop(step.stream, None)
        self._cursor.execute(_SQL["drop_stream"], (step.stream,))

    # Sessions, asks, readers

    def _put_session(self, step: PutSession) -> None:
        self._cursor.execute(_SQL["put_session"], rows.session_row(step.record))

    def _end_session(self, step: EndSession) -> None:
        self.forget()
        self._cursor.execute(_SQL["drop_streams"], (step.session,))
        self._cursor.execute(_SQL["end_session"], (step.time, step.session))

    def _open_ask(self, step: OpenAsk) -> None:
        if (key := self._key(step.record.stream)) is not None:
            self._cursor.execute(_SQL["open_ask"], rows.ask_row(key, step.record))

    def _close_ask(self, step: CloseAsk) -> None:
        self._cursor.execute(_SQL["close_ask"], (step.session, step.id))

    def _put_reader(self, step: PutReader) -> None:
        if (key := self._key(step.record.stream)) is not None:
            self._cursor.execute(_SQL["put_reader"], rows.reader_row(key, step.record))

    def _leave_reader(self, step: LeaveReader) -> None:
        if (key := self._key(step.stream)) is not None:
            self._cursor.execute(_SQL["leave_reader"], (key, step.reader))

    # What is not a step

    def next_fence(self) -> Fence:
        self._cursor.execute(_SQL["raise_fence"])
        (fence,) = self._cursor.execute(_SQL["read_fence"]).fetchone()
        return Fence(fence)

    def claim(self, stream: StreamId) -> StreamRecord | None:
        if self._key(stream) is None:
            return None
        self._cursor.execute(_SQL["end_generation"], (stream,))
        self._cursor.execute(_SQL["next_generation"], (self.next_fence(), stream))
        return rows.stream_record(self._cursor.execute(_SQL["stream_by_id"], (stream,)).fetchone())

    def join(self, node: NodeId) -> Fence:
        self._cursor.execute(_SQL["empty_mail"], (node,))
        return self.next_fence()

    def post(self, node: NodeId, message: bytes) -> None:
        self._cursor.execute(_SQL["post_mail"], (node, message))

    def collect(self, node: NodeId) -> list[bytes]:
        messages = [message for (message,) in self._cursor.execute(_SQL["read_mail"], (node,))]
        self._cursor.execute(_SQL["empty_mail"], (node,))
        return messages

    def forgets_little(self, steps: Sequence[Step]) -> bool:
        """Whether what the steps forget is soon done."""
        if any(isinstance(step, EndSession) for step in steps):
            return False
        return sum(self._forgets(step) for step in steps if isinstance(step, Trim | DropStream)) <= MAX_INLINE_EVENTS

    def _forgets(self, step: Trim | DropStream) -> int:
        """How many events a step forgets, at most."""
        key = self._key(step.stream)
        oldest = None if key is None else self._cursor.execute(_SQL["oldest_event"], (key,)).fetchone()
        if oldest is None:
            return 0
        if isinstance(step, Trim):
            return int(max(0, step.through - oldest[0] + 1))
        (_, last, _) = self._cursor.execute(_SQL["stream_end"], (key,)).fetchone()
        return int(last - oldest[0] + 1)


def weigh(steps: Sequence[Step]) -> tuple[int, int, bool]:
    """How many rows and bytes the steps write, nearly; and whether they forget anything."""
    count = size = 0
    forget = False
    for step in steps:
        count += 1
        if type(step) is Append:
            count += len(step.events)
            for event in step.events:
                size += len(event.payload)
        elif type(step) is OpenStream:
            count += len(step.calls)
            for call in step.calls:
                size += len(call.request)
        elif type(step) is PutSession:
            size += len(step.record.client_params) + len(step.record.result)
        elif type(step) is OpenAsk:
            size += len(step.record.request)
        elif type(step) is Trim or type(step) is DropStream or type(step) is EndSession:
            forget = True
    return count, size, forget


def _stale(step: Append, why: str) -> StaleFence:
    return StaleFence(f"fence {step.fence} may not append to stream {step.stream}: it {why}")
