"""What an operator's programs are given of sessions: JSON objects whose keys stay. Times are seconds since 1970."""

from __future__ import annotations

from typing import Any

from perdure._core.ids import Kind, NodeId
from perdure.admin.queries import Overview, Picture
from perdure.admin.summaries import call_name, members
from perdure.store.base import CallRecord, StreamRecord

KINDS = {Kind.CALL: "call", Kind.STANDALONE: "standalone"}


def list_object(session: Overview) -> dict[str, Any]:
    return {
        "id": session.id,
        "owner": session.owner,
        "state": session.state.value,
        "version": session.version,
        "created": session.created,
        "active": session.active,
        "calls": session.calls,
        "streams": session.streams,
        "home": session.home or None,
    }


def show_object(seen: Picture) -> dict[str, Any]:
    record = seen.record
    writers = {stream.id: stream.node for stream in seen.streams}
    return {
        "id": record.id,
        "owner": record.owner,
        "state": record.state.value,
        "ended": record.ended or None,
        "version": record.version,
        "incarnation": record.incarnation,
        "initialized": record.initialized,
        "client": members(record.client_params),
        "server": members(record.result),
        "created": record.created,
        "active": record.active,
        "home": seen.home or None,
        "resume_token": seen.resumable,
        "sticky": [members(request) for request in record.sticky],
        "calls": [_call_object(call, writers.get(call.stream)) for call in seen.calls],
        "asks": [
            {"id": ask.id, "stream": ask.stream, "node": ask.node or None, "request": members(ask.request)}
            for ask in seen.asks
        ],
        "streams": [_stream_object(seen, stream) for stream in seen.streams],
    }


def _call_object(call: CallRecord, node: NodeId | None) -> dict[str, Any]:
    return {
        "request_id": call.request_id,
        "incarnation": call.incarnation,
        "method": call.method,
        "name": call_name(call),
        "state": call.state.value,
        "attempt": call.attempt,
        "progress": call.progress,
        "principal": call.principal,
        "node": node or None,
        "stream": call.stream,
    }


def _stream_object(seen: Picture, stream: StreamRecord) -> dict[str, Any]:
    reader, kept = seen.readers.get(stream.id), seen.kept.get(stream.id)
    return {
        "id": stream.id,
        "kind": KINDS[stream.kind],
        "last": stream.last,
        "sealed": stream.sealed,
        "generation": stream.generation,
        "opened": stream.opened,
        "node": stream.node or None,
        "reader": {"node": reader.node, "seq": reader.seq} if reader else None,
        "events": kept.events if kept else None,
        "answers": kept.answers if kept else None,
    }
