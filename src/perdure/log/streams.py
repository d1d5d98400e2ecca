"""Keeps the streams of calls that are in memory: one object for each stream of this process.

Sessions, settling and resumed readers all ask here, so a stream that one of them has is the stream that the others get.
It stays until it is over, written and unread, or until no reader needs what another node writes. A session's
standalone stream is not here: it lives and goes with its session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from perdure._core.ids import SessionId, StreamId
from perdure._core.states import WritingState
from perdure.log.journal import Journal
from perdure.log.stream import Stream, StreamOwner
from perdure.store.base import StreamRecord

_NONE: Mapping[StreamId, Stream] = MappingProxyType({})


class Streams:
    """The streams of calls, by session and id."""

    def __init__(self, journal: Journal, owner: StreamOwner, *, limit: int) -> None:
        self._journal = journal
        self._owner = owner
        self._limit = limit
        self._by_session: dict[SessionId, dict[StreamId, Stream]] = {}

    def __iter__(self) -> Iterator[Stream]:
        return iter([stream for streams in self._by_session.values() for stream in streams.values()])

    def of(self, session: SessionId) -> Mapping[StreamId, Stream]:
        """A session's, the oldest first."""
        return self._by_session.get(session, _NONE)

    def write(self, record: StreamRecord, *, owed: int) -> Stream:
        """The stream of a record that this node has opened or claimed: from now on it writes here."""
        stream = self.of(record.session).get(record.id)
        if stream is None:
            stream = Stream(record, self._journal, self._owner, limit=self._limit, writes=True, owed=owed)
            self._add(stream)
        else:
            stream.claim(record, owed=owed)
        return stream

    def follow(self, record: StreamRecord) -> Stream:
        """The stream of a record that a reader needs; where this node does not write it, it has come this far.

        The caller keeps it (`Stream.kept_whole`) in the same turn of the loop, until its reader is there.
        """
        stream = self.of(record.session).get(record.id)
        if stream is None:
            stream = Stream(record, self._journal, self._owner, limit=self._limit, writes=False)
        else:
            stream.follow(record)
            if stream.writing is WritingState.LOST:
                stream.follow(record)  # this node does not write it any more; it is read here all the same
        self._add(stream)  # again, if that let go of it
        return stream

    def release(self, stream: Stream) -> bool:
        """Let go of a stream. Tells whether it was here."""
        streams = self._by_session.get(stream.session, {})
        if streams.pop(stream.id, None) is None:
            return False
        if not streams:
            del self._by_session[stream.session]
        return True

    def release_parked(self, is_needed: Callable[[Stream], bool]) -> None:
        """Let go of streams that are not needed, and on which nothing is under way: calls wait there for their
        principal while their session is not in memory, or their session has ended."""
        for stream in self:
            tail = stream.tail
            at_rest = stream.reader is None and not tail.pins and tail.durable >= tail.last
            if at_rest and not is_needed(stream):
                self.release(stream)

    def _add(self, stream: Stream) -> None:
        self._by_session.setdefault(stream.session, {})[stream.id] = stream
