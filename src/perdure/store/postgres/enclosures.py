"""Writes what a hint brings along into the text of a notification, and reads it there.

Payloads go as they are stored, so a codec that hides them in the tables hides them here.
"""

import base64
import json
from collections.abc import Iterable, Sequence
from dataclasses import astuple

from perdure._core.ids import Kind
from perdure.errors import StoreError
from perdure.store import base, rows
from perdure.store.base import Event, Followed
from perdure.store.codec import Payloads

WORD = "e1"
"""The first word of such a text: what follows, in its first form. A release that does not know it reads instead."""

MAX_TEXT = 7_900
"""Bytes in a notification (PostgreSQL takes 8,000)."""

MAX_EVENTS = 32
"""Events of one stream. More come at a pace at which one read serves many of them."""

MAX_PAYLOAD = 5_000
"""Bytes of the payloads of one stream: in the text they take a third more, and the rest of the record some."""


def is_small(followed: Followed) -> bool:
    """Whether it is worth a try to enclose this."""
    sizes = [len(event.payload) for event in followed.events or ()]
    return 0 < len(sizes) <= MAX_EVENTS and sum(sizes) <= MAX_PAYLOAD


def write(enclosed: Iterable[Followed], payloads: Payloads) -> str:
    """The text; empty if it is too large. Of a thousand streams that grew together no more is written than fits."""
    streams: list[str] = []
    size = len(f"{WORD} []")
    for followed in enclosed:
        stream = [[base.RECORD_VERSION, *_row(followed.record)], _events(followed, payloads)]
        streams.append(json.dumps(stream, separators=(",", ":")))
        size += len(streams[-1]) + (len(streams) > 1)
        if size > MAX_TEXT:
            return ""
    return f"{WORD} [{','.join(streams)}]"


def read(text: str, payloads: Payloads) -> Sequence[Followed]:
    """What a text brings along; nothing, if this release cannot read it: its streams are read from the store then."""
    try:
        streams = json.loads(text.removeprefix(WORD))
        return [
            Followed(
                rows.stream_record(row),
                [
                    Event(seq, time, payloads.decode_one(base64.b64decode(payload)), final)
                    for seq, time, payload, final in events
                ],
            )
            for row, events in streams
        ]
    except (ValueError, TypeError, LookupError, StoreError):
        return []


def _row(record: base.StreamRecord) -> list[object]:
    return [value.value if isinstance(value, Kind) else value for value in astuple(record)]


def _events(followed: Followed, payloads: Payloads) -> list[tuple[object, ...]]:
    return [
        (event.seq, event.time, base64.b64encode(payloads.encode_one(event.payload)).decode(), event.final)
        for event in followed.events or ()
    ]
