"""Lists, shows, follows and ends sessions and durable calls for an operator, as JSON objects whose keys stay.

The program that runs this is not a node: the servers may run in other processes, or not at all. Times are seconds since
1970. A payload that is not JSON is shown as text, because the log may hold anything.
"""

import asyncio
import enum
import heapq
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perdure._core import mail
from perdure._core.ids import Kind, NodeId, RecordKind, SessionId, StreamId, reader_since
from perdure._core.jsonrpc import JsonObject
from perdure._core.principals import is_called, readable
from perdure._core.states import (
    SESSION,
    UNENDED,
    CallState,
    IllegalStep,
    SessionState,
    SessionStep,
    ToolStepState,
    advance,
)
from perdure._core.tool_steps import StepHistory, ToolStepKind
from perdure.errors import Misuse
from perdure.store.interface import Inspect, Store, stream_by_id
from perdure.store.notes import chain_of
from perdure.store.records import (
    NO_USAGE,
    AskRecord,
    CallRecord,
    Event,
    Outline,
    SessionRecord,
    StreamRecord,
    ToolStepRecord,
    Usage,
    UsageRecord,
)
from perdure.store.steps import EndSession, SendMail

PAGE = 100
"""Entries read at a time: a record may carry a quarter of a mebibyte of sticky requests."""

EVENTS_PAGE = 32
"""Events of one stream that `SessionTail` holds at a time: they may be megabytes each."""

MIN_PREFIX = 8
"""Characters of an id that name a session: as many as log records show of it."""

STEPPED_SHOWN = 20
"""Sealed streams whose calls are shown with the steps of their tools, the newest: a session may keep ten thousand."""

CANCEL_SECONDS = 5.0
"""How long `end_session` waits until a running call is cancelled: its node takes a few milliseconds, unless it is
busy."""

CANCEL_POLL = 0.05
"""Seconds between two reads of the call meanwhile."""

_ENDED = frozenset({SessionState.ENDED.value, *(state.value for state in CallState if state not in UNENDED)})
_STREAM_KINDS = {Kind.CALL: "call", Kind.STANDALONE: "standalone"}

_SUBJECTS = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}
"""The member of `params` that names the tool, prompt or resource of a request."""


class NoSuchSession(Misuse):
    """No session or task of the store has this id."""


class EntryKind(enum.Enum):
    """The kind of a record in an operator's list."""

    SESSION = "session"
    TASK = "task"
    """A durable call that its client can ask for again: it has a handle, or gave a key."""
    CALL = "call"
    """A durable call whose client only waits for the response."""


def entry_kind(record: SessionRecord | Outline) -> EntryKind:
    if record.kind is RecordKind.SESSION:
        return EntryKind.SESSION
    return EntryKind.TASK if record.is_task else EntryKind.CALL


# --- Reading ----------------------------------------------------------------------------------------------------------


def fits(
    outline: Outline, *, kind: EntryKind | None, state: SessionState | CallState | None, owner: str | None
) -> bool:
    """Whether a record is of this kind, in this state and of this owner. The state of a durable call is that of its
    ledger row."""
    return (
        kind in (None, entry_kind(outline))
        and (state is None or state.value == (outline.call or outline.state).value)
        and (owner is None or is_called(outline.owner, owner))
    )


async def list_sessions(
    store: Inspect,
    *,
    state: SessionState | CallState | None,
    owner: str | None,
    kind: EntryKind | None,
    living: Collection[NodeId],
) -> list[JsonObject]:
    """List the sessions and durable calls that fit, the last active one first. Only `living` nodes have readers."""
    outlines = await store.newest(limit=sys.maxsize)
    ids = [outline.id for outline in outlines if fits(outline, kind=kind, state=state, owner=owner)]
    found: list[JsonObject] = []
    for start in range(0, len(ids), PAGE):
        found += await list_entries(store, ids[start : start + PAGE], living=living)
    return sorted(found, key=lambda entry: (-entry["active"], entry["id"]))


