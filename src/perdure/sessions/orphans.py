"""Tells clients of orphans: calls whose reader is lost while their client is back, without the call's position (R5).

What such a call still says goes to the standalone stream, and the client learns there what it missed: which call, what
lies on the call's own stream, and that it has ended once it has (promise 4). A client that comes without a position (a
handshake, or a GET without `Last-Event-ID`) has lost the positions of its calls as well, so their messages change the
stream at once. One that resumes the standalone stream may be about to resume its calls: it gets the time that clients
are asked to wait before they reconnect. Only then does this node tell anything, so a client that has its positions
hears nothing.

Several nodes may run calls of a session. Each tells of those that it wrote; the one to which the client came tells of
those of dead nodes, and lets the living ones know that the time has passed.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perdure._core import mail
from perdure._core.ids import Kind, NodeId, Position
from perdure._core.losses import NO_VISITS, ORPHAN, Orphan, Visits
from perdure._core.states import LogState, SessionState
from perdure.errors import StoreError, StoreUnavailable
from perdure.log.stream import Stream
from perdure.sessions.context import mail_to
from perdure.sessions.ledger import name_of
from perdure.sessions.messages import encode_notification
from perdure.store.base import Reached, Step, StreamRecord
from perdure.telemetry.events import log_event

if TYPE_CHECKING:
    from perdure.sessions.session import Session

ATTEMPTS = 2
SLACK = 3.0
"""A client may resume its calls for so many times `retry`, as stock clients try, and seconds beyond: one that backs
off, or whose streams take turns, needs them. What is said meanwhile waits on the call's own stream, in front of the
answer; on the standalone stream it could arrive behind it, where clients no longer want it."""

MOST_TOLD = 100
"""Calls that have ended of which a client learns at a time, because they share the standalone stream with everything
else. There are more only if a client drops connection after connection; the next time that it comes it learns the rest.
"""


@dataclass(slots=True, eq=False)
class Orphans:
    """Knows which calls of a session are orphans, and tells the client of them."""

    _session: Session
    _visits: Visits = NO_VISITS
    _newest: int = 0
    """When the client was last given time, as an arrival number of the hub."""
    _timer: asyncio.TimerHandle | None = None
    _tasks: tuple[asyncio.Task[None], ...] = ()

    def is_orphan(self, stream: Stream) -> bool:
        """Whether no reader is on this call's stream, and its client has come back since without asking for it."""
        return not stream.readers.present and self._visits.is_orphan(stream.readers.lost_at)

    # The client comes and calls end

    def begun(self) -> None:
        """The client has come without positions, here or at another node."""
        self._visits = self._visits.without_positions(self._session.context.hub.arrive())

    def tell_begun(self) -> None:
        """Let the other nodes know that the client has come without positions: they may run calls that it lost."""
        session = self._session
        attached = mail.Attached(session=session.id, incarnation=session.record.incarnation)
        session.put(*mail_to(session.context.nodes.others, attached))

    def give_time(self) -> None:
        """The client is here: what is still unread when it has had the time to resume is an orphan."""
        self._newest = self._session.context.hub.arrive()
        if self._timer is None:
            self._begin(self._newest)

    def _begin(self, since: int) -> None:
        seconds = ATTEMPTS * self._session.context.settings.retry + SLACK
        self._timer = asyncio.get_running_loop().call_later(seconds, self._time_has_passed, since)

    def _time_has_passed(self, since: int) -> None:
        self._timer = None
        if self._newest > since:
            self._begin(self._newest)  # it came again meanwhile, and may have lost more
        self._visits = self._visits.with_time_passed(since)
        self._spawn(here=True)

    def time_has_passed_elsewhere(self) -> None:
        """The client is at another node, and has had the time to resume its calls."""
        self._visits = self._visits.with_time_passed(self._session.context.hub.arrive())
        self._spawn(here=False)

    def ended(self, stream: Stream) -> None:
        """A call's stream is over, and no reader is there."""
        if self._is_due(stream):
            self._spawn(here=False)

    def _is_due(self, stream: Stream) -> bool:
        return not stream.readers.present and self._visits.is_due(stream.readers.lost_at)

    def close(self) -> None:
        """Tell nothing more; the process to which the client comes next tells the rest."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for task in self._tasks:
            task.cancel()

    # Telling

    def _spawn(self, *, here: bool) -> None:
        def forget(done: asyncio.Task[None]) -> None:
            self._tasks = tuple(task for task in self._tasks if task is not done)

        task = asyncio.create_task(self._tell(here=here), name="perdure-orphans")
        self._tasks += (task,)
        task.add_done_callback(forget)

    async def _tell(self, *, here: bool) -> None:
        """Tell of calls that run or have ended; `here`: the client came to this node, so other nodes tell of theirs."""
        session, context = self._session, self._session.context
        if session.state is SessionState.ENDED:
            return
        try:
            for call in session.exchange.calls.all_running():
                if self._is_due(call.stream) and not self._visits.remembers(call.told_at):
                    call.told_at, stream = context.hub.arrive(), call.stream
                    running = Orphan(
                        incarnation=call.incarnation,
                        request_id=call.request.id,
                        method=call.request.method,
                        name=name_of(call.request.params),
                        ended=False,
                        position=stream.position(min(stream.readers.delivered, stream.tail.last)),
                        last=stream.tail.last,
                    )
                    self._say(running)
            if context.journal.state is LogState.DEGRADED:
                # A store that can be read would not learn what its client was told, and have it told again.
                raise StoreUnavailable
            async with context.hub.marks.one_at_a_time:
                elsewhere, told = set[NodeId](), 0
                for record in await context.store.unread(session.id):
                    if record.node in context.nodes.others:
                        elsewhere.add(record.node)
                    elif record.sealed and (here or record.node == context.node) and told < MOST_TOLD:
                        told += 1
                        await self._tell_ended(record)
                if here:
                    session.put(*mail_to(elsewhere, mail.Unread(session=session.id)))
        except StoreError as failure:
            log_event(
                logging.DEBUG,
                "orphans.untold",
                f"the store fails; the client learns of its lost calls later: {failure}",
                session=session.name,
            )
            self.give_time()

    async def _tell_ended(self, record: StreamRecord) -> None:
        session, last = self._session, record.last
        rows = [row for row in await session.context.store.calls_on(record.id) if row.method != "initialize"]
        held = session.streams.get(record.id)
        if held is not None and held.readers.present:
            return  # it is being resumed at this moment
        seq = min(record.delivered, last)
        position = Position(kind=Kind.CALL, stream=record.id, generation=record.generation, seq=seq)
        told = Reached(stream=record.id, generation=record.generation, through=record.delivered)
        if not rows:
            session.put(told)  # a client that has sent another handshake since misses nothing
        for place, row in enumerate(rows, 1):
            ended = Orphan(
                incarnation=row.incarnation,
                request_id=row.request_id,
                method=row.method,
                name=None,
                ended=True,
                position=position,
                last=last,
            )
            self._say(ended, told if place == len(rows) else None)

    def _say(self, said: Orphan, also: Step | None = None) -> None:
        """Tell it on the standalone stream; where the server declares logging also in a way that stock clients show."""
        session = self._session
        if session.tells_by_log:
            log = {"level": "warning", "logger": "perdure", "data": said.sentence}
            session.home.send(encode_notification("notifications/message", log))
        session.home.send(encode_notification(ORPHAN, said.params), also)
        session.context.counters.orphans_told += 1
        sentence = "a client was told that a call which it lost " + ("has ended" if said.ended else "still runs")
        log_event(
            logging.INFO,
            "call.orphan",
            sentence,
            session=session.name,
            stream=said.position.stream,
            position=str(said.position),
            call=said.request_id,
        )
