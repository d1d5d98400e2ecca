"""The MCP endpoint: POST takes messages of a client, GET attaches readers, DELETE ends a session.

The requests of a POST open a stream, on which their answers come; the rest is accepted with 202. Requests of the resume
broker and of the era without sessions go to their own handlers.
"""

import contextlib
import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope

from perdure._core import sticky
from perdure._core.durable_calls import MAX_KEY, is_key
from perdure._core.envelope import KEY
from perdure._core.ids import Kind, NodeId, parse_position
from perdure._core.jsonrpc import Batch, Envelope, Notification, Request
from perdure._core.limits import Caller, weigh
from perdure._core.losses import numbers_of
from perdure._core.states import SessionState, SessionStep
from perdure.assembly import ServerProcess
from perdure.errors import (
    IdTaken,
    NodeGone,
    SessionEnded,
    StaleFence,
    StaleRecord,
    TooManyCalls,
    TooManyProcesses,
    TooManySessions,
)
from perdure.http.access import FAILURES, SessionAccess
from perdure.http.credentials import caller_of
from perdure.http.durable_calls import BEGIN_MOST, DurableCallHandler
from perdure.http.event_stream import EventStreamResponse
from perdure.http.listening import ListeningHandler
from perdure.http.refusals import HttpRefusal, Refusal, json_answer
from perdure.http.request import KEY_MEMBER, REQUEST_ID, Headers, parse, replayed, require_accept, require_json
from perdure.http.resume_tokens import ResumeTokenHandler
from perdure.http.sdk_passthrough import SdkPassthrough
from perdure.http.session_tasks import SessionTaskHandler
from perdure.runtime.hosted import Started
from perdure.sessions.durable_calls import DurableCalls
from perdure.sessions.keyed_calls import AnswerGone, CallKey, KeyTaken, TooManyKeys
from perdure.sessions.ledger import Call, Duplicate
from perdure.sessions.resume import NothingMore, ReplayOff, Resume, Start, Stream, attach, read_answers
from perdure.sessions.session import FirstAnswer, Intake, Session
from perdure.telemetry import tracing as spans

ALLOW = {"allow": "GET, POST, DELETE, OPTIONS"}

MAX_HANDSHAKE = 64 << 10
"""Bytes of an `initialize` request: its params are kept in memory for as long as the session lives."""

MAX_HANDSHAKE_MEMORY = 512 << 10
"""Bytes of memory that an `initialize` request may take once parsed, estimated: the SDK keeps it with its runtime.
Enough for some thousand values; clients send a dozen."""

ORDER_SECONDS = 1.0
"""How long a request waits for what other nodes have forwarded to the standalone stream, whose reader may be slow.
After that it runs, and its notifications may come first."""

READ_AFTER_ANSWER = "tools/list"
"""The Python SDK's client sends this after the answer of a tool that it does not know. A refusal while the process
drains would cost the program the answer that the stop has waited for."""

_SUBSCRIBING = frozenset({"resources/subscribe", "resources/unsubscribe"})

MAX_NOTIFICATIONS = 1_000
"""Notifications of one session that wait for their handler or are being handled: a task each, of a few kilobytes."""


