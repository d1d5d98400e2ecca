"""Reads and follows sessions and single calls for an operator, as JSON objects whose keys stay, and ends one.

The command that runs this is not a node: the servers may run in other processes, or not at all. Times are seconds since
1970. A payload that is not JSON is shown as text, because the log may hold anything.
"""

import asyncio
import enum
import heapq
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perdure._core import mail
from perdure._core.ids import Kind, NodeId, RecordKind, SessionId, StreamId, reader_since
from perdure._core.jsonrpc import JsonObject
from perdure._core.principals import is_called, readable
from perdure._core.states import SESSION, CallState, IllegalStep, SessionState, SessionStep, advance
from perdure.errors import Misuse
from perdure.store.interface import Store, stream_by_id, usage_of
from perdure.store.records import (
    NO_USAGE,
    AskRecord,
    CallRecord,
    Event,
    KeptRecord,
    Outline,
    ReaderRecord,
    SessionRecord,
    StreamRecord,
    Usage,
)
from perdure.store.steps import EndSession, SendMail

PAGE = 100
"""Sessions read at a time: a record may carry a quarter of a mebibyte of sticky requests."""

EVENTS_PAGE = 32
"""Events of one stream that `Tail` holds at a time: they may be megabytes each."""

MIN_PREFIX = 8
"""Characters of an id that name a session: as many as log records show of it."""

CANCEL_SECONDS = 5.0
"""How long `end` waits until a running call is cancelled: its node takes a few milliseconds, unless it is busy."""

CANCEL_LOOK = 0.05
"""Seconds between two looks whether it is."""

UNENDED = frozenset({CallState.RUNNING, CallState.WAITING})


_ENDED = frozenset({SessionState.ENDED.value, *(state.value for state in CallState if state not in UNENDED)})


class NoSuchSession(Misuse):
    """No session or task of the store has this id."""


class Shown(enum.Enum):
    """What a record is for an operator."""

    SESSION = "session"
    TASK = "task"
    """A single call that its client can ask for again: it has a handle, or gave a key."""
    CALL = "call"
    """A single call whose client only waits for the response."""


_KINDS = {Kind.CALL: "call", Kind.STANDALONE: "standalone"}

_SUBJECTS = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}
"""The member of `params` that names the tool, prompt or resource of a request."""


async def list_sessions(
    store: Store,
    *,
    state: SessionState | CallState | None,
    owner: str | None,
    kind: Shown | None = None,
    living: Collection[NodeId] | None = None,
) -> list[JsonObject]:
    """The sessions and single calls in this state, of this owner and of this kind, the last active one first. The state
    of a single call is that of its row. Only nodes that live have readers: all that have joined, where it is not
    given which those are."""
    found: list[JsonObject] = []
    living = await _joined(store) if living is None else living
    after: SessionId | None = None
    while page := await store.sessions(after=after, limit=PAGE):
        after = page[-1].id
        wanted = [record for record in page if _is_wanted(record, state, owner, kind)]
        rows = await listed(store, wanted, living=living)
        found += [one for one in rows if state is None or state.value == (one["call"] or one)["state"]]
    return sorted(found, key=lambda session: (-session["active"], session["id"]))


def is_living(listed: JsonObject) -> bool:
    """Whether what is listed has not ended. The state of a single call is that of its row."""
    return str((listed["call"] or listed)["state"]) not in _ENDED


def _is_wanted(
    record: SessionRecord, state: SessionState | CallState | None, owner: str | None, kind: Shown | None
) -> bool:
    """Whether a record may be listed, as far as it tells by itself."""
    if not is_clients(record):
        return False
    if record.kind is RecordKind.SESSION and state not in (None, record.state):
        return False
    return kind in (None, shown_kind(record)) and (owner is None or is_called(record.owner, owner))


async def _joined(store: Store) -> frozenset[NodeId]:
    return frozenset(node.id for node in await store.nodes())


