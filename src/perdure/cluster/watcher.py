"""Looks at what other nodes wrote, and handles their mail, when the store hints at it and in each round.

Streams, homes and mail are looked at apart from each other: a message may take its time (a session ends, a home is
looked for), and readers must not wait for that.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from perdure._core import mail
from perdure._core.ids import Kind, StreamId
from perdure._core.jsonrpc import Notification, Response, coerce_id
from perdure.cluster.remote_readers import RemoteReaders
from perdure.cluster.settler import Settler
from perdure.errors import SessionEnded, StoreError, StoreLost, StoreUnavailable
from perdure.log.chores import OnDemand
from perdure.log.journal import Steps
from perdure.sessions.context import ServerContext, mail_to
from perdure.sessions.listening import Listening
from perdure.sessions.registry import SessionRegistry
from perdure.store.interface import stream_by_id
from perdure.store.records import Overview, StreamRecord
from perdure.store.steps import MailReceived
from perdure.telemetry.log_records import log_event

_ROUNDS_UNKNOWN = 3
"""Rounds of a new node in which others may not know it yet, and hint it nothing: each of them learns of it in a round
of its own, and one that is busy comes late to that."""


class Watcher:
    """Follows the other nodes through the store."""

    def __init__(
        self,
        context: ServerContext,
        sessions: SessionRegistry,
        settler: Settler,
        readers: RemoteReaders,
        listening: Listening | None = None,
    ) -> None:
        self._context = context
        self._sessions = sessions
        self._settler = settler
        self._readers = readers
        self._listening = listening
        self.handled = 0
        """The key of the last message that was handled."""
        self._unknown_rounds = _ROUNDS_UNKNOWN
        self._named: set[StreamId] = set()
        self._all = False
        self._looked: object = None
        """The store's stamp from before everything was last looked at."""
        self._homeless: dict[StreamId, StreamRecord] = {}
        self._streams = OnDemand(self._look_at_streams, name="perdure-look", on_failure=self._not_looked)
        self._homes = OnDemand(self._look_at_homes, name="perdure-homes", on_failure=self._not_looked)
        self._mail = OnDemand(self._handle_mail, name="perdure-mail", on_failure=self._mail_waits)

    def subscribe(self) -> Callable[[], None]:
        """Look whenever the store hints; gives the way to stop."""
        return self._context.store.subscribe(self._context.node, self._on_hint)

    async def aclose(self) -> None:
        await asyncio.gather(self._streams.aclose(), self._homes.aclose(), self._mail.aclose())

    def go_round(self, seen: Overview | None) -> None:
        """Look at everything in which there may be something to see; `None`: that is not known."""
        if self._unknown_rounds:
            self._unknown_rounds -= 1
            self._context.waiters.wake_all()
        if seen is None or seen.has_forwarded:
            self._homes.want()  # also what this node itself has forwarded to one that died
        if self._listening is not None:
            self._listening.go_round(seen)
        if self._context.store.stamp() != self._looked or self._readers.has_readers_beyond:
            self._all = True
            if seen is None or seen.has_mail:
                self._mail.want()
            self._streams.want()

    def _on_hint(self, streams: Sequence[StreamId]) -> None:
        """`streams` may have changed; without any, others may have written anything."""
        self._context.waiters.wake(streams)
        if streams:
            self._named.update(streams)
        else:
            self._all = True
            self._mail.want()
            self._homes.want()
        self._streams.want()

    async def _look_at_streams(self) -> None:
        everything, self._all = self._all, False
        named, self._named = self._named, set()
        stamp = self._context.store.stamp()
        unknown = not all(map(self._readers.follows, named))  # something was forwarded to a stream that is written here
        found = await self._readers.look(named, everything=everything)
        self._homeless |= {record.id: record for record in found}
        if unknown or found:
            self._homes.want()
        if everything:
            self._looked = stamp

    async def _look_at_homes(self) -> None:
        """Become the home of sessions whose standalone stream is read here and has no writer, and of those for which
        messages wait that were forwarded to this node or to one that is gone; append these."""
        homeless, self._homeless = self._homeless, {}
        for record in (*homeless.values(), *await self._context.store.forwarded_to(self._context.node)):
            try:
                session = await self._sessions.load(record.session)
                if session is not None and session.standalone.id == record.id:
                    session.standalone.follow(record)
                    with session.in_use():
                        if await session.home.claim():
                            await session.home.caught_up()
            except SessionEnded:
                await self._sessions.load(record.session)  # which lets go of it
            except (StoreUnavailable, StoreLost):
                raise
            except Exception as failure:  # it must not stand in the way of other streams
                sentence = f"what was forwarded could not be appended: {failure!r}"
                log_event(logging.ERROR, "forward.failed", sentence, session=record.session, stream=record.id)

    async def _handle_mail(self) -> None:
        """Handle the mail that has come, in order and one at a time. A message that cannot be handled must not stand in
        the way of those behind it."""
        context = self._context
        while page := await context.store.mail(context.node, after=self.handled):
            for key, raw in page:
                try:
                    if (message := mail.decode(raw)) is not None:
                        log_event(logging.DEBUG, "mail.received", f"mail from another node: {type(message).__name__}")
                        await self._handle(message)
                    else:
                        log_event(
                            logging.WARNING,
                            "mail.unknown",
                            "a newer release sent mail of a kind that this one does not know",
                        )
                except StoreUnavailable:
                    raise
                except Exception as failure:
                    log_event(logging.ERROR, "mail.failed", f"mail could not be handled: {failure!r}")
                self.handled = key
                context.journal.put(Steps((MailReceived(node=context.node, through=key),)))

    async def _handle(self, message: mail.Message) -> None:
        if isinstance(message, mail.ListeningMail):
            if self._listening is not None:
                self._listening.on_mail(message)
            return
        held = self._sessions.held(message.session)
        if isinstance(message, mail.Unread | mail.AskAnswered | mail.Notified | mail.Cancelled):
            held = await self._sessions.load(message.session)
        match message:
            case mail.Ended():
                await self._sessions.was_ended(message.session, message.reason)
            case mail.Waiting():
                self._settler.waiting.expect(message.session)
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
                await self._readers.look_who_reads(stream)
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
            # What a client said to another node, and concerns this one.
            case mail.AskAnswered() if held is not None:
                held.link.asks.answer(Response(id=message.response.get("id"), raw=message.response), None)
            case mail.Notified() if held is not None:
                held.link.pass_on(Notification(method=message.method, params=message.params, raw={}), None)
            case mail.Cancelled(request_id=id_, incarnation=incarnation, params=params) if held is not None:
                if not held.link.cancel(id_, incarnation=incarnation, params=params):
                    await self._settler.waiting.cancel(message)

    # Whatever fails is looked at again in the next round, with everything else. The journal logs a store that fails;
    # anything else is logged once.

    def _not_looked(self, failure: Exception, again: bool) -> None:
        self._looked = None
        level = logging.DEBUG if again or isinstance(failure, StoreError) else logging.ERROR
        log_event(level, "neighbours.look", f"what other nodes wrote could not be read: {failure!r}")

    def _mail_waits(self, failure: Exception, again: bool) -> None:
        self._looked = None
        level = logging.DEBUG if again or isinstance(failure, StoreError) else logging.ERROR
        log_event(level, "mail.unread", f"mail waits, it cannot be read: {failure!r}")