async def list_entries(
    store: Inspect, ids: Sequence[SessionId], *, living: Collection[NodeId] | None = None
) -> list[JsonObject]:
    """Return the entries of those records that exist. Without `living`, every node counts as one that lives."""

    async def entry(record: SessionRecord, usage: Usage) -> JsonObject:
        # By stream, because a session may have thousands of calls that have ended, and a few that have not.
        read = [
            stream.id
            for stream in usage.streams
            if stream.kind is Kind.CALL and (record.kind is RecordKind.CALL or not stream.sealed)
        ]
        calls = [call for stream in read for call in await store.calls(record.id, stream=stream)]
        return list_object(record, usage=usage, calls=calls, living=living)

    found = await store.usage(ids) if ids else {}
    return await asyncio.gather(*(entry(*found[id_]) for id_ in ids if id_ in found))


def entry_state(entry: JsonObject) -> str:
    """Return the state of a session; of a durable call, the state of its ledger row."""
    return str((entry["call"] or entry)["state"])


def has_ended(entry: JsonObject) -> bool:
    return entry_state(entry) in _ENDED


async def find(store: Inspect, text: str) -> SessionRecord:
    """Return the session or durable call whose id is this text, or begins with it."""
    if len(text) < MIN_PREFIX:
        raise Misuse(f"{text!r} is too short; give at least {MIN_PREFIX} characters of the id")
    if (record := await store.session(SessionId(text))) is not None:
        return record
    found = await store.newest(limit=2, prefix=text)
    if len(found) > 1:
        raise Misuse(f"several ids begin with {text!r}; give more of the id")
    if not found or (record := await store.session(found[0].id)) is None:
        raise NoSuchSession(f"no session or task {text!r} in the store")
    return record


async def show_session(
    store: Inspect, text: str, *, living: Collection[NodeId] | None = None
) -> tuple[JsonObject, frozenset[NodeId]]:
    """Return the session whose id is or begins with this text, and the nodes that have joined the store. Without
    `living`, every node that has joined counts as one that lives."""
    record = await find(store, text)
    joined = frozenset(node.id for node in await store.nodes())
    usage = (await store.usage([record.id])).get(record.id, (record, NO_USAGE))[1]
    calls = await store.calls(record.id)
    tools = {call.stream for call in calls if call.method == "tools/call"}
    streams = [stream for stream in usage.streams if stream.id in tools]
    sealed = [stream.id for stream in streams if stream.sealed][-STEPPED_SHOWN:]
    stepped = [*sealed, *(stream.id for stream in streams if not stream.sealed)]
    session = show_object(
        record,
        usage=usage,
        calls=calls,
        tool_steps=[step for stream in stepped for step in await store.tool_steps(stream, values=False)],
        asks=await store.asks(record.id),
        retained={row.stream: row for row in await store.kept(record.id)},
        has_token=await chain_of(store, record.id) is not None,
        living=joined if living is None else living,
    )
    return session, joined


# --- Ending -----------------------------------------------------------------------------------------------------------


async def end_session(
    store: Inspect, text: str, *, now: float, living: Callable[[], Awaitable[Sequence[NodeId]]]
) -> str:
    """End the session or durable call whose id is or begins with this text. Returns what came of it: it may have ended
    by itself. `living` returns the nodes that live."""
    record = await find(store, text)
    name = f"{entry_kind(record).value} {record.id}"
    is_call = record.kind is RecordKind.CALL
    if is_call and (outcome := await _cancel_call(store, record, await living())) is not None:
        return f"{name} {outcome}"
    step = SessionStep.OPERATOR_ENDED
    try:
        advance(SESSION, record.state, step)
    except IllegalStep:
        if record.state is SessionState.ENDED:
            raise Misuse(f"{name} has ended already: {record.ended or 'the reason is unknown'}") from None
        raise Misuse(f"{name} is {record.state.value}; it can be ended once its handshake is done") from None
    message = mail.encode(mail.Ended(session=record.id, reason=step.value))
    # Mail to a node that has left meanwhile is refused, and that node needs none.
    posts = [SendMail(node=node.id, message=message) for node in await store.nodes()]
    await store.commit([EndSession(session=record.id, time=now, reason=step.value), *posts])
    if is_call:  # its record is deleted
        return f"{name} has ended: {step.value}"
    return f"{name} has ended: {(await store.session(record.id) or record).ended}"