class McpEndpoint:
    """Answers requests. Raises one of `FAILURES` for a request that it refuses."""

    def __init__(self, process: ServerProcess, started: Started, *, is_draining: Callable[[], bool]) -> None:
        self._access = access = SessionAccess(process, is_draining)
        self._post = PostHandler(access, SessionTaskHandler(access, started.tools))
        self._resume = ResumeTokenHandler(access)
        self.sessionless: SdkPassthrough | None = None
        if started.sessionless is not None and started.tools is not None:
            calls, listening = DurableCalls(process.context, process.sessions, access.principal_calls.cancel), None
            asks = started.asks_in_session
            durable_calls = DurableCallHandler(access, calls, started.tools, asks_in_session=asks)
            if process.listening is not None:
                tasks = None if started.tools.serves_tasks else calls
                listening = ListeningHandler(access, process.listening, tasks)
            self.sessionless = SdkPassthrough(started.sessionless, access, durable_calls, listening)

    async def __call__(
        self, scope: Scope, receive: Receive, headers: Headers, owner: str, *, resume: str | None
    ) -> Response | EventStreamResponse:
        """`resume`: the action of a request to the resume broker."""
        if resume is not None:
            return await self._resume(resume, scope, receive, headers, owner)
        match scope["method"]:
            case "POST":
                return await self._post(scope, receive, headers, owner)
            case "GET":
                try:
                    return await self._get(scope, headers, owner)
                except FAILURES as failure:
                    is_complete = isinstance(failure, HttpRefusal) and failure.refusal is Refusal.NOTHING_MORE
                    if headers.get(b"last-event-id") and not is_complete:
                        self._access.context.counters.replays_refused += 1
                    raise
            case "DELETE":
                session = await self._access.find(headers, owner, scope)
                with session.in_use():
                    await self._access.come_back(session, scope, resume=False)
                    why = "The session was deleted by its client"
                    await self._access.sessions.end(session, SessionStep.CLIENT_DELETED, why)
                    return Response()
            case method:
                raise HttpRefusal(Refusal.METHOD, method=method, allowed="POST, GET or DELETE", headers=ALLOW)

    async def _get(self, scope: Scope, headers: Headers, owner: str) -> EventStreamResponse:
        """Attach a reader to a stream; where it begins is decided by `sessions.resume`."""
        access, context = self._access, self._access.context
        require_accept(headers, json=False)
        text = headers.get(b"last-event-id", b"").decode("latin-1")
        position = parse_position(text)
        # The store returns the revision of the session's record together with a call's stream.
        of_call = position is not None and position.kind is Kind.CALL and access.settings.enable_replay
        # Before anything is waited for: of two that come, the store may answer the later one first.
        arrival = context.hub.arrive()
        session = await access.find(headers, owner, scope, checked_later=of_call)
        with session.in_use():
            await access.come_back(session, scope)
            if text:
                context.counters.resumes += 1
            resume = Resume(session, text, position)
            try:
                found = await resume.find()
                with contextlib.nullcontext() if found is None else found.stream.pinned():
                    read = None if found is None else found.read
                    if of_call and (read is None or read.revision != session.record.revision):
                        await access.check(session, headers, owner, scope)
                    if session.state is SessionState.ENDED:
                        raise SessionEnded
                    if found is None:
                        resume.log_unknown()
                        raise HttpRefusal(Refusal.POSITION_UNKNOWN)
                    if found.stream is session.standalone:
                        access.refuse_if_draining()
                    start = await resume.start(found)
                    if found.stream.readers.reader is None:
                        access.refuse_readers(session.link.calls.caller)
                    resume.begin(found, start)
                    return _show(session, found.stream, start, arrival)
            except ReplayOff:
                raise HttpRefusal(Refusal.REPLAY_OFF) from None
            except NothingMore:
                raise HttpRefusal(Refusal.NOTHING_MORE, headers={"allow": "POST, DELETE"}) from None


class NewRequests(NamedTuple):
    """The requests of one POST, before they are written."""

    session: Session
    requests: Sequence[Request]
    body: bytes
    http: HttpRequest
    size: int
    """Bytes of memory that they take, estimated."""
    seen: int | None
    """The revision that the session's record must have; `None`: the record was read just now."""
    first: FirstAnswer | None
    node: NodeId | None
    """The other node that runs them."""


