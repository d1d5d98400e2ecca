"""Readers on streams.

A reader is one HTTP response on one stream. It holds a position and pulls: read what comes after it, write it, go on;
nothing there, then rest until woken. Reading at the end is live delivery, reading from further back is resuming; there
is one path for both, so there is no moment between them in which an event could fall through (promise 2).

At rest a reader costs no task of its own: its response waits for the client to leave, and `wake` starts a pump that
runs until it has caught up. The newest reader of a stream wins; the older one is ended at once and writes nothing more.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from perdure._core import gap, sse
from perdure._core.ids import Kind, RandomBytes
from perdure._core.states import StreamStep
from perdure.errors import StoreUnavailable
from perdure.log.chores import Chores
from perdure.log.read_marks import ReadMarks
from perdure.log.stream import Stream
from perdure.settings import Settings
from perdure.store.base import READ_BYTES, Event
from perdure.telemetry.counters import Counters
from perdure.telemetry.events import PeerLog
from perdure.telemetry.tracing import Replay

LostAnswers = Callable[[Stream], Awaitable[Sequence[bytes]]]
"""Gives error responses for the answers of a stream that are no longer retained."""

ClosedAsks = Callable[[Sequence[Event]], Awaitable[set[int]]]
"""Gives the sequence numbers of those events that are asks which nobody waits for any more."""


class Registry(Protocol):
    """Who is told of readers on streams that another node writes."""

    def attached(self, reader: Reader) -> None: ...

    def progressed(self, reader: Reader) -> None: ...

    def left(self, reader: Reader) -> None: ...


class Connection(Protocol):
    """What a reader knows of the response that it is."""

    async def write(self, body: bytes, *, last: bool) -> None: ...

    def abort(self) -> None:
        """Break it off: its client takes nothing, so it could not even be ended politely."""
        ...


BATCH = 256
"""Events read and written together at the most: one write for many, and never a long one for a slow reader. They are no
more than `READ_BYTES`, as the store reads them: what was read is written, and nothing of it is read twice."""

_CLOSE_SECONDS = 1.0
"""How long ending a connection politely may take; a dead socket is not waited for."""

_logger = logging.getLogger("perdure")

_KEEPALIVE = sse.encode_comment("keep-alive")


class Reader:
    """One response on one stream. `cursor` is the sequence number of the last event that was written."""

    __slots__ = (
        "_again",
        "_ahead",
        "_begun",
        "_closed_asks",
        "_closing",
        "_connection",
        "_finished",
        "_gapped",
        "_hub",
        "_lost_answers",
        "_owner",
        "_preamble",
        "_pump",
        "_retry",
        "_stop_at",
        "_tells_by_log",
        "_writing_since",
        "arrival",
        "cursor",
        "failure",
        "last_write",
        "listed",
        "live_from",
        "registered",
        "replay",
        "since",
        "stream",
    )

    def __init__(
        self,
        hub: Hub,
        stream: Stream,
        *,
        cursor: int,
        arrival: int,
        ahead: Sequence[Event] = (),
        preamble: bytes = b"",
        retry: bytes = b"",
        tells_by_log: bool = False,
        lost_answers: LostAnswers | None = None,
        closed_asks: ClosedAsks | None = None,
    ) -> None:
        self.stream = stream
        self.cursor = cursor
        self.arrival = arrival
        self.live_from = stream.visible
        self.replay: Replay | None = None
        self.failure: Exception | None = None
        self.since = hub.clock()
        self.last_write = hub.monotonic()
        self._hub = hub
        self._ahead = ahead
        self._preamble = preamble
        self._retry = retry
        self._tells_by_log = tells_by_log
        self._lost_answers = lost_answers
        self._closed_asks = closed_asks
        self.registered: int | None = None
        """How far it had got when the store was last told, of one on a stream that another node writes."""
        self.listed = False
        """The store knows of it: from then on its row tells who reads."""
        self._connection: Connection | None = None
        self._owner: asyncio.Task[object] | None = None
        self._pump: asyncio.Task[None] | None = None
        self._again = False
        self._begun = False
        self._closing = False
        self._finished = False
        self._gapped = False
        self._stop_at: int | None = None
        self._writing_since: float | None = None

    async def begin(self, connection: Connection) -> None:
        """Write what comes before the first event. The pump starts afterwards, and only if there is something.

        The caller then waits for its client to leave; it is cancelled when the reader is through before that.
        """
        self._connection = connection
        self._owner = asyncio.current_task()
        if self._closing:  # another reader was faster than the start of this response
            await connection.write(b"", last=True)
            self._finish()
            return
        preamble, self._preamble = self._preamble, b""
        if preamble:
            await self._send(preamble, last=False)
        self._begun = True
        if self._again or self.stream.visible > self.cursor or self.stream.over:
            self.wake()

    @property
    def is_writing(self) -> bool:
        """Events are on their way that `cursor` does not count yet."""
        return self._writing_since is not None

    @property
    def is_through(self) -> bool:
        """Whether the cancellation of the owner was the reader's, and is settled with that."""
        return self._finished and (self._owner is None or self._owner.uncancel() == 0)

    def leave(self) -> None:
        """Let go of the stream, whatever happened."""
        self._finished = self._closing = True
        if self._pump is not None:
            self._pump.cancel()
        self._hub.detach(self)

    def wake(self) -> None:
        """There may be something to write."""
        if self._closing:
            return
        if self._pump is None and self._begun:
            self._pump = asyncio.create_task(self._run_pump())
        else:
            self._again = True

    def keep_alive(self) -> None:
        if self._pump is None and self._begun and not self._closing:
            self._preamble += _KEEPALIVE
            self.wake()

    def stop_here(self) -> None:
        """Close the connection once everything appended so far is written; the stream goes on (P7)."""
        self._stop_at = self.stream.last
        self.wake()

    def send_home(self) -> None:
        """Write what is there and a hint when to come back, then close the connection."""
        self._preamble += self._retry
        self.stop_here()

    def end(self) -> None:
        """Close the connection now, without another event."""
        if self._closing:
            return
        self._closing = True
        if self._pump is not None:
            self._pump.cancel()
        self._pump = asyncio.create_task(self._close())

    async def _run_pump(self) -> None:
        try:
            while (await self._deliver() or self._again) and not self._closing:
                self._again = False
        except StoreUnavailable as failure:
            self.failure = failure
            peers = self._hub.peers
            peers.log_event(logging.WARNING, "reader.store", f"a reader was ended, its client may resume: {failure}")
            self._pump = None
            self.end()
        except OSError:
            self._finish()  # the connection broke; the client may resume
        except Exception as failure:
            self.failure = failure
            _logger.exception("a reader failed and was ended; its client may resume", extra={"action": "reader.failed"})
            self._finish()
        else:
            self._pump = None

    async def _deliver(self) -> bool:
        """Write what is there; tells whether there was anything."""
        stream = self.stream
        target = stream.durable
        events = self._ahead or await stream.read(after=self.cursor, limit=BATCH)
        self._ahead = ()
        skipped: set[int] = set()
        if events and events[0].seq <= self.live_from and self._closed_asks is not None:
            skipped = await self._closed_asks(events)
        frames = [self._preamble] if self._preamble else []
        self._preamble = b""
        cursor = self._encode(events, frames, skipped)
        if not events and cursor < target:
            frames.append(self._gap(cursor + 1, target))
            cursor = target
        moved = cursor > self.cursor
        last = self._is_last(cursor)
        if last and stream.over and self._gapped and self._lost_answers is not None:
            frames += await self._encode_lost(cursor)
        if frames or last:
            await self._send(b"".join(frames), last=last)
        if frames or last or moved:
            if self.replay is not None:
                self._hub.counters.events_replayed += max(0, min(cursor, self.live_from) - self.cursor)
                self.replay = self.replay.at(cursor, end=self.live_from)
            self.cursor = cursor
            stream.delivered = max(stream.delivered, cursor)
            self._hub.marks.moved(stream)
            if not stream.writes:
                self._hub.registry.progressed(self)
            stream.moved()
        if last:
            self._finish()
            return False
        return moved

    def _encode(self, events: Sequence[Event], frames: list[bytes], skipped: set[int]) -> int:
        """Add the frames of events, as many as fit into one write; gives the sequence number of the last one."""
        cursor, size, prefix = self.cursor, 0, self.stream.prefix
        for event in events:
            if event.seq != cursor + 1:
                frames.append(self._gap(cursor + 1, event.seq - 1))
            if event.seq not in skipped:
                frames.append(sse.encode_event(b"%s%010d" % (prefix, event.seq), event.payload))
            cursor = event.seq
            size += len(event.payload)
            if size >= READ_BYTES:
                break
        return cursor

    def _is_last(self, cursor: int) -> bool:
        if self._stop_at is not None and cursor >= self._stop_at:
            return True
        return self.stream.over and cursor >= self.stream.visible

    def _gap(self, first: int, last: int) -> bytes:
        """Tell that events are no longer there (promise 4)."""
        self._gapped = True
        self._hub.counters.gaps += 1
        stream, peers = self.stream, self._hub.peers
        peers.log_event(
            logging.WARNING, "stream.gap", f"events {first} to {last} of a stream are gone", stream=stream.id
        )
        return gap_frames(
            stream, first, last, reason="trimmed", behind=last, random=self._hub.random, log=self._tells_by_log
        )

    async def _encode_lost(self, cursor: int) -> list[bytes]:
        assert self._lost_answers is not None
        answers = await self._lost_answers(self.stream)
        name = self.stream.position(cursor)
        return [sse.encode_event(name.priming(self._hub.random).encode(), answer) for answer in answers]

    async def _send(self, body: bytes, *, last: bool) -> None:
        self._writing_since = self._hub.monotonic()
        assert self._connection is not None
        await self._connection.write(body, last=last)
        self._writing_since = None
        self.last_write = self._hub.monotonic()

    def look_stuck(self, before: float) -> None:
        """End a connection that has taken nothing since then, though there is something to write."""
        if self._writing_since is not None and self._writing_since <= before:
            self._hub.counters.slow_readers_ended += 1
            self.failure = TimeoutError("the reader made no progress")
            self._hub.peers.log_event(
                logging.WARNING, "reader.slow", "a reader made no progress and was ended", stream=self.stream.id
            )
            if self._connection is not None:
                self._connection.abort()
            self._finish()

    async def _close(self) -> None:
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                if self._connection is not None:
                    await self._connection.write(b"", last=True)
        except (OSError, TimeoutError):
            if self._connection is not None:
                self._connection.abort()  # dead or stuck: letting go of it is all that is left
        finally:
            self._finish()

    def _finish(self) -> None:
        self._closing = True
        if not self._finished and self._owner is not None:
            self._finished = True
            self._owner.cancel()


