"""Keeps all readers of this process: attaches and ends them, keeps silent ones alive, and records how far they got."""

import asyncio
import json
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from perdure._core import sse
from perdure._core.ids import Kind, Position, RandomBytes, StreamId
from perdure._core.limits import Quota, share_of
from perdure._core.losses import gap_notification
from perdure._core.states import ContentState
from perdure.log.chores import Chores
from perdure.log.journal import Journal, Steps
from perdure.log.reader import Reader
from perdure.log.remote_readers import RemoteReaders
from perdure.log.stream import Stream
from perdure.settings import Settings
from perdure.store.steps import Reached, Step
from perdure.telemetry.counters import Counters
from perdure.telemetry.log_records import PeerLog

MOMENT = 0.1
"""Seconds until a reader's position is written. With less, a busy standalone stream costs a write for each event; with
more, more events are delivered again after a crash."""


class ReadMarks:
    """Writes the positions of readers, so that the next reader continues from there in any process.

    For standalone streams this is written `MOMENT` later, for all of them together, and at once when a reader leaves.
    So a process that is killed forgets its last deliveries, and a client that returns without a position gets them
    again. For a call's stream only the loss of its reader before the end is written, because a client that lost
    the position as well has to learn of it.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._unwritten: dict[StreamId, Stream] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.one_at_a_time = asyncio.Lock()
        """Held while unread calls are searched: thousands of clients may return at once, and requests come first."""

    def left(self, stream: Stream) -> None:
        """The reader of a stream has left, or came to its end."""
        if stream.kind is Kind.CALL:
            readers = stream.readers
            has_all = stream.content is ContentState.SEALED and readers.delivered >= stream.tail.last
            unread = not has_all and not stream.answered
            if unread is readers.marked_unread is False:
                return  # by far the most: nothing was ever written of it, and nothing need be
            readers.marked_unread = unread
        elif stream.id not in self._unwritten:
            return
        self.moved(stream)
        self._write(stream)

    def lost(self, stream: Stream) -> None:
        """The reader of a call's stream died with its process."""
        stream.readers.marked_unread = True
        self.moved(stream)

    def close(self) -> None:
        self._write(*self._unwritten.values())
        if self._timer is not None:
            self._timer.cancel()

    def moved(self, stream: Stream) -> None:
        """The reader of a stream has moved: write that a moment later."""
        self._unwritten[stream.id] = stream
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(MOMENT, self._in_time)

    def _in_time(self) -> None:
        self._timer = None
        self._write(*self._unwritten.values())
        if self._unwritten:  # the store fails
            self.moved(next(iter(self._unwritten.values())))

    def _write(self, *streams: Stream) -> None:
        if self._journal.is_degraded:
            return  # it would only have more to catch up with; once it is back, one step for each stream says it all
        steps: list[Step] = []
        for stream in streams:
            del self._unwritten[stream.id]
            readers = stream.readers
            through, unread = readers.delivered, readers.marked_unread
            steps.append(Reached(stream=stream.id, generation=stream.generation, through=through, unread=unread))
        if steps:
            self._journal.put(Steps(steps))


