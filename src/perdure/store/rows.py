"""Turns records into rows of a database and rows into records, and reads the records that every database keeps alike.

The statements in `queries.sql` of all databases and of one name their values as records and steps name their fields.
`{stream}` stands for the columns of a stream's record in the order of its fields, `{stream s}` for the same of a table
that is called `s`.
"""

import enum
import json
import re
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, TypeVar, cast

from perdure._core.ids import Generation, Kind, NodeId, RecordKind, SessionId, StreamId
from perdure._core.jsonrpc import coerce_id
from perdure._core.limits import Caller
from perdure._core.states import CallState, SessionState, ToolStepState
from perdure._core.tool_steps import ToolStepKind
from perdure.store.interface import Inspect
from perdure.store.records import (
    FORWARDED_AT_ONCE,
    MAIL_AT_ONCE,
    AnsweredPage,
    AskRecord,
    CallRecord,
    Followed,
    Forwarded,
    Mail,
    NodeRecord,
    OpenCall,
    Outline,
    ReaderRecord,
    SessionRecord,
    StreamRecord,
    ToolStepRecord,
    UsageRecord,
)

R = TypeVar("R")

Row = tuple[Any, ...]


# --- Into the database ----------------------------------------------------------------------------------------------


def named_values(value: Any) -> dict[str, object]:
    """Return the fields of a record, or of a step, by their names."""
    found: dict[str, object] = {}
    for name in value.__dataclass_fields__:
        field = getattr(value, name)
        found[name] = field.value if isinstance(field, enum.Enum) else field
    return found


def session_values(record: SessionRecord) -> dict[str, object]:
    return named_values(record) | {"owner": loose(record.owner), "sticky": sticky_text(record.sticky)}


def stream_row(record: StreamRecord, *, listed: bool, seen: int | None) -> Row:
    """The last columns are the session again and its revision, because the statement looks the session up."""
    row = (record.id, record.session, record.kind.value, record.node, record.fence, record.opened)
    return (*row, record.generation, record.last, record.sealed, record.answered, listed, record.session, seen)


def call_row(key: int, place: int, record: CallRecord) -> Row:
    id_ = request_id_text(record.request_id)
    row = (key, record.incarnation, id_, record.session, id_key(record.request_id), place)
    said = (loose(record.method), record.request, loose(record.principal))
    state = (record.attempt, record.progress, record.state.value)
    return (*row, *said, *state, record.digest, loose(record.name), record.upstream)


def tool_step_row(record: ToolStepRecord) -> Row:
    """Without its stream."""
    key = (record.incarnation, request_id_text(record.request_id), record.number)
    said = (record.kind.value, loose(record.name), record.state.value, record.again, record.own)
    return (*key, *said, record.attempt, record.began, record.ended, record.value)


def ask_values(record: AskRecord) -> dict[str, object]:
    return named_values(record) | {"request_id": request_id_text(record.request_id)}


def sticky_text(requests: tuple[bytes, ...]) -> str:
    return json.dumps([request.decode("latin-1") for request in requests])


def request_id_text(request_id: int | str | None) -> str:
    """As JSON: keeps 8 and "8" apart, and takes numbers of any size and any text that a peer may send."""
    return str(request_id) if type(request_id) is int else json.dumps(request_id)


def id_key(request_id: int | str) -> str | bytes:
    """The form in which ids are compared, as text: it may be a number of any size."""
    return str(request_id) if type(request_id) is int else loose(str(coerce_id(request_id)))


