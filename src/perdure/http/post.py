"""POST: messages of the client's. Requests open a stream, on which their answers come; the rest is accepted with
202."""

from __future__ import annotations

import json
from collections.abc import Sequence

from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope

from perdure._core import sticky
from perdure._core.jsonrpc import Batch, Envelope, InvalidMessage, Notification, Request, parse_body
from perdure._core.memory_budget import weigh
from perdure._core.states import SessionState, SessionStep
from perdure.errors import IdTaken, SessionEnded, StoreError, TooManyCalls, TooManySessions
from perdure.http.access import Headers, SessionAccess
from perdure.http.body import accepts, replayed
from perdure.http.caller import caller_of
from perdure.http.event_stream import EventStreamResponse
from perdure.http.refusals import Answer, Refusal, Refused, refusal_of
from perdure.log.stream import Stream
from perdure.sessions.client_messages import receive
from perdure.sessions.ledger import Call
from perdure.sessions.registry import Caller
from perdure.sessions.session import Session
from perdure.telemetry import tracing as spans

MAX_HANDSHAKE = 64 << 10
"""Bytes of an `initialize` request: its params are kept in memory for as long as the session lives."""

MAX_HANDSHAKE_MEMORY = 512 << 10
"""Bytes of memory that an `initialize` request may take once parsed, estimated: the SDK keeps it with its runtime.
Enough for some thousand values; clients send a dozen."""

_SUBSCRIBING = ("resources/subscribe", "resources/unsubscribe")