@dataclass(slots=True, eq=False)
class Hub:
    _settings: Settings
    counters: Counters
    peer_log: PeerLog
    marks: ReadMarks
    registry: RemoteReaders
    journal: Journal
    arrivals: Iterator[int]
    clock: Callable[[], float]
    monotonic: Callable[[], float]
    random: RandomBytes
    readers: set[Reader] = field(default_factory=set)
    frozen: set[Reader] = field(default_factory=set)
    """Readers that rest because nothing may be shown."""
    open: Quota = field(init=False)
    """The open event streams, by caller."""
    retry: int = field(init=False)
    """Milliseconds after which a client connects again."""
    heartbeat: float = field(init=False)
    """Seconds of silence after which a call's client is sent progress; without end if never."""
    _chores: Chores = field(default_factory=Chores)

    def __post_init__(self) -> None:
        most = self._settings.max_readers
        self.open = Quota(most, each=share_of(most, self._settings.max_share))
        self.retry = round(self._settings.retry * 1000)
        self.heartbeat = self._settings.heartbeat or math.inf

    def arrive(self) -> int:
        """Return a number for a request that will become a reader: a later one has a higher number."""
        return next(self.arrivals)

    def count_readers(self) -> dict[str, int]:
        """The open event streams by kind. `sessionless`: of clients without a session, which read no stream of the
        log."""
        standalone = sum(1 for reader in self.readers if reader.stream.kind is Kind.STANDALONE)
        calls = len(self.readers) - standalone
        return {"call": calls, "standalone": standalone, "sessionless": self.open.held - len(self.readers)}

    def attach(self, reader: Reader) -> None:
        """Put a reader on its stream, and end the older one. The arrival decides, not the store's order of answers."""
        stream = reader.stream
        before = stream.readers.reader
        self.readers.add(reader)
        self.open.take(reader.caller)
        if before is not None and before.arrival > reader.arrival:
            reader.end()
            return
        stream.readers.reader = reader
        if before is not None or stream.readers.remote is not None:
            self.counters.take_overs += 1
        if before is not None:
            before.end()
        if not stream.is_over:
            if stream.writer is None or stream.readers.remote is not None:
                self.registry.on_attached(reader)
            if stream.writer is not None and (stream.kind is Kind.STANDALONE or stream.readers.marked_unread):
                self.registry.list_here(reader)
        stream.moved()

    def resume_readers(self) -> None:
        """Wake the frozen readers. Called repeatedly while this node holds its claim, because a reader may come to rest
        just before the claim is renewed."""
        while self.frozen:
            self.frozen.pop().wake()

    def detach(self, reader: Reader) -> None:
        if reader in self.readers:
            self.readers.discard(reader)
            self.open.take(reader.caller, -1)
        self.frozen.discard(reader)
        stream = reader.stream
        if stream.readers.reader is reader:
            stream.readers.reader = None
            stream.readers.lost_at = next(self.arrivals)
            self.marks.left(stream)
            self.registry.on_detached(reader)
            stream.on_reader_left()
            stream.moved()

    def tell_gap(
        self,
        stream: Stream,
        first: int,
        last: int,
        *,
        reason: str,
        by_log: bool,
        behind: int | None = None,
        progress: float | None = None,
    ) -> bytes:
        """Count, log and frame a gap: events no longer exist (promise 4). The stream continues after `behind`, or after
        the last of them. `progress` is the progress that they had reported."""
        self.counters.gaps += 1
        sentence = f"events {first} to {last} of a stream are gone: {reason}"
        position = stream.position(last if behind is None else behind, progress)
        self.peer_log.log_event(
            logging.WARNING, "stream.gap", sentence, session=stream.session, stream=stream.id, position=str(position)
        )
        message = gap_notification(stream.id, first, last, reason=reason)
        sentence = f"gap: events {first} to {last} are no longer retained ({reason})"
        return warning_frames(position, sentence, message, random=self.random, log=by_log)

    async def watch(self) -> None:
        while True:
            settings = self._settings
            await asyncio.sleep(min(settings.keepalive_interval, settings.stream_timeout, self.heartbeat) / 4)
            self._watch_all()

    def _watch_all(self) -> None:
        # On its own, or `watch` would hold on to the last one while it sleeps.
        now, settings = self.monotonic(), self._settings
        silent_since = self.clock() - self.heartbeat
        for reader in list(self.readers):
            with self._chores.surviving("a reader could not be looked after"):
                reader.end_if_stuck(now - settings.stream_timeout)
                if reader.last_write <= now - settings.keepalive_interval * 3 / 4:
                    reader.keep_alive()
                reader.beat_if_silent(silent_since)

    def end_idle(self) -> None:
        """End every reader that does not wait for a call that runs here; its client reconnects to another node."""
        for reader in list(self.readers):
            stream = reader.stream
            if stream.kind is Kind.STANDALONE or (stream.writer is None and not stream.is_over):
                reader.close_with_retry()

    @property
    def unwritten(self) -> int:
        """How many readers wait for answers that are not in the store yet."""
        return sum(reader.stream.is_sealed and not reader.stream.is_over for reader in self.readers)

    def end_all(self) -> None:
        """End every reader whose stream is not about to end by itself."""
        for reader in list(self.readers):
            if not reader.stream.is_sealed or reader.stream.is_withheld:
                reader.end()


def warning_frames(behind: Position, sentence: str, *messages: bytes, random: RandomBytes, log: bool) -> bytes:
    """Frame a warning: a comment for people, messages for programs, and with `log` a log message. The stream
    continues after `behind`."""
    if log:
        params = {"level": "warning", "logger": "perdure", "data": sentence}
        message = {"jsonrpc": "2.0", "method": "notifications/message", "params": params}
        messages += (json.dumps(message).encode(),)
    frames = [sse.encode_comment(sentence)]
    frames += [sse.encode_event(behind.priming(random).encode(), message) for message in messages]
    return b"".join(frames)