async def _cancel_call(store: Store, record: SessionRecord, living: Sequence[NodeId]) -> str | None:
    """Let a node cancel a durable call that has not ended, so that its client gets an answer. Returns what came of it;
    `None` if the call has ended, or if no node is left that could take the message."""

    async def unended() -> CallRecord | None:
        return next((row for row in await store.calls(record.id) if row.state in UNENDED), None)

    if (row := await unended()) is None:
        return None
    stream = await stream_by_id(store, row.stream)
    writer = None if stream is None else stream.node
    # Any node sends the message on to the node that runs the call. Mail of a dead node goes to the node that buries it.
    joined = [node.id for node in await store.nodes()]
    to = next(iter(sorted(joined, key=lambda node: (node not in living, node != writer))), None)
    params = {"requestId": row.request_id, "reason": "an operator ended it"}
    message = mail.Cancelled(session=record.id, incarnation=1, request_id=row.request_id, params=params)
    if to is None or any(await store.commit([SendMail(node=to, message=mail.encode(message))])):
        return None
    if not living:
        return "ends when a server starts: none runs that could cancel it"
    for _ in range(round(CANCEL_SECONDS / CANCEL_POLL)):
        if await unended() is None:
            rows = await store.calls(record.id)  # a call whose client cannot ask for it again has left no row
            return f"has ended: {rows[0].state.value if rows else CallState.CANCELLED.value}"
        await asyncio.sleep(CANCEL_POLL)
    raise Misuse(
        f"{entry_kind(record).value} {record.id} still runs; node {to[:MIN_PREFIX]} has a message to cancel it"
    )


# --- The objects ------------------------------------------------------------------------------------------------------


def message_of(payload: bytes) -> Any:
    try:
        return json.loads(payload)
    except (ValueError, RecursionError):
        return payload.decode(errors="replace")


def _members(payload: bytes) -> JsonObject:
    message = message_of(payload)
    return message if isinstance(message, dict) else {}


def _picked(record: object, *names: str) -> JsonObject:
    """Attributes of a record under their own names; a state as its value."""
    found = {name: getattr(record, name) for name in names}
    return {name: value.value if isinstance(value, enum.Enum) else value for name, value in found.items()}


def _shared(record: SessionRecord, usage: Usage, calls: Sequence[CallRecord]) -> JsonObject:
    """Return the members that an entry of the list and a whole session have in common."""
    client = _members(record.client_params).get("clientInfo")
    names = [str(client[name]) for name in ("name", "version") if name in client] if isinstance(client, dict) else []
    writers = {stream.id: stream.node for stream in usage.streams}
    durable: JsonObject | None = None
    if calls and record.kind is RecordKind.CALL:
        call = calls[0]
        node = writers.get(call.stream) if call.state in UNENDED else None
        about = {**_picked(call, "method"), "name": subject_of(call), **_picked(call, "state", "attempt")}
        durable = {**about, "node": node or None}
    return {
        "kind": entry_kind(record).value,
        **_picked(record, "id", "owner"),
        "owner_name": readable(record.owner) or None,
        **_picked(record, "state", "version", "created"),
        "active": max(record.active, usage.newest),
        "client_name": " ".join(names) or None,
        "home": writers.get(record.standalone) or None,
        "call": durable,
    }


def list_object(
    record: SessionRecord, *, usage: Usage, calls: Sequence[CallRecord], living: Collection[NodeId] | None = None
) -> JsonObject:
    """Return a session or durable call as a list shows it: `calls` that have not ended, `streams` that are not sealed,
    `readers` that are connected, the first of them since `connected`."""
    readers = [reader for reader in _readers(usage, living).values() if reader is not None]
    return {
        **_shared(record, usage, calls),
        "readers": len(readers),
        "connected": min((reader["since"] for reader in readers if reader["since"] is not None), default=None),
        "calls": sum(call.state in UNENDED for call in calls),
        "streams": sum(not stream.sealed for stream in usage.streams),
    }


