"""What is shown of a session that is followed: a line for people, or a JSON object, for each thing that is seen."""

from __future__ import annotations

import json
from typing import Any

from perdure.admin.as_json import KINDS
from perdure.admin.summaries import call_name, call_title, short, summary
from perdure.admin.tail import Appended, Opened, Over, Seen, Trimmed
from perdure.admin.terminal import clean, clock, cut
from perdure.store.base import StreamRecord

_NO_TIME = " " * len(clock(0))


def tail_line(seen: Seen, *, columns: int | None) -> str:
    return cut(clean(_line(seen)), columns)


def _line(seen: Seen) -> str:
    match seen:
        case Opened(stream=stream, calls=calls):
            asked = ", ".join(f"{call_title(call)} (request {json.dumps(call.request_id)})" for call in calls)
            return f"{clock(stream.opened)}  {_stream(stream)}  {'':<6}  opened{': ' if asked else ''}{asked}"
        case Appended(stream=stream, event=event):
            return f"{clock(event.time)}  {_stream(stream)}  {event.seq:<6}  {summary(event.payload)}"
        case Trimmed(stream=stream, first=first, last=last):
            return f"{_NO_TIME}  {_stream(stream)}  {'':<6}  gap: {_numbers(first, last)} no longer there"
        case Over(session=session, reason=reason):
            return f"session {session} has ended: {reason}"


def _stream(stream: StreamRecord) -> str:
    return f"{KINDS[stream.kind]:<10}  {short(stream.id)}"


def _numbers(first: int, last: int) -> str:
    return f"{first} is" if first == last else f"{first} to {last} are"


def tail_object(seen: Seen) -> dict[str, Any]:
    match seen:
        case Opened(stream=stream, calls=calls):
            asked = [{"request_id": c.request_id, "method": c.method, "name": call_name(c)} for c in calls]
            return {"what": "opened", "time": stream.opened, **_stream_object(stream), "calls": asked}
        case Appended(stream=stream, event=event):
            told = {"seq": event.seq, "final": event.final, "message": _message(event.payload)}
            return {"what": "event", "time": event.time, **_stream_object(stream), **told}
        case Trimmed(stream=stream, first=first, last=last):
            return {"what": "gap", **_stream_object(stream), "first": first, "last": last}
        case Over(session=session, reason=reason):
            return {"what": "ended", "session": session, "reason": reason}


def _stream_object(stream: StreamRecord) -> dict[str, Any]:
    return {"stream": stream.id, "kind": KINDS[stream.kind]}


def _message(payload: bytes) -> Any:
    """The whole of it; as text, should it be no JSON."""
    try:
        return json.loads(payload)
    except ValueError:
        return payload.decode(errors="replace")
