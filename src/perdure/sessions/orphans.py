"""Notifies clients of orphans: calls whose reader is lost while their client is back, without the call's position (R5).

An orphan's notifications and asks go to the standalone stream; a report names its call, its unread events and its end
(promise 4). Open asks are repeated there, because the client has forgotten them. A client that comes without a
position (a handshake, or a GET without `Last-Event-ID`) has lost the positions of its calls as well, so their messages
change the stream at once. One that resumes the standalone stream may be about to resume its calls: it gets the time
that clients are asked to wait before they reconnect. Only then does this node tell anything, so a client that has its
positions hears nothing. The same time passes where a call loses its reader while the client reads the standalone
stream: it then counts as come back.

Several nodes may run calls of a session. Each reports those that it wrote; the node to which the client came reports
those of dead nodes, and lets the living ones know that the time has passed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from perdure._core import mail
from perdure._core.ids import Kind, NodeId, Position
from perdure._core.jsonrpc import Request, coerce_id
from perdure._core.losses import ORPHAN, Orphan, Visits
from perdure._core.states import SessionState
from perdure.errors import StoreError, StoreUnavailable
from perdure.log.nodes import mail_to
from perdure.log.stream import Stream
from perdure.sessions.context import ServerContext
from perdure.sessions.home import Home, NoHome
from perdure.sessions.ledger import Call, encode_notification, name_of
from perdure.sessions.record_keeper import RecordKeeper
from perdure.sessions.runtime_link import RuntimeLink
from perdure.store.interface import open_call, paged, reader_of, stream_by_id
from perdure.store.records import StreamRecord
from perdure.store.steps import MailReceived, Reached, Step
from perdure.telemetry.log_records import log_event

ATTEMPTS = 2
SLACK = 3.0
"""A client may resume its calls for so many times `retry`, as stock clients try, and seconds beyond: one that backs
off, or whose streams take turns, needs them. What is said meanwhile waits on the call's own stream, in front of the
answer; on the standalone stream it could arrive after it, where clients no longer want it."""

MOST_TOLD = 100
"""Calls that have ended of which a client learns at a time, because they share the standalone stream with everything
else. There are more only if a client drops connection after connection; the next time that it comes it learns the rest.
"""


MOST_GIVEN = 16
"""Times that may be running for one session: a client that comes more often in that time shares the last of them."""


SLOW = 1.0
"""Seconds that the store may take to say which calls are unread: longer, and it keeps clients from resuming as well."""


class _TimeToResume(NamedTuple):
    """Time that a client has to resume its calls."""

    since: int
    """As an arrival number of the hub."""
    came: bool
    """The client has come; otherwise a call has lost its reader."""
    timer: asyncio.TimerHandle


@dataclass(slots=True, eq=False)
class Orphans:
    """Knows which calls of a session are orphans, and notifies the client of them."""

    _context: ServerContext
    _keeper: RecordKeeper
    _home: Home | NoHome
    _link: RuntimeLink
    _visits: Visits
    """Written here."""
    _given: tuple[_TimeToResume, ...] = ()
    """The oldest first; all are given equally long, so it ends first."""
    _tasks: tuple[asyncio.Task[None], ...] = ()

    def is_orphan(self, stream: Stream) -> bool:
        """Whether this call has no reader, and its client has come back since without asking for it."""
        return not (stream.readers.present or stream.answered) and self._visits.is_orphan(stream.readers.lost_at)

    # The client comes and calls end

    def begun(self, *, cursor: int) -> None:
        """The client has come without positions, here or at another node, and reads the standalone stream after
        `cursor`. Its open questions on that stream are repeated at once; those on a call's own stream once it has had
        the time to resume that."""
        self.reattached()
        asks, standalone = self._link.asks, self._home.standalone
        if asked := [name for name, ask in asks.open.items() if ask.on == standalone.id]:
            self._spawn(self._ask_again(asked, cursor))

    def reattached(self) -> None:
        """The client has forgotten everything. (The caller repeats its asks.)"""
        self._visits.come_without_positions(self._context.hub.arrive())

    async def _ask_again(self, asked: Collection[str], cursor: int) -> None:
        """Repeat open asks that the standalone reader will not reach."""
        stream, store, context = self._home.standalone, self._context.store, self._context
        coming = [event.payload for event in stream.tail.after(cursor)]
        with suppress(StoreError):  # then a question may come twice
            # After a commit, because a question of this node may be about to be forwarded. What is forwarded is read
            # first: the home makes events of it meanwhile.
            await context.journal.write(MailReceived(node=context.node, through=0))
            coming += [payload for _, payload in await store.forwarded(stream.id)]
            events = paged(lambda after: store.read(stream.id, after=max(after, cursor), limit=1_000))
            coming += [event.payload async for event in events]
        met = {name for name in asked if any(name.encode() in payload for payload in coming)}
        self._link.asks.repeat([name for name in asked if name not in met])

    def tell_begun(self, *, cursor: int = 0) -> None:
        """Notify the other nodes that the client has come without positions: they may run calls that it lost."""
        record = self._keeper.record
        attached = mail.Attached(session=record.id, incarnation=record.incarnation, cursor=cursor)
        self._context.put(*mail_to(self._context.nodes.others, attached))

    @property
    def _seconds(self) -> float:
        return ATTEMPTS * self._context.settings.retry + SLACK

    def give_time(self, *, came: bool = True) -> None:
        """Give the client time to resume its calls. If it `came`, calls that are still unread then are orphans.
        Otherwise a call that is written here has lost its reader: a client that still reads the standalone stream then,
        at any node, will not resume it."""
        if len(self._given) == MOST_GIVEN:
            *rest, last = self._given
            last.timer.cancel()
            self._given, came = tuple(rest), came or last.came
        timer = asyncio.get_running_loop().call_later(self._seconds, self._time_has_passed)
        self._given += (_TimeToResume(self._context.hub.arrive(), came, timer),)

    def _time_has_passed(self) -> None:
        given, *rest = self._given
        self._given = tuple(rest)
        if given.came:
            self._visits.pass_time(given.since)
            self._spawn(self._tell(here=True))
        elif self._is_there(given.since) or not self._context.nodes.alone:
            self._spawn(self._report_lost(given.since))

    def _is_there(self, since: int) -> bool:
        """Whether the client has read the standalone stream here since then."""
        reader = self._home.standalone.readers.reader
        return reader is not None and reader.arrival < since

    def lost_elsewhere(self, *, waited: bool) -> None:
        """Calls of other nodes have lost their readers; `waited`: so long ago that the client could have resumed them.
        The client is here."""
        reader, context = self._home.standalone.readers.reader, self._context
        if not waited:
            self.give_time()
        elif reader is not None and context.clock() - reader.since >= self._seconds:
            self._visits.pass_time(context.hub.arrive())
            self._spawn(self._tell(here=True))

    def time_has_passed_elsewhere(self) -> None:
        """The client is at another node, and has had the time to resume its calls; but not those that have only just
        lost their reader."""
        lost = [given.since - 1 for given in self._given if not given.came]
        since = min(lost, default=self._context.hub.arrive())
        self._visits.pass_time(since)
        self._spawn(self._tell(here=False))

    def ended(self, stream: Stream) -> None:
        """A call's stream is over, and has no reader."""
        if self._is_due(stream):
            self._spawn(self._tell(here=False))

    def _is_due(self, stream: Stream) -> bool:
        return self._visits.is_due(stream.readers.lost_at) and not (stream.readers.present or stream.answered)

    def close(self) -> None:
        """Send nothing more; the process to which the client comes next sends the rest."""
        for given in self._given:
            given.timer.cancel()
        self._given = ()
        for task in self._tasks:
            task.cancel()

    # Ids that a client uses again

    async def give_up_ids(self, incarnation: int, requests: Sequence[Request]) -> bool:
        """New requests have ids of calls that still run. Returns whether all of these are orphans, and the requests may
        take their ids: a client that came back by GET alone counts from 0 again. From then on such a call's progress
        token is changed as after a handshake."""
        context, session, calls, found = self._context, self._keeper.record.id, self._link.calls, False
        displaced: list[Call] = []
        steps: list[Step] = []
        for request in requests:
            key = incarnation, coerce_id(request.id)
            if (call := calls.running(key)) is not None:
                if not self.is_orphan(call.stream):
                    return False
                displaced.append(call)
            elif calls.is_reserved(key):
                return False
            elif row := await open_call(context.store, session, incarnation=incarnation, request_id=request.id):
                stream = await stream_by_id(context.store, row.stream)
                reader = await reader_of(context.store, row.stream)
                if stream is None or not stream.unread or reader is not None or not self._visits.attached:
                    return False
                message = mail.Displaced(session=session, incarnation=incarnation, request_id=request.id)
                steps += mail_to([stream.node] if stream.node else (), message)
            else:
                continue
            found = True
        for call in displaced:
            call.is_displaced = True
        context.put(*steps)
        return found

    # Telling

    def _spawn(self, telling: Coroutine[None, None, None]) -> None:
        def forget(done: asyncio.Task[None]) -> None:
            self._tasks = tuple(task for task in self._tasks if task is not done)

        task = asyncio.create_task(telling, name="perdure-orphans")
        self._tasks += (task,)
        task.add_done_callback(forget)

    async def _report_lost(self, since: int) -> None:
        """Calls of this node lost their readers at that moment, and may have none yet: notify their client, if it is
        here, or the other nodes. While the store is slow no client can resume, so it gets the time again."""
        session, context = self._keeper.record.id, self._context
        try:
            async with context.hub.marks.one_at_a_time, asyncio.timeout(SLOW):
                found = await context.store.streams(session, only_unread=True)
        except (StoreError, TimeoutError):
            self.give_time(came=False)
            return
        streams, unread = self._link.streams, [record for record in found if record.node == context.node]
        if all(record.id in streams and streams[record.id].readers.present for record in unread):
            return
        if self._is_there(since):
            self._visits.pass_time(since)
            await self._tell(here=True)
        else:
            context.put(*mail_to(context.nodes.others, mail.Lost(session=session, waited=True)))

    async def _tell(self, *, here: bool) -> None:
        """Notify the client of calls that run or have ended; `here`: it came to this node, so other nodes notify it of
        theirs."""
        record, context = self._keeper.record, self._context
        if record.state is SessionState.ENDED:
            return
        try:
            for call in self._link.calls.all_running():
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
            if context.journal.is_degraded:
                # A store that can be read would not learn what its client was told, and have it told again.
                raise StoreUnavailable
            async with context.hub.marks.one_at_a_time:
                elsewhere, told = set[NodeId](), 0
                unread = await context.store.streams(record.id, only_unread=True)
                # Where the store can be read, the streams of calls could be resumed.
                for name, ask in list(self._link.asks.open.items()):
                    if ask.call is not None and ask.on == ask.call.stream.id and self.is_orphan(ask.call.stream):
                        self._link.asks.repeat([name])
                for stream_record in unread:
                    if stream_record.node in context.nodes.others:
                        elsewhere.add(stream_record.node)
                    elif stream_record.sealed and (here or stream_record.node == context.node) and told < MOST_TOLD:
                        told += 1
                        await self._tell_ended(stream_record)
                if here:
                    context.put(*mail_to(elsewhere, mail.Unread(session=record.id)))
        except StoreError as failure:
            log_event(
                logging.DEBUG,
                "orphans.untold",
                f"the store fails; the client learns of its lost calls later: {failure}",
                session=self._keeper.name,
            )
            self.give_time()

    async def _tell_ended(self, record: StreamRecord) -> None:
        last = record.last
        calls = await self._context.store.calls(record.session, stream=record.id)
        rows = [row for row in calls if row.method != "initialize"]
        held = self._link.streams.get(record.id)
        if held is not None and held.readers.present:
            return  # it is being resumed at this moment
        seq = min(record.delivered, last)
        position = Position(kind=Kind.CALL, stream=record.id, generation=record.generation, seq=seq)
        told = Reached(stream=record.id, generation=record.generation, through=record.delivered)
        if not rows:
            self._context.put(told)  # a client that has sent another handshake since misses nothing
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
        """Send it on the standalone stream; where the server declares logging, also in a way that stock clients
        show."""
        if self._keeper.tells_by_log:
            log = {"level": "warning", "logger": "perdure", "data": said.sentence}
            self._home.send(encode_notification("notifications/message", log))
        self._home.send(encode_notification(ORPHAN, said.params), also)
        self._context.counters.orphans_told += 1
        sentence = "a client was told that a call which it lost " + ("has ended" if said.ended else "still runs")
        log_event(
            logging.INFO,
            "call.orphan",
            sentence,
            session=self._keeper.name,
            stream=said.position.stream,
            position=str(said.position),
            call=said.request_id,
        )
