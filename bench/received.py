"""What a response held, taken apart after the clock has stopped: its SSE events, and when each was read."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

EVENT = re.compile(rb"(.+?)\r?\n\r?\n", re.DOTALL)


class BrokenAnswerError(Exception):
    """An answer was not what it has to be; the figures of this measure would mean nothing."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """One SSE event, and when its last byte was read."""

    id: str
    data: bytes
    arrived: int

    def message(self) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self.data)
        return parsed


@dataclass(kw_only=True)
class Response:
    """One HTTP response: its head, and its raw body read by read."""

    asked: int
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    reads: list[tuple[int, bytes]] = field(default_factory=list)

    @property
    def ended(self) -> int:
        """When its last byte was read."""
        return self.reads[-1][0]

    def body(self) -> bytes:
        return b"".join(content for _, content in _chunks(self._raw())) if self._chunked else self._raw()

    def events(self) -> list[Event]:
        """The SSE events in order; those without data and id, such as comments, are left out."""
        clock = _Clock(self)
        found = ((match.group(1), clock.at(match.end() - 1)) for match in EVENT.finditer(clock.body))
        return [event for block, arrived in found if (event := _event(block, arrived)) is not None]

    @property
    def _chunked(self) -> bool:
        return self.headers.get("transfer-encoding") == "chunked"

    def _raw(self) -> bytes:
        return b"".join(data for _, data in self.reads)


class _Clock:
    """Says when the byte at an offset of the body was read."""

    def __init__(self, response: Response) -> None:
        raw = b"".join(data for _, data in response.reads)
        pieces = list(_chunks(raw)) if response.headers.get("transfer-encoding") == "chunked" else [(0, raw)]
        self.body = b"".join(content for _, content in pieces)
        self._raw_starts = [start for start, _ in pieces]
        self._body_starts = _starts([len(content) for _, content in pieces])
        self._read_starts = _starts([len(data) for _, data in response.reads])
        self._times = [time for time, _ in response.reads]

    def at(self, offset: int) -> int:
        piece = bisect_right(self._body_starts, offset) - 1
        raw = self._raw_starts[piece] + offset - self._body_starts[piece]
        return self._times[bisect_right(self._read_starts, raw) - 1]


def _starts(lengths: list[int]) -> list[int]:
    starts, total = [], 0
    for length in lengths:
        starts.append(total)
        total += length
    return starts


def _chunks(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """The chunks of a chunked body: where each starts, and its bytes; a cut body ends with a part of one."""
    at = 0
    while (end := raw.find(b"\r\n", at)) > 0:
        size = int(raw[at:end], 16)
        if size == 0:
            return
        start = end + 2
        yield start, raw[start : start + size]
        at = start + size + 2


def _event(block: bytes, arrived: int) -> Event | None:
    fields = {b"id": b"", b"data": b""}
    for line in block.splitlines():
        name, _, value = line.partition(b":")
        if name in fields:
            fields[name] = value.removeprefix(b" ")
    if not fields[b"id"] and not fields[b"data"]:
        return None
    return Event(id=fields[b"id"].decode(), data=fields[b"data"], arrived=arrived)