class Hub:
    """All readers of this process."""

    def __init__(
        self,
        settings: Settings,
        counters: Counters,
        peers: PeerLog,
        marks: ReadMarks,
        *,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
        random: RandomBytes,
    ) -> None:
        self.counters = counters
        self.peers = peers
        self.marks = marks
        self.clock = clock
        self.monotonic = monotonic
        self.random = random
        self._stream_timeout = settings.stream_timeout
        self._keepalive = settings.keepalive_interval
        self._most = settings.max_readers
        self.readers: set[Reader] = set()
        self.foreign = 0
        """Event streams that the SDK's own handler serves, to clients without a session."""
        self.registry: Registry = _NoRegistry()
        self._arrivals = itertools.count(1)
        self._chores = Chores()

    def arrive(self) -> int:
        """A number for a request that will become a reader: who came later has a higher one."""
        return next(self._arrivals)

    @property
    def full(self) -> bool:
        return len(self.readers) + self.foreign >= self._most

    def attach(self, reader: Reader) -> None:
        """Put a reader on its stream; whoever was there is ended (take-over).

        The newest wins, whichever of them the store answered first.
        """
        stream = reader.stream
        before = stream.reader
        self.readers.add(reader)
        if before is not None and before.arrival > reader.arrival:
            reader.end()
            return
        was_read = stream.is_read
        stream.reader = reader
        if was_read:
            self.counters.take_overs += 1
        if before is not None:
            before.end()
        stream.advance(StreamStep.READER_REPLACED if was_read else StreamStep.READER_ATTACHED)
        if not stream.over and (not stream.writes or stream.foreign is not None):
            self.registry.attached(reader)
        stream.moved()

    def detach(self, reader: Reader) -> None:
        self.readers.discard(reader)
        stream = reader.stream
        if stream.reader is reader:
            stream.reader = None
            stream.lost_at = self.arrive()
            self.marks.left(stream)
            if not (stream.over or stream.foreign is not None):
                stream.advance(StreamStep.READER_LOST)
            if reader.registered is not None:
                self.registry.left(reader)
            stream.unread()

    def move(self, reader: Reader, stream: Stream) -> None:
        """A reader's stream is known by another object from now on: the one through which this node writes it."""
        step = StreamStep.READER_REPLACED if stream.is_read else StreamStep.READER_ATTACHED
        reader.stream.reader = None
        reader.stream, stream.reader = stream, reader
        stream.advance(step)
        stream.moved()
        reader.wake()

    async def watch(self) -> None:
        """Write a comment to connections that are silent, end those that are stuck; runs for ever."""
        while True:
            await asyncio.sleep(min(self._keepalive, self._stream_timeout) / 4)
            self._look_at_all()

    def _look_at_all(self) -> None:
        # On its own, or `watch` would hold on to the last one while it sleeps.
        now = self.monotonic()
        for reader in list(self.readers):
            with self._chores.surviving("a reader could not be looked after"):
                reader.look_stuck(now - self._stream_timeout)
                if reader.last_write <= now - self._keepalive * 3 / 4:
                    reader.keep_alive()

    def end_idle(self) -> None:
        """End every reader that does not wait for a call that runs here; its client comes back elsewhere."""
        for reader in list(self.readers):
            stream = reader.stream
            if stream.kind is Kind.STANDALONE or not (stream.writes or stream.over):
                reader.send_home()

    def end_all(self) -> None:
        """End every reader whose stream is not about to end by itself."""
        for reader in list(self.readers):
            if not reader.stream.sealed:
                reader.end()


