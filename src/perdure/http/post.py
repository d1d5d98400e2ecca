"""POST: messages of the client's. Requests open a stream, on which their answers come; the rest is accepted with
202."""

from __future__ import annotations

import json
from collections.abc import Sequence

from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope

from perdure import spans, sticky
from perdure._core.jsonrpc import Batch, Envelope, InvalidMessage, Notification, Request, Response, parse_body
from perdure._core.states import SessionState, SessionStep
from perdure.errors import SessionEnded, StoreError
from perdure.http.answers import Answer, Refusal, Refused
from perdure.http.body import accepts, read_body, replayed
from perdure.http.desk import Desk, Headers
from perdure.http.streamed import Streamed
from perdure.ledger import Call
from perdure.session import Session
from perdure.streams import Stream

MAX_HANDSHAKE = 64 << 10
"""Bytes of an `initialize` request: its params are kept in memory for as long as the session lives."""


class Post:
    """Takes messages."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._house = desk.house
        self._settings = desk.settings

    async def __call__(self, scope: Scope, receive: Receive, headers: Headers, owner: str) -> Answer | Streamed:
        self._check(headers)
        body = await read_body(receive, headers, self._settings)
        try:
            parsed = parse_body(body)
        except InvalidMessage as error:
            raise Refused(Refusal.BAD_MESSAGE, id=error.id, code=error.code, reason=error.reason) from None
        http = HttpRequest(scope, replayed(body))
        if isinstance(parsed, Request) and parsed.method == "initialize":
            return await self._initialize(parsed, body, http, owner)
        session = self._desk.session(headers, owner)
        messages = self._messages(parsed, session)
        requests = [message for message in messages if isinstance(message, Request)]
        if not requests:
            self._pass_on(session, messages, (), http)
            return Answer(status=202, headers=_session_header(session))
        calls = await self._accept(session, requests, body)
        spans.tell(stream=calls[0].stream.id)
        self._pass_on(session, messages, calls, http)
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

    def _pass_on(
        self, session: Session, messages: Sequence[Envelope], calls: Sequence[Call], http: HttpRequest
    ) -> None:
        """Hand messages to the runtime in their order."""
        waiting = iter(calls)
        for message in messages:
            match message:
                case Request():
                    session.exchange.start(next(waiting), http)
                case Notification():
                    session.exchange.notify(message, http)
                case Response():
                    session.exchange.answer_ask(message, http)

    # Requests

    async def _accept(self, session: Session, requests: Sequence[Request], body: bytes) -> list[Call]:
        first = requests[0].id
        self._check_room(first)
        if session.exchange.calls.load + len(requests) > self._settings.max_calls:
            raise Refused(Refusal.TOO_MANY_CALLS, id=first, limit=self._settings.max_calls)
        if sticky.is_full(session.record.sticky, session.exchange.calls.all_running(), requests):
            full = Refusal.TOO_MANY_SUBSCRIPTIONS
            raise Refused(full, id=first, limit=sticky.MAX_STICKY, size=sticky.MAX_BYTES)
        taken = session.exchange.calls.reserve(requests)
        if taken is not None:
            raise Refused(Refusal.DUPLICATE_ID, id=taken.id, seen=taken.id)
        bodies = [body] if len(requests) == 1 else [json.dumps(request.raw).encode() for request in requests]
        try:
            return await session.accept(requests, bodies)
        except StoreError:
            raise Refused(Refusal.STORE_FAILS, id=first) from None
        except SessionEnded:
            raise self._desk.gone() from None

    def _check_room(self, request_id: int | str) -> None:
        if self._house.journal.refuses:
            raise Refused(Refusal.STORE_FAILS, id=request_id)
        if self._house.hub.full and not self._settings.json_response:
            raise Refused(Refusal.TOO_MANY_READERS, id=request_id, limit=self._settings.max_readers)

    async def _as_json(self, session: Session, stream: Stream, *, batch: bool = False) -> Answer:
        with stream.kept_whole():
            await stream.wait_over()
            answers = await _answers(stream)
        body = b"[%b]" % b",".join(answers) if batch else answers[0]
        return Answer(status=200, body=body, headers=_session_header(session))

    # The handshake

    async def _initialize(self, request: Request, body: bytes, http: HttpRequest, owner: str) -> Answer | Streamed:
        """Open a session. Its id leaves only with a successful answer, so the response waits for it."""
        sessions = self._desk.sessions
        if len(body) > MAX_HANDSHAKE:
            raise Refused(Refusal.HANDSHAKE_TOO_LARGE, id=request.id, limit=MAX_HANDSHAKE)
        self._check_room(request.id)
        if await sessions.full():
            raise Refused(Refusal.TOO_MANY_SESSIONS, id=request.id, limit=self._settings.max_sessions)
        if sessions.full_for(owner):
            raise Refused(Refusal.TOO_MANY_OF_YOURS, id=request.id, limit=self._settings.max_principal_sessions)
        try:
            session, call = await sessions.open(owner, request, body)
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
    answers = [event.payload for event in await stream.read(after=0, limit=stream.last) if event.final]
    if not answers:
        raise Refused(Refusal.STORE_FAILS)
    return answers


def _session_header(session: Session) -> tuple[tuple[bytes, bytes], ...]:
    return ((b"mcp-session-id", session.record.id.encode()),)
