"""Counts what one session keeps of the streams that are over.

Usage is counted incrementally, so that enforcing a limit costs what it removes.
"""

from collections.abc import Sequence

from perdure._core.ids import StreamId
from perdure._core.retention import Cutoffs, Limits, StreamUsage, answers_to_drop, events_to_trim
from perdure.log.stream import Stream
from perdure.store.records import UsageRecord
from perdure.store.steps import DropStream, Step, Trim

_ALL = (1 << 62) - 1
"""Beyond every sequence number, and still an integer of the database's."""


class RetainedStreams:
    """Counts the streams of one session that are over, the oldest first."""

    __slots__ = ("_answer_bytes", "_answers", "_event_bytes", "_events", "_limits", "_streams", "_with_events")

    def __init__(self, limits: Limits, stored: Sequence[UsageRecord]) -> None:
        self._limits = limits
        self._streams: dict[StreamId, tuple[StreamUsage, float]] = {}
        self._with_events: dict[StreamId, StreamUsage] = {}
        self._answers = self._answer_bytes = self._events = self._event_bytes = 0
        for record in stored:
            kept = StreamUsage(
                stream=record.stream,
                events=record.events,
                answers=record.answers,
                idle=True,
                event_bytes=record.event_bytes,
                answer_bytes=record.answer_bytes,
            )
            self.add(kept, time=record.opened)

    def add(self, kept: StreamUsage, *, time: float) -> None:
        if kept.stream in self._streams:
            self._forget(kept.stream)
        self._streams[kept.stream] = kept, time
        self._answers += kept.answers
        self._answer_bytes += kept.answer_bytes
        if kept.events:
            self._with_events[kept.stream] = kept
            self._events += kept.events
            self._event_bytes += kept.event_bytes

    def enforce(self, open_streams: Sequence[Stream]) -> Sequence[Step]:
        """The steps that bring the session back within its limits; mostly none."""
        # Streams that are over and are read again are left alone until their reader has left.
        resumed = {stream.id for stream in open_streams if stream.id in self._streams}
        kept: list[StreamUsage] = []
        written: dict[StreamId, Stream] = {}
        total, answer_bytes = self._answers, self._answer_bytes
        for stream in open_streams:
            if stream.writer is not None and stream.id not in resumed:
                written[stream.id] = stream
                kept.append(usage := stream.usage(idle=stream.is_over and not stream.readers.present))
                total += usage.answers
                answer_bytes += usage.answer_bytes
        oldest = (stream for stream, _ in self._streams.values() if stream.stream not in resumed)
        # The newest answer stays, whatever its size: its client may have lost the connection just now.
        newest = next(reversed(self._streams.values()))[0].answer_bytes if self._streams else 0
        dropped = answers_to_drop(oldest, total=total, size=self._answer_bytes - newest, limits=self._limits)
        steps: list[Step] = []
        for stream_id in dropped:
            answer_bytes -= self._forget(stream_id)
            steps.append(DropStream(stream=stream_id))
        events = self._events + sum([usage.events for usage in kept])
        size = self._event_bytes + answer_bytes + sum([usage.event_bytes for usage in kept])
        if self._limits.allow(events=events, streams=len(self._with_events) + len(kept), size=size):
            return steps  # as after most calls, without a look at each stream
        over = [stream for stream in self._with_events.values() if stream.stream not in resumed]
        for stream_id in events_to_trim([*over, *kept], self._limits, answer_bytes=answer_bytes):
            if stream_id in written:
                steps.append(written[stream_id].forget_events())
            else:
                steps.append(Trim(stream=stream_id, through=_ALL))
                self._forget_events(stream_id)
        return steps

    def swept(self, cutoffs: Cutoffs) -> None:
        """The store has deleted what had expired: no longer count it."""
        for stream_id, (_, time) in list(self._streams.items()):
            if time < cutoffs.answers:
                self._forget(stream_id)
            elif time < cutoffs.events:
                self._forget_events(stream_id)
            else:
                break

    def _forget(self, stream_id: StreamId) -> int:
        """No longer count a stream. Returns the bytes of its answers."""
        self._forget_events(stream_id)
        if (found := self._streams.pop(stream_id, None)) is None:
            return 0
        self._answers -= found[0].answers
        self._answer_bytes -= found[0].answer_bytes
        return found[0].answer_bytes

    def _forget_events(self, stream_id: StreamId) -> None:
        if (found := self._with_events.pop(stream_id, None)) is not None:
            self._events -= found.events
            self._event_bytes -= found.event_bytes