def show_object(
    record: SessionRecord,
    *,
    usage: Usage,
    calls: Sequence[CallRecord],
    tool_steps: Sequence[ToolStepRecord],
    asks: Sequence[AskRecord],
    retained: Mapping[StreamId, UsageRecord],
    has_token: bool,
    living: Collection[NodeId] | None = None,
) -> JsonObject:
    """Return everything that the store holds of a session or durable call (S6)."""
    writers = {stream.id: stream.node for stream in usage.streams}
    readers = _readers(usage, living)
    return {
        **_shared(record, usage, calls),
        "ended": record.ended or None,
        **_picked(record, "incarnation", "initialized"),
        "client": _members(record.client_params),
        "server": _members(record.result),
        "resume_token": has_token,
        "sticky": [_members(request) for request in record.sticky],
        "calls": [
            {
                **_picked(call, "request_id", "incarnation", "method"),
                "name": subject_of(call),
                **_picked(call, "state", "attempt", "progress", "principal"),
                "node": writers.get(call.stream) or None,
                "stream": call.stream,
                "asks": sum(
                    (ask.call, ask.incarnation, ask.request_id) == (call.stream, call.incarnation, call.request_id)
                    for ask in asks
                ),
                "steps": _steps_of(call, tool_steps),
            }
            for call in calls
        ],
        "asks": [
            {**_picked(ask, "id", "stream"), "node": ask.node or None, "request": _members(ask.request)} for ask in asks
        ],
        "streams": [
            {
                "id": stream.id,
                "kind": _STREAM_KINDS[stream.kind],
                **_picked(stream, "last", "sealed", "generation", "opened"),
                "node": stream.node or None,
                "reader": readers[stream.id],
                "events": retained[stream.id].events if stream.id in retained else None,
                "answers": retained[stream.id].answers if stream.id in retained else None,
            }
            for stream in usage.streams
        ],
    }


def _steps_of(call: CallRecord, tool_steps: Sequence[ToolStepRecord]) -> list[JsonObject]:
    """Return the steps of a call's tool, without their values. The `ended` of a sleep may be in the future; one that
    was cut short has none."""
    key = call.stream, call.incarnation, call.request_id
    records = [step for step in tool_steps if (step.stream, step.incarnation, step.request_id) == key]
    marks = StepHistory(records).marks
    shown = [{"name": marks[step.number].label, **_picked(step, "kind", "attempt", "began")} for step in records]
    for step, row in zip(records, shown, strict=True):
        sleeps = step.kind is ToolStepKind.SLEEP
        row["state"] = ToolStepState.ENDED.value if sleeps else step.state.value
        row["ended"] = None if sleeps and step.state is not ToolStepState.OPEN else step.ended
    return shown


def _readers(usage: Usage, living: Collection[NodeId] | None) -> dict[StreamId, JsonObject | None]:
    """Return the reader that is connected to each stream. The first reader of a call came with the call and has no row;
    the stream records whether it was lost. A row of a node that has died means no reader."""
    rows = {reader.stream: reader for reader in usage.readers}
    found: dict[StreamId, JsonObject | None] = {}
    for stream in usage.streams:
        row = rows.get(stream.id)
        node, since = NodeId(""), None
        if row is not None:
            node, since = row.node, reader_since(row.reader)
        elif stream.kind is Kind.CALL and not stream.unread:
            node, since = stream.node, stream.opened
        is_connected = not stream.sealed and node and (living is None or node in living)
        seq = max(stream.delivered, 0 if row is None else row.seq)
        found[stream.id] = {"node": node, "seq": seq, "since": since} if is_connected else None
    return found


def subject_of(call: CallRecord) -> str | None:
    """Return the tool, prompt or resource of a call. The store forgets a resource once its call has ended."""
    if call.name:
        return call.name
    params = _members(call.request).get("params")
    name = params.get(_SUBJECTS.get(call.method, "")) if isinstance(params, dict) else None
    return name if isinstance(name, str) else None


# --- Following: one object for each thing that happens, told apart by `what` ------------------------------------------


def opened(stream: StreamRecord, calls: Sequence[CallRecord]) -> JsonObject:
    requests = [{**_picked(call, "request_id", "method"), "name": subject_of(call)} for call in calls]
    return {"what": "opened", "time": stream.opened, **_stream_names(stream), "calls": requests}


def appended(stream: StreamRecord, event: Event) -> JsonObject:
    message = {"seq": event.seq, "final": event.final, "message": message_of(event.payload)}
    return {"what": "event", "time": event.time, **_stream_names(stream), **message}


def trimmed(stream: StreamRecord, first: int, last: int) -> JsonObject:
    """Return the gap of events that were deleted before they could be shown."""
    return {"what": "gap", **_stream_names(stream), "first": first, "last": last}


