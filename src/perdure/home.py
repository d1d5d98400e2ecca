"""A session's home, and the way there: the node that writes the standalone stream.

Any node may have a message for that stream. One that is not the home sends it by mail, in the order of its journal; as
long as it is not known who the home is, messages wait, and a session without one finds a new one here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from perdure._core import gap, mail
from perdure._core.ids import new_stream_id
from perdure._core.states import SessionState
from perdure.errors import HeldElsewhere, NodeGone, PerdureError, SessionEnded, StoreError
from perdure.observe import note
from perdure.store.base import Event, Post, Step
from perdure.streams import RUN_AHEAD, Flow, Stream

if TYPE_CHECKING:
    from perdure.session import Session

_FORWARD_AT_ONCE = 64
"""Messages for the home that travel together."""

_FORWARD_AGAIN = 0.2
"""Seconds until the home is looked for again while the store fails."""

TAKE_PATIENCE = 2.0
"""Seconds for which a request that moves the home waits for a home that holds what is not written. Most locks on a file
are over by then, and its client sees nothing of them; a longer outage is told, so that the client decides."""

_TAKE_AGAIN = 0.05
"""Seconds between two looks whether the home still holds something."""


class Home:
    """One session's home, as this node sees it."""

    __slots__ = ("_forwarding", "_homing", "_mailed", "_outgoing", "_room", "_session")

    def __init__(self, session: Session) -> None:
        self._session = session
        self._outgoing: list[tuple[bytes, Step | None]] | None = None
        self._forwarding: asyncio.Task[None] | None = None
        self._homing: asyncio.Lock | None = None
        self._mailed = 0
        self._room: asyncio.Event | None = None
        session.standalone.on_lost = self._lost

    @property
    def here(self) -> bool:
        """This node is the home."""
        return self._session.standalone.writes

    @property
    def owing(self) -> bool:
        """Messages wait until it is known who the home is."""
        return bool(self._outgoing)

    @property
    def waiting(self) -> int:
        """Messages that are on their way to the home."""
        return self._mailed + len(self._outgoing or ())

    @property
    def crowded(self) -> bool:
        """Whoever says more should wait in `flow` until what was said has been accepted."""
        return self.waiting >= RUN_AHEAD

    async def flow(self) -> None:
        while self.crowded and self._session.state is not SessionState.ENDED:
            self._room = self._room or asyncio.Event()
            self._room.clear()
            await self._room.wait()

    def accepted(self) -> None:
        """A message is in the home's mail, or waits until it is known who that is."""
        self._mailed -= 1
        self._make_room()

    def _make_room(self) -> None:
        if self._room is not None:
            self._room.set()

    def say(self, payload: bytes, also: Step | None = None) -> Flow:
        """Send a message on the standalone stream; through the session's home, where that is another node.

        Gives where to wait before more is said.
        """
        standalone = self._session.standalone
        if standalone.writes and not self._outgoing:
            standalone.append(payload, also=also)
            return standalone
        if standalone.node and not self._outgoing:
            # In the journal's order, so that nothing is answered before what was said is in the home's mail (R2).
            self._mailed += 1
            self._session.house.journal.put(_Mailed(self, payload, also))
        else:
            self.say_later(payload, also)
        return self

    def say_later(self, payload: bytes, also: Step | None) -> None:
        """Send it when it is known who the home is."""
        if self._outgoing is None:
            self._outgoing = []
        self._outgoing.append((payload, also))
        if self._forwarding is None and self._session.state is not SessionState.ENDED:
            self._forwarding = asyncio.create_task(self._forward(), name="perdure-forward")

    async def _forward(self) -> None:
        try:
            while self._outgoing and self._session.state is not SessionState.ENDED:
                try:
                    await self._forward_some()
                except NodeGone:
                    continue  # the home is looked for anew
                except SessionEnded:
                    return
                except StoreError as failure:
                    note(logging.WARNING, "home.unreached", f"messages wait for their session's home: {failure}")
                    await asyncio.sleep(_FORWARD_AGAIN)
        finally:
            self._forwarding = None
            self._make_room()

    async def forwarded(self) -> None:
        """Wait until everything said so far has reached the home's mail, or this is the home."""
        if self._forwarding is not None:
            await asyncio.wait({self._forwarding})

    async def _forward_some(self) -> None:
        if await self.come_here():
            outgoing, self._outgoing = self._outgoing, None
            for payload, also in outgoing or ():
                self._session.standalone.append(payload, also=also)
            self._make_room()
            return
        some = (self._outgoing or [])[:_FORWARD_AT_ONCE]
        steps = [step for _, step in some if step is not None]
        await self._session.house.journal.write(*steps, self.mailed(*(payload for payload, _ in some)))
        del (self._outgoing or [])[: len(some)]
        self._make_room()

    def mailed(self, *payloads: bytes) -> Post:
        """Messages for the standalone stream, in the mail of the home."""
        texts = tuple(payload.decode() for payload in payloads)
        session = self._session
        message = mail.Forward(id=new_stream_id(session.house.random), session=session.id, payloads=texts)
        return Post(node=session.standalone.node, message=mail.encode(message))

    async def come_here(self, *, take: bool = False) -> bool:
        """Become the session's home, if it has none that lives; with `take`, in any case. Tells whether it is."""
        if self.here:
            return True
        self._homing = self._homing or asyncio.Lock()
        async with self._homing:
            while not self.here:
                if not await self._claim(take=take):
                    return False
        return True

    async def take(self) -> None:
        """Become the session's home in any case, once the present one has written what it has shown.

        Raises `HeldElsewhere` if that takes longer than `TAKE_PATIENCE`.
        """
        deadline = self._session.house.hub.monotonic() + TAKE_PATIENCE
        while True:
            try:
                await self.come_here(take=True)
                return
            except HeldElsewhere:
                if self._session.house.hub.monotonic() >= deadline:
                    raise
            await asyncio.sleep(_TAKE_AGAIN)

    async def _claim(self, *, take: bool) -> bool:
        session, house = self._session, self._session.house
        record = await house.journal.within_time(house.store.stream(session.standalone.id))
        if record is None or session.state is SessionState.ENDED:
            raise SessionEnded
        session.standalone.follow(record)
        if record.node and not await house.neighbours.is_dead(record.node):
            if not take:
                return False
            if record.node in await house.neighbours.holders():
                # What it has shown is not in the log, and would come again under other numbers.
                raise HeldElsewhere(f"the session's home, node {record.node[:8]}, holds what is not written yet")
        claimed = await house.journal.within_time(house.store.claim(record.id, node=house.node, held=record.fence))
        if claimed is not None:
            session.standalone.claimed(claimed)
            if record.node:
                told = mail.encode(mail.Reading(session=session.id, stream=record.id))
                session.put(Post(node=record.node, message=told))  # so that its subscriptions end there
            house.neighbours.now_written_here(session.standalone)
            session.exchange.came_home()
        return True  # or another one was faster: look again

    def _lost(self, stream: Stream, unwritten: Sequence[Event], shown: int) -> None:
        """Another node is the home now: it repeats the subscriptions, and what was not written goes there.

        Not what was shown: it would come again under another number. A home that holds is not taken, but it may begin
        to hold in the moment in which another node becomes the home. Then a gap is told, for a client that was not
        reached; one that was knows the events already.
        """
        session = self._session
        if session.state is SessionState.ENDED:
            return
        session.exchange.left_home()
        if session.standalone.reader is not None:
            session.house.hub.registry.attached(session.standalone.reader)
        rest, self._outgoing = self._outgoing, None
        if seen := [event.seq for event in unwritten if event.seq <= shown]:
            self.say(gap.notification(stream.id, seen[0], seen[-1], reason="lost"))
        for event in unwritten[len(seen) :]:
            self.say(event.payload)
        if rest:
            self._outgoing = [*(self._outgoing or ()), *rest]


class _Mailed:
    """A source for a message that the home appends; if that is gone, another one is looked for."""

    __slots__ = ("_also", "_home", "_payload")

    def __init__(self, home: Home, payload: bytes, also: Step | None) -> None:
        self._home = home
        self._payload = payload
        self._also = also

    def take(self) -> Sequence[Step]:
        post = self._home.mailed(self._payload)
        return (post,) if self._also is None else (self._also, post)

    def accepted(self, steps: Sequence[Step]) -> None:
        self._home.accepted()

    def written(self, steps: Sequence[Step]) -> None:
        pass

    def refused(self, steps: Sequence[Step], reason: PerdureError) -> None:
        self._home.say_later(self._payload, self._also)
        self._home.accepted()