async def listed(
    store: Store, records: Sequence[SessionRecord], *, living: Collection[NodeId] | None = None
) -> list[JsonObject]:
    """Sessions and single calls as they are in a list."""
    usage = await usage_of(store, [record.id for record in records]) if records else {}
    found = (_listed(store, record, usage.get(record.id, NO_USAGE), living) for record in records)
    return await asyncio.gather(*found)


async def _listed(store: Store, record: SessionRecord, usage: Usage, living: Collection[NodeId] | None) -> JsonObject:
    streams = usage.streams
    # By stream, because a session may have thousands of calls that have ended, and a few that have not.
    of = [
        stream
        for stream in streams
        if stream.kind is Kind.CALL and (record.kind is RecordKind.CALL or not stream.sealed)
    ]
    calls = [call for stream in of for call in await store.calls_on(stream.id)]
    return list_object(record, streams=streams, calls=calls, usage=usage, living=living)


def is_clients(record: SessionRecord | Outline) -> bool:
    """Whether a record is of a session or a call. Others are the server's own."""
    return record.kind in (RecordKind.SESSION, RecordKind.CALL)


def shown_kind(record: SessionRecord | Outline) -> Shown:
    if record.kind is RecordKind.SESSION:
        return Shown.SESSION
    return Shown.TASK if record.initialized else Shown.CALL


async def find(store: Store, text: str) -> SessionRecord:
    """The session or single call whose id is this text, or begins with it."""
    if len(text) < MIN_PREFIX:
        raise Misuse(f"{text!r} is too short; give at least {MIN_PREFIX} characters of the id")
    if (record := await store.session(SessionId(text))) is not None:
        return record
    following = await store.sessions(after=SessionId(text), limit=2)
    found = [record for record in following if record.id.startswith(text)]
    if not found:
        raise NoSuchSession(f"no session or task {text!r} in the store")
    if len(found) > 1:
        raise Misuse(f"several ids begin with {text!r}; give more of the id")
    return found[0]


async def show_session(
    store: Store, text: str, *, living: Collection[NodeId] | None = None
) -> tuple[JsonObject, frozenset[NodeId]]:
    """The session whose id is or begins with this text, and the nodes that have joined the store. `living` as for
    `list_sessions`."""
    record = await find(store, text)
    usage = (await usage_of(store, [record.id])).get(record.id, NO_USAGE)
    streams = usage.streams
    joined = await _joined(store)
    session = show_object(
        record,
        streams=streams,
        calls=await store.calls(record.id),
        asks=await store.asks(record.id),
        readers={reader.stream: reader for reader in usage.readers},
        kept={kept.stream: kept for kept in await store.kept(record.id)},
        has_token=await store.chain_of(record.id) is not None,
        newest=usage.newest,
        living=joined if living is None else living,
    )
    return session, joined


async def end_session(store: Store, text: str, *, now: float, living: Callable[[], Awaitable[Sequence[NodeId]]]) -> str:
    """End the session or single call whose id is or begins with this text, and say how: it may have ended by itself.
    `living` tells which nodes live."""
    record = await find(store, text)
    name = f"{shown_kind(record).value} {record.id}"
    is_call = record.kind is RecordKind.CALL
    if is_call and (said := await _cancel_call(store, record, await living())) is not None:
        return f"{name} {said}"
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
    if is_call:  # of which nothing is kept
        return f"{name} has ended: {step.value}"
    return f"{name} has ended: {(await store.session(record.id) or record).ended}"


