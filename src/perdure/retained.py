"""What one session keeps of the streams that are over, counted as it grows, so that keeping within limits costs nothing
until a limit is reached."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from perdure._core.ids import StreamId
from perdure._core.retention import Cutoffs, Kept, Limits, over_limits
from perdure.store.base import DropStream, Step, Trim
from perdure.streams import Stream

_ALL = (1 << 62) - 1
"""Beyond every sequence number, and still an integer of the database's."""


class Retained:
    """The streams of one session that are over, the oldest first."""

    __slots__ = ("_answers", "_events", "_limits", "_streams", "_with_events")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._streams: dict[StreamId, tuple[Kept, float]] = {}
        self._events = self._with_events = self._answers = 0

    def add(self, kept: Kept, *, time: float) -> None:
        self._forget(kept.stream)
        self._streams[kept.stream] = kept, time
        self._count(kept, 1)

    def enforce(self, open_streams: Iterable[Stream]) -> Sequence[Step]:
        """The steps that bring the session back within its limits; mostly none."""
        streams = list(open_streams)
        open_by_id = {stream.id: stream for stream in streams if stream.id not in self._streams}
        kept = [stream.kept for stream in open_by_id.values()]
        if not self._over(kept):
            return ()
        # Somebody reads these again: they are left alone until that is over.
        resumed = {stream.id for stream in streams} - open_by_id.keys()
        over = [before for before, _ in self._streams.values() if before.stream not in resumed]
        forget = over_limits([*over, *kept], self._limits)
        steps: list[Step] = []
        for stream_id in forget.events_of:
            if stream_id in open_by_id:
                steps.append(open_by_id[stream_id].forget_events())
            else:
                steps.append(Trim(stream=stream_id, through=_ALL))
                self._forget_events(stream_id)
        for stream_id in forget.streams:
            steps.append(DropStream(stream=stream_id))
            self._forget(stream_id)
        return steps

    def swept(self, cutoffs: Cutoffs) -> None:
        """The store has removed what had expired: no longer count it."""
        for stream_id, (_, time) in list(self._streams.items()):
            if time < cutoffs.answers:
                self._forget(stream_id)
            elif time < cutoffs.events:
                self._forget_events(stream_id)
            else:
                break

    def _over(self, more: Sequence[Kept]) -> bool:
        return (
            self._answers + sum(kept.answers for kept in more) > self._limits.answers
            or self._events + sum(kept.events for kept in more) > self._limits.session_events
            or self._with_events + sum(1 for kept in more if kept.events) > self._limits.streams
        )

    def _forget_events(self, stream_id: StreamId) -> None:
        kept, time = self._streams[stream_id]
        bare = replace(kept, events=0)
        self._streams[stream_id] = bare, time
        self._count(kept, -1)
        self._count(bare, 1)

    def _forget(self, stream_id: StreamId) -> None:
        if (found := self._streams.pop(stream_id, None)) is not None:
            self._count(found[0], -1)

    def _count(self, kept: Kept, sign: int) -> None:
        self._events += sign * kept.events
        self._with_events += sign * bool(kept.events)
        self._answers += sign * kept.answers
