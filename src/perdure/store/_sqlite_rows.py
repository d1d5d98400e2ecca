"""Records to rows and back."""

from __future__ import annotations

import json
from typing import Any

from perdure._core.ids import Kind
from perdure._core.states import CallState, SessionState
from perdure.errors import StoreTooNew
from perdure.store.base import (
    RECORD_VERSION,
    AskRecord,
    CallRecord,
    Generation,
    ReaderRecord,
    SessionRecord,
    StreamRecord,
)

Row = tuple[Any, ...]


def session_row(record: SessionRecord) -> Row:
    return (
        record.id,
        RECORD_VERSION,
        _loose(record.owner),
        record.node,
        record.state.value,
        record.version,
        record.client_params,
        record.result,
        record.initialized,
        json.dumps([request.decode("latin-1") for request in record.sticky]),
        record.incarnation,
        record.standalone,
        record.created,
        record.active,
    )


def session_record(row: Row) -> SessionRecord:
    version, id_, owner, node, state, revision, params, result, initialized, sticky, incarnation, standalone, *times = (
        row
    )
    _known(version, f"session {id_}")
    return SessionRecord(
        id=id_,
        owner=_strict(owner),
        node=node,
        state=SessionState(state),
        version=revision,
        client_params=params,
        result=result,
        initialized=bool(initialized),
        sticky=tuple(request.encode("latin-1") for request in json.loads(sticky)),
        incarnation=incarnation,
        standalone=standalone,
        created=times[0],
        active=times[1],
    )


def stream_row(record: StreamRecord) -> Row:
    return (
        record.id,
        RECORD_VERSION,
        record.session,
        record.kind.value,
        record.fence,
        record.opened,
        record.generation,
        record.last,
        record.sealed,
    )


def stream_record(row: Row) -> StreamRecord:
    version, id_, session, kind, fence, opened, generation, last, sealed = row
    _known(version, f"stream {id_}")
    return StreamRecord(
        id=id_,
        session=session,
        kind=Kind(kind),
        fence=fence,
        opened=opened,
        generation=generation,
        last=last,
        sealed=bool(sealed),
    )


def generation(row: Row) -> Generation:
    number, end = row
    return Generation(generation=number, end=end)


def call_row(key: int, place: int, record: CallRecord) -> Row:
    return (
        key,
        record.incarnation,
        request_id_text(record.request_id),
        place,
        RECORD_VERSION,
        _loose(record.method),
        record.request,
        _loose(record.principal),
        record.node,
        record.attempt,
        record.progress,
        record.state.value,
    )


def request(row: Row) -> tuple[int | str, str]:
    request_id, method = row
    return json.loads(request_id), _strict(method)


def call_record(row: Row) -> CallRecord:
    version, session, incarnation, request_id, stream, method, request, principal, node, attempt, progress, state = row
    _known(version, f"call {request_id} of stream {stream}")
    return CallRecord(
        session=session,
        incarnation=incarnation,
        request_id=json.loads(request_id),
        stream=stream,
        method=_strict(method),
        request=request,
        principal=_strict(principal),
        node=node,
        attempt=attempt,
        progress=progress,
        state=CallState(state),
    )


def ask_row(key: int, record: AskRecord) -> Row:
    return (record.session, record.id, RECORD_VERSION, key, record.request, record.node)


def ask_record(row: Row) -> AskRecord:
    version, session, id_, stream, request, node = row
    _known(version, f"ask {id_}")
    return AskRecord(session=session, id=id_, stream=stream, request=request, node=node)


def reader_row(key: int, record: ReaderRecord) -> Row:
    return (key, RECORD_VERSION, record.reader, record.node, record.seq)


def reader_record(row: Row) -> ReaderRecord:
    version, stream, reader, node, seq = row
    _known(version, f"reader of stream {stream}")
    return ReaderRecord(stream=stream, reader=reader, node=node, seq=seq)


def request_id_text(request_id: int | str) -> str:
    """As JSON: keeps 8 and "8" apart, and takes numbers of any size and any text that a peer may send."""
    return str(request_id) if type(request_id) is int else json.dumps(request_id)


def _loose(text: str) -> str | bytes:
    """Text from outside as SQLite can hold it: half a surrogate pair, which JSON may spell, is no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
    return text


def _strict(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("utf-8", "surrogatepass")


def _known(version: int, what: str) -> None:
    if version > RECORD_VERSION:
        raise StoreTooNew(
            f"the record of {what} has version {version}, written by a newer release; this one knows versions up to"
            f" {RECORD_VERSION}"
        )