def ended(session: str, reason: str, *, kind: EntryKind = EntryKind.SESSION) -> JsonObject:
    return {"what": "ended", "session": session, "record": kind.value, "reason": reason}


def _stream_names(stream: StreamRecord) -> JsonObject:
    return {"stream": stream.id, "kind": _STREAM_KINDS[stream.kind]}


@dataclass(slots=True)
class _Cursor:
    """How far a stream was shown."""

    record: StreamRecord
    shown: int
    announced: bool
    page: list[Event] = field(default_factory=list)
    """Events that were read and not shown yet, the last one first."""


class SessionTail:
    """Follows the events of one session or durable call: each `read` returns what is new.

    It only reads the store: it joins no node, attaches no reader, and holds no writer up. Events that are trimmed
    before they were read are shown as a gap. The end of a session deletes its log, so the events of its last moment may
    not be seen. The log of a task stays, and its answer is the last event.
    """

    def __init__(self, store: Store, session: SessionId, *, only: Callable[[StreamId], bool] = lambda _: True) -> None:
        self._store = store
        self._session = session
        self._only = only
        self._cursors: dict[StreamId, _Cursor] = {}
        self._kind = EntryKind.SESSION

    async def skip(self, *, but_events: int = 0, but_streams: int = 0) -> None:
        """Skip what was written already, except for the newest events of each stream that is open or among the newest
        streams."""
        records = await self._streams()
        newest = {record.id for record in records[len(records) - but_streams :]}
        for record in records:
            if but_events and (not record.sealed or record.id in newest):
                cursor = _Cursor(record, shown=max(0, record.last - but_events), announced=False)
            else:
                cursor = _Cursor(record, shown=record.last, announced=True)
            self._cursors[record.id] = cursor

    async def read(self) -> AsyncIterator[JsonObject]:
        """Yield what is new since the last read, in the order of its times; nothing follows `ended`."""
        records = await self._streams()
        session = await self._store.session(self._session)
        if session is None or session.state is SessionState.ENDED:
            kind = self._kind if session is None else entry_kind(session)
            yield ended(self._session, session.ended if session else "it is forgotten", kind=kind)
            return
        self._kind = entry_kind(session)
        cursors = {record.id: self._cursors.get(record.id) or _Cursor(record, 0, announced=False) for record in records}
        for record in records:
            cursors[record.id].record = record
        self._cursors = cursors
        pending = [one for one in cursors.values() if not one.announced or one.shown < one.record.last]
        # Merges the streams by time. A stream is read when the others reach its beginning, so few events are held.
        heap = [(cursor.record.opened, number) for number, cursor in enumerate(pending)]
        heapq.heapify(heap)
        while heap:
            _, number = heapq.heappop(heap)
            cursor = pending[number]
            async for item in self._next(cursor):
                yield item
            if cursor.page:
                heapq.heappush(heap, (cursor.page[-1].time, number))
        if self._kind is not EntryKind.SESSION and records and all(record.sealed for record in records):
            rows = await self._store.calls(self._session)  # nothing follows the answer of a durable call
            yield ended(self._session, rows[0].state.value if rows else "it is forgotten", kind=self._kind)

    async def _streams(self) -> list[StreamRecord]:
        return [record for record in await self._store.streams(self._session) if self._only(record.id)]

    async def _next(self, cursor: _Cursor) -> AsyncIterator[JsonObject]:
        """Yield the next event of a stream with what belongs before it. Afterwards the cursor has a page, or the stream
        is done."""
        stream = cursor.record
        if not cursor.announced:
            cursor.announced = True
            yield opened(stream, await self._store.calls(stream.session, stream=stream.id))
        if cursor.page:
            event = cursor.page.pop()
            if event.seq > cursor.shown + 1:
                yield trimmed(stream, cursor.shown + 1, event.seq - 1)
            cursor.shown = event.seq
            yield appended(stream, event)
        # Up to the last event of the record, which was read before: a fast writer must not hide new streams.
        if not cursor.page and cursor.shown < stream.last:
            cursor.page = list(await self._store.read(stream.id, after=cursor.shown, limit=EVENTS_PAGE))[::-1]
            if not cursor.page:
                yield trimmed(stream, cursor.shown + 1, stream.last)
                cursor.shown = stream.last