def loose(text: str) -> str | bytes:
    """Return text as a database can hold it: half a surrogate pair, which JSON may spell, is not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
    return text


# --- Out of the database --------------------------------------------------------------------------------------------


def sticky_requests(text: str) -> tuple[bytes, ...]:
    return tuple(request.encode("latin-1") for request in json.loads(text))


def strict(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("utf-8", "surrogatepass")


def record_maker(kind: Callable[..., R], /, **changes: Callable[[Any], object]) -> Callable[[Row], R]:
    """Return the function that makes a record of a row. `changes`: how the columns of these fields are read."""
    names = [field.name for field in fields(cast("Any", kind))]

    def record(row: Row) -> R:
        values = dict(zip(names, row, strict=True))
        for name, change in changes.items():
            values[name] = change(values[name])
        return kind(**values)

    return record


session_record = record_maker(
    SessionRecord,
    owner=strict,
    state=SessionState,
    initialized=bool,
    sticky=sticky_requests,
    kind=RecordKind,
    is_task=bool,
)
stream_record = record_maker(StreamRecord, kind=Kind, sealed=bool, unread=bool)
call_record = record_maker(
    CallRecord,
    request_id=json.loads,
    method=strict,
    principal=strict,
    state=CallState,
    name=strict,
)


def outline(row: Row) -> Outline:
    id_, owner, state, is_task, active, kind, call = row
    return Outline(
        id_,
        strict(owner),
        SessionState(state),
        bool(is_task),
        active,
        RecordKind(kind),
        None if call is None else CallState(call),
    )


def open_call(row: Row) -> OpenCall:
    session, stream, method, state, attempt, node = row
    return OpenCall(session, stream, strict(method), CallState(state), attempt, node)


tool_step_record = record_maker(
    ToolStepRecord,
    request_id=lru_cache(maxsize=64)(json.loads),  # hundreds of steps have the id of one call
    kind=ToolStepKind,
    name=strict,
    state=ToolStepState,
    again=bool,
    own=bool,
    value=lambda value: value or b"",
)
ask_record = record_maker(AskRecord, request_id=json.loads)
reader_record = record_maker(ReaderRecord)
node_record = record_maker(NodeRecord)
kept_record = record_maker(UsageRecord)


READER_COLUMNS = len(fields(ReaderRecord))


def followed(row: Row) -> Followed:
    """Return a stream and its reader, whose columns are the last ones, and empty if there is none."""
    stream, reader = row[:-READER_COLUMNS], row[-READER_COLUMNS:]
    return Followed(stream_record(stream), reader=None if reader[0] is None else reader_record(reader))


generation = record_maker(Generation)


T = TypeVar("T")


class RecordReads(Inspect):
    """Reads the records that every database keeps alike, by the same queries. A database adds the form of its sessions
    and callers, and reads its events."""

    _session_record: Callable[[Row], SessionRecord]

    @abstractmethod
    def _columns_of(self, caller: Caller) -> tuple[object, ...]:
        """Return the columns by which a caller's records are found."""

    @abstractmethod
    async def _all(self, query: str, record: Callable[[Any], T], *values: Any) -> Sequence[T]:
        """Return the records that a query finds."""

    async def _one(self, query: str, record: Callable[[Any], T], *values: Any) -> T | None:
        found = await self._all(query, record, *values)
        return found[0] if found else None

    # Streams

    async def streams(self, whose: SessionId | AnsweredPage, *, only_unread: bool = False) -> Sequence[StreamRecord]:
        if isinstance(whose, AnsweredPage):
            values = (*self._columns_of(whose.caller), *whose.after, whose.limit)
            return await self._all("answered_streams", stream_record, *values)
        return await self._all("unread_streams" if only_unread else "streams_of_session", stream_record, whose)

    async def written_by(self, node: NodeId, *, forwarded: bool = False) -> Sequence[StreamRecord]:
        return await self._all("forwarded_to" if forwarded else "streams_of_node", stream_record, node)

    async def kept(self, session: SessionId) -> Sequence[UsageRecord]:
        return await self._all("kept_of_session", kept_record, session)

    async def generations(self, stream: StreamId) -> Sequence[Generation]:
        return await self._all("generations_of_stream", generation, stream)

    async def forwarded(self, stream: StreamId, *, after: int = 0) -> Sequence[Forwarded]:
        return await self._all("read_forwarded", Forwarded._make, stream, after, FORWARDED_AT_ONCE)

    # Sessions, their calls and asks

    async def session(self, session: SessionId) -> SessionRecord | None:
        return await self._one("session_by_id", self._session_record, session)

    async def longest_dormant(
        self, caller: Caller | None = None, *, kind: RecordKind = RecordKind.SESSION, delivered: bool = False
    ) -> SessionRecord | None:
        if caller is None:
            return await self._one("longest_dormant", self._session_record, kind.value)
        values = (*self._columns_of(caller), kind.value, delivered)
        return await self._one("longest_dormant_of", self._session_record, *values)

    async def newest_of(self, caller: Caller, *, kind: RecordKind, limit: int) -> Sequence[SessionRecord]:
        return await self._all("newest_of", self._session_record, *self._columns_of(caller), kind.value, limit)

    async def bytes_of(self, caller: Caller) -> int:
        [size] = await self._all("bytes_of_caller", lambda row: int(row[0]), *self._columns_of(caller))
        return size

    async def count_states(
        self, kind: RecordKind = RecordKind.SESSION, caller: Caller | None = None
    ) -> Mapping[SessionState, int]:
        def count(row: Row) -> tuple[SessionState, int]:
            return SessionState(row[0]), row[1]

        if caller is None:
            return dict(await self._all("count_states", count, kind.value))
        return dict(await self._all("count_states_of", count, *self._columns_of(caller), kind.value))

    async def newest(self, *, limit: int, prefix: str = "") -> Sequence[Outline]:
        if prefix:
            return await self._all("newest_with_prefix", outline, limit, prefix, f"{prefix}{chr(sys.maxunicode)}")
        return await self._all("newest", outline, limit)

    async def open_calls(self, *, limit: int) -> Sequence[OpenCall]:
        return await self._all("open_calls", open_call, limit)

    async def calls(
        self, session: SessionId, *, stream: StreamId | None = None, only_open: bool = False
    ) -> Sequence[CallRecord]:
        if stream is not None:
            return await self._all("calls_of_stream", call_record, stream)
        return await self._all("open_calls_of_session" if only_open else "calls_of_session", call_record, session)

    async def tool_steps(self, stream: StreamId, *, values: bool = True) -> Sequence[ToolStepRecord]:
        return await self._all("tool_steps", tool_step_record, stream, values)

    async def asks(self, session: SessionId) -> Sequence[AskRecord]:
        return await self._all("asks_of_session", ask_record, session)

    # Notes and nodes

    async def notes(self, prefix: str) -> Mapping[str, bytes]:
        bounds = (prefix, prefix + chr(sys.maxunicode))
        return dict(await self._all("notes", lambda row: (str(row[0]), bytes(row[1])), *bounds))

    async def nodes(self) -> Sequence[NodeRecord]:
        return await self._all("all_nodes", node_record)

    async def mail(self, node: NodeId, *, after: int = 0) -> Sequence[Mail]:
        return await self._all("read_mail", Mail._make, node, after, MAIL_AT_ONCE)