class _NoRegistry:
    """Nobody else writes."""

    def attached(self, reader: Reader) -> None:
        pass

    def progressed(self, reader: Reader) -> None:
        pass

    def left(self, reader: Reader) -> None:
        pass


def gap_frames(
    stream: Stream, first: int, last: int, *, reason: str, behind: int, random: RandomBytes, log: bool
) -> bytes:
    """A gap on the wire. `behind` is the sequence number after which the stream goes on."""
    message = gap.notification(stream.id, first, last, reason=reason)
    sentence = f"gap: events {first} to {last} are no longer retained ({reason})"
    return warning_frames(stream, sentence, message, behind=behind, random=random, log=log)


def warning_frames(
    stream: Stream, sentence: str, *messages: bytes, behind: int, random: RandomBytes, log: bool
) -> bytes:
    """A warning on the wire: a comment for people, messages for programs, a log message where that is declared."""
    if log:
        params = {"level": "warning", "logger": "perdure", "data": sentence}
        message = {"jsonrpc": "2.0", "method": "notifications/message", "params": params}
        messages += (json.dumps(message).encode(),)
    name = stream.position(behind)
    frames = [sse.encode_comment(sentence)]
    frames += [sse.encode_event(name.priming(random).encode(), message) for message in messages]
    return b"".join(frames)
