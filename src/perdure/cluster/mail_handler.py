"""Handles mail from other nodes, in order and one message at a time."""

from __future__ import annotations

import logging

from perdure._core import mail
from perdure._core.ids import Kind
from perdure._core.jsonrpc import Notification, Response
from perdure.cluster.remote_readers import RemoteReaders
from perdure.cluster.settler import Settler
from perdure.errors import StoreUnavailable
from perdure.log.journal import Steps
from perdure.sessions.context import ServerContext
from perdure.sessions.registry import SessionRegistry
from perdure.store.base import MailReceived, SendMail, stream_by_id
from perdure.telemetry.events import log_event


class MailHandler:
    """Handles the mail of this node."""

    def __init__(
        self, context: ServerContext, sessions: SessionRegistry, settler: Settler, readers: RemoteReaders
    ) -> None:
        self._context = context
        self._sessions = sessions
        self._settler = settler
        self._readers = readers
        self._handled = 0
        """The key of the last message that was handled."""

    async def handle_all(self) -> None:
        """Handle what has come. A message that cannot be handled must not stand in the way of those behind it."""
        context = self._context
        while page := await context.store.mail(context.node, after=self._handled):
            for key, raw in page:
                try:
                    if (message := mail.decode(raw)) is not None:
                        log_event(logging.DEBUG, "mail.received", f"mail from another node: {type(message).__name__}")
                        await self.handle(message)
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
                self._handled = key
                context.journal.put(Steps((MailReceived(node=context.node, through=key),)))

    async def handle(self, message: mail.Message) -> None:
        held = self._sessions.held(message.session)
        match message:
            case mail.Ended():
                await self._sessions.was_ended(message.session, message.reason)
            case mail.Waiting():
                self._settler.waiting.expect(message.session)
            case mail.Attached() if held is not None:
                if message.incarnation > held.record.incarnation:
                    await self._sessions.load(message.session)  # which begins the incarnation
                else:
                    held.orphans.begun()
            case mail.Reading() if held is not None and (stream := held.held_stream(message.stream)) is not None:
                if stream.kind is Kind.STANDALONE and stream.writer is not None:
                    record = await stream_by_id(self._context.store, stream.id)
                    if record is not None:
                        stream.follow(record)  # another node may have become the home
                await self._readers.look_who_reads(stream)
            case mail.Missed() if held is not None and held.is_connected:
                here = mail.encode(mail.Here(session=held.id))
                self._context.journal.put(Steps((SendMail(node=message.node, message=here),)))
            case mail.Lost() if held is not None and held.standalone.reader is not None:
                held.orphans.give_time()
            case mail.Here() if held is not None:
                held.touch()
            case mail.Unread():
                if (session := await self._sessions.load(message.session)) is not None:
                    session.orphans.time_has_passed_elsewhere()
            case mail.AskAnswered() | mail.Notified() | mail.Cancelled():
                await self._pass_on(message)

    async def _pass_on(self, message: mail.AskAnswered | mail.Notified | mail.Cancelled) -> None:
        """Pass on what a client said to another node and concerns this one."""
        session = await self._sessions.load(message.session)
        if session is None:
            return
        exchange = session.exchange
        match message:
            case mail.AskAnswered():
                exchange.asks.answer(Response(id=message.response.get("id"), raw=message.response), None)
            case mail.Notified():
                exchange.pass_on(Notification(method=message.method, params=message.params, raw={}), None)
            case mail.Cancelled():
                if not exchange.cancel(message.request_id, incarnation=message.incarnation, params=message.params):
                    await self._settler.waiting.cancel(message)
