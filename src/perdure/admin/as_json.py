"""Describes sessions, calls, streams and events as JSON objects whose keys stay. `text` makes its lines from them.

Times are seconds since 1970. A payload that is not JSON is shown as text, because the log may hold anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from perdure._core.ids import Kind, StreamId
from perdure._core.jsonrpc import JsonObject
from perdure.store.base import AskRecord, CallRecord, Event, KeptRecord, ReaderRecord, SessionRecord, StreamRecord

_KINDS = {Kind.CALL: "call", Kind.STANDALONE: "standalone"}

_SUBJECTS = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}
"""The member of `params` that names the tool, prompt or resource of a request."""


def message_of(payload: bytes) -> Any:
    try:
        return json.loads(payload)
    except ValueError:
        return payload.decode(errors="replace")


def _members(payload: bytes) -> JsonObject:
    message = message_of(payload)
    return message if isinstance(message, dict) else {}


def _home(record: SessionRecord, streams: Sequence[StreamRecord]) -> str | None:
    """The node that writes the standalone stream."""
    return next((stream.node for stream in streams if stream.id == record.standalone), "") or None


def list_object(record: SessionRecord, *, streams: Sequence[StreamRecord], calls: int) -> JsonObject:
    """A session in a list: `calls` that have not ended, `streams` that are not sealed."""
    return {
        "id": record.id,
        "owner": record.owner,
        "state": record.state.value,
        "version": record.version,
        "created": record.created,
        "active": record.active,
        "calls": calls,
        "streams": len(streams),
        "home": _home(record, streams),
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
) -> JsonObject:
    """All that the store holds of a session (S6)."""
    writers = {stream.id: stream.node for stream in streams}
    return {
        "id": record.id,
        "owner": record.owner,
        "state": record.state.value,
        "ended": record.ended or None,
        "version": record.version,
        "incarnation": record.incarnation,
        "initialized": record.initialized,
        "client": _members(record.client_params),
        "server": _members(record.result),
        "created": record.created,
        "active": record.active,
        "home": _home(record, streams),
        "resume_token": has_token,
        "sticky": [_members(request) for request in record.sticky],
        "calls": [
            {
                "request_id": call.request_id,
                "incarnation": call.incarnation,
                "method": call.method,
                "name": _subject(call),
                "state": call.state.value,
                "attempt": call.attempt,
                "progress": call.progress,
                "principal": call.principal,
                "node": writers.get(call.stream) or None,
                "stream": call.stream,
            }
            for call in calls
        ],
        "asks": [
            {"id": ask.id, "stream": ask.stream, "node": ask.node or None, "request": _members(ask.request)}
            for ask in asks
        ],
        "streams": [_stream_object(stream, readers.get(stream.id), kept.get(stream.id)) for stream in streams],
    }


def _subject(call: CallRecord) -> str | None:
    """The tool, prompt or resource that a call asks for. It is forgotten with the request once the call has ended."""
    params = _members(call.request).get("params")
    name = params.get(_SUBJECTS.get(call.method, "")) if isinstance(params, dict) else None
    return name if isinstance(name, str) else None


def _stream_object(stream: StreamRecord, reader: ReaderRecord | None, kept: KeptRecord | None) -> JsonObject:
    return {
        "id": stream.id,
        "kind": _KINDS[stream.kind],
        "last": stream.last,
        "sealed": stream.sealed,
        "generation": stream.generation,
        "opened": stream.opened,
        "node": stream.node or None,
        "reader": {"node": reader.node, "seq": reader.seq} if reader else None,
        "events": kept.events if kept else None,
        "answers": kept.answers if kept else None,
    }


# What `tail` shows: one object for each thing that is seen, told apart by `what`.


def opened(stream: StreamRecord, calls: Sequence[CallRecord]) -> JsonObject:
    asked = [{"request_id": call.request_id, "method": call.method, "name": _subject(call)} for call in calls]
    return {"what": "opened", "time": stream.opened, **_of(stream), "calls": asked}


def appended(stream: StreamRecord, event: Event) -> JsonObject:
    message = {"seq": event.seq, "final": event.final, "message": message_of(event.payload)}
    return {"what": "event", "time": event.time, **_of(stream), **message}


def trimmed(stream: StreamRecord, first: int, last: int) -> JsonObject:
    """Events that were forgotten before they could be shown."""
    return {"what": "gap", **_of(stream), "first": first, "last": last}


def ended(session: str, reason: str) -> JsonObject:
    return {"what": "ended", "session": session, "reason": reason}


def _of(stream: StreamRecord) -> JsonObject:
    return {"stream": stream.id, "kind": _KINDS[stream.kind]}
