"""Decides which events and streams may be deleted, and in which order (R7).

They work on plain numbers; streams, sessions and the store apply them. A final answer is deleted last.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from perdure._core.ids import StreamId
from perdure._core.states import SessionStep

MAX_ENDED = 10_000
"""Records of ended sessions that a store keeps: as many as sessions may be open by default. Such a record says why its
id is unknown, so losing the oldest costs a client the reason and nothing else."""

MAX_ENDED_OF_CALLER = 1_000
"""The same of one owner, or of one address without an owner: a caller in a loop pushes out its own records only."""

MAX_ENDED_PARAMS = 4 << 10
"""Bytes of an expired session's client params that are kept. Handshakes have a few hundred bytes; of a larger one a
reissued session gets the protocol version only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits of what one session keeps."""

    streams: int
    session_events: int
    answers: int
    size: int
    """Bytes, of events and answers together."""

    def allow(self, *, events: int, streams: int, size: int) -> bool:
        """Whether no stream has to lose its events."""
        many = streams > self.streams + self.streams // SLACK_SHARE
        return events <= self.session_events and not many and size <= self.size


SLACK_SHARE = 20
"""A session may have a twentieth more streams or answers than its limit before the oldest are deleted, back to the
limit. If the limit were exact, each call of a long session would pay for one more commit, in another thread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cutoffs:
    """The times before which things have expired."""

    events: float
    """Events that are not final answers."""
    answers: float
    """Final answers, stream records, and sessions by their last activity."""
    calls: float = -math.inf
    """Durable calls, by their last activity; none by default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamUsage:
    """The events and answers that one stream keeps."""

    stream: StreamId
    events: int
    """Events that may be deleted: not final answers, and not beyond the position of an attached reader."""
    answers: int
    idle: bool
    """Sealed and without a reader: may be deleted altogether."""
    event_bytes: int = 0
    """Of those events."""
    answer_bytes: int = 0


class StreamSizes:
    """Counts the kept events of one stream that this process has appended; only the store knows those of others."""

    __slots__ = ("_event_bytes", "_finals", "_sized_from", "_sizes", "trimmed")

    def __init__(self, last: int, *, finals: tuple[tuple[int, int], ...] = (), trimmed: int = 0) -> None:
        self._finals = finals
        """Sequence numbers and bytes of final answers."""
        self.trimmed = trimmed
        """Events up to this number are forgotten, final answers excepted."""
        self._event_bytes = 0
        self._sized_from = last
        self._sizes: array[int] | None = None
        """Bytes of each event after `_sized_from`; 0 for a final answer."""

    def restarted(self, last: int) -> StreamSizes:
        """The rest of this count when the stream continues after that number."""
        finals = tuple(final for final in self._finals if final[0] <= last)
        return StreamSizes(last, finals=finals, trimmed=self.trimmed)

    def count(self, sizes: Sequence[int], finals: Mapping[int, int] | None = None) -> None:
        """Add the next events; `finals`: numbers and sizes of those that are final answers, which are 0 in `sizes`."""
        if finals:
            self._finals += tuple(finals.items())
        self._event_bytes += sum(sizes)
        if self._sizes is None:
            self._sizes = array("Q")
        self._sizes.extend(sizes)

    def trim(self, through: int) -> None:
        self.trimmed = through
        gone = through - self._sized_from
        if self._sizes is not None and gone > 0:
            self._event_bytes -= sum(self._sizes[:gone])
            del self._sizes[:gone]
            self._sized_from = through

    def overflow(self, last: int, *, limit: int, read: int | None) -> int:
        """The last event to delete, so that no more than the limit are kept; not past the reader at `read`."""
        events = last - self.trimmed
        if events > limit:
            events -= sum(1 for seq, _ in self._finals if seq > self.trimmed)
        if events <= limit:
            return self.trimmed
        through = self.trimmed + events - limit
        for seq, _ in self._finals:
            if self.trimmed < seq <= through:
                through += 1
        return through if read is None else max(self.trimmed, min(through, read))

    def usage(self, stream: StreamId, *, last: int, read: int | None, idle: bool) -> StreamUsage:
        """What the stream keeps; events may be deleted, but not past `read`, where a reader is."""
        floor = last if read is None else min(last, read)
        events, event_bytes, answer_bytes = floor - self.trimmed, self._event_bytes, 0
        for seq, size in self._finals:
            events -= self.trimmed < seq <= floor
            answer_bytes += size
        if floor < last and self._sizes is not None:
            event_bytes = sum(self._sizes[: max(0, floor - self._sized_from)])
        return StreamUsage(
            stream=stream,
            events=max(0, events),
            answers=len(self._finals),
            idle=idle,
            event_bytes=event_bytes,
            answer_bytes=answer_bytes,
        )


def keeps_params(reason: str, size: int) -> bool:
    """Whether an ended session's record keeps the client's params: only a session that expired is ever
    replaced by a new one (`recover="reissue"`)."""
    return reason == SessionStep.WINDOW_PASSED.value and size <= MAX_ENDED_PARAMS


def cutoffs(*, now: float, event_ttl: float, replay_window: float, task_ttl: float) -> Cutoffs:
    return Cutoffs(events=now - event_ttl, answers=now - replay_window, calls=now - min(task_ttl, replay_window))


def answers_to_drop(kept: Iterable[StreamUsage], *, total: int, size: int, limits: Limits) -> Sequence[StreamId]:
    """The streams to delete, so that of `total` answers with `size` bytes no more than the limits allow are kept: the
    oldest. `kept` has that order, and is read no further than needed."""
    dropped: list[StreamId] = []
    if total <= limits.answers + limits.answers // SLACK_SHARE and size <= limits.size:
        return dropped
    streams = iter(kept)
    while (total > limits.answers or size > limits.size) and (stream := next(streams, None)) is not None:
        dropped.append(stream.stream)
        total -= stream.answers
        size -= stream.answer_bytes
    return dropped


def events_to_trim(kept: Iterable[StreamUsage], limits: Limits, *, answer_bytes: int = 0) -> Sequence[StreamId]:
    """The streams that lose their events, answers excepted: idle ones before busy ones, and the oldest first. Answers
    take their part of the bytes, so events go before them."""
    streams = sorted(kept, key=lambda stream: not stream.idle)
    size = answer_bytes + sum(stream.event_bytes for stream in streams)
    events = sum(stream.events for stream in streams)
    with_events = sum(1 for stream in streams if stream.events)
    trimmed: list[StreamId] = []
    if limits.allow(events=events, streams=with_events, size=size):
        return trimmed
    for stream in streams:
        if events <= limits.session_events and with_events <= limits.streams and size <= limits.size:
            break
        if stream.events:
            trimmed.append(stream.stream)
            events -= stream.events
            size -= stream.event_bytes
            with_events -= 1
    return trimmed