async def _cancel_call(store: Store, record: SessionRecord, living: Sequence[NodeId]) -> str | None:
    """Let a node cancel a single call that has not ended, so that its client gets an answer. Says what came of it;
    `None` if the call has ended, or if no node is left that could take the message."""
    if (row := await _open_row(store, record.id)) is None:
        return None
    stream = await stream_by_id(store, row.stream)
    writer = None if stream is None else stream.node
    # Any node sends the message on to the one that runs the call. What a dead node gets goes to the one that buries it.
    joined = [node.id for node in await store.nodes()]
    to = next(iter(sorted(joined, key=lambda node: (node not in living, node != writer))), None)
    params = {"requestId": row.request_id, "reason": "an operator ended it"}
    message = mail.Cancelled(session=record.id, incarnation=1, request_id=row.request_id, params=params)
    if to is None or any(await store.commit([SendMail(node=to, message=mail.encode(message))])):
        return None
    if not living:
        return "ends when a server starts: none runs that could cancel it"
    for _ in range(round(CANCEL_SECONDS / CANCEL_LOOK)):
        if await _open_row(store, record.id) is None:
            rows = await store.calls(record.id)  # there is none for a call whose client cannot ask for it
            return f"has ended: {rows[0].state.value if rows else CallState.CANCELLED.value}"
        await asyncio.sleep(CANCEL_LOOK)
    raise Misuse(
        f"{shown_kind(record).value} {record.id} still runs; node {to[:MIN_PREFIX]} has been told to cancel it"
    )


async def _open_row(store: Store, session: SessionId) -> CallRecord | None:
    return next((row for row in await store.calls(session) if row.state in UNENDED), None)


# The objects


def message_of(payload: bytes) -> Any:
    try:
        return json.loads(payload)
    except (ValueError, RecursionError):
        return payload.decode(errors="replace")


def _members(payload: bytes) -> JsonObject:
    message = message_of(payload)
    return message if isinstance(message, dict) else {}


def _picked(record: object, *names: str) -> JsonObject:
    """The members of an object that are called as in the record; a state is its value."""
    found = {name: getattr(record, name) for name in names}
    return {name: value.value if isinstance(value, enum.Enum) else value for name, value in found.items()}


def _home(record: SessionRecord, streams: Sequence[StreamRecord]) -> str | None:
    """The node that writes the standalone stream."""
    return next((stream.node for stream in streams if stream.id == record.standalone), "") or None


def list_object(
    record: SessionRecord,
    *,
    streams: Sequence[StreamRecord],
    calls: Sequence[CallRecord],
    usage: Usage = NO_USAGE,
    living: Collection[NodeId] | None = None,
) -> JsonObject:
    """A session or single call in a list: `calls` that have not ended, `streams` that are not sealed, `readers` that
    are connected, the first of them since `connected`."""
    rows = {reader.stream: reader for reader in usage.readers}
    readers = [reader for stream in streams if (reader := _reader(stream, rows.get(stream.id), living)) is not None]
    return {
        "kind": shown_kind(record).value,
        **_picked(record, "id", "owner"),
        "owner_name": readable(record.owner) or None,
        **_picked(record, "state", "version", "created"),
        "active": max(record.active, usage.newest),
        "client_name": _client(record),
        "readers": len(readers),
        "connected": min((reader["since"] for reader in readers if reader["since"] is not None), default=None),
        "calls": sum(call.state in UNENDED for call in calls),
        "streams": sum(not stream.sealed for stream in streams),
        "home": _home(record, streams),
        "call": _single_call(record, streams, calls),
    }


def _client(record: SessionRecord) -> str | None:
    """The client's name and version, as it says of itself."""
    client = _members(record.client_params).get("clientInfo")
    named = [str(client[name]) for name in ("name", "version") if name in client] if isinstance(client, dict) else []
    return " ".join(named) or None


def _reader(stream: StreamRecord, row: ReaderRecord | None, living: Collection[NodeId] | None) -> JsonObject | None:
    """The reader that is connected to a stream. The first reader of a call came with it and has no row; the stream says
    if it was lost. A row of a node that has died is of no reader."""
    if stream.sealed:
        return None
    if row is not None:
        node, since = row.node, reader_since(row.reader)
    elif stream.kind is Kind.CALL and not stream.unread:
        node, since = stream.node, stream.opened
    else:
        return None
    if not node or (living is not None and node not in living):
        return None
    return {"node": node, "seq": max(stream.delivered, 0 if row is None else row.seq), "since": since}


