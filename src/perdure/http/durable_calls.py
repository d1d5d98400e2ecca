"""Serves `tools/call` of 2026-07-28 as a durable call on the log, and tasks.

A call is durable if it has a key, or if its client takes tasks or can be asked something.

The SDK's own functions judge the request. What they refuse, and every call that needs no log, the SDK's own handler
answers. A call with a key is joined by every request that shows the key again, at any node.
"""

import asyncio
import contextlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from starlette.types import Receive, Send

from perdure._core import early_answers as texts
from perdure._core import heartbeats, sse
from perdure._core.codes import STOPPING
from perdure._core.durable_calls import (
    MAX_KEY,
    PROGRESS_TOKEN,
    STATE_PREFIX,
    TaskFacts,
    TaskSupport,
    call_digest,
    handle_view,
    input_requests,
    is_key,
    key_names,
    parse_task_rules,
    task_support,
)
from perdure._core.envelope import CANCEL, HOST
from perdure._core.ids import SessionId, StreamId
from perdure._core.jsonrpc import JsonObject, error_payload, meta_of
from perdure._core.states import CallState, SessionStep
from perdure.errors import StoreError, TooManySessions
from perdure.http.access import FAILURES, SessionAccess, refusal_of
from perdure.http.credentials import caller_of, ending_with_token, while_good
from perdure.http.event_stream import Ending, EventStream
from perdure.http.refusals import HttpRefusal, Refusal
from perdure.http.request import Headers, ModernRequest, needs_tasks, read_key
from perdure.runtime.base import Tools
from perdure.sessions.calls_by_id import CallsById, KnownCall, is_waiting
from perdure.sessions.durable_calls import DurableCalls, NewCall, needs_its_client
from perdure.sessions.keyed_calls import TooManyKeys
from perdure.sessions.ledger import Call, encode, encode_answer, progress_token, unknown_outcome
from perdure.sessions.resume import Reader, Start, attach
from perdure.sessions.session import Session
from perdure.store.interface import stream_by_id
from perdure.store.records import Event, SessionRecord

TASK_METHODS = frozenset({b"tasks/get", b"tasks/update", b"tasks/cancel"})
CALL_METHOD = b"tools/call"
CANCEL_METHOD = CANCEL.encode()

FIRST_SIGN = 1.0
"""Seconds until the first comment to a client that waits for a call that another request began: it shows that its
request has arrived."""

MAX_RESPONSES = 100
"""Answers that one request may bring: each may be searched in the store. As many as a batch may have messages; a call
that asks for more at once is answered with several requests."""

REQUIRED_AFTER = 0.25
"""Seconds that a tool which always runs as a task may take to ask its client something by a round: the tool does that
first, and tasks are made after it. Never more than `task_after`."""

AS_IN_SESSION = "2025-11-25"
"""The revision in which a call runs whose server asks in a session alone."""

STORE_PAUSE = 1.0
"""Seconds until a handle or an early answer is tried again that the store could not keep."""

BEGIN_MOST = 3
"""Times that a request with a key tries to begin its call. A call that existed may be gone when it is read, because its
time passed in that moment, or because its own request was refused."""

_NO_ROOM = (Refusal.TOO_MANY_TASKS, Refusal.TOO_MANY_TASKS_IN_ALL, Refusal.TOO_MANY_KEYS)

MAX_CLIENT = 64 << 10
"""Bytes of what a client declares of itself with a durable call, as of an `initialize` request."""

WAIT_PREFIX = f"{STATE_PREFIX}wait."
"""Begins the `requestState` of a wait whose call waits for its client's input."""