class PostHandler:
    """Takes messages."""

    def __init__(self, desk: SessionAccess) -> None:
        self._desk = desk
        self._context = desk.context
        self._settings = desk.settings

    async def __call__(
        self, scope: Scope, receive: Receive, headers: Headers, owner: str
    ) -> Answer | EventStreamResponse:
        self._check(headers)
        body = await self._desk.bodies.read(receive, headers)
        try:
            parsed = parse_body(body)
        except InvalidMessage as error:
            raise Refused(Refusal.BAD_MESSAGE, id=error.id, code=error.code, reason=error.reason) from None
        try:
            return await self._answer(parsed, body, HttpRequest(scope, replayed(body)), headers, owner)
        except Refused as refused:
            raise refused.answering(parsed.id if isinstance(parsed, Request) else None) from None

    async def _answer(
        self, parsed: Envelope | Batch, body: bytes, http: HttpRequest, headers: Headers, owner: str
    ) -> Answer | EventStreamResponse:
        if isinstance(parsed, Request) and parsed.method == "initialize":
            return await self._initialize(parsed, body, http, headers, owner)
        # A word that is no request may be that a call shall not run again.
        resume = isinstance(parsed, Request | Batch)
        async with self._desk.session(headers, owner, http.scope, resume=resume) as session:
            return await self._take(session, parsed, body, http)

    async def _take(
        self, session: Session, parsed: Envelope | Batch, body: bytes, http: HttpRequest
    ) -> Answer | EventStreamResponse:
        messages = self._messages(parsed, session)
        size = weigh(body)
        self._check_work(session, messages, size)
        requests = [message for message in messages if isinstance(message, Request)]
        if not requests:
            await self._pass_on(session, messages, (), http, size)
            return Answer(status=202, headers=_session_header(session))
        calls = await self._accept(session, requests, body, size)
        spans.tell(stream=calls[0].stream.id)
        await self._pass_on(session, messages, calls, http, 0)
        if self._settings.json_response:
            return await self._as_json(session, calls[0].stream, batch=isinstance(parsed, Batch))
        return self._desk.read(session, calls[0].stream, cursor=0)

    def _check(self, headers: Headers) -> None:
        content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if content_type != b"application/json":
            raise Refused(Refusal.MEDIA_TYPE, seen=content_type.decode("latin-1") or "(none)")
        takes_json, takes_events = accepts(headers)
        if self._settings.json_response:
            if not takes_json:
                raise Refused(Refusal.NOT_ACCEPTABLE_JSON)
        elif not (takes_json and takes_events):
            raise Refused(Refusal.NOT_ACCEPTABLE_POST)

    def _messages(self, parsed: Envelope | Batch, session: Session) -> Sequence[Envelope]:
        if not isinstance(parsed, Batch):
            return (parsed,)
        if any(isinstance(message, Request) and message.method == "initialize" for message in parsed.messages):
            raise Refused(Refusal.INITIALIZE_IN_BATCH)
        if not session.revision.batches:
            raise Refused(Refusal.BATCH, version=session.record.version)
        return parsed.messages

    def _check_work(self, session: Session, messages: Sequence[Envelope], size: int) -> None:
        """Refuse what would have more handled at once than may be. What ends work is always heard: a cancellation, or
        the answer to an ask."""
        first = next((message.id for message in messages if isinstance(message, Request)), None)
        heard = sum(isinstance(m, Notification) and m.method != "notifications/cancelled" for m in messages)
        if first is None and not heard:
            return
        exchange, settings = session.exchange, self._settings
        if heard and exchange.runtime.notifications + heard > settings.max_notifications:
            raise Refused(Refusal.TOO_MANY_NOTIFICATIONS, id=first, limit=settings.max_notifications)
        if exchange.work and exchange.work + size > settings.max_session_work:
            raise Refused(Refusal.TOO_MUCH_OF_SESSION, id=first, limit=settings.max_session_work)
        if not self._context.work.has_room(size):
            raise Refused(Refusal.TOO_MUCH_WORK, id=first, limit=settings.max_work)

    async def _pass_on(
        self, session: Session, messages: Sequence[Envelope], calls: Sequence[Call], http: HttpRequest, size: int
    ) -> None:
        """Hand messages to the runtime in their order. `size`: the bytes of memory that are not counted yet."""
        waiting = iter(calls)
        for message in messages:
            if isinstance(message, Request):
                session.exchange.start(next(waiting), http)
                continue
            try:
                cancel_waiting = self._desk.settler.waiting.cancel
                share = size // len(messages) or 1
                await receive(session, message, http, size=share, cancel_waiting=cancel_waiting)
            except StoreError:
                raise Refused(Refusal.STORE_FAILS) from None

    # Requests

    async def _accept(self, session: Session, requests: Sequence[Request], body: bytes, size: int) -> list[Call]:
        first = requests[0].id
        self._check_room(first)
        if session.exchange.calls.load + len(requests) > self._settings.max_calls:
            raise Refused(Refusal.TOO_MANY_CALLS, id=first, limit=self._settings.max_calls)
        if _is_full(session, requests):
            full = Refusal.TOO_MANY_SUBSCRIPTIONS
            raise Refused(full, id=first, limit=sticky.MAX_STICKY, size=sticky.MAX_BYTES)
        incarnation = session.record.incarnation
        taken = session.exchange.calls.reserve(requests, incarnation=incarnation, size=size)
        if taken is not None:
            raise Refused(Refusal.DUPLICATE_ID, id=taken.id, seen=taken.id)
        bodies = [body] if len(requests) == 1 else [json.dumps(request.raw).encode() for request in requests]
        try:
            await self._bring_home(session, requests, incarnation)
            # What runs here was counted above; what runs in other processes only the store can count.
            most = self._settings.max_calls if self._context.store.shared else None
            return await session.accept(requests, bodies, incarnation=incarnation, most_calls=most)
        except IdTaken:
            raise Refused(Refusal.DUPLICATE_ID, id=first, seen=first) from None
        except TooManyCalls:
            raise Refused(Refusal.TOO_MANY_CALLS, id=first, limit=self._settings.max_calls) from None
        except StoreError as failure:
            raise Refused(refusal_of(failure, Refusal.STORE_FAILS), id=first) from None
        except SessionEnded:
            raise self._desk.gone() from None

    async def _bring_home(self, session: Session, requests: Sequence[Request], incarnation: int) -> None:
        """Subscriptions live with the home: who changes them becomes it."""
        if any(request.method in _SUBSCRIBING for request in requests):
            try:
                await session.home.take()
            except BaseException:
                session.exchange.calls.release(requests, incarnation=incarnation)
                raise

    def _check_room(self, request_id: int | str) -> None:
        self._desk.refuse_if_draining(request_id)
        if self._context.journal.refuses:
            raise Refused(Refusal.STORE_FAILS, id=request_id)
        if self._context.hub.full and not self._settings.json_response:
            raise Refused(Refusal.TOO_MANY_READERS, id=request_id, limit=self._settings.max_readers)

    async def _as_json(self, session: Session, stream: Stream, *, batch: bool = False) -> Answer:
        with stream.kept_whole():
            await stream.wait_over()
            answers = await _answers(stream)
        body = b"[%b]" % b",".join(answers) if batch else answers[0]
        return Answer(status=200, body=body, headers=_session_header(session))

    # The handshake

    async def _initialize(
        self, request: Request, body: bytes, http: HttpRequest, headers: Headers, owner: str
    ) -> Answer | EventStreamResponse:
        """Go on with the session that the client names, or open one."""
        if len(body) > MAX_HANDSHAKE:
            raise Refused(Refusal.HANDSHAKE_TOO_LARGE, id=request.id, limit=MAX_HANDSHAKE)
        if weigh(body) > MAX_HANDSHAKE_MEMORY:
            raise Refused(Refusal.HANDSHAKE_TOO_RICH, id=request.id, limit=MAX_HANDSHAKE_MEMORY)
        self._check_room(request.id)
        reattached = await self._reattach(request, body, http, headers, owner)
        return await self._open(request, body, http, owner) if reattached is None else reattached

    async def _reattach(
        self, request: Request, body: bytes, http: HttpRequest, headers: Headers, owner: str
    ) -> Answer | EventStreamResponse | None:
        """A client that runs its handshake again on its own session gets the recorded result, and keeps everything
        (R10). With another version or other capabilities it is somebody else: `None`."""
        text = headers.get(b"x-mcp-reconnect-session") or headers.get(b"mcp-session-id")
        if not text:
            return None
        try:
            found = await self._desk.sessions.reattach(text.decode("latin-1"), owner, request.params or {})
            if found is None:
                return None
            session, incarnation = found
            self._desk.credentials.bring(session.id, http.scope)
            with session.in_use():
                if session.waits:
                    await self._desk.settler.waiting.resume(session, http)
                session.exchange.calls.reserve([request], incarnation=incarnation)
                [call] = await session.accept([request], [body], incarnation=incarnation)
        except StoreError as failure:
            raise Refused(refusal_of(failure, Refusal.STORE_FAILS), id=request.id) from None
        except SessionEnded:
            return None
        with call.stream.kept_whole():
            session.exchange.answer_recorded(call)
            if self._settings.json_response:
                return await self._as_json(session, call.stream)
            return self._desk.read(session, call.stream, cursor=0)

    def _full(self, request_id: int | str, caller: Caller, full: TooManySessions) -> Refused:
        settings = self._settings
        if not full.of_caller:
            return Refused(Refusal.TOO_MANY_SESSIONS, id=request_id, limit=settings.max_sessions)
        if caller.owner:
            return Refused(Refusal.TOO_MANY_OF_YOURS, id=request_id, limit=settings.max_principal_sessions)
        return Refused(Refusal.TOO_MANY_FROM_THERE, id=request_id, limit=settings.max_address_sessions)

    async def _open(self, request: Request, body: bytes, http: HttpRequest, owner: str) -> Answer | EventStreamResponse:
        """Open a session. Its id leaves only with a successful answer, so the response waits for it."""
        sessions, caller = self._desk.sessions, caller_of(owner, http.scope)
        try:
            session, call = await sessions.open(caller, request, body)
        except TooManySessions as full:
            raise self._full(request.id, caller, full) from None
        except (StoreError, SessionEnded):  # ended: the store took longer than a handshake may
            raise Refused(Refusal.STORE_FAILS, id=request.id) from None
        with call.stream.kept_whole():
            session.exchange.start(call, http)
            await call.stream.wait_over()
            if session.state is not SessionState.ACTIVE:
                answers = await _answers(call.stream)
                await sessions.end(session, SessionStep.HANDSHAKE_FAILED, "The handshake failed")
                return Answer(status=200, body=answers[0])
            if self._settings.json_response:
                return await self._as_json(session, call.stream)
            return self._desk.read(session, call.stream, cursor=0)


async def _answers(stream: Stream) -> list[bytes]:
    """The answers on a stream that is over. There are none where the store refused it for good."""
    answers: list[bytes] = []
    after = 0
    while events := await stream.read(after=after, limit=stream.tail.last):
        answers += [event.payload for event in events if event.final]
        after = events[-1].seq
    if not answers:
        raise Refused(Refusal.STORE_FAILS)
    return answers


def _is_full(session: Session, requests: Sequence[Request]) -> bool:
    running = [call.request for call in session.exchange.calls.all_running()]
    return sticky.is_full(session.record.sticky, running, requests)


def _session_header(session: Session) -> tuple[tuple[bytes, bytes], ...]:
    return ((b"mcp-session-id", session.record.id.encode()),)
