"""Delivers one stream to one HTTP response.

A reader holds a position, reads the events after it, writes them, and rests until it is woken. Reading at the end is
live delivery, and reading from further back is resuming. Both take one path, so no event is lost between them
(promise 2).

At rest a reader has no task: its response waits for the client to leave, and `wake` starts a pump that runs until it
has caught up. The newest reader of a stream wins; the older one is ended at once and writes nothing more.
`_core.states.READER` defines what a reader may do in which state.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Protocol

from perdure._core import heartbeats, settling, sse
from perdure._core.ids import Kind
from perdure._core.limits import Caller
from perdure._core.states import READER, ReaderState, ReaderStep, advance
from perdure.errors import StoreUnavailable
from perdure.log.stream import Stream
from perdure.store.records import READ_BYTES, Event
from perdure.telemetry.log_records import SHORT
from perdure.telemetry.tracing import Replay

if TYPE_CHECKING:
    from perdure.log.hub import Hub


class History(Protocol):
    """The session, as a reader uses it that reads events again."""

    @property
    def tells_by_log(self) -> bool:
        """A log message may report a gap."""

    async def lost_answers(self, stream: Stream) -> Sequence[bytes]:
        """Error responses for the answers of a stream that are no longer retained."""

    async def progress_token(self, stream: Stream) -> int | str | None:
        """The token under which the one call of a stream reports progress, if its client gave one."""

    async def closed_asks(self, events: Sequence[Event]) -> set[int]:
        """The sequence numbers of events that are asks which wait for no answer any more."""


class Connection(Protocol):
    """The response that a reader writes to."""

    async def write(self, body: bytes, *, last: bool) -> None: ...

    def abort(self) -> None:
        """Break the connection off, because its client takes nothing."""

    def finish(self) -> None:
        """Stop waiting for the client: the reader has written everything."""


BATCH = 256
"""Events that are read and written together, within `READ_BYTES`, as the store reads them: nothing is read twice."""

_SEARCHED = BATCH
"""Events in which the highest progress is searched, behind a silence: what follows it are questions, which are few, or
log messages."""

_CLOSE_SECONDS = 1.0
"""Seconds for the last write to a connection that is ended: its socket may be dead."""

_logger = logging.getLogger("perdure")

_OPEN = (ReaderState.STARTING, ReaderState.RESTING, ReaderState.PUMPING)


@dataclass(slots=True, eq=False)
class Reader:
    """One response on one stream."""

    _hub: Hub
    stream: Stream
    _history: History
    _: KW_ONLY
    cursor: int
    """The sequence number of the last event that was written."""
    arrival: int
    caller: Caller
    """The caller that it is counted for."""
    ahead: Sequence[Event] = ()
    """The first events after the cursor, where they have been read already."""
    preamble: bytes = b""
    """Bytes that are written before the next event."""
    is_primed: bool = False
    """Its client understands a priming event, and a `retry` without an event."""
    retry: bytes = b""
    """Written with the first event, for clients that understand `retry` there alone."""
    frame: Callable[[Event], bytes] | None = None
    """Encodes an event without its position."""
    progress: float | None = None
    """Progress that its client was shown before it was in the log."""
    beats: bool = False
    """Its client may be sent progress while the call says nothing."""
    state: ReaderState = ReaderState.STARTING
    failure: Exception | None = None
    live_from: int = field(init=False)
    since: float = field(init=False)
    last_write: float = field(init=False)
    _replay: Replay | None = None
    _connection: Connection | None = None
    _pump: asyncio.Task[None] | None = None
    _woken: bool = False
    """There may be more to write than the pump has seen."""
    _has_written: bool = False
    _gapped: bool = False
    _stop_at: int | None = None
    _writing_since: float | None = None
    _heard: float = field(init=False)
    """The time of the last event that was written; of the stream's opening before the first."""
    _hearing: heartbeats.Hearing | None = None
    """What the client has heard of the call's progress, as long as it may have been sent beats above that."""
    _silent_since: float = field(init=False)
    """When the client was last shown an event or a beat, by the store's clock."""
    _beat_is_due: bool = False

    def __post_init__(self) -> None:
        self.live_from = self.stream.tail.visible
        self.since = self._silent_since = self._hub.clock()
        self._heard = -math.inf if self.cursor else self.stream.opened
        self.last_write = self._hub.monotonic()

    def watch(self, replay: Replay) -> None:
        """Report to a replay how far this reader gets with the events that existed when it came."""
        self._replay = replay

    async def begin(self, connection: Connection) -> None:
        """Write the preamble. The caller then waits for its client to leave, or for `finish`."""
        self._connection = connection
        if self.state is ReaderState.CLOSING:  # another reader was faster than the start of this response
            self.preamble = b""
            await self._close()
            return
        is_over = self.stream.is_over
        if self.frame is None and not is_over:
            # At once, not with the first event: a tool may block the event loop, and its client must have a position.
            await self._send(b"", last=False)
        if self.state is ReaderState.STARTING:
            self.state = advance(READER, self.state, ReaderStep.BEGIN)
            if self._woken or is_over or self.stream.tail.visible > self.cursor:
                self.wake()

    @property
    def is_writing(self) -> bool:
        """Events are being written that `cursor` does not count yet."""
        return self._writing_since is not None

    def leave(self) -> None:
        if self.state is not ReaderState.FINISHED:
            self.state = advance(READER, self.state, ReaderStep.FINISH)
        if self._pump is not None:
            self._pump.cancel()
        if self._replay is not None:
            self._replay.give_up()
            self._replay = None
        self._connection = None  # which holds this reader: all that the two hold would wait for the garbage collector
        self._hub.detach(self)

    def wake(self) -> None:
        if self.state is ReaderState.RESTING:
            self.state = READER[ReaderState.RESTING][ReaderStep.WAKE]
            self._pump = asyncio.create_task(self._run_pump())
        else:
            self._woken = True

    @contextmanager
    def taking(self, events: Sequence[Event], *, after: int) -> Iterator[None]:
        """Hand `events`, the first ones `after` a number, to a reader at rest that is woken in the block. Only a reader
        whose pump has not begun takes them, because a pump that runs may have read some of them."""
        was_resting = self.state is ReaderState.RESTING
        yield
        if not events or not was_resting or self.state is not ReaderState.PUMPING:
            return
        if after <= self.cursor < events[0].seq and events[-1].seq <= self.stream.tail.durable:
            self.ahead = events

    def keep_alive(self) -> None:
        if self.state is ReaderState.RESTING:
            self.preamble += sse.KEEP_ALIVE
            self.wake()

    def beat_if_silent(self, since: float) -> None:
        """Send progress if nothing was sent `since`, and all that the call has said was."""
        stream = self.stream
        if not self.beats or self._silent_since > since or self.state is not ReaderState.RESTING:
            return
        if stream.has_one_call and not stream.is_sealed and self.cursor >= stream.tail.last:
            self._beat_is_due = True
            self.wake()

    def stop_here(self) -> None:
        """Close the connection once everything appended so far is written; the stream stays open (P7)."""
        self._stop_at = self.stream.tail.last
        self.wake()

    def close_with_retry(self) -> None:
        """Write what exists and a hint when to come back, then close the connection."""
        if self.is_primed:
            self.preamble += sse.encode_retry(self._hub.retry)
        self.stop_here()

    def end(self) -> None:
        """Close the connection now, without another event."""
        if self.state not in _OPEN:
            return
        has_begun = self._connection is not None
        self.state = advance(READER, self.state, ReaderStep.END)
        if self._pump is not None:
            self._pump.cancel()
        if has_begun:  # else `begin` closes it
            self._pump = asyncio.create_task(self._close())

    def end_if_stuck(self, before: float) -> None:
        """End a connection that has taken nothing since `before`, though there is something to write."""
        if self._writing_since is not None and self._writing_since <= before:
            self._hub.counters.slow_readers_ended += 1
            self.failure = TimeoutError("the reader made no progress")
            stream = self.stream
            self._hub.peer_log.log_event(
                logging.WARNING,
                "reader.slow",
                "a reader made no progress and was ended",
                session=stream.session,
                stream=stream.id,
                position=str(stream.position(self.cursor)),
            )
            if self._connection is not None:
                self._connection.abort()
            self._finish()

    async def _run_pump(self) -> None:
        try:
            while (await self._deliver() or self._woken) and self.state is ReaderState.PUMPING:
                self._woken = False
        except StoreUnavailable as failure:
            self.failure = failure
            peer_log, stream = self._hub.peer_log, self.stream
            sentence = f"a reader was ended, its client may resume: {failure}"
            peer_log.log_event(logging.WARNING, "reader.store", sentence, session=stream.session, stream=stream.id)
            self._pump = None
            self.end()
        except OSError:
            self._finish()  # the connection broke; the client may resume
        except Exception as failure:
            self.failure = failure
            _logger.exception(
                "a reader failed and was ended; its client may resume",
                extra={
                    "action": "reader.failed",
                    "session": self.stream.session[:SHORT],
                    "stream": self.stream.id,
                    "position": str(self.stream.position(self.cursor)),
                },
            )
            self._finish()
        else:
            self._pump = None
            if self.state is ReaderState.PUMPING:
                self.state = READER[ReaderState.PUMPING][ReaderStep.CATCH_UP]

    async def _deliver(self) -> bool:
        """Write what exists. Returns whether there was anything."""
        if not self._hub.journal.may_show:
            self._hub.frozen.add(self)
            if self.preamble or not self._has_written:
                await self._send(b"", last=False)  # also comments that keep the connection open meanwhile
            return False
        stream = self.stream
        target = stream.tail.durable
        events = self.ahead or await stream.read(after=self.cursor, limit=BATCH)
        self.ahead = ()
        skipped: set[int] = set()
        if events and events[0].seq <= self.live_from:
            skipped = await self._history.closed_asks(events)
        frames: list[bytes] = []
        cursor, size, frame = self.cursor, 0, self.frame
        heard, silence = self._heard, self._hub.heartbeat if self.beats else math.inf
        for event in events:  # as many as fit into one write
            if self._hearing is not None or event.time - heard >= silence:
                event = await self._above_beats(event)
            heard = event.time
            if event.seq != cursor + 1:
                frames.append(self._gap(cursor + 1, event.seq - 1))
            if frame is not None:
                frames.append(frame(event))
            elif event.seq in skipped:
                pass
            elif event.seq > target or self.progress is not None:
                if self._note_progress(event, is_held=event.seq > target):
                    name = stream.position(event.seq, self.progress)
                    frames.append(sse.encode_event(str(name).encode(), event.payload))
            else:
                frames.append(sse.encode_event(b"%s%010d" % (stream.prefix, event.seq), event.payload))
            cursor = event.seq
            size += len(event.payload)
            if size >= READ_BYTES or cursor == stream.answered:
                break
        if not events and cursor < target:
            frames.append(self._gap(cursor + 1, target))
            cursor = target
        moved = cursor > self.cursor
        stops = self._stop_at is not None and cursor >= self._stop_at
        is_over = stream.is_over
        last = stops or (is_over and cursor >= stream.tail.visible) or 0 < stream.answered <= cursor
        if last and is_over and self._gapped and stream.kind is Kind.CALL:
            name = stream.position(cursor)
            answers = await self._history.lost_answers(stream)
            frames += [sse.encode_event(name.priming(self._hub.random).encode(), answer) for answer in answers]
        if self._beat_is_due and not (frames or last):
            await self._beat()
        self._beat_is_due = False
        if frames or last or self.preamble or not (self._has_written or self.frame):
            await self._send(b"".join(frames), last=last)
        if moved:
            hub = self._hub
            if self._replay is not None:
                hub.counters.events_replayed += max(0, min(cursor, self.live_from) - self.cursor)
                self._replay = self._replay.at(cursor, end=self.live_from)
            self.cursor = cursor
            self._heard = self._silent_since = heard
            stream.readers.delivered = max(stream.readers.delivered, cursor)
            if stream.kind is Kind.STANDALONE:
                hub.marks.moved(stream)
            if stream.writer is None:
                hub.registry.on_progress(self)
            stream.moved()
        if last:
            self._finish()
            return False
        return moved

    async def _beat(self) -> None:
        """Write progress that the log does not have, and no position: a client that comes again misses nothing."""
        hub, stream = self._hub, self.stream
        token = await self._history.progress_token(stream)
        self._silent_since = now = hub.clock()
        self._hearing = self._hearing or await self._listen(self.cursor + 1)
        if token is None or self._hearing is None:
            return
        self._hearing.is_beaten = True
        payload = heartbeats.beat(token, self._hearing.said, now - stream.opened)
        if payload is not None and self.cursor >= stream.tail.last:
            written = self.last_write
            await self._send(sse.encode_message(payload), last=False)
            self.last_write = written  # comments come as ever: by two in a row clients learn how often

    async def _above_beats(self, event: Event) -> Event:
        """An event behind a silence, in which beats may have been sent: its progress must be above them."""
        if not self.stream.has_one_call:
            return event
        self._hearing = self._hearing or await self._listen(event.seq)
        if self._hearing is None:
            return event
        payload = self._hearing.hear([(event.time, event.payload)])
        if not self._hearing.is_beaten:
            self._hearing = None
        return event if payload is event.payload else event._replace(payload=payload)

    async def _listen(self, seq: int) -> heartbeats.Hearing | None:
        """Read the progress before an event, as far as that is not long ago. `None` if only a store that fails has it:
        live traffic goes on without (promise 7)."""
        stream, after, events = self.stream, max(0, seq - 1 - _SEARCHED), None
        with suppress(StoreUnavailable):
            is_held = self._hub.journal.is_degraded
            events = stream.tail.read(after, _SEARCHED) if is_held else await stream.read(after=after, limit=_SEARCHED)
        if events is None:
            return None
        before = [(event.time, event.payload) for event in events if event.seq < seq]
        first = before[0][0] if seq - 1 > _SEARCHED and before else stream.opened
        hearing = heartbeats.Hearing(opened=stream.opened, silence=self._hub.heartbeat, time=first)
        hearing.hear(before)
        return hearing

    def _note_progress(self, event: Event, *, is_held: bool) -> bool:
        """Keep the progress of a held event for later positions, until the log is beyond it. Returns whether the event
        is shown: an event of a second run is not while the first run was further."""
        progress = settling.progress_in(event.payload) if self.stream.has_one_call else None
        if progress is not None and is_held and math.isfinite(progress):
            self.progress = progress if self.progress is None else max(self.progress, progress)
        elif progress is not None and self.progress is not None:
            if progress <= self.progress:
                return False
            self.progress = None
        return True

    def _gap(self, first: int, last: int) -> bytes:
        self._gapped = True
        return self._hub.tell_gap(self.stream, first, last, reason="trimmed", by_log=self._history.tells_by_log)

    async def _send(self, body: bytes, *, last: bool) -> None:
        self._writing_since = self._hub.monotonic()
        assert self._connection is not None
        if self.preamble:
            body, self.preamble = self.preamble + body, b""
        if self.retry and body.startswith(b"id:"):
            body, self.retry = self.retry + body, b""
        await self._connection.write(body, last=last)
        self._has_written = True
        self._writing_since = None
        self.last_write = self._hub.monotonic()

    async def _close(self) -> None:
        connection = self._connection
        assert connection is not None
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await connection.write(b"" if self._has_written else self.preamble, last=True)
        except (OSError, TimeoutError):
            connection.abort()  # dead or stuck: letting go of it is all that is left
        finally:
            self._finish()

    def _finish(self) -> None:
        if self.state is not ReaderState.FINISHED:
            self.state = advance(READER, self.state, ReaderStep.FINISH)
            if self._connection is not None:
                self._connection.finish()
