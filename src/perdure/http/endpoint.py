"""The MCP endpoint of the session era: POST, GET and DELETE, translated to sessions, calls and readers.

The numbers (A1 …) are those of the protocol checklist in the documentation.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.requests import Request as HttpRequest
from starlette.types import Message, Receive, Scope, Send

from perdure import sticky
from perdure._core import sse
from perdure._core.ids import Kind, Position, parse_position, place
from perdure._core.jsonrpc import Batch, Envelope, InvalidMessage, Notification, Request, Response, parse_body
from perdure._core.states import SessionState, SessionStep, StreamState
from perdure.errors import SessionEnded, StoreError
from perdure.house import House
from perdure.http.answers import RECOVERY, Answer, Refusal, Refused
from perdure.hub import Reader, gap_frames
from perdure.ledger import Call
from perdure.observe import note
from perdure.session import Session
from perdure.streams import Stream

if TYPE_CHECKING:
    from perdure.sessions import Sessions

Headers = dict[bytes, bytes]

_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)


class Endpoint:
    """Answers one HTTP request at a time; holds no state of its own."""

    def __init__(self, house: House, sessions: Sessions) -> None:
        self._house = house
        self._sessions = sessions
        self._settings = house.settings
        self._retry_ms = round(house.settings.retry * 1000)

    async def __call__(self, scope: Scope, receive: Receive, send: Send, headers: Headers, owner: str) -> None:
        match scope["method"]:
            case "POST":
                await self._post(scope, receive, send, headers, owner)
            case "GET":
                await self._get(receive, send, headers, owner)
            case "DELETE":
                await self._delete(send, headers, owner)
            case method:
                raise Refused(Refusal.METHOD, method=method, headers=((b"allow", b"GET, POST, DELETE, OPTIONS"),))

    # POST

    async def _post(self, scope: Scope, receive: Receive, send: Send, headers: Headers, owner: str) -> None:
        self._check_post(headers)
        body = await self._body(receive, headers)
        try:
            parsed = parse_body(body)
        except InvalidMessage as error:
            raise Refused(Refusal.BAD_MESSAGE, id=error.id, code=error.code, reason=error.reason) from None
        http = HttpRequest(scope, _replayed(body))
        if isinstance(parsed, Request) and parsed.method == "initialize":
            await self._initialize(parsed, body, http, receive, send, owner)
            return
        session = self._session(headers, owner)
        messages = self._messages(parsed, session)
        requests = [message for message in messages if isinstance(message, Request)]
        calls = await self._accept(session, requests, body) if requests else []
        if not requests:
            self._pass_on(session, messages, [], http)
            await Answer(status=202, headers=_session_header(session)).send(send)
        elif self._settings.json_response:
            self._pass_on(session, messages, calls, http)
            await self._answer_json(session, calls, send)
        else:
            reader = self._reader(session, calls[0].stream, send, cursor=0)
            self._pass_on(session, messages, calls, http)
            await self._stream(session, reader, receive, send)

    async def _body(self, receive: Receive, headers: Headers) -> bytes:
        try:
            async with asyncio.timeout(self._settings.stream_timeout):
                return await read_body(receive, headers, limit=self._settings.max_body)
        except TimeoutError:
            raise Refused(Refusal.BODY_TOO_SLOW, limit=f"{self._settings.stream_timeout:g}") from None

    def _check_post(self, headers: Headers) -> None:
        content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if content_type != b"application/json":
            raise Refused(Refusal.MEDIA_TYPE, seen=content_type.decode("latin-1") or "(none)")
        takes_json, takes_events = _accepts(headers)
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

    async def _accept(self, session: Session, requests: Sequence[Request], body: bytes) -> list[Call]:
        self._check_room(session, requests)
        taken = session.exchange.calls.reserve(requests)
        if taken is not None:
            raise Refused(Refusal.DUPLICATE_ID, id=taken.id, seen=taken.id)
        bodies = [body] if len(requests) == 1 else [json.dumps(request.raw).encode() for request in requests]
        try:
            return await session.accept(requests, bodies)
        except StoreError:
            raise Refused(Refusal.STORE_FAILS, id=requests[0].id) from None
        except SessionEnded:
            raise self._gone() from None

    def _check_room(self, session: Session | None, requests: Sequence[Request]) -> None:
        if self._house.journal.refuses:
            raise Refused(Refusal.STORE_FAILS, id=requests[0].id)
        if self._house.hub.full and not self._settings.json_response:
            raise Refused(Refusal.TOO_MANY_READERS, id=requests[0].id, limit=self._settings.max_readers)
        if session is not None and len(session.exchange.calls) + len(requests) > self._settings.max_calls:
            raise Refused(Refusal.TOO_MANY_CALLS, id=requests[0].id, limit=self._settings.max_calls)
        if session is not None and any(sticky.is_full(session.record.sticky, request) for request in requests):
            raise Refused(Refusal.TOO_MANY_SUBSCRIPTIONS, id=requests[0].id, limit=sticky.MAX_STICKY)

    async def _initialize(
        self, request: Request, body: bytes, http: HttpRequest, receive: Receive, send: Send, owner: str
    ) -> None:
        """Open a session. Its id leaves only with a successful answer, so the response waits for it."""
        self._check_room(None, (request,))
        if await self._sessions.full():
            raise Refused(Refusal.TOO_MANY_SESSIONS, id=request.id, limit=self._settings.max_sessions)
        if self._sessions.full_for(owner):
            raise Refused(Refusal.TOO_MANY_OF_YOURS, id=request.id, limit=self._settings.max_principal_sessions)
        try:
            session, call = await self._sessions.open(owner, request, body)
        except StoreError:
            raise Refused(Refusal.STORE_FAILS, id=request.id) from None
        session.exchange.start(call, http)
        await call.stream.wait_over()
        if session.state is not SessionState.ACTIVE:
            answers = await self._answers(call.stream)
            await self._sessions.end(session, SessionStep.HANDSHAKE_FAILED, "The handshake failed")
            await Answer(status=200, body=answers[0]).send(send)
        elif self._settings.json_response:
            await self._answer_json(session, (call,), send)
        else:
            await self._stream(session, self._reader(session, call.stream, send, cursor=0), receive, send)

    async def _answer_json(self, session: Session, calls: Sequence[Call], send: Send) -> None:
        stream = calls[0].stream
        await stream.wait_over()
        answers = await self._answers(stream)
        body = answers[0] if len(answers) == 1 else b"[%b]" % b",".join(answers)
        await Answer(status=200, body=body, headers=_session_header(session)).send(send)

    @staticmethod
    async def _answers(stream: Stream) -> list[bytes]:
        events = await stream.read(after=0, limit=stream.last)
        return [event.payload for event in events if event.final]

    # GET

    async def _get(self, receive: Receive, send: Send, headers: Headers, owner: str) -> None:
        if not _accepts(headers)[1]:
            raise Refused(Refusal.NOT_ACCEPTABLE_GET)
        session = self._session(headers, owner)
        if self._house.hub.full:
            raise Refused(Refusal.TOO_MANY_READERS, limit=self._settings.max_readers)
        text = headers.get(b"last-event-id")
        if not text:
            reader = self._read_standalone(session, send)
        else:
            self._house.counters.resumes += 1
            try:
                reader = await self._resume(session, text.decode("latin-1"), send)
            except StoreError:
                raise Refused(Refusal.STORE_UNREADABLE) from None
        await self._stream(session, reader, receive, send)

    def _read_standalone(self, session: Session, send: Send, *, cursor: int | None = None, told: bytes = b"") -> Reader:
        """The standalone stream; without a position from where its readers had got to, so that what was sent while
        nobody was there still arrives."""
        self._house.counters.standalone_readers += 1
        stream = session.standalone
        return self._reader(session, stream, send, cursor=stream.delivered if cursor is None else cursor, told=told)

    async def _resume(self, session: Session, text: str, send: Send) -> Reader:
        position = parse_position(text)
        if position is None:
            note(logging.WARNING, "position.unreadable", "a Last-Event-ID is no position", session=session.record.id)
            return self._read_standalone(session, send, cursor=await self._before_oldest(session.standalone))
        if position.kind is Kind.STANDALONE:
            return await self._resume_standalone(session, position, send)
        if not self._settings.enable_replay:
            raise Refused(Refusal.REPLAY_OFF)
        stream = await session.find_stream(position.stream)
        if stream is None:
            self._house.counters.positions_lost += 1
            raise Refused(Refusal.POSITION_UNKNOWN)
        if stream.state is StreamState.SEALED and position.seq >= stream.last:
            raise Refused(Refusal.NOTHING_MORE, headers=((b"allow", b"POST, DELETE"),))
        cursor, told = await self._place(session, stream, position)
        return self._reader(session, stream, send, cursor=cursor, told=told)

    async def _resume_standalone(self, session: Session, position: Position, send: Send) -> Reader:
        stream = session.standalone
        if not self._settings.enable_replay:
            told = self._told(session, stream, position.seq + 1, stream.last, "replay is off")
            return self._read_standalone(session, send, cursor=stream.last, told=told)
        if position.stream != stream.id:
            self._house.counters.positions_lost += 1
            oldest = await self._before_oldest(stream)
            told = self._told(session, stream, 1, oldest, "unknown position")
            return self._read_standalone(session, send, cursor=oldest, told=told)
        cursor, told = await self._place(session, stream, position)
        return self._read_standalone(session, send, cursor=cursor, told=told)

    async def _place(self, session: Session, stream: Stream, position: Position) -> tuple[int, bytes]:
        """Where to go on, and what to tell first: a position beyond its writer's end names events that were lost."""
        same = position.generation == stream.generation
        ended = () if same else await self._house.store.generations(stream.id)
        cursor = place(position, generation=stream.generation, last=stream.last, ended=ended)
        if cursor == position.seq:
            return cursor, b""
        self._house.counters.positions_lost += 1
        return cursor, self._told(session, stream, cursor + 1, position.seq, "lost", behind=cursor)

    def _told(
        self, session: Session, stream: Stream, first: int, last: int, reason: str, *, behind: int | None = None
    ) -> bytes:
        self._house.counters.gaps += 1
        return gap_frames(
            stream,
            first,
            last,
            reason=reason,
            behind=last if behind is None else behind,
            random=self._house.random,
            log=session.tells_by_log,
        )

    async def _before_oldest(self, stream: Stream) -> int:
        """The sequence number before the oldest event that is retained."""
        events = await stream.read(after=0, limit=1)
        return events[0].seq - 1 if events else stream.last

    # DELETE

    async def _delete(self, send: Send, headers: Headers, owner: str) -> None:
        session = self._session(headers, owner)
        await self._sessions.end(session, SessionStep.CLIENT_DELETED, "The session was deleted by its client")
        await Answer(status=200).send(send)

    # What they share

    def _session(self, headers: Headers, owner: str) -> Session:
        text = headers.get(b"mcp-session-id")
        if not text:
            raise Refused(Refusal.NO_SESSION_ID)
        session = self._sessions.find(text.decode("latin-1"), owner)
        if session is None or session.state is SessionState.OPENING:
            raise self._gone()
        session.touch()
        return session

    def _gone(self) -> Refused:
        self._house.counters.sessions_not_found += 1
        return Refused(Refusal.SESSION_GONE, data=RECOVERY)

    def _reader(self, session: Session, stream: Stream, send: Send, cursor: int, told: bytes = b"") -> Reader:
        """A reader, primed where the revision knows that (A9): its priming id is exactly its starting position."""
        if session.state is SessionState.ENDED:
            raise self._gone()
        revision = session.revision
        preamble = b""
        if revision.primes:
            name = stream.position(cursor).priming(self._house.random)
            preamble = sse.encode_priming(name.encode(), self._retry_ms)

        async def write(body: bytes, last: bool) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": not last})

        async def lost() -> Sequence[bytes]:
            return await session.lost_answers(stream)

        reader = Reader(
            self._house.hub,
            stream,
            write,
            cursor=cursor,
            preamble=preamble + told,
            tells_by_log=session.tells_by_log,
            answers_lost=lost if stream.kind is Kind.CALL else None,
        )
        self._house.hub.attach(reader)
        return reader

    async def _stream(self, session: Session, reader: Reader, receive: Receive, send: Send) -> None:
        async def disconnected() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        try:
            start = {"type": "http.response.start", "status": 200}
            await send({**start, "headers": [*_STREAM_HEADERS, *_session_header(session)]})
        except BaseException:
            self._house.hub.detach(reader)
            raise
        await reader.run(disconnected)
        session.touch()


async def read_body(receive: Receive, headers: Headers, *, limit: int) -> bytes:
    """The whole body, or `Refused` as soon as it is known to be too large."""
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared) > limit:
        raise Refused(Refusal.BODY_TOO_LARGE, limit=limit)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise Refused(Refusal.BODY_TOO_LARGE, limit=limit)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


class ClientGone(Exception):
    """The client left before its request was there."""


def _replayed(body: bytes) -> Receive:
    """A `receive` that gives the body again, for tools that look at the HTTP request."""

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


def _accepts(headers: Headers) -> tuple[bool, bool]:
    """Whether the client takes JSON, and whether it takes event streams."""
    accept = headers.get(b"accept", b"").lower()
    kinds = {kind.partition(b";")[0].strip() for kind in accept.split(b",")}
    everything = b"*/*" in kinds
    return (
        everything or bool(kinds & {b"application/json", b"application/*"}),
        everything or bool(kinds & {b"text/event-stream", b"text/*"}),
    )


def _session_header(session: Session) -> tuple[tuple[bytes, bytes], ...]:
    return ((b"mcp-session-id", session.record.id.encode()),)
