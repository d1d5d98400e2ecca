"""Finds a session's home, the node that writes the standalone stream, and sends messages there.

Any node may have a message for that stream. One that is not the home forwards it: the store keeps it under the stream,
in the order of the commits, for the node that is the home by then. A node that becomes the home first appends what
waits there, and what it says itself meanwhile stays behind that. So the messages of one tool keep their order however
the home moves, and each is appended once: the store takes it away in one step with its event.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from perdure._core import mail
from perdure._core.losses import gap_notification
from perdure._core.states import SessionState
from perdure.errors import HeldElsewhere, MailFull, NodeGone, PerdureError, SessionEnded
from perdure.log.stream import Stream
from perdure.log.stream_parts import RUN_AHEAD
from perdure.runtime.base import Flow
from perdure.sessions.outbox import Message, Outbox
from perdure.store.base import Event, SendMail, Step, StreamRecord, stream_by_id
from perdure.telemetry.events import log_event

if TYPE_CHECKING:
    from perdure.sessions.session import Session

_FORWARD_AGAIN = 0.2
"""Seconds until the home is looked for again while the store fails."""

TAKE_PATIENCE = 2.0
"""Seconds for which a request that moves the home waits for a home that holds what is not written. Most locks on a file
are over by then, and its client sees nothing of them; a longer outage is answered with an error."""

_TAKE_AGAIN = 0.05
"""Seconds between two looks whether the home still holds something."""
_FULL_AGAIN = 0.02
"""Seconds until a message is forwarded again for which there was no room: a live home takes a page in less."""


class Home:
    """One session's home, as this node sees it."""

    __slots__ = (
        "_direct",
        "_drawing",
        "_drawn",
        "_drawn_through",
        "_forwarding",
        "_homing",
        "_outbox",
        "_outgoing",
        "_room",
        "_session",
        "standalone",
    )

    def __init__(self, session: Session, record: StreamRecord, *, is_new: bool) -> None:
        self._session = session
        context = session.context
        self.standalone = Stream(
            record,
            context.journal,
            self,
            limit=context.settings.max_stream_events,
            writes=record.node == context.node,
        )
        self._direct = is_new and self.is_here
        """This node is the home, and nothing that was said before waits: what it says is appended at once."""
        self._outgoing: list[Message] = []
        """What is said while it is not known who the home is, or while this node becomes it."""
        self._outbox: Outbox | None = None
        """Made with the first message that is forwarded: most sessions never need it."""
        self._forwarding: asyncio.Task[None] | None = None
        self._homing: asyncio.Lock | None = None
        self._drawing: asyncio.Lock | None = None
        self._drawn_through = 0
        """The key of the last forwarded message that was appended under the present claim."""
        self._drawn: frozenset[int] = frozenset()
        """The events that were made of forwarded messages, as far as they may not be written yet."""
        self._room: asyncio.Event | None = None

    @property
    def is_here(self) -> bool:
        """This node is the home."""
        return self.standalone.writer is not None

    @property
    def _has_work(self) -> bool:
        returned = self._outbox is not None and self._outbox.has_returned
        return bool(self._outgoing) or returned or (self.is_here and not self._direct)

    @property
    def waiting(self) -> int:
        """Messages that are on their way to the home."""
        return len(self._outgoing) + (0 if self._outbox is None else self._outbox.unaccepted)

    @property
    def is_full(self) -> bool:
        """Whether a caller should wait in `wait_for_room` until what was sent has been accepted."""
        return self.waiting >= RUN_AHEAD or not self._session.context.journal.backlog.has_room

    async def wait_for_room(self) -> None:
        while self.waiting >= RUN_AHEAD and self._session.state is not SessionState.ENDED:
            self._room = self._room or asyncio.Event()
            self._room.clear()
            await self._room.wait()
        await self._session.context.journal.backlog.wait_for_room()

    def _make_room(self) -> None:
        if self._room is not None:
            self._room.set()

    def _on_forwarded(self) -> None:
        """What was forwarded is accepted, or has come back."""
        self._make_room()
        if self._outbox is not None and self._outbox.has_returned:
            self._begin()

    # Sending

    def send(self, payload: bytes, also: Step | None = None) -> Flow:
        """Send a message on the standalone stream; through the session's home, where that is another node.

        Gives where to wait before more is sent.
        """
        if self._direct:
            self.standalone.append(payload, also=also)
            return self.standalone
        if self.is_here or self._has_work or self._forwarding is not None:
            self._outgoing.append((payload, also))
            self._begin()
        else:
            # In the journal's order, so that nothing is answered before what was said is in the store (R2).
            self._put(payload, also)
        return self

    def _put(self, payload: bytes, also: Step | None) -> Outbox:
        if self._outbox is None:
            self._outbox = Outbox(self._session.context, self.standalone, self._on_forwarded)
        self._outbox.put(payload, also)
        return self._outbox

    def _begin(self) -> None:
        if self._forwarding is None and self._session.state is not SessionState.ENDED:
            self._forwarding = asyncio.create_task(self._forward(), name="perdure-forward")

    async def _forward(self) -> None:
        try:
            while self._has_work and self._session.state is not SessionState.ENDED:
                try:
                    await self._forward_some()
                except NodeGone:
                    continue  # no node is the home: this one becomes it
                except SessionEnded:
                    self._outgoing = []
                    if self._outbox is not None:
                        self._outbox.take_back()  # nothing reads it any more
                    return
                except MailFull:
                    await asyncio.sleep(_FULL_AGAIN)
                except PerdureError as failure:
                    log_event(logging.WARNING, "home.unreached", f"messages wait for their session's home: {failure}")
                    await asyncio.sleep(_FORWARD_AGAIN)
        finally:
            self._forwarding = None
            self._make_room()

    async def _forward_some(self) -> None:
        """Forward what waits here; or append it, behind what was forwarded before, if this is the home."""
        if self._outbox is not None:
            await self._outbox.settled()
            self._outgoing[:0] = self._outbox.take_back()
        if await self._look_home():
            if await self._draw():
                outgoing, self._outgoing = self._outgoing, []
                for payload, also in outgoing:
                    self.standalone.append(payload, also=also)
                self._direct = True
            return
        outgoing, self._outgoing = self._outgoing, []
        for payload, also in outgoing:
            outbox = self._put(payload, also)
        if outgoing:
            await outbox.settled()
            if outbox.refusal is not None:
                raise outbox.refusal

    async def forwarded(self) -> None:
        """Wait until what could not be forwarded at once is in the store, or this is the home."""
        if self._forwarding is not None:
            await asyncio.wait({self._forwarding})

    # Being the home

    async def claim(self, *, take: bool = False) -> bool:
        """Become the session's home, if it has none that lives; with `take`, in any case. Tells whether it is."""
        found = await self._look_home(take=take)
        if self._has_work:
            self._begin()
        return found

    async def _look_home(self, *, take: bool = False) -> bool:
        if self.is_here:
            return True
        self._homing = self._homing or asyncio.Lock()
        async with self._homing:
            while not self.is_here:
                if not await self._try_claim(take=take):
                    return False
        return True

    async def take(self) -> None:
        """Become the session's home in any case, once the present one has written what it has shown.

        Raises `HeldElsewhere` if that takes longer than `TAKE_PATIENCE`.
        """
        deadline = self._session.context.hub.monotonic() + TAKE_PATIENCE
        while True:
            try:
                await self.claim(take=True)
                return
            except HeldElsewhere:
                if self._session.context.hub.monotonic() >= deadline:
                    raise
            await asyncio.sleep(_TAKE_AGAIN)

    async def _try_claim(self, *, take: bool) -> bool:
        """Claim the standalone stream. `False` if a live node is the home, and keeps it."""
        session, context = self._session, self._session.context
        record = await stream_by_id(context.store, session.standalone.id)
        if record is None or session.state is SessionState.ENDED:
            raise SessionEnded
        session.standalone.follow(record)
        elsewhere = record.node not in ("", context.node)
        if elsewhere and not await context.nodes.is_dead(record.node):
            if not take:
                return False
            if record.node in await context.nodes.holders():
                # What it has shown is not in the log, and would come again under other numbers.
                raise HeldElsewhere(f"the session's home, node {record.node[:8]}, holds what is not written yet")
        claimed = await context.store.claim(record.id, node=context.node, held=record.fence)
        if claimed is not None:
            self._drawn_through, self._drawn = 0, frozenset()
            session.standalone.claim(claimed)
            if elsewhere:
                told = mail.encode(mail.Reading(session=session.id, stream=record.id))
                session.put(SendMail(node=record.node, message=told))  # so that its subscriptions end there
            context.hub.registry.on_claimed(session.standalone)
            session.exchange.runtime.on_home_gained()
        return True  # or another one was faster: look again

    async def caught_up(self) -> None:
        """Append what other nodes have forwarded until now, if this is the home: what is said next comes behind it."""
        if self._direct:
            await self._draw()
        elif self.is_here:
            self._begin()
            await self.forwarded()

    async def _draw(self) -> bool:
        """Append the forwarded messages that wait. Tells whether none does any more, and this is still the home."""
        standalone, context = self._session.standalone, self._session.context
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
        """Another node is the home now: it repeats the subscriptions, and what was not written is forwarded to it.

        What had been forwarded to this one is not: it still waits in the store. Nor is what was shown: it would come
        again under another number. A home that holds is not taken, but it may begin to hold in the moment in which
        another node becomes the home. Then a gap is sent, for a client that was not reached; one that was reached has
        the events already.
        """
        session = self._session
        self._direct = False
        drawn, self._drawn = self._drawn, frozenset()
        if session.state is SessionState.ENDED:
            return
        session.exchange.runtime.on_home_lost()
        if session.standalone.reader is not None:
            session.context.hub.registry.on_attached(session.standalone.reader)
        rest, self._outgoing = self._outgoing, []
        if seen := [event.seq for event in unwritten if event.seq <= shown]:
            self.send(gap_notification(stream.id, seen[0], seen[-1], reason="lost"))
        own: list[Message] = [(event.payload, None) for event in unwritten[len(seen) :] if event.seq not in drawn]
        for payload, also in (*own, *rest):
            self.send(payload, also)

    def on_grown(self, stream: Stream) -> None:
        self._session.context.hub.registry.on_grown(stream)

    def on_settled(self, stream: Stream) -> None:
        """It stays as long as its session."""

    def on_step_written(self, stream: Stream, step: Step) -> None:
        """Asks are known to the store; the record is changed by answers, on the streams of calls."""