_ASK = b'{"jsonrpc":"2.0","id":"ask-'
"""What every ask begins with (`sessions.ledger.encode_ask`): a client of this revision is not asked on a stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Late:
    """The reply to a client that no longer waits for the answer itself: a handle, or an early answer."""

    after: float
    early: float | None = None
    """The seconds of its rule (`answer_within`); `None`: it takes handles."""


class CallReader:
    """The connection of a reader: selects the events that the client sees before the answer, and ends the wait."""

    def __init__(self, stream: EventStream, *, token: bool, may_be_late: Callable[[], bool]) -> None:
        """`token`: the client wants progress. `may_be_late`: the store takes what stands in place of the answer."""
        self._stream = stream
        self._token = token
        self._may_be_late = may_be_late
        self._takes_handle = False
        self._answer: bytes | None = None
        self._is_asked = False

    async def read(
        self, reader: Reader, *, after: float | None, begun: asyncio.Future[None] | None, latest: float
    ) -> Ending:
        """Read until the answer is written, `after` has passed since the call has `begun`, `latest` has passed since
        now, or the client leaves."""
        self._takes_handle = after is not None
        timers: list[asyncio.TimerHandle] = []

        def end_after(seconds: float) -> None:
            timers.append(asyncio.get_running_loop().call_later(seconds, on_late))

        def on_late() -> None:
            if self._may_be_late():
                self._end(Ending.LATE)
            else:
                end_after(STORE_PAUSE)

        def on_begun(_: object) -> None:
            end_after(after or 0.0)

        if after is not None and begun is None:
            end_after(after)
        elif after is not None and begun is not None:
            begun.add_done_callback(on_begun)
            if latest < math.inf:
                end_after(latest)
        try:
            ending = await self._stream.wait(reader, self)
        finally:
            if begun is not None:
                begun.remove_done_callback(on_begun)
            for timer in timers:
                timer.cancel()
        if self._answer is not None:
            return Ending.WRITTEN
        return Ending.LEFT if ending is Ending.WRITTEN else ending

    def give_handle(self) -> None:
        """Give the client a handle now, if it takes one: the process is about to stop."""
        if self._takes_handle:
            self._end(Ending.LATE)

    def _end(self, ending: Ending) -> None:
        if self._answer is None:
            self._stream.finish(ending)

    def frame(self, event: Event) -> bytes:
        payload = event.payload
        if event.final:
            self._answer = payload
        elif payload.startswith(_ASK):
            self._is_asked = True
        elif b'"method":"notifications/progress"' in payload[:80]:
            return sse.encode_message(payload) if self._token else b""
        elif b'"method":"notifications/message"' in payload[:80]:
            return sse.encode_message(payload)
        return b""

    async def write(self, body: bytes, *, last: bool) -> None:
        if last and self._answer is None:
            self._stream.finish(Ending.STOPPED)
            return
        if body:
            await self._stream.write(body)
        if self._answer is not None:
            await self._stream.answer(self._answer)
        elif self._is_asked:  # and not answered in the same moment, or the answer would be broken off
            self._end(Ending.ASKED)

    def finish(self) -> None:
        self._stream.finish()

    def abort(self) -> None:
        """The connection is left to its server, which ends it."""


class DurableCallHandler:
    """Answers calls, tasks, and cancellations by key."""

    def __init__(
        self,
        access: SessionAccess,
        calls: DurableCalls,
        tools: Tools,
        *,
        asks_in_session: bool,
    ) -> None:
        """`asks_in_session`: tools of this server ask in a session alone."""
        self._access = access
        self._context = access.context
        self._settings = access.settings
        self._calls = calls
        self._tools = tools
        self._asks_in_session = asks_in_session
        self._by_id = CallsById(self._context)
        self._rules = parse_task_rules(access.settings.tasks)
        self._shown: set[CallReader] = set()
        """Requests that wait for the call that they began."""
        self._joined: set[asyncio.Task[None]] = set()
        """Requests that wait for a call that another request began."""
        self._beginning = 0
        """Requests whose call is about to run here."""
        self._ended = False

    @property
    def is_beginning(self) -> bool:
        return self._beginning > 0

    def give_handles(self) -> None:
        """The process is about to stop: clients that take handles get theirs now, and go on elsewhere."""
        for connection in list(self._shown):
            connection.give_handle()

    def end_all(self) -> None:
        """The process stops: answer what waits, and run nothing more."""
        self._ended = True
        for waiting in self._joined:
            waiting.cancel()
        self._context.waiters.end()  # a poll that is held is answered with the present state of its task

    def wants(self, headers: Headers) -> bool:
        """Whether a request may be one for this endpoint. A server with tasks of its own has the requests for them."""
        method = headers.get(b"mcp-method")
        return method in (CALL_METHOD, CANCEL_METHOD) or (method in TASK_METHODS and not self._tools.serves_tasks)

    async def __call__(self, request: ModernRequest, receive: Receive, send: Send) -> bool:
        """Answer a request; `False` if it is one for the SDK's own handler."""
        message = request.message
        is_call = message.method == CALL_METHOD.decode()
        response = EventStream(receive, send, streams=is_call and not self._settings.json_response)
        try:
            if not self._context.journal.may_show:
                raise HttpRefusal(Refusal.FROZEN)
            if is_call:
                self._access.refuse_if_draining()
                return await self._answer_call(request, response)
            result = await (self._cancel if message.method == CANCEL else self._task)(request)
            await response.result(message.id, self._complete(result))
        except FAILURES as failure:
            if not response.has_begun:
                raise
            await response.answer(refusal_of(failure, message.id, self._context.counters).body)
        return True

    async def _cancel(self, request: ModernRequest) -> JsonObject:
        given = request.params.get("key")
        if not is_key(given):
            raise HttpRefusal(Refusal.BAD_KEY, where="key", limit=MAX_KEY, seen=repr(given))
        name = self._names(request, given)[0]
        record = await self._calls.find(name, request.owner)
        if record is not None:
            await self._calls.cancel(record, "it was cancelled by its key")
        elif await self._calls.given_up(name, request.owner) is None:
            raise HttpRefusal(Refusal.NO_KEY)
        return {}

    # Tasks

    async def _task(self, request: ModernRequest) -> JsonObject:
        """Serve `tasks/get`, `tasks/update` and `tasks/cancel`, at any node."""
        from mcp.shared.inbound import MCP_NAME_HEADER, decode_header_value

        if not request.client.takes_tasks:
            raise needs_tasks()
        task_id = request.params.get("taskId")
        header = request.http.headers.get(MCP_NAME_HEADER)
        if header is not None and decode_header_value(header) != task_id:
            raise HttpRefusal(Refusal.NAME_MISMATCH, message=f"{MCP_NAME_HEADER} header does not match params.taskId")
        found = await self._calls.find_with_facts(task_id, request.owner)
        if found is None:
            await self._refuse_given_up(task_id, request.owner)
        if found is None or not found[0].is_task:
            raise HttpRefusal(Refusal.NO_TASK)
        record, facts = found
        match request.message.method:
            case "tasks/get":
                return self._calls.view(await self._poll(record, facts, request))
            case "tasks/update":
                if request.params.get("inputResponses") is None:
                    raise HttpRefusal(Refusal.BAD_RESPONSES, seen="nothing")
                await self._take_responses(record, request)
            case _:
                await self._calls.cancel(record, "it was cancelled as a task")
        return {}

    async def _poll(self, record: SessionRecord, facts: TaskFacts, request: ModernRequest) -> TaskFacts:
        """Return the state of a task. A client that repeats what breaks is answered as soon as its task needs it, and
        within `task_hold`, or the life of its token. Any other client is answered at once: it would end with a poll
        that is open when this process dies, and a poll that is held is nearly always open."""

        has_token = True

        def may_answer(facts: TaskFacts) -> bool:
            # A process that stops holds no poll: the next one may go elsewhere.
            is_over = self._access.is_draining() or self._context.waiters.is_over
            return needs_its_client(facts) or is_over or not has_token

        def on_token_gone() -> None:
            nonlocal has_token
            has_token = False
            self._context.waiters.wake_all()

        hold = while_good(self._settings.task_hold, request.http.scope) if request.client.repeats else 0.0
        if needs_its_client(facts) or not (hold or facts.state is CallState.WAITING):
            return facts
        if facts.state is CallState.WAITING:
            await self._run_again(record, request)
        scope = request.http.scope
        held = self._context.work.holding(caller_of(request.owner, scope), request.size)
        with ending_with_token(scope, on_token_gone), held:
            return await self._calls.wait(record, may_answer, seconds=hold) or facts

    # Calls

    async def _answer_call(self, request: ModernRequest, response: EventStream) -> bool:
        key, late = read_key(request), None
        name, client, early = str(request.params.get("name")), request.client, self._context.early
        for_host = HOST in request.params["_meta"]
        within = None if early is None else early.at_call(client, for_host=for_host)
        if within is not None and texts.may_be_own(name) and name in (names := await self._own_tools(request)):
            await self._serve_own(request, names, within, response)
            return True
        if within is not None and (key is None or for_host):
            late = Late(after=while_good(within, request.http.scope), early=within)
        state = request.params.get("requestState")
        if isinstance(state, str) and state.startswith(STATE_PREFIX):
            # A further round of a call: its client brings the answers to what it was asked.
            record = await self._calls.find(state.removeprefix(STATE_PREFIX), request.owner)
            row = None if record is None else await self._calls.row(record)
            begun = {name: value for name, value in request.params.items() if name != "inputResponses"}
            if record is None or row is None or row.digest != call_digest(request.message.method, begun):
                raise HttpRefusal(Refusal.BAD_STATE)
            answered = await self._take_responses(record, request)
            await self._join(request, record, late, response, answered=answered, gone=Refusal.BAD_STATE)
            return True
        rule = self._rules.get(name, self._rules.get("*"))
        late = None if rule is TaskSupport.NEVER else late
        if key is None and late is None and not client.takes_asks:
            rule = TaskSupport.NEVER if self._tools.serves_tasks else rule
            if rule is TaskSupport.NEVER or (rule is TaskSupport.OPTIONAL and not client.takes_tasks):
                return False  # it needs no log, whatever the server declares of its tool
        tool = await self._tools.tool(name, request.owner, client, request.http)
        support = task_support(name, self._rules, tool, usual=TaskSupport.OPTIONAL)
        if self._tools.serves_tasks:
            support = TaskSupport.NEVER  # they are its own
        if support is TaskSupport.REQUIRED and not client.takes_tasks:
            raise needs_tasks()
        as_task = client.takes_tasks and support is not TaskSupport.NEVER
        if key is None and not as_task and late is None and not client.takes_asks:
            return False
        arguments = request.params.get("arguments") or {}
        if tool is not None and isinstance(arguments, Mapping):
            from mcp.shared.inbound import validate_mcp_param_headers

            wrong = validate_mcp_param_headers(tool.get("inputSchema"), arguments, request.http.headers)
            if wrong is not None:
                raise HttpRefusal(Refusal.NAME_MISMATCH, message=wrong.message)
        if as_task and late is None:
            after = while_good(self._settings.task_after, request.http.scope)
            late = Late(after=min(after, REQUIRED_AFTER) if support is TaskSupport.REQUIRED else after)
        try:
            await self._serve(request, key, late, response)
        except HttpRefusal as refused:
            if key is None and not as_task and refused.refusal in _NO_ROOM:
                return False  # nothing of it need be kept: its tool runs, and cannot ask
            raise
        return True

    async def _serve(self, request: ModernRequest, key: str | None, late: Late | None, response: EventStream) -> None:
        """Begin a call, or join the one with the same key. `late`: `None` if its client waits for the answer."""
        params, client = request.params, request.client
        message, body = request.message, request.body
        if len(body) > MAX_CLIENT and len(encode(client.told)) > MAX_CLIENT:
            raise HttpRefusal(Refusal.CLIENT_TOO_LARGE, limit=MAX_CLIENT)
        if progress_token(message) is None:  # a task shows its progress in any case
            params = {**params, "_meta": {**params["_meta"], "progressToken": PROGRESS_TOKEN}}
            raw = {**message.raw, "params": params}
            message, body = replace(message, params=params, raw=raw), encode(raw)
        if self._asks_in_session and client.takes_asks:
            client = replace(client, version=AS_IN_SESSION)
        call = NewCall(
            request=message,
            body=body,
            caller=caller_of(request.owner, request.http.scope),
            client=client,
            names=None if key is None else self._names(request, key),
            digest=call_digest(message.method, params),
            size=request.size,
        )
        record = None
        for _ in range(BEGIN_MOST):
            begun = await self._begin(call)
            if begun is not None:
                await self._show(request, *begun, late, response)
                return
            assert call.names is not None, "a call without a key is always new"
            record = await self._calls.find(call.names[0], request.owner)
            row = None if record is None else await self._calls.row(record)
            if record is not None and row is not None:
                if row.digest != call.digest:
                    raise HttpRefusal(Refusal.KEY_TAKEN)
                self._context.counters.calls_joined += 1
                await self._join(request, record, late, response)
                return
            if (stream := await stream_by_id(self._context.store, call.names[1])) is not None:
                # The call of the key was begun in a session, and its answer is, or will be, there.
                rows = await self._context.store.calls(stream.session, stream=stream.id)
                is_same = all(row.digest == call.digest for row in rows)
                raise HttpRefusal(Refusal.KEY_OF_SESSION if is_same else Refusal.KEY_TAKEN)
            await self._refuse_given_up(call.names[0], request.owner, call.digest)
        # A record is without a row; without a record the client tries again.
        raise HttpRefusal(Refusal.STORE_FAILS if record is None else Refusal.ANSWER_GIVEN_UP)

    def _names(self, request: ModernRequest, key: str) -> tuple[SessionId, StreamId]:
        state = request.params.get("requestState")
        return key_names(self._context.keyed.secret, request.owner, key, state if isinstance(state, str) else None)

    async def _begin(self, call: NewCall) -> tuple[Session, Call] | None:
        """Accept a call, which then runs in the same turn of the event loop, or `None` if its key is taken."""
        if self._context.journal.refuses:
            raise HttpRefusal(Refusal.STORE_FAILS)
        begun = None
        self._beginning += 1
        try:
            if not self._ended:
                if self._context.running.lacks(call.caller, 1):
                    await self._calls.give_up_round(call.caller)
                self._access.refuse_calls(call.caller, 1)
                begun = await self._calls.begin(call)
        except TooManyKeys as full:
            raise HttpRefusal(Refusal.TOO_MANY_KEYS, limit=full.limit) from None
        except TooManySessions as full:
            if full.of_caller:
                raise HttpRefusal(Refusal.TOO_MANY_TASKS, limit=self._settings.max_principal_tasks) from None
            raise HttpRefusal(Refusal.TOO_MANY_TASKS_IN_ALL, limit=self._settings.max_tasks) from None
        finally:
            self._beginning -= 1
        if self._ended:  # while the row was being written: what runs was ended without this call
            if begun is not None:
                await self._access.sessions.end(begun[0], SessionStep.CLIENT_DELETED, "The server is stopping")
            raise HttpRefusal(Refusal.STOPPING)
        return begun

    # A call that this request began, and that runs here

    async def _show(
        self, request: ModernRequest, session: Session, call: Call, late: Late | None, response: EventStream
    ) -> None:
        has_key = session.record.is_task
        has_begun, has_token = False, progress_token(request.message) is not None
        journal, waits_for_tool = self._context.journal, late is not None and late.early is None
        try:
            with session.in_use(), call.stream.pinned():
                self._access.credentials.bring(session.id, request.http.scope)
                while True:
                    may_be_late: Callable[[], bool] = lambda: not journal.is_degraded  # noqa: E731
                    connection = CallReader(response, token=has_token, may_be_late=may_be_late)
                    start = Start(call.stream.readers.delivered)
                    reader = attach(session, call.stream, start, frame=connection.frame, beats=has_token)
                    if not has_begun:
                        has_begun = True
                        session.link.start(call, request.http)
                    self._shown.add(connection)
                    try:
                        ending = await connection.read(
                            reader,
                            after=None if late is None else late.after,
                            begun=session.link.runtime.begun if waits_for_tool else None,
                            latest=while_good(math.inf, request.http.scope),
                        )
                    finally:
                        self._shown.discard(connection)
                    if ending is Ending.WRITTEN:
                        return
                    finals = call.stream.tail.finals
                    if not session.record.is_task and call.stream.is_over and finals:
                        # The answer came in the same moment in which its reader ended, and is not kept. There is none
                        # if another process has taken the call over.
                        await response.answer(finals[-1].payload)
                        return
                    if ending is Ending.LEFT:
                        # The client cancels the call by closing the connection, unless it can ask for it again.
                        if not session.record.is_task:
                            self._context.counters.calls_cut += 1
                            early = self._context.early
                            if early is not None and early.keeps(session.record):  # it finds what became of the call
                                with contextlib.suppress(StoreError):
                                    await session.show_to_client()
                            session.link.cancel(
                                call.request.id, incarnation=1, params={"reason": "the client has left"}
                            )
                        return
                    is_late = late is not None and (late.early is None or ending is not Ending.ASKED)
                    if late is not None and is_late and await self._answer_late(request, session, late, response):
                        return
                    if late is None or ending is not Ending.LATE:
                        break
                    # The store fails, and cannot keep what a handle stands for.
                    late, waits_for_tool = replace(late, after=STORE_PAUSE), False
                if ending is Ending.ASKED:
                    await session.show_to_client()
                    facts = await self._calls.facts(session.record)
                    asks = {} if facts is None else facts.asks
                    await response.result(call.request.id, self._round(STATE_PREFIX + session.id, asks))
                else:
                    await self._answer_stopped(request, response, is_kept=has_key)
        finally:
            self._access.sessions.let_go(session)

    async def _answer_late(self, request: ModernRequest, session: Session, late: Late, response: EventStream) -> bool:
        """Give the client a handle or an early answer, if the store has what it stands for. Returns whether."""
        try:
            await session.show_to_client()
        except StoreError:
            return False
        if self._context.journal.is_degraded:
            return False
        facts = await self._calls.facts(session.record)
        if facts is None:
            raise HttpRefusal(Refusal.NO_TASK)
        if late.early is not None and facts.is_over and facts.answer is not None:
            await response.answer(facts.answer)
            return True
        if late.early is None:
            self._context.counters.tasks_handed_out += 1
        await response.result(request.message.id, await self._late_result(request, facts, late))
        return True

    async def _late_result(self, request: ModernRequest, facts: TaskFacts, late: Late) -> JsonObject:
        if late.early is None:
            return self._handle(facts)
        self._context.counters.calls_answered_early += 1
        return self._complete(
            texts.still_running(
                str(request.params.get("name")),
                facts.id,
                age=self._context.clock() - facts.created,
                seconds=late.early,
                names=await self._own_tools(request),
                progress=facts.progress,
                asks=bool(facts.asks),
            )
        )

    # A call that another request began

    async def _join(
        self,
        request: ModernRequest,
        record: SessionRecord,
        late: Late | None,
        response: EventStream,
        *,
        answered: frozenset[str] = frozenset(),
        gone: Refusal = Refusal.STORE_FAILS,
    ) -> None:
        """Wait for the answer of a call, wherever it runs; until this process stops, or the client leaves. `answered`:
        asks whose answers this request brings, which the node that asked may not have yet. `gone`: the refusal if the
        call's time passes in this moment."""
        token, interval = self._rhythm(request)
        loop = asyncio.get_running_loop()
        deadline = None if late is None else loop.time() + late.after
        takes_handle = late is not None and late.early is None

        async def write_outcome() -> None:
            silent, is_first, heard = min(FIRST_SIGN, interval), True, None
            while True:
                seconds = silent if deadline is None else max(0.0, min(silent, deadline - loop.time()))
                await self._run_again(record, request)
                facts = await self._calls.follow(record, answered=answered, seconds=seconds)
                if facts is None:
                    await self._refuse_given_up(record.id, request.owner)
                    raise HttpRefusal(gone)
                if facts.is_over and facts.answer is not None:
                    return await response.answer(encode({**json.loads(facts.answer), "id": request.message.id}))
                if facts.is_over or (takes_handle and facts.asks):
                    return await response.result(request.message.id, self._handle(facts))
                if facts.asks:
                    return await response.result(request.message.id, self._round(STATE_PREFIX + record.id, facts.asks))
                if late is not None and deadline is not None and loop.time() >= deadline:
                    return await response.result(request.message.id, await self._late_result(request, facts, late))
                age = self._context.clock() - facts.created
                heard = heartbeats.rising(heard, facts.progress)
                beat = None if token is None or is_first else heartbeats.beat(token, heard, age)
                await response.write(sse.KEEP_ALIVE if beat is None else sse.encode_message(beat))
                silent, is_first = interval, not self._settings.heartbeat

        waiting = asyncio.create_task(write_outcome())
        self._joined.add(waiting)
        try:
            with self._context.work.holding(caller_of(request.owner, request.http.scope), request.size):
                ending = await response.serve(waiting, end=waiting.cancel)
                if waiting.cancelled() and ending is not Ending.LEFT:
                    await self._answer_stopped(request, response, is_kept=True)
        finally:
            self._joined.discard(waiting)

    # Perdure's own tools

    async def _own_tools(self, request: ModernRequest) -> texts.OwnTools:
        by = request.owner, request.client, request.http
        # The tools of a server outside this process may not have been read yet.
        await self._tools.tool(str(request.params.get("name")), *by)
        return texts.own_tools(texts.names_of(await self._tools.tools(*by)))

    async def _serve_own(
        self, request: ModernRequest, names: texts.OwnTools, within: float, response: EventStream
    ) -> None:
        name, wanted = request.params["name"], texts.call_named(request.params)
        if name == names.wait and wanted is not None:
            await self._wait(request, wanted, names, within, response)
            return
        result = await self._by_id.list_or_cancel(name, wanted, names, request.owner)
        await response.result(request.message.id, self._complete(result))

    async def _wait(
        self, request: ModernRequest, wanted: object, names: texts.OwnTools, within: float, response: EventStream
    ) -> None:
        """Wait for the end of a call of either era. A question of a durable call is a round of the wait."""
        message, scope, client = request.message, request.http.scope, request.client
        token, interval = self._rhythm(request)
        answered = await self._answered_by_wait(request, wanted)
        ended: KnownCall | None = None

        async def outcome() -> bytes:
            nonlocal ended
            loop, clock = asyncio.get_running_loop(), self._context.clock
            written, last, heard = loop.time() - interval + FIRST_SIGN, None, None
            follow = self._by_id.follow(wanted, request.owner, seconds=while_good(within, scope))
            async with contextlib.aclosing(follow) as states:
                async for found in states:
                    if found is None:
                        return encode(self._complete(self._by_id.unknown))
                    if found.stream.sealed:
                        ended = found
                        return await self._by_id.outcome(found, self._tools.server_info)
                    if is_waiting(found.row):
                        await self._access.resume(found.record.id, request.http)
                    said, age = await self._by_id.progress(found), clock() - found.stream.opened
                    asks = {name: ask for name, ask in said.asks.items() if name not in answered}
                    if asks and found.is_durable_call and client.takes_asks:
                        return encode(self._round(WAIT_PREFIX + found.record.id, asks))
                    is_new = said.progress is not None and (last is None or said.progress != last[1].progress)
                    last, is_due, beat = (found, said), loop.time() - written >= interval, None
                    heard = heartbeats.rising(heard, said.progress)
                    if token is not None and (is_new or (is_due and self._settings.heartbeat)):
                        beat = heartbeats.beat(token, heard, age)
                    if beat is not None or is_due:
                        written = loop.time()
                        await response.write(sse.KEEP_ALIVE if beat is None else sse.encode_message(beat))
            assert last is not None, "a call that is followed was found"
            found, said = last
            running = self._by_id.still_running(
                found, said, names, seconds=within, asks=bool(said.asks), is_elsewhere=not found.is_durable_call
            )
            return encode(self._complete(running))

        async def write_outcome() -> None:
            try:
                result = await outcome()
            except StoreError:
                result = encode(self._complete(texts.failure(texts.STORE_FAILS)))
            await response.answer(encode_answer(message.id, result))
            if ended is not None:
                self._by_id.fetched(ended)

        waiting = asyncio.create_task(write_outcome())
        with self._context.work.holding(caller_of(request.owner, scope), request.size):
            ending = await response.serve(waiting, end=waiting.cancel)
            if waiting.cancelled() and ending is not Ending.LEFT:
                await response.result(message.id, self._complete(texts.failure(texts.STOPPING)))

    async def _answered_by_wait(self, request: ModernRequest, wanted: object) -> frozenset[str]:
        """Take the answers that a further round of a wait brings. Returns their names: the node that asked may not have
        them yet."""
        state = request.params.get("requestState")
        if state is None:
            return frozenset()
        record = await self._calls.find(wanted, request.owner) if state == f"{WAIT_PREFIX}{wanted}" else None
        if record is None:
            raise HttpRefusal(Refusal.BAD_STATE)
        return await self._take_responses(record, request)

    async def _run_again(self, record: SessionRecord, request: ModernRequest) -> None:
        if await self._calls.waits_for_principal(record):
            await self._access.resume(record.id, request.http)

    async def _take_responses(self, record: SessionRecord, request: ModernRequest) -> frozenset[str]:
        """Hand the client's answers to the node that asked, and wait, for a short time, until it has them. Returns the
        names of the asks."""
        responses = request.params.get("inputResponses")
        if responses is None:
            return frozenset()
        if not isinstance(responses, Mapping) or not all(isinstance(value, dict) for value in responses.values()):
            raise HttpRefusal(Refusal.BAD_RESPONSES, seen=repr(responses))
        if len(responses) > MAX_RESPONSES:
            raise HttpRefusal(Refusal.TOO_MANY_RESPONSES, limit=MAX_RESPONSES, seen=len(responses))
        await self._calls.answer(record, responses, request.http)
        await self._calls.wait_answered(record, responses.keys())
        return frozenset(responses)

    def _rhythm(self, request: ModernRequest) -> tuple[int | str | None, float]:
        """The progress token of a request that waits, and the seconds of silence after which its client gets a sign."""
        token, settings = progress_token(request.message), self._settings
        beats = token is not None and settings.heartbeat
        return token, min(settings.keepalive_interval, settings.heartbeat) if beats else settings.keepalive_interval

    async def _refuse_given_up(self, text: object, owner: str, digest: bytes | None = None) -> None:
        """Refuse if the answer of a caller's own call was given up. `digest`: of the request, if it is a call."""
        key = await self._calls.given_up(text, owner)
        if key is not None:
            if digest is not None and key.digest != digest:
                raise HttpRefusal(Refusal.KEY_TAKEN)
            self._context.counters.keys_given_up += 1
            raise HttpRefusal(Refusal.ANSWER_GIVEN_UP)

    # Results

    def _round(self, state: str, asks: Mapping[str, bytes]) -> JsonObject:
        """Asks a client without tasks what its call wants to know; it comes again with the answers."""
        result: JsonObject = {"resultType": "input_required", "requestState": state}
        if asks:
            result["inputRequests"] = input_requests(asks)
        return self._stamped(result)

    async def _answer_stopped(self, request: ModernRequest, response: EventStream, *, is_kept: bool) -> None:
        """The process stops, and the call is left to the next one: only a key finds it there."""
        message, sentence = request.message, "This server is stopping; ask again with the same key"
        answer = error_payload(message.id, STOPPING, sentence)
        if not is_kept:
            reason = "the server is stopping"
            answer = unknown_outcome(message.id, method=message.method, reason=reason, params=message.params)
        await response.answer(answer, 503 if is_kept else 200)

    def _handle(self, facts: TaskFacts) -> JsonObject:
        return self._stamped({"resultType": "task", **handle_view(self._calls.view(facts))})

    def _complete(self, result: JsonObject) -> JsonObject:
        return self._stamped({"resultType": "complete", **result})

    def _stamped(self, result: JsonObject) -> JsonObject:
        return {**result, "_meta": {**meta_of(result), **self._tools.server_info}}
