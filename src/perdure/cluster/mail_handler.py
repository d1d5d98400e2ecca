"""What other nodes tell this one, and what comes of it."""

from __future__ import annotations

import logging

from perdure._core import mail
from perdure._core.ids import Kind
from perdure._core.jsonrpc import Notification, Response
from perdure.cluster.peers import Neighbours
from perdure.cluster.settler import Settler
from perdure.errors import SessionEnded
from perdure.log.journal import Steps
from perdure.log.stream import Stream
from perdure.sessions.context import ServerContext
from perdure.sessions.registry import SessionRegistry
from perdure.sessions.session import Session
from perdure.store.base import MailReceived, SendMail, StreamRecord, stream_by_id
from perdure.telemetry.events import log_event


class MailHandler:
    """Deals with mail."""

    def __init__(
        self, context: ServerContext, sessions: SessionRegistry, settler: Settler, neighbours: Neighbours
    ) -> None:
        self._context = context
        self._sessions = sessions
        self._settler = settler
        self._neighbours = neighbours

    async def deal(self, message: mail.Message, received: MailReceived) -> None:
        log_event(logging.DEBUG, "mail.received", f"mail from another node: {type(message).__name__}")
        match message:
            case mail.Ended():
                await self._sessions.was_ended(message.session, message.reason)
            case mail.Attached():
                await self._attached(message)
            case mail.Waiting():
                self._settler.waiting.expect(message.session)
            case mail.Reading():
                await self._reading(message)
            case mail.Missed():
                self._missed(message)
            case mail.Lost():
                self._lost(message)
            case mail.Unread():
                if (session := await self._sessions.load(message.session)) is not None:
                    session.orphans.time_has_passed_elsewhere()
            case mail.Here():
                if (session := self._sessions.held(message.session)) is not None:
                    session.touch()
            case mail.AskAnswered() | mail.Notified() | mail.Cancelled():
                await self._from_client(message)
        self._context.journal.put(Steps((received,)))

    async def come_home(self, stream: Stream) -> None:
        session = self._sessions.held(stream.session)
        if session is not None and session.standalone is stream:
            try:
                await session.home.claim()
            except SessionEnded:
                await self._sessions.load(stream.session)  # which lets go of it

    async def forwarded(self, record: StreamRecord) -> None:
        session = await self._sessions.load(record.session)
        if session is not None and session.standalone.id == record.id:
            try:
                session.standalone.follow(record)
                with session.in_use():
                    if await session.home.claim():
                        await session.home.caught_up()
            except SessionEnded:
                await self._sessions.load(record.session)  # which lets go of it

    async def cancel_waiting(self, cancelled: mail.Cancelled) -> None:
        await self._settler.waiting.cancel(cancelled)

    async def _attached(self, message: mail.Attached) -> None:
        session = self._sessions.held(message.session)
        if session is None:
            return
        if message.incarnation > session.record.incarnation:
            await self._sessions.load(message.session)  # which begins the incarnation
        else:
            session.orphans.begun()

    async def _reading(self, message: mail.Reading) -> None:
        session = self._sessions.held(message.session)
        if session is None:
            return
        stream = session.held_stream(message.stream)
        if stream is not None:
            await self._look_who_writes(stream)
            await self._neighbours.look_who_reads(stream)

    def _lost(self, message: mail.Lost) -> None:
        session = self._sessions.held(message.session)
        if session is not None and session.standalone.reader is not None:
            session.orphans.give_time()

    def _missed(self, message: mail.Missed) -> None:
        session = self._sessions.held(message.session)
        if session is not None and session.connected:
            here = mail.encode(mail.Here(session=session.id))
            self._context.journal.put(Steps((SendMail(node=message.node, message=here),)))

    async def _look_who_writes(self, stream: Stream) -> None:
        """Another node may have become the home."""
        if stream.kind is Kind.STANDALONE and stream.writes:
            record = await stream_by_id(self._context.store, stream.id)
            if record is not None:
                stream.follow(record)

    async def _from_client(self, message: mail.AskAnswered | mail.Notified | mail.Cancelled) -> None:
        """What a client said to another node, and concerns this one."""
        session: Session | None = await self._sessions.load(message.session)
        if session is None:
            return
        match message:
            case mail.AskAnswered():
                session.exchange.asks.answer(Response(id=message.response.get("id"), raw=message.response), None)
            case mail.Notified():
                session.exchange.pass_on(Notification(method=message.method, params=message.params, raw={}), None)
            case mail.Cancelled():
                here = session.exchange.cancel(
                    message.request_id, incarnation=message.incarnation, params=message.params
                )
                if not here:
                    await self._settler.waiting.cancel(message)
