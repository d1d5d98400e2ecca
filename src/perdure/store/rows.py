"""Turns records into rows of a database, and rows into records."""

from __future__ import annotations

import json
from typing import Any

from perdure._core.chains import Chain
from perdure._core.ids import Kind
from perdure._core.jsonrpc import coerce_id
from perdure._core.states import CallState, SessionState
from perdure.errors import StoreTooNew
from perdure.store.base import (
    RECORD_VERSION,
    AskRecord,
    CallRecord,
    ChangeSession,
    Forwarded,
    Generation,
    KeptRecord,
    Mail,
    NodeRecord,
    ReaderRecord,
    SessionRecord,
    StreamRecord,
)

Row = tuple[Any, ...]


def session_row(record: SessionRecord) -> Row:
    return (
        record.id,
        RECORD_VERSION,
        loose(record.owner),
        record.state.value,
        record.version,
        record.client_params,
        record.result,
        record.initialized,
        sticky_text(record.sticky),
        record.incarnation,
        record.standalone,
        record.created,
        record.active,
        record.ended,
        record.address,
    )


def change_values(step: ChangeSession) -> dict[str, object]:
    return {
        "record": RECORD_VERSION,
        "session": step.session,
        "active": step.active,
        "state": None if step.state is None else step.state.value,
        "version": step.version,
        "result": step.result,
        "initialized": step.initialized,
    }


def state_count(row: Row) -> tuple[SessionState, int]:
    state, count = row
    return SessionState(state), count


def session_record(row: Row) -> SessionRecord:
    version, id_, owner, state, revision, params, result, initialized, sticky, incarnation, standalone, *rest = row
    _known(version, f"session {id_}")
    return SessionRecord(
        id=id_,
        owner=_strict(owner),
        state=SessionState(state),
        version=revision,
        client_params=params,
        result=result,
        initialized=bool(initialized),
        sticky=sticky_requests(sticky),
        incarnation=incarnation,
        standalone=standalone,
        created=rest[0],
        active=rest[1],
        ended=rest[2],
        address=rest[3],
    )


def sticky_text(requests: tuple[bytes, ...]) -> str:
    return json.dumps([request.decode("latin-1") for request in requests])


def sticky_requests(text: str) -> tuple[bytes, ...]:
    return tuple(request.encode("latin-1") for request in json.loads(text))


def stream_row(record: StreamRecord, *, listed: bool) -> Row:
    """With the session once more, at the end: it is looked up, too."""
    return (
        record.id,
        RECORD_VERSION,
        record.session,
        record.kind.value,
        record.node,
        record.fence,
        record.opened,
        record.generation,
        record.last,
        record.sealed,
        listed,
        record.session,
    )


def stream_record(row: Row) -> StreamRecord:
    version, id_, session, kind, node, fence, opened, generation, last, sealed, delivered, unread = row
    _known(version, f"stream {id_}")
    return StreamRecord(
        id=id_,
        session=session,
        kind=Kind(kind),
        node=node,
        fence=fence,
        opened=opened,
        generation=generation,
        last=last,
        sealed=bool(sealed),
        delivered=delivered,
        unread=bool(unread),
    )


def kept_record(row: Row) -> KeptRecord:
    stream, opened, events, answers, event_bytes, answer_bytes = row
    return KeptRecord(
        stream=stream,
        opened=opened,
        events=events,
        answers=answers,
        event_bytes=event_bytes,
        answer_bytes=answer_bytes,
    )


def generation(row: Row) -> Generation:
    number, end = row
    return Generation(generation=number, end=end)


def call_row(key: int, place: int, record: CallRecord) -> Row:
    return (
        key,
        record.incarnation,
        request_id_text(record.request_id),
        record.session,
        id_key(record.request_id),
        place,
        RECORD_VERSION,
        loose(record.method),
        record.request,
        loose(record.principal),
        record.attempt,
        record.progress,
        record.state.value,
    )


def call_record(row: Row) -> CallRecord:
    version, session, incarnation, request_id, stream, method, request, principal, attempt, progress, state = row
    _known(version, f"call {request_id} of stream {stream}")
    return CallRecord(
        session=session,
        incarnation=incarnation,
        request_id=json.loads(request_id),
        stream=stream,
        method=_strict(method),
        request=request,
        principal=_strict(principal),
        attempt=attempt,
        progress=progress,
        state=CallState(state),
    )


def ask_row(record: AskRecord) -> Row:
    return (record.session, record.id, RECORD_VERSION, record.request, record.node, record.stream)


def ask_record(row: Row) -> AskRecord:
    version, session, id_, stream, request, node = row
    _known(version, f"ask {id_}")
    return AskRecord(session=session, id=id_, stream=stream, request=request, node=node)


def reader_row(record: ReaderRecord) -> Row:
    return (RECORD_VERSION, record.reader, record.node, record.seq, record.stream)


def reader_record(row: Row) -> ReaderRecord:
    version, stream, reader, node, seq = row
    _known(version, f"reader of stream {stream}")
    return ReaderRecord(stream=stream, reader=reader, node=node, seq=seq)


def node_record(row: Row) -> NodeRecord:
    """Of any version: it tells which one the node writes."""
    id_, record, beat, facts = row
    return NodeRecord(id=id_, record=record, beat=beat, facts=facts)


def mail(row: Row) -> Mail:
    return Mail(*row)


def forwarded(row: Row) -> Forwarded:
    return Forwarded(*row)


def request_id_text(request_id: int | str) -> str:
    """As JSON: keeps 8 and "8" apart, and takes numbers of any size and any text that a peer may send."""
    return str(request_id) if type(request_id) is int else json.dumps(request_id)


def chain_row(chain: Chain) -> Row:
    """With the session once more, at the end: it is looked up, too."""
    return (
        chain.session,
        chain.name,
        RECORD_VERSION,
        chain.holder,
        chain.current,
        chain.next,
        chain.session,
    )


def chain_record(row: Row) -> Chain:
    version, name, session, holder, current, next_ = row
    _known(version, f"the chain of session {session}")
    return Chain(name=name, session=session, holder=holder, current=current, next=next_)


def id_key(request_id: int | str) -> str | bytes:
    """The form in which ids are compared, as text: it may be a number of any size."""
    return str(request_id) if type(request_id) is int else loose(str(coerce_id(request_id)))


def loose(text: str) -> str | bytes:
    """Give text as a database can hold it: half a surrogate pair, which JSON may spell, is not UTF-8."""
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