_HEADING = re.compile(r"^-- (\w+): (.+)$", re.MULTILINE)
_RECORDS: Mapping[str, Any] = {"session": SessionRecord, "stream": StreamRecord}
_COLUMNS = re.compile(r"\{(session|stream)( \w+)?\}")


_CALL_COLUMNS = ", ".join("s.id" if field.name == "stream" else f"c.{field.name}" for field in fields(CallRecord))


def shared_sql(name: str) -> str:
    """Return a file of statements that both databases run. They are written for PostgreSQL and the schema `perdure`."""
    return files("perdure.store").joinpath("sql", name).read_text(encoding="utf-8")


def statements_by_name(text: str) -> Mapping[str, str]:
    """Return the statements of a file in which each stands below a line with its name and its purpose."""

    def columns(found: re.Match[str]) -> str:
        table = f"{found[2].strip()}." if found[2] else ""
        return ", ".join(table + field.name for field in fields(_RECORDS[found[1]]))

    text = _COLUMNS.sub(columns, text).replace("{call}", _CALL_COLUMNS)
    headings = list(_HEADING.finditer(text))
    ends = [heading.start() for heading in headings[1:]] + [len(text)]
    found = {heading[1]: text[heading.end() : end].strip() for heading, end in zip(headings, ends, strict=True)}
    return MappingProxyType(found)