def _single_call(
    record: SessionRecord, streams: Sequence[StreamRecord], calls: Sequence[CallRecord]
) -> JsonObject | None:
    """How the call of a record for one call is; `None` for a session, and for a call of which only the record is
    left."""
    if record.kind is RecordKind.SESSION or not calls:
        return None
    call = calls[0]
    node = next((stream.node for stream in streams if stream.id == call.stream), "") if call.state in UNENDED else ""
    return {
        **_picked(call, "method"),
        "name": subject_of(call),
        **_picked(call, "state", "attempt"),
        "node": node or None,
    }


def show_object(
    record: SessionRecord,
    *,
    streams: Sequence[StreamRecord],
    calls: Sequence[CallRecord],
    asks: Sequence[AskRecord],
    readers: Mapping[StreamId, ReaderRecord],
    kept: Mapping[StreamId, KeptRecord],
    has_token: bool,
    newest: float = 0.0,
    living: Collection[NodeId] | None = None,
) -> JsonObject:
    """All that the store holds of a session or single call (S6). `newest`: when its newest event was appended."""
    writers = {stream.id: stream.node for stream in streams}
    return {
        "kind": shown_kind(record).value,
        **_picked(record, "id", "owner"),
        "owner_name": readable(record.owner) or None,
        **_picked(record, "state"),
        "ended": record.ended or None,
        **_picked(record, "version", "incarnation", "initialized"),
        "client": _members(record.client_params),
        "client_name": _client(record),
        "server": _members(record.result),
        **_picked(record, "created"),
        "active": max(record.active, newest),
        "home": _home(record, streams),
        "call": _single_call(record, streams, calls),
        "resume_token": has_token,
        "sticky": [_members(request) for request in record.sticky],
        "calls": [_call_object(call, writers.get(call.stream)) for call in calls],
        "asks": [
            {**_picked(ask, "id", "stream"), "node": ask.node or None, "request": _members(ask.request)} for ask in asks
        ],
        "streams": [
            {
                "id": stream.id,
                "kind": _KINDS[stream.kind],
                **_picked(stream, "last", "sealed", "generation", "opened"),
                "node": stream.node or None,
                "reader": _reader(stream, readers.get(stream.id), living),
                "events": kept[stream.id].events if stream.id in kept else None,
                "answers": kept[stream.id].answers if stream.id in kept else None,
            }
            for stream in streams
        ],
    }


def _call_object(call: CallRecord, node: NodeId | None) -> JsonObject:
    return {
        **_picked(call, "request_id", "incarnation", "method"),
        "name": subject_of(call),
        **_picked(call, "state", "attempt", "progress", "principal"),
        "node": node or None,
        "stream": call.stream,
    }


def subject_of(call: CallRecord) -> str | None:
    """The tool, prompt or resource that a call asks for. A resource is forgotten once the call has ended."""
    if call.name:
        return call.name
    params = _members(call.request).get("params")
    name = params.get(_SUBJECTS.get(call.method, "")) if isinstance(params, dict) else None
    return name if isinstance(name, str) else None


# What `tail` shows: one object for each thing that is seen, told apart by `what`.


def opened(stream: StreamRecord, calls: Sequence[CallRecord]) -> JsonObject:
    asked = [{**_picked(call, "request_id", "method"), "name": subject_of(call)} for call in calls]
    return {"what": "opened", "time": stream.opened, **_of(stream), "calls": asked}


def appended(stream: StreamRecord, event: Event) -> JsonObject:
    message = {"seq": event.seq, "final": event.final, "message": message_of(event.payload)}
    return {"what": "event", "time": event.time, **_of(stream), **message}


def trimmed(stream: StreamRecord, first: int, last: int) -> JsonObject:
    """Events that were forgotten before they could be shown."""
    return {"what": "gap", **_of(stream), "first": first, "last": last}


def ended(session: str, reason: str, *, kind: Shown = Shown.SESSION) -> JsonObject:
    return {"what": "ended", "session": session, "record": kind.value, "reason": reason}


def _of(stream: StreamRecord) -> JsonObject:
    return {"stream": stream.id, "kind": _KINDS[stream.kind]}


