"""What may be forgotten, and in which order (R7).

Rules over plain numbers; the hub and the store apply them. A final answer is the last thing to go.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from perdure._core.ids import StreamId


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How much one session keeps."""

    streams: int
    session_events: int
    answers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Cutoffs:
    """The times before which things have expired."""

    events: float
    """Events that are not final answers."""
    answers: float
    """Final answers, stream records, and sessions by their last activity."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """What one stream keeps at the moment."""

    stream: StreamId
    events: int
    """Events that may go: not final answers, and not beyond the position of an attached reader."""
    answers: int
    idle: bool
    """Sealed, and nobody reads: may go altogether."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forget:
    """What a session over its limits loses: the events of some streams, and some streams altogether."""

    events_of: tuple[StreamId, ...]
    streams: tuple[StreamId, ...]


def cutoffs(*, now: float, event_ttl: float, replay_window: float) -> Cutoffs:
    return Cutoffs(events=now - event_ttl, answers=now - replay_window)


def over_limits(kept: Iterable[Kept], limits: Limits) -> Forget:
    """Choose what a session forgets: idle streams before busy ones, and the oldest first (the order of `kept`)."""
    streams = sorted(kept, key=lambda stream: not stream.idle)
    events = sum(stream.events for stream in streams)
    with_events = sum(1 for stream in streams if stream.events)
    answers = sum(stream.answers for stream in streams)
    events_of: list[StreamId] = []
    dropped: list[StreamId] = []
    for stream in streams:
        if stream.idle and answers > limits.answers:
            dropped.append(stream.stream)
            answers -= stream.answers
        elif stream.events and (events > limits.session_events or with_events > limits.streams):
            events_of.append(stream.stream)
        else:
            continue
        events -= stream.events
        with_events -= 1 if stream.events else 0
    return Forget(events_of=tuple(events_of), streams=tuple(dropped))
