"""Finds a session's home, the node that writes the standalone stream, and sends messages there.

Any node may have a message for that stream. One that is not the home forwards it: the store keeps it under the stream,
in the order of the commits, for the node that is the home by then. A node that becomes the home first appends what
waits there, and its own messages come after that. So the messages of one tool keep their order however
the home moves, and each is appended once: the store takes it away in one step with its event.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field

from perdure._core import mail
from perdure._core.ids import NO_FENCE, Kind, NodeId, SessionId, StreamId, new_stream_id
from perdure._core.losses import gap_notification
from perdure._core.states import SessionState
from perdure.errors import Behind, HeldElsewhere, MailFull, NodeGone, PerdureError, SessionEnded, StoreError
from perdure.log.journal import AHEAD
from perdure.log.nodes import mail_to
from perdure.log.stream import RUN_AHEAD, Stream, StreamOwner
from perdure.runtime.base import Flow
from perdure.sessions.context import ServerContext
from perdure.sessions.record_keeper import RecordKeeper
from perdure.store.interface import stream_by_id
from perdure.store.records import Event, StreamRecord
from perdure.store.steps import Forward, Step
from perdure.telemetry.log_records import log_event

_FORWARD_AGAIN = 0.2
"""Seconds until the home is searched again while the store fails."""

TAKE_PATIENCE = 2.0
"""Seconds for which a request that moves the home waits for a home that holds what is not written. Most locks on a file
are over by then, and the client notices nothing; a longer outage is answered with an error."""

_TAKE_AGAIN = 0.05
_FULL_AGAIN = 0.02
"""Seconds until a message is forwarded again for which there was no room: a live home takes a page in less."""

Message = tuple[bytes, Step | None]
"""A payload, and what is committed together with it."""


@dataclass(slots=True, eq=False)
class _Group:
    messages: list[Message]
    steps: Sequence[Step]
    held: bool = False
    """They are held while the store fails."""


@dataclass(slots=True, eq=False)
class Outbox:
    """Forwards messages of this node for a stream that another node writes: a source of the journal.

    The store takes the numbers of one sender in order only. So where a message is refused, those after it are refused
    as well: they all come back, still in order, and are forwarded again later.
    """

    _context: ServerContext
    _stream: Stream
    _on_room: Callable[[], None]
    _sender: str = ""
    _sent: int = 0
    """The number of the last message that the journal got."""
    _pending: list[Message] = field(default_factory=list)
    _queued: bool = False
    _taken: list[_Group] = field(default_factory=list)
    """What the journal has taken and has neither written nor refused, the oldest first."""
    returned: list[Message] = field(default_factory=list)
    """Messages that were refused and are here again."""
    _settled: asyncio.Event | None = None
    refusal: PerdureError | None = None
    """Why the oldest of these came back."""

    @property
    def unaccepted(self) -> int:
        under_way = sum(len(group.messages) for group in self._taken if not group.held)
        return len(self._pending) + under_way + len(self.returned)

    @property
    def is_settled(self) -> bool:
        """Nothing is under way: every message is in the store, or here again."""
        return not self._pending and not self._taken

    def put(self, payload: bytes, also: Step | None) -> None:
        self._pending.append((payload, also))
        if not self._queued:
            self._queued = True
            self._context.journal.put(self)

    def take_back(self) -> list[Message]:
        """Return the refused messages, once nothing is under way: their numbers are free again."""
        assert self.is_settled
        back, self.returned, self.refusal = self.returned, [], None
        self._sent -= len(back)
        return back

    async def settled(self) -> None:
        while not self.is_settled:
            self._settled = self._settled or asyncio.Event()
            self._settled.clear()
            await self._settled.wait()

    # A source of the journal

    def take(self) -> Sequence[Step]:
        self._queued = False
        messages, self._pending = self._pending, []
        self._sender = self._sender or new_stream_id(self._context.random)
        payloads = tuple(payload for payload, _ in messages)
        first, self._sent = self._sent + 1, self._sent + len(messages)
        forward = Forward(
            stream=self._stream.id, node=self._context.node, sender=self._sender, first=first, payloads=payloads
        )
        steps = [*(also for _, also in messages if also is not None), forward]
        self._taken.append(_Group(messages, steps))
        return steps

    def held(self, steps: Sequence[Step]) -> None:
        for group in self._taken:
            group.held = group.held or group.steps is steps
        self._on_room()

    def written(self, steps: Sequence[Step]) -> None:
        del self._taken[0]
        if self._stream.node:
            self._context.store.hint(self._stream.node, [self._stream.id])
        self._note_settled()
        self._on_room()

    def after_loss(self, steps: Sequence[Step], reason: Behind) -> Sequence[Step]:
        return ()  # a message in front of them may have been refused: they come back, and are sent again after it

    def restart(self) -> None:
        """The store has lost messages that it had taken: the next ones get the numbers of another sender."""
        sentence = f"the store has lost messages that were forwarded ({self.refusal})"
        log_event(logging.ERROR, "forward.lost", sentence, session=self._stream.session, stream=self._stream.id)
        self._sender, self._sent = "", len(self.returned)

    def refused(self, steps: Sequence[Step], reason: PerdureError) -> None:
        self.returned += self._taken.pop(0).messages
        self.refusal = self.refusal or reason
        self._note_settled()
        self._on_room()

    def _note_settled(self) -> None:
        if self._settled is not None and self.is_settled:
            self._settled.set()


@dataclass(slots=True, eq=False)
class Home(StreamOwner):
    """The home of one session, as this node sees it."""

    _context: ServerContext
    _keeper: RecordKeeper
    _on_moved: Callable[[], None]
    """Called when this node has become the home, or is it no longer."""
    record: InitVar[StreamRecord]
    is_new: InitVar[bool]
    standalone: Stream = field(init=False)
    _direct: bool = field(init=False)
    """This node is the home, and no earlier message waits: messages are appended at once."""
    _outgoing: list[Message] = field(default_factory=list)
    """Messages that came while the home is not known, or while this node becomes it."""
    _outbox: Outbox | None = None
    """Made with the first message that is forwarded: most sessions never need it."""
    _forwarding: asyncio.Task[None] | None = None
    _homing: asyncio.Lock | None = None
    _drawing: asyncio.Lock | None = None
    _drawn_through: int = 0
    """The key of the last forwarded message that was appended under the present claim."""
    _drawn: frozenset[int] = frozenset()
    """The events of forwarded messages, as far as they may not be written yet."""
    _room: asyncio.Event | None = None
    _ordered: object = None
    """The store's stamp from before forwarded messages were last read."""

    def __post_init__(self, record: StreamRecord, is_new: bool) -> None:
        context = self._context
        # One that is loaded is claimed, also where the store names this node: then it has lost the end of its rest, and
        # perhaps events, whose numbers must not come again in the same generation.
        self.standalone = Stream(record, context.journal, self, limit=context.settings.max_stream_events, writes=is_new)
        self._direct = is_new

    @property
    def is_here(self) -> bool:
        return self.standalone.writer is not None

    @property
    def _has_ended(self) -> bool:
        return self._keeper.record.state is SessionState.ENDED

    @property
    def _has_work(self) -> bool:
        returned = self._outbox is not None and self._outbox.returned
        return bool(self._outgoing or returned) or (self.is_here and not self._direct)

    @property
    def waiting(self) -> int:
        return len(self._outgoing) + (0 if self._outbox is None else self._outbox.unaccepted)

    async def wait_for_room(self) -> None:
        while self.waiting >= RUN_AHEAD and not self._has_ended:
            self._room = self._room or asyncio.Event()
            self._room.clear()
            await self._room.wait()
        journal = self._context.journal
        await journal.backlog.wait_for_room()
        if journal.turns.is_over:
            await journal.turns.wait()

    def _make_room(self) -> None:
        if self._room is not None:
            self._room.set()

    def _on_forwarded(self) -> None:
        """Forwarded messages are accepted, or have come back."""
        self._make_room()
        if self._outbox is not None and self._outbox.returned:
            self._begin()

    # Sending

    def send(self, payload: bytes, also: Step | None = None) -> Flow | None:
        """Send a message on the standalone stream; through the home of the session, where that is another node. Returns
        where to wait before more is sent, if too much is under way."""
        if self._direct:
            return self.standalone if self.standalone.append(payload, also=also) else None
        if self.is_here or self._has_work or self._forwarding is not None:
            self._outgoing.append((payload, also))
            self._begin()
        else:
            # In the journal's order, so that nothing is answered before what was said is in the store (R2).
            self._put(payload, also)
        journal, waiting = self._context.journal, self.waiting
        is_ahead = waiting >= RUN_AHEAD or (waiting >= AHEAD and journal.turns.is_over)
        return self if is_ahead or not journal.backlog.has_room else None

    def _put(self, payload: bytes, also: Step | None) -> None:
        if self._outbox is None:
            self._outbox = Outbox(self._context, self.standalone, self._on_forwarded)
        self._outbox.put(payload, also)

    def _begin(self) -> None:
        if self._forwarding is None and not self._has_ended:
            self._forwarding = asyncio.create_task(self._forward(), name="perdure-forward")

    async def _forward(self) -> None:
        """Forward what waits here; or append it, after what was forwarded before, if this is the home."""
        try:
            while self._has_work and not self._has_ended:
                try:
                    if self._outbox is not None:
                        await self._outbox.settled()
                        self._outgoing[:0] = self._outbox.take_back()
                    here = await self._claim_home()
                    if here and not await self._draw():
                        continue
                    outgoing, self._outgoing = self._outgoing, []
                    for payload, also in outgoing:
                        if here:
                            self.standalone.append(payload, also=also)
                        else:
                            self._put(payload, also)
                    self._direct = here
                    if not here and self._outbox is not None:
                        await self._outbox.settled()
                        if self._outbox.refusal is not None:
                            raise self._outbox.refusal
                except NodeGone:
                    continue  # no node is the home: this one becomes it
                except SessionEnded:
                    self._outgoing = []
                    if self._outbox is not None:
                        self._outbox.take_back()  # nothing reads it any more
                    return
                except Behind:
                    # All returned messages are sent again in order: a missing number was accepted and then lost.
                    if self._outbox is not None:
                        self._outbox.restart()
                except MailFull:
                    await asyncio.sleep(_FULL_AGAIN)
                except PerdureError as failure:
                    sentence = f"messages wait for their session's home: {failure}"
                    log_event(logging.WARNING, "home.unreached", sentence, session=self._keeper.record.id)
                    await asyncio.sleep(_FORWARD_AGAIN)
        finally:
            self._forwarding = None
            self._make_room()

    async def forwarded(self) -> None:
        """Wait until what could not be forwarded at once is in the store, or this is the home."""
        if self._forwarding is not None:
            await asyncio.wait({self._forwarding})

    # Being the home

    async def claim(self, *, take: bool = False, seen: StreamRecord | None = None) -> bool:
        """Become the home of the session, if it has no live home; with `take`, in any case. Returns whether this node
        is the home. `seen`: the standalone stream, where it was read just now."""
        found = await self._claim_home(take=take, seen=seen)
        if self._has_work:
            self._begin()
        return found

    async def _claim_home(self, *, take: bool = False, seen: StreamRecord | None = None) -> bool:
        """Claim the standalone stream, unless it is claimed. Returns `False` if a live node is the home, and keeps
        it."""
        if self.is_here:
            return True
        context, standalone = self._context, self.standalone
        self._homing = self._homing or asyncio.Lock()
        async with self._homing:
            while not self.is_here:  # read again where another node was faster
                record, seen = seen or await read_record(context, standalone), None
                if record is None or self._has_ended:
                    raise SessionEnded
                elsewhere = record.node not in ("", context.node)
                if elsewhere and not await context.nodes.is_dead(record.node):
                    if not take:
                        return False
                    if record.node in await context.nodes.holders():
                        # What it has shown is not in the log, and would come again under other numbers.
                        holder = f"the session's home, node {record.node[:8]}, holds events that are not written yet"
                        raise HeldElsewhere(holder)
                context.journal.check_claim()
                known = standalone.generation
                claimed = await context.store.claim(record.id, node=context.node, held=record.fence, known=known)
                if claimed is not None:
                    self._drawn_through, self._drawn = 0, frozenset()
                    standalone.claim(claimed)
                    if elsewhere:  # so that its subscriptions end there
                        reading = mail.Reading(session=record.session, stream=record.id)
                        context.put(*mail_to([record.node], reading))
                    context.hub.registry.on_claimed(standalone)
                    self._on_moved()
        return True

    async def take(self) -> None:
        """Become the home in any case, once the present home has written what it has shown. Raises `HeldElsewhere` if
        that takes longer than `TAKE_PATIENCE`."""
        deadline = self._context.hub.monotonic() + TAKE_PATIENCE
        while True:
            try:
                await self.claim(take=True)
                return
            except HeldElsewhere:
                if self._context.hub.monotonic() >= deadline:
                    raise
            await asyncio.sleep(_TAKE_AGAIN)

    async def caught_up(self) -> None:
        """Append what other nodes have forwarded until now, if this is the home: later messages come after it."""
        if self._direct:
            await self._draw()
        elif self.is_here:
            self._begin()
            await self.forwarded()

    async def come_first(self, seconds: float, *, reads: bool) -> None:
        """Append what other nodes forwarded before this moment, if this is the home: a call that begins now speaks
        after calls that have ended. It does not wait while the store fails, nor for longer than `seconds`. Where the
        stamp does not show whether others have written (PostgreSQL), the commit of the call does (`StaleRecord`), and
        then `reads` is set."""
        if self.standalone.writer is None:
            return
        store = self._context.store
        if (stamp := store.stamp()) == self._ordered:
            return
        if reads or any(store.stamp() == store.stamp() for _ in range(3)):
            with contextlib.suppress(StoreError, TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.caught_up()
                self._ordered = stamp

    async def _draw(self) -> bool:
        """Append the forwarded messages that wait. Returns whether none is left and this is still the home."""
        standalone, context = self.standalone, self._context
        self._drawing = self._drawing or asyncio.Lock()
        async with self._drawing:
            fence = standalone.fence
            self._drawn = frozenset(seq for seq in self._drawn if seq > standalone.tail.durable)
            while True:
                page = await context.store.forwarded(standalone.id, after=self._drawn_through)
                if standalone.writer is None or standalone.fence != fence:
                    return False  # lost, or claimed again: what was read may be out of date
                if not page:
                    return True
                first = standalone.tail.last + 1
                for key, payload in page:
                    standalone.append(payload, taken=key)
                self._drawn |= frozenset(range(first, standalone.tail.last + 1))
                self._drawn_through = page[-1].key
                await standalone.wait_for_room()

    # The owner of the standalone stream

    def on_lost(self, stream: Stream, unwritten: Sequence[Event], shown: int) -> None:
        """Another node is the home now: it repeats the subscriptions, and what was not written is forwarded to it. What
        had been forwarded to this node is not, because it still waits in the store. Nor is what was shown, because it
        would come again under another number. A home that holds is not taken, but it may begin to hold at the moment at
        which another node becomes the home. Then a gap is sent, for a client that was not reached; a client that was
        reached has the events already."""
        self._direct = False
        drawn, self._drawn = self._drawn, frozenset()
        if self._has_ended:
            return
        self._on_moved()
        if self.standalone.readers.reader is not None:
            self._context.hub.registry.on_attached(self.standalone.readers.reader)
        rest, self._outgoing = self._outgoing, []
        if seen := [event.seq for event in unwritten if event.seq <= shown]:
            self.send(gap_notification(stream.id, seen[0], seen[-1], reason="lost"))
        own: list[Message] = [(event.payload, None) for event in unwritten[len(seen) :] if event.seq not in drawn]
        for payload, also in (*own, *rest):
            self.send(payload, also)

    def on_grown(self, stream: Stream) -> None:
        self._context.hub.registry.on_grown(stream)


class NoHome(StreamOwner):
    """Takes the place of the home of a durable call, which has no standalone stream: what belongs to no request has no
    reader."""

    def __init__(self, context: ServerContext, session: SessionId) -> None:
        nothing = StreamRecord(
            id=StreamId(""), session=session, kind=Kind.STANDALONE, node=NodeId(""), fence=NO_FENCE, opened=0.0
        )
        self.standalone = Stream(nothing, context.journal, self, limit=1, writes=False)
        self.is_here = False
        self.waiting = 0

    def send(self, payload: bytes, also: Step | None = None) -> None: ...

    async def claim(self, *, take: bool = False, seen: StreamRecord | None = None) -> bool:
        return False

    async def take(self) -> None: ...

    async def come_first(self, seconds: float, *, reads: bool) -> None: ...

    async def caught_up(self) -> None: ...

    async def forwarded(self) -> None: ...


async def read_record(context: ServerContext, stream: Stream) -> StreamRecord | None:
    """Read a stream's record, and follow what another node has written."""
    record = await stream_by_id(context.store, stream.id)
    if record is not None:
        stream.follow(record)
    return record
