"""Keeps all readers of this process: attaches them to their streams, ends them, and looks after the silent ones."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from perdure._core import sse
from perdure._core.ids import Kind, Position, RandomBytes
from perdure._core.losses import gap_notification
from perdure.log.chores import Chores
from perdure.log.read_marks import ReadMarks
from perdure.log.reader import Reader
from perdure.log.stream import Stream
from perdure.settings import Settings
from perdure.telemetry.counters import Counters
from perdure.telemetry.events import PeerLog


class Registry(Protocol):
    """Learns of readers on streams that another node writes."""

    def on_attached(self, reader: Reader) -> None: ...

    def on_progress(self, reader: Reader) -> None: ...

    def on_detached(self, reader: Reader) -> None: ...

    def on_grown(self, stream: Stream) -> None:
        """A stream that this node writes has grown, and its reader sits at another node."""
        ...

    async def look_who_reads(self, stream: Stream) -> None:
        """Learn from the store which reader is on a stream, at whatever node."""
        ...

    def on_claimed(self, stream: Stream) -> None:
        """This node has claimed a stream that another one wrote."""
        ...


@dataclass(slots=True, eq=False)
class Hub:
    """All readers of this process."""

    _settings: Settings
    counters: Counters
    peers: PeerLog
    marks: ReadMarks
    registry: Registry
    arrivals: Iterator[int]
    clock: Callable[[], float]
    monotonic: Callable[[], float]
    random: RandomBytes
    readers: set[Reader] = field(default_factory=set)
    _sessionless: int = 0
    _chores: Chores = field(default_factory=Chores)

    def arrive(self) -> int:
        """A number for a request that will become a reader: a later one has a higher number."""
        return next(self.arrivals)

    @property
    def full(self) -> bool:
        return len(self.readers) + self._sessionless >= self._settings.max_readers

    @contextmanager
    def counting_sessionless(self) -> Iterator[None]:
        """Count an event stream that the SDK's own handler serves, to a client without a session."""
        self._sessionless += 1
        try:
            yield
        finally:
            self._sessionless -= 1

    def attach(self, reader: Reader) -> None:
        """Put a reader on its stream; the reader that was there is ended (take-over).

        The newest wins, whichever of them the store answered first.
        """
        stream = reader.stream
        before = stream.reader
        self.readers.add(reader)
        if before is not None and before.arrival > reader.arrival:
            reader.end()
            return
        was_read = stream.readers.present
        stream.readers.reader = reader
        if was_read:
            self.counters.take_overs += 1
        if before is not None:
            before.end()
        if not stream.is_over and (stream.writer is None or stream.readers.remote is not None):
            self.registry.on_attached(reader)
        stream.moved()

    def detach(self, reader: Reader) -> None:
        self.readers.discard(reader)
        stream = reader.stream
        if stream.reader is reader:
            stream.readers.reader = None
            stream.readers.lost_at = self.arrive()
            self.marks.left(stream)
            self.registry.on_detached(reader)
            stream.moved()

    def tell_gap(
        self, stream: Stream, first: int, last: int, *, reason: str, by_log: bool, behind: int | None = None
    ) -> bytes:
        """Count, log and frame a gap: events are no longer there (promise 4). `behind` is the number after which the
        stream goes on, if that is not the last of them."""
        self.counters.gaps += 1
        sentence = f"events {first} to {last} of a stream are gone: {reason}"
        self.peers.log_event(logging.WARNING, "stream.gap", sentence, stream=stream.id)
        position = stream.position(last if behind is None else behind)
        message = gap_notification(stream.id, first, last, reason=reason)
        sentence = f"gap: events {first} to {last} are no longer retained ({reason})"
        return warning_frames(position, sentence, message, random=self.random, log=by_log)

    async def watch(self) -> None:
        """Write a comment to connections that are silent, end those that are stuck; runs for ever."""
        while True:
            await asyncio.sleep(min(self._settings.keepalive_interval, self._settings.stream_timeout) / 4)
            self._look_at_all()

    def _look_at_all(self) -> None:
        # On its own, or `watch` would hold on to the last one while it sleeps.
        now, settings = self.monotonic(), self._settings
        for reader in list(self.readers):
            with self._chores.surviving("a reader could not be looked after"):
                reader.end_if_stuck(now - settings.stream_timeout)
                if reader.last_write <= now - settings.keepalive_interval * 3 / 4:
                    reader.keep_alive()

    def end_idle(self) -> None:
        """End every reader that does not wait for a call that runs here; its client comes back elsewhere."""
        for reader in list(self.readers):
            stream = reader.stream
            if stream.kind is Kind.STANDALONE or (stream.writer is None and not stream.is_over):
                reader.close_with_retry()

    def end_all(self) -> None:
        """End every reader whose stream is not about to end by itself."""
        for reader in list(self.readers):
            if not reader.stream.is_sealed:
                reader.end()


def warning_frames(behind: Position, sentence: str, *messages: bytes, random: RandomBytes, log: bool) -> bytes:
    """A warning on the wire: a comment for people, messages for programs, a log message where that is declared.
    `behind` is the position after which the stream goes on."""
    if log:
        params = {"level": "warning", "logger": "perdure", "data": sentence}
        message = {"jsonrpc": "2.0", "method": "notifications/message", "params": params}
        messages += (json.dumps(message).encode(),)
    frames = [sse.encode_comment(sentence)]
    frames += [sse.encode_event(behind.priming(random).encode(), message) for message in messages]
    return b"".join(frames)