class PostHandler:
    """Accepts the messages of a POST: requests get a stream, the rest a 202."""

    def __init__(self, access: SessionAccess, tasks: SessionTaskHandler) -> None:
        self._access = access
        self._context = access.context
        self._settings = access.settings
        self._session_work = access.settings.session_work
        self._tasks = tasks

    async def __call__(
        self, scope: Scope, receive: Receive, headers: Headers, owner: str
    ) -> Response | EventStreamResponse:
        require_json(headers)
        require_accept(headers, events=not self._settings.json_response)
        body = await self._access.bodies.read(receive, headers)
        parsed = parse(scope, body)
        http = HttpRequest(scope, replayed(body))
        if isinstance(parsed, Request):
            if parsed.method == "initialize":
                return await self._initialize(parsed, body, http, headers, owner)
            # If another process has changed the session, or forwarded something, the record is read now, once.
            with contextlib.suppress(StaleRecord):
                session = await self._access.find(headers, owner, scope, checked_later=True)
                with session.in_use():
                    await self._access.come_back(session, scope)
                    return await self._take(session, parsed, body, http, seen=session.keeper.record.revision)
        session = await self._access.find(headers, owner, scope)
        with session.in_use():
            # A notification may cancel a call that would run again.
            await self._access.come_back(session, scope, resume=isinstance(parsed, Request | Batch))
            return await self._take(session, parsed, body, http)

    async def _take(
        self,
        session: Session,
        parsed: Envelope | Batch,
        body: bytes,
        http: HttpRequest,
        seen: int | None = None,
        *,
        waits_here: bool = False,
    ) -> Response | EventStreamResponse:
        """`waits_here`: a request that waits for a call runs here, though another node may run the call."""
        messages = parsed.messages if isinstance(parsed, Batch) else (parsed,)
        requests = [message for message in messages if isinstance(message, Request)]
        if isinstance(parsed, Batch):
            if any(request.method == "initialize" for request in requests):
                raise HttpRefusal(Refusal.INITIALIZE_IN_BATCH)
            if not session.keeper.revision.batches:
                raise HttpRefusal(Refusal.BATCH, version=session.record.version)
        first: FirstAnswer | None = None
        if isinstance(parsed, Request) and session.link.serves_tasks:
            answer, first = await self._tasks(session, parsed, http)
            if answer is not None:
                return json_answer(answer, headers=_session_header(session))
        size, notifications = weigh(body), 0
        if requests:
            http.scope[REQUEST_ID] = requests[0].id
            # Also if no other node is known yet: a new one may have begun and answered a call meanwhile.
            await session.home.come_first(ORDER_SECONDS, reads=seen is None)
        if len(requests) < len(messages):
            notifications = sum(isinstance(m, Notification) and m.method != "notifications/cancelled" for m in messages)
        # A cancellation and the answer to an ask are always taken, because they end work.
        if requests or notifications:
            link, most = session.link, self._session_work
            if notifications and link.runtime.notifications + notifications > MAX_NOTIFICATIONS:
                raise HttpRefusal(Refusal.TOO_MANY_NOTIFICATIONS, limit=MAX_NOTIFICATIONS)
            if link.work and link.work + size > most:
                raise HttpRefusal(Refusal.TOO_MUCH_OF_SESSION, limit=most)
            self._access.refuse_work(link.calls.caller, size)
        node = await session.runner() if requests else None
        if node is None and isinstance(parsed, Request) and not (waits_here or self._context.nodes.alone):
            node = await session.asker(parsed)
        stream, calls, share = None, list[Call](), size // len(messages) or 1
        if requests:
            share = 1  # the memory is counted with the calls
            new = NewRequests(session, requests, body, http, size=size, seen=seen, first=first, node=node)
            try:
                stream, calls = await self._accept(new)
            except NodeGone:  # this one becomes the home; the calls of the other are about to be settled
                return await self._take(session, parsed, body, http, waits_here=True)
        with contextlib.nullcontext() if stream is None or node is None else stream.pinned():
            waiting = iter(calls)
            for message in messages:
                if not isinstance(message, Request):
                    await session.receive(message, http, size=share, cancel_waiting=self._access.principal_calls.cancel)
                elif node is None:
                    session.link.start(next(waiting), http)
            if stream is None:
                return Response(status_code=202, headers=_session_header(session))
            return await self._answer(session, stream, batch=isinstance(parsed, Batch))

    async def _accept(self, new: NewRequests) -> tuple[Stream, list[Call]]:
        """Write requests. One whose key belongs to a call is joined to it."""
        given = [request for request in new.requests if request.method == "tools/call" and KEY in request.meta]
        if not given:
            return await self._write(new)
        if len(new.requests) > 1:
            raise HttpRefusal(Refusal.KEY_IN_BATCH, where=KEY_MEMBER)
        [request], owner, keyed = given, new.session.record.owner, self._context.keyed
        if not is_key(key := request.meta.get(KEY)):
            raise HttpRefusal(Refusal.BAD_KEY, where=KEY_MEMBER, limit=MAX_KEY, seen=repr(key))
        async with keyed.one_at_a_time(keyed.names(owner, key)[1]):
            for _ in range(BEGIN_MOST):
                try:
                    found = await keyed.find(self._context, owner, request)
                    if found.is_taken:
                        self._context.counters.calls_joined += 1
                        if found.waits_in is not None:
                            await self._access.resume(found.waits_in, new.http)
                    else:
                        await keyed.check_room(self._context, new.session.link.calls.caller)
                    return await self._write(new, key=found)
                except StaleFence:
                    continue  # another node has begun the call in this moment
                except KeyTaken:
                    raise HttpRefusal(Refusal.KEY_TAKEN) from None
                except AnswerGone:
                    self._context.counters.keys_given_up += 1
                    raise HttpRefusal(Refusal.ANSWER_GIVEN_UP) from None
                except TooManyKeys as full:
                    raise HttpRefusal(Refusal.TOO_MANY_KEYS, limit=full.limit) from None
        raise HttpRefusal(Refusal.STORE_FAILS)

    async def _write(self, new: NewRequests, key: CallKey | None = None) -> tuple[Stream, list[Call]]:
        """Check the limits, and write requests under numbers whose ids are free."""
        session, requests = new.session, new.requests
        settings, calls = self._settings, session.link.calls
        methods = {request.method for request in requests}
        self._check_room(calls.caller, is_read=methods == {READ_AFTER_ANSWER})
        if calls.load + len(requests) > settings.max_calls:
            raise HttpRefusal(Refusal.TOO_MANY_CALLS, limit=settings.max_calls)
        self._access.refuse_calls(calls.caller, len(requests))
        record = session.keeper.record
        if not methods.isdisjoint(sticky.METHODS):
            running = [call.request for call in calls.all_running()]
            if sticky.is_full(record.sticky, running, requests):
                raise HttpRefusal(Refusal.TOO_MANY_SUBSCRIPTIONS, limit=sticky.MAX_STICKY, size=sticky.MAX_BYTES)
        bodies = [new.body] if len(requests) == 1 else [json.dumps(request.raw).encode() for request in requests]
        # What runs here was counted above; what runs in other processes only the store can count.
        most = settings.max_calls if self._context.store.shared else None
        in_use: int | str = ""
        for number in numbers_of(record.incarnation):
            try:
                with Intake(session, requests, incarnation=number, size=new.size, key=key) as intake:
                    if new.node is None and not _SUBSCRIBING.isdisjoint(methods):
                        # Subscriptions live with the home: the node that changes them becomes it.
                        await session.home.take()
                    return await intake.accept(bodies, most_calls=most, seen=new.seen, first=new.first, node=new.node)
            except IdTaken as taken:
                in_use = taken.request_id if isinstance(taken, Duplicate) else requests[0].id
                if not await session.orphans.give_up_ids(number, requests):
                    break
            except TooManyCalls:
                raise HttpRefusal(Refusal.TOO_MANY_CALLS, limit=settings.max_calls) from None
        raise HttpRefusal(Refusal.DUPLICATE_ID, id=in_use, seen=in_use)

    def _check_room(self, caller: Caller, *, is_read: bool = False) -> None:
        if not is_read:
            self._access.refuse_if_draining()
        if self._context.journal.refuses:
            raise HttpRefusal(Refusal.STORE_FAILS)
        if not self._settings.json_response:
            self._access.refuse_readers(caller)

    async def _answer(self, session: Session, stream: Stream, *, batch: bool = False) -> Response | EventStreamResponse:
        """The response that shows a stream: its events or, where the server is set so, its answers as JSON."""
        if not self._settings.json_response:
            return _show(session, stream, Start(0))
        spans.add_attributes(stream=stream.id)
        with stream.pinned():
            await stream.wait_over()
            answers = await _answers(stream)
        body = b"[%b]" % b",".join(answers) if batch else answers[0]
        return json_answer(body, headers=_session_header(session))

    # The handshake

    async def _initialize(
        self, request: Request, body: bytes, http: HttpRequest, headers: Headers, owner: str
    ) -> Response | EventStreamResponse:
        """Go on with the session that the client names, or open one."""
        if len(body) > MAX_HANDSHAKE:
            raise HttpRefusal(Refusal.HANDSHAKE_TOO_LARGE, limit=MAX_HANDSHAKE, where="")
        if weigh(body) > MAX_HANDSHAKE_MEMORY:
            raise HttpRefusal(Refusal.HANDSHAKE_TOO_LARGE, limit=MAX_HANDSHAKE_MEMORY, where=" in memory")
        sessions, caller = self._access.sessions, caller_of(owner, http.scope)
        self._check_room(caller)
        reattached = await self._reattach(request, body, http, headers, owner)
        if reattached is not None:
            return reattached
        try:
            session, call = await sessions.open(caller, request, body)
        except TooManySessions as full:
            settings = self._settings
            refusal, limit = Refusal.TOO_MANY_SESSIONS, settings.max_sessions
            if full.of_caller and caller.owner:
                refusal, limit = Refusal.TOO_MANY_OF_YOURS, settings.max_principal_sessions
            elif full.of_caller:
                refusal, limit = Refusal.TOO_MANY_FROM_THERE, settings.max_address_sessions
            raise HttpRefusal(refusal, limit=limit) from None
        except TooManyProcesses as full:
            refusal = Refusal.TOO_MANY_OWN_PROCESSES if full.of_caller else Refusal.TOO_MANY_PROCESSES
            raise HttpRefusal(refusal, upstream=full.upstream, limit=full.limit) from None
        except SessionEnded:  # the store took longer than a handshake may
            raise HttpRefusal(Refusal.STORE_FAILS) from None
        self._access.credentials.bring(session.id, http.scope)
        with call.stream.pinned():
            session.link.announces = await self._tasks.announced(request, owner, http)
            session.link.start(call, http)
            await call.stream.wait_over()  # the session's id leaves only with a successful answer
            if session.state is not SessionState.ACTIVE:
                answers = await _answers(call.stream)
                await sessions.end(session, SessionStep.HANDSHAKE_FAILED, "The handshake failed")
                return json_answer(answers[0])
            return await self._answer(session, call.stream)

    async def _reattach(
        self, request: Request, body: bytes, http: HttpRequest, headers: Headers, owner: str
    ) -> Response | EventStreamResponse | None:
        """A client that runs its handshake again on its own session gets the recorded result, and keeps everything
        (R10). With another version or other capabilities it is another client: `None`."""
        text = headers.get(b"x-mcp-reconnect-session") or headers.get(b"mcp-session-id")
        if not text:
            return None
        try:
            found = await self._access.sessions.reattach(text.decode("latin-1"), owner, request.params or {})
            if found is None:
                return None
            session, incarnation = found
            self._access.credentials.bring(session.id, http.scope)
            with session.in_use():
                if session.waits:
                    await self._access.principal_calls.resume(session, http)
                with Intake(session, [request], incarnation=incarnation) as intake:
                    _, [call] = await intake.accept([body])
        except IdTaken:
            raise HttpRefusal(Refusal.DUPLICATE_ID, seen=request.id) from None
        except SessionEnded:
            return None
        with call.stream.pinned():
            session.link.answer_recorded(call)
            return await self._answer(session, call.stream)


def _show(session: Session, stream: Stream, start: Start, arrival: int | None = None) -> EventStreamResponse:
    if session.keeper.record.state is SessionState.ENDED:
        raise SessionEnded
    return EventStreamResponse(session, attach(session, stream, start, arrival=arrival))


async def _answers(stream: Stream) -> list[bytes]:
    if not (answers := await read_answers(stream)):
        raise HttpRefusal(Refusal.STORE_FAILS)
    return answers


def _session_header(session: Session) -> dict[str, str]:
    return {"mcp-session-id": session.record.id}
