"""Keeps this process alive as a node of the store, follows the other nodes, and has the calls of dead ones settled."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field

from perdure._core import mail
from perdure._core.ids import Kind, NodeId, StreamId
from perdure._core.jsonrpc import Notification, Response, coerce_id
from perdure._core.leases import BEATS_IN_LEASE
from perdure._core.states import ClaimState
from perdure.cluster.settler import Settler
from perdure.errors import SessionEnded, StoreLost, StoreUnavailable
from perdure.log.chores import Chores, OnDemand, cancel_all
from perdure.log.nodes import OtherNodes, mail_to
from perdure.log.remote_readers import RemoteReaders
from perdure.sessions.context import ServerContext
from perdure.sessions.listening import Listening
from perdure.sessions.registry import SessionRegistry
from perdure.store.interface import Liveness, stream_by_id
from perdure.store.records import Overview, StreamRecord
from perdure.store.steps import MailReceived
from perdure.telemetry.log_records import log_event

ROUND = 0.65
"""Seconds between two readings of which nodes are alive: the calls of a dead process are settled within about a second.
With the beats (`LONGEST_PAUSE`) that makes two statements a second, which is all that an idle node asks of a server."""

LONGEST_PAUSE = 3.0
"""Seconds between two beats at the most: operators see the numbers of all nodes as of their last beat."""


@dataclass(eq=False)
class Watcher:
    """Reads what other nodes wrote, and handles their mail, when the store hints at it and in each round. Streams,
    homes and mail are separate jobs: a message may take long (a session ends, a home is searched), and readers must
    not wait for that."""

    _context: ServerContext
    _sessions: SessionRegistry
    _settler: Settler
    _readers: RemoteReaders
    listening: Listening | None
    handled: int = 0
    """The key of the last message that was handled."""
    _named: set[StreamId] = field(default_factory=set)
    _all: bool = False
    _read_at: object = None
    """The store's stamp from before everything was last read."""
    _homeless: dict[StreamId, StreamRecord] = field(default_factory=dict)
    _streams: OnDemand = field(init=False)
    _homes: OnDemand = field(init=False)
    _mail: OnDemand = field(init=False)

    def __post_init__(self) -> None:
        # What fails is read again in the next round, with everything else.
        failure = "what other nodes wrote could not be read"

        def again() -> None:
            self._read_at = None

        self._streams = OnDemand(self._read_streams, name="perdure-look", failure=failure, on_failure=again)
        self._homes = OnDemand(self._take_homes, name="perdure-homes", failure=failure, on_failure=again)
        failure = "mail waits, it could not be read"
        self._mail = OnDemand(self._handle_mail, name="perdure-mail", failure=failure, on_failure=again)

    async def aclose(self) -> None:
        await asyncio.gather(self._streams.aclose(), self._homes.aclose(), self._mail.aclose())

    def go_round(self, seen: Overview | None) -> None:
        """Read everything that another node may have written. `seen`: this round's overview; `None`: unreadable."""
        if seen is None or seen.has_forwarded:
            self._homes.want()  # including messages this node forwarded to a dead home
        if self.listening is not None:
            self.listening.go_round(seen)
        if self._context.store.stamp() != self._read_at or self._readers.has_readers_beyond:
            self._all = True
            if seen is None or seen.has_mail:
                self._mail.want()
            self._streams.want()

    def on_hint(self, streams: Sequence[StreamId]) -> None:
        """`streams` may have changed; without any, others may have written anything."""
        self._context.waiters.wake(streams)
        if streams:
            self._named.update(streams)
        else:
            self._all = True
            self._mail.want()
            self._homes.want()
        self._streams.want()

    async def _read_streams(self) -> None:
        everything, self._all = self._all, False
        named, self._named = self._named, set()
        stamp = self._context.store.stamp()
        unknown = not all(map(self._readers.follows, named))  # something was forwarded to a stream that is written here
        found = await self._readers.read_ends(named, everything=everything)
        self._homeless |= {record.id: record for record in found}
        if unknown or found:
            self._homes.want()
        if everything:
            self._read_at = stamp

    async def _take_homes(self) -> None:
        """Become the home of sessions whose standalone stream is read here and has no writer, and of those with
        messages that were forwarded to this node or to a dead node; append these."""
        homeless, self._homeless = self._homeless, {}
        for record in (*homeless.values(), *await self._context.store.written_by(self._context.node, forwarded=True)):
            try:
                session = await self._sessions.load(record.session)
                if session is not None and session.standalone.id == record.id:
                    session.standalone.follow(record)
                    with session.in_use():
                        if await session.home.claim():
                            await session.home.caught_up()
            except SessionEnded:
                await self._sessions.load(record.session)  # which removes it
            except (StoreUnavailable, StoreLost):
                raise
            except Exception as failure:  # it must not stand in the way of other streams
                sentence = f"forwarded messages could not be appended: {failure!r}"
                log_event(logging.ERROR, "forward.failed", sentence, session=record.session, stream=record.id)

    async def _handle_mail(self) -> None:
        """Handle mail in order, one message at a time. A message that cannot be handled must not block those after
        it."""
        context = self._context
        while page := await context.store.mail(context.node, after=self.handled):
            for key, raw in page:
                try:
                    if (message := mail.decode(raw)) is not None:
                        log_event(logging.DEBUG, "mail.received", f"mail from another node: {type(message).__name__}")
                        await self._handle(message)
                    else:
                        sentence = "a newer release sent mail of a kind that this one does not know"
                        log_event(logging.WARNING, "mail.unknown", sentence)
                except StoreUnavailable:
                    raise
                except Exception as failure:
                    log_event(logging.ERROR, "mail.failed", f"mail could not be handled: {failure!r}")
                self.handled = key
                context.put(MailReceived(node=context.node, through=key))

    async def _handle(self, message: mail.Message) -> None:
        if isinstance(message, mail.ListeningMail):
            if self.listening is not None:
                self.listening.on_mail(message)
            return
        held = self._sessions.held(message.session)
        if isinstance(message, mail.Unread | mail.AskAnswered | mail.Notified | mail.Cancelled | mail.HandedOver):
            held = await self._sessions.load(message.session)
        match message:
            case mail.Ended():
                await self._sessions.was_ended(message.session, message.reason)
            case mail.Waiting():
                self._settler.principal_calls.expect(message.session)
            case mail.Attached() if held is not None:
                if message.incarnation > held.record.incarnation:
                    await self._sessions.load(message.session)  # which begins the incarnation
                else:
                    held.orphans.begun(cursor=message.cursor)
            case mail.Reading() if held is not None and (stream := held.held_stream(message.stream)) is not None:
                if stream.kind is Kind.STANDALONE and stream.writer is not None:
                    record = await stream_by_id(self._context.store, stream.id)
                    if record is not None:
                        stream.follow(record)  # another node may have become the home
                await self._readers.read_reader(stream)
            case mail.Missed() if held is not None and held.is_connected:
                held.context.put(*mail_to([message.node], mail.Here(session=held.id)))
            case mail.Lost() if held is not None and held.standalone.readers.reader is not None:
                held.orphans.lost_elsewhere(waited=message.waited)
            case mail.Here() if held is not None:
                held.touch()
            case mail.Displaced(incarnation=incarnation, request_id=id_) if held is not None:
                if (call := held.link.calls.running((incarnation, coerce_id(id_)))) is not None:
                    call.is_displaced = True
            case mail.Unread() if held is not None:
                held.orphans.time_has_passed_elsewhere()
            # A client's message that reached another node.
            case mail.AskAnswered() if held is not None:
                await held.link.asks.answer(Response(id=message.response.get("id"), raw=message.response), None)
            case mail.Notified() if held is not None:
                held.link.pass_on(Notification(method=message.method, params=message.params, raw={}), None)
            case mail.HandedOver() if held is not None:
                with held.in_use():
                    await self._settler.begin(held, message.stream)
            case mail.Standing():
                await self._settler.take_standing(message)
            case mail.Cancelled(request_id=id_, incarnation=incarnation, params=params) if held is not None:
                if not held.link.cancel(id_, incarnation=incarnation, params=params):
                    await self._settler.principal_calls.cancel(message)