@dataclass(slots=True)
class _Cursor:
    """How far a stream was shown."""

    record: StreamRecord
    shown: int
    announced: bool
    page: list[Event] = field(default_factory=list)
    """Read and not yet shown, the last one first."""


class Tail:
    """Follows the events of one session or single call from outside: look, show what is new, wait until something was
    written, look again.

    It only reads the store: it joins no node, attaches no reader, and holds no writer up. Events that are trimmed
    before they were read are shown as a gap. When a session ends its log goes, so what was written in its last moment
    may not be seen. The log of a task stays, and its answer is the last thing that is seen.
    """

    def __init__(self, store: Store, session: SessionId, *, only: Callable[[StreamId], bool] = lambda _: True) -> None:
        self._store = store
        self._session = session
        self._only = only
        self._cursors: dict[StreamId, _Cursor] = {}
        self._kind = Shown.SESSION

    async def skip(self) -> None:
        """Show nothing of what is there already."""
        for record in await self._streams():
            self._cursors[record.id] = _Cursor(record, shown=record.last, announced=True)

    async def begin(self, *, events: int, streams: int) -> None:
        """Show of what is there already only the newest events of each stream, and nothing of streams that are over
        but for the newest ones."""
        records = await self._streams()
        newest = {record.id for record in records[-streams:]}
        for record in records:
            if record.sealed and record.id not in newest:
                self._cursors[record.id] = _Cursor(record, shown=record.last, announced=True)
            else:
                shown = max(0, record.last - events)
                self._cursors[record.id] = _Cursor(record, shown=shown, announced=False)

    async def look(self) -> AsyncIterator[JsonObject]:
        """What is new since the last look, in the order of its times; after `ended` nothing follows."""
        records = await self._streams()
        session = await self._store.session(self._session)
        if session is None or session.state is SessionState.ENDED:
            kind = self._kind if session is None else shown_kind(session)
            yield ended(self._session, session.ended if session else "it is forgotten", kind=kind)
            return
        self._kind = shown_kind(session)
        cursors = {}
        for record in records:
            cursors[record.id] = self._cursors.get(record.id) or _Cursor(record, shown=0, announced=False)
            cursors[record.id].record = record
        self._cursors = cursors
        behind = [one for one in cursors.values() if not one.announced or one.shown < one.record.last]
        # Several streams as one. A stream is read when the others have come to its beginning, so few events are held.
        heap = [(cursor.record.opened, number) for number, cursor in enumerate(behind)]
        heapq.heapify(heap)
        while heap:
            _, number = heapq.heappop(heap)
            cursor = behind[number]
            async for seen in self._next(cursor):
                yield seen
            if cursor.page:
                heapq.heappush(heap, (cursor.page[-1].time, number))
        if self._kind is not Shown.SESSION and records and all(record.sealed for record in records):
            rows = await self._store.calls(self._session)  # nothing follows the answer of a single call
            yield ended(self._session, rows[0].state.value if rows else "it is forgotten", kind=self._kind)

    async def _streams(self) -> list[StreamRecord]:
        return [record for record in await self._store.streams(self._session) if self._only(record.id)]

    async def _next(self, cursor: _Cursor) -> AsyncIterator[JsonObject]:
        """The next event of a stream, with what belongs before it; then there is a page, or the stream is done."""
        stream = cursor.record
        if not cursor.announced:
            cursor.announced = True
            yield opened(stream, await self._store.calls_on(stream.id))
        if cursor.page:
            event = cursor.page.pop()
            if event.seq > cursor.shown + 1:
                yield trimmed(stream, cursor.shown + 1, event.seq - 1)
            cursor.shown = event.seq
            yield appended(stream, event)
        # No further than what was there when the look began: a fast writer must not hide that new streams are there.
        if not cursor.page and cursor.shown < stream.last:
            cursor.page = list(await self._store.read(stream.id, after=cursor.shown, limit=EVENTS_PAGE))[::-1]
            if not cursor.page:
                yield trimmed(stream, cursor.shown + 1, stream.last)
                cursor.shown = stream.last