@dataclass(eq=False)
class Node:
    """Beats, and does the rounds. Beats continue while a dead node is settled, however long that takes."""

    _context: ServerContext
    _liveness: Liveness
    _settler: Settler
    _watcher: Watcher
    _: KW_ONLY
    facts: Callable[[], bytes]
    """What this node writes with its beat."""
    on_buried: Callable[[], None]
    """Called if other nodes have buried this one."""
    on_lost: Callable[[StoreLost], None]
    """Called, again and again, if the store cannot be used any more."""
    _nodes: OtherNodes = field(init=False)
    _every: float = field(init=False)
    _round: float = field(init=False)
    _chores: Chores = field(default_factory=Chores)
    _settling: set[NodeId] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._nodes = self._context.nodes
        self._every = min(self._context.settings.lease / BEATS_IN_LEASE, LONGEST_PAUSE)
        self._round = min(ROUND, self._every)

    async def run(self) -> None:
        """Run until another node has buried this one."""
        tasks = [
            asyncio.create_task(self._repeat("this node could not show that it lives", self._beat, self._every)),
            asyncio.create_task(self._repeat("other nodes could not be looked after", self._go_round, self._round)),
        ]
        before = ClaimState.HOLDING
        try:
            # The claim lapses by a clock, without an event.
            while (claim := self._liveness.node_claim.at(time.monotonic())) is not ClaimState.BURIED:
                if claim is ClaimState.FROZEN is not before:
                    sentence = "this node's lease has lapsed: it shows and accepts nothing until the store answers"
                    log_event(logging.ERROR, "node.lapsed", sentence)
                elif claim is not before:
                    log_event(logging.WARNING, "node.resumed", "the store answers and knows this node, which continues")
                before = claim
                if claim is ClaimState.HOLDING:
                    self._context.hub.resume_readers()  # that rest because it held no claim
                await asyncio.sleep(self._round)
        finally:
            await cancel_all(tasks)
        sentence = "other nodes took this node for dead and have settled its calls: it writes nothing more, and ends"
        log_event(logging.ERROR, "node.buried", sentence)
        self.on_buried()

    async def _repeat(self, what: str, work: Callable[[], Awaitable[None]], pause: float) -> None:
        while True:
            await self._attempt(what, work())
            holds = self._liveness.node_claim.at(time.monotonic()) is ClaimState.HOLDING
            await asyncio.sleep(pause if holds else self._round)  # so that it continues soon

    async def _attempt(self, what: str, work: Awaitable[None]) -> None:
        """Do something that may fail, and that is done again in the next round."""
        with self._chores.surviving(what):
            try:
                await work
            except StoreLost as failure:
                self.on_lost(failure)

    async def _beat(self) -> None:
        # One that hangs must not be the last: the store may be back long before the lease has lapsed.
        async with asyncio.timeout(2 * self._every):
            await self._liveness.beat(self.facts())

    async def _go_round(self) -> None:
        if self._liveness.node_claim.at(time.monotonic()) is not ClaimState.HOLDING:
            return  # other nodes may act in its place; it must not act in theirs
        seen: Overview | None = None

        async def meet() -> None:
            nonlocal seen
            seen = await self._nodes.meet(mail_after=self._watcher.handled)
            self._settling &= set(seen.dead)
            for node, beat in seen.dead.items():
                await self._attempt(f"node {node[:8]} could not be settled", self._settle(node, beat))

        await self._attempt("the other nodes could not be seen", meet())
        await self._settler.go_round()  # which survives whatever fails in it
        self._watcher.go_round(seen)

    async def _settle(self, dead: NodeId, beat: int) -> None:
        has_left, listening = dead in self._nodes.departed, self._watcher.listening
        if dead not in self._settling:
            self._settling.add(dead)
            name = dead[:8]
            if has_left:
                log_event(logging.INFO, "node.departed", f"node {name} has left; its calls are taken over", node=dead)
            else:
                log_event(logging.WARNING, "node.dead", f"node {name} has died; its calls are being settled", node=dead)
                if listening is not None:
                    listening.on_death()
        is_buried = await self._settler.settle_node(dead, beat, has_left=has_left)
        if is_buried and not has_left and listening is not None:
            listening.cue_others()  # they may not have seen that it was dead
        await self._nodes.meet()
