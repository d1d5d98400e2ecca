"""Serves `tools/call` of 2026-07-28 as a single call on the log: with a key, for clients that take tasks, and for those
that can be asked something.

The SDK's own functions judge the request. What they refuse, and every call that needs no log, the SDK's own handler
answers. A call with a key is joined by every request that shows the key again, at any node.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter

from mcp.shared.inbound import (
    InboundLadderRejection,
    validate_mcp_param_headers,
)
from starlette.types import Receive, Send

from perdure._core.durable_calls import (
    MAX_KEY,
    PROGRESS_TOKEN,
    STATE_PREFIX,
    Client,
    TaskSupport,
    call_digest,
    handle_view,
    is_key,
    key_names,
    parse_task_rules,
    task_support,
)
from perdure._core.ids import SessionId, StreamId
from perdure._core.jsonrpc import JsonObject
from perdure._core.limits import Caller
from perdure._core.states import LogState, SessionStep
from perdure.errors import StoreError, TooManySessions
from perdure.http.access import SessionAccess
from perdure.http.credentials import caller_of, while_good
from perdure.http.event_stream import Ending, EventStream
from perdure.http.known_calls import KnownCalls
from perdure.http.modern_request import ModernRequest, needs_tasks, read_key
from perdure.http.refusals import Refusal, Refused
from perdure.http.single_call_response import CallReader
from perdure.log.reader import Reader
from perdure.runtime.own_requests import ToolCatalog
from perdure.sessions.durable_calls import Asked, DurableCalls, TooManyKeys
from perdure.sessions.ledger import Call, encode, progress_token
from perdure.sessions.session import Session, SessionHistory

REQUIRED_AFTER = 0.25
"""Seconds that a tool which always runs as a task may take to ask its client something by a round: it does that first,
and tasks are made behind it. Never more than `task_after`."""

AS_IN_SESSION = "2025-11-25"
"""The revision in which a call runs whose server asks in a session alone."""

BEGIN_MOST = 3
"""Times that a request with a key tries to begin its call: one that was there already may be gone when it is looked
for, because its time passed in that moment, or because its own request was refused."""

MAKE_ROOM_MOST = 32
"""Times that calls which have ended are given up for a new one before it is refused: requests at other nodes may take
the room each time."""

GIVEN_UP_SECONDS = 1.0
"""How long a new call waits for the end of one that was given up for it."""

_NO_ROOM = (Refusal.TOO_MANY_TASKS, Refusal.TOO_MANY_TASKS_IN_ALL, Refusal.TOO_MANY_KEYS)

MAX_CLIENT = 64 << 10
"""Bytes of what a client says of itself with a call that is kept, as of an `initialize` request."""


class SingleCallHandler:
    """Takes calls."""

    def __init__(
        self,
        access: SessionAccess,
        calls: DurableCalls,
        known: KnownCalls,
        tools: ToolCatalog,
        secret: bytes,
        *,
        asks_in_session: bool,
    ) -> None:
        """`secret`: of the store, the same for all nodes. `asks_in_session`: tools of this server ask in a session
        alone."""
        self._access = access
        self._context = access.context
        self._settings = access.settings
        self._calls = calls
        self._known = known
        self._tools = tools
        self._secret = secret
        self._asks_in_session = asks_in_session
        self._rules = parse_task_rules(access.settings.tasks)
        self._shown: set[CallReader] = set()
        """Requests that wait for the call that they began."""
        self.beginning = 0
        """Requests whose call is about to run here."""
        self._ended = False
        self._making_room = asyncio.Lock()

    @property
    def leaves_tasks(self) -> bool:
        """The server has tasks of its own."""
        return self._tools.serves_tasks

    async def __call__(self, asked: ModernRequest, receive: Receive, send: Send) -> bool:
        """Answer a call; `False` if it is one for the SDK's own handler."""
        response = EventStream(receive, send, streams=not self._settings.json_response)
        try:
            return await self._answer(asked, response)
        except Refused as refused:
            if not response.has_begun:
                raise
            self._context.counters.requests_refused += 1
            await response.answer(refused.answering(asked.request.id).answer.body)
            return True

    async def _answer(self, asked: ModernRequest, response: EventStream) -> bool:
        key = read_key(asked)
        state = asked.params.get("requestState")
        if isinstance(state, str) and state.startswith(STATE_PREFIX):
            await self._go_on(asked, state.removeprefix(STATE_PREFIX), response)
            return True
        name = str(asked.params.get("name"))
        if key is None and self._is_plain(name, asked.client):
            return False
        tool = await self._tools.tool(name, asked.owner, asked.client, asked.http)
        support = task_support(name, self._rules, tool)
        if self._tools.serves_tasks:
            support = TaskSupport.NEVER  # they are its own
        if support is TaskSupport.REQUIRED and not asked.client.takes_tasks:
            raise needs_tasks()
        as_task = asked.client.takes_tasks and support is not TaskSupport.NEVER
        if key is None and not as_task and not asked.client.takes_asks:
            return False
        if tool is not None and (wrong := _check_param_headers(asked, tool)) is not None:
            raise Refused(Refusal.NAME_MISMATCH, message=wrong.message)
        after = while_good(self._settings.task_after, asked.http.scope)
        if support is TaskSupport.REQUIRED:
            after = min(after, REQUIRED_AFTER)
        try:
            await self._serve(asked, key, after if as_task else None, response)
        except Refused as refused:
            if key is None and not as_task and refused.refusal in _NO_ROOM:
                return False  # nothing of it need be kept: its tool runs, and cannot ask
            raise
        return True

    def _is_plain(self, name: str, client: Client) -> bool:
        """Whether a call without a key needs no log, whatever the server says of its tool."""
        rule = TaskSupport.NEVER if self._tools.serves_tasks else self._rules.get(name, self._rules.get("*"))
        no_task = rule is TaskSupport.NEVER or (rule is TaskSupport.OPTIONAL and not client.takes_tasks)
        return no_task and not client.takes_asks

    async def _serve(self, asked: ModernRequest, key: str | None, after: float | None, response: EventStream) -> None:
        """Begin a call, or join the one with the same key. `after`: when its client gets a handle, if it may."""
        call = self._as_call(asked)
        if key is not None:
            call = replace(call, names=self._names(asked, key))
        record = None
        for _ in range(BEGIN_MOST):
            begun = await self._begin(call)
            if begun is not None:
                await self._show(asked, *begun, after, response)
                return
            assert call.names is not None, "calls without a key are never there already"
            with self._access.refusing(Refusal.STORE_UNREADABLE):
                record = await self._calls.find(call.names[0], asked.owner)
                row = None if record is None else await self._calls.row(record)
            if record is not None and row is not None:
                if row.digest != call.digest:
                    raise Refused(Refusal.KEY_TAKEN)
                self._context.counters.calls_joined += 1
                await self._known.join(asked, record, after, response)
                return
            await self._known.refuse_given_up(call.names[0], asked.owner, call.digest)
        if record is not None:  # without a row
            raise Refused(Refusal.ANSWER_GIVEN_UP)
        raise Refused(Refusal.STORE_UNREADABLE)  # the client asks again

    def _names(self, asked: ModernRequest, key: str) -> tuple[SessionId, StreamId]:
        state = asked.params.get("requestState")
        return key_names(self._secret, asked.owner, key, state if isinstance(state, str) else None)

    def _as_call(self, asked: ModernRequest) -> Asked:
        params, client = asked.params, asked.client
        request, body = asked.request, asked.body
        if len(body) > MAX_CLIENT and len(encode(client.told)) > MAX_CLIENT:
            raise Refused(Refusal.CLIENT_TOO_LARGE, limit=MAX_CLIENT)
        if progress_token(request) is None:  # a task tells its progress in any case
            params = {**params, "_meta": {**params["_meta"], "progressToken": PROGRESS_TOKEN}}
            raw = {**request.raw, "params": params}
            request, body = replace(request, params=params, raw=raw), encode(raw)
        if self._asks_in_session and client.takes_asks:
            client = replace(client, version=AS_IN_SESSION)
        return Asked(
            request=request,
            body=body,
            caller=caller_of(asked.owner, asked.http.scope),
            client=client,
            names=None,
            digest=call_digest(request.method, params),
            size=asked.size,
        )

    async def _begin(self, call: Asked) -> tuple[Session, Call] | None:
        """Accept a call, which then runs in the same turn of the event loop, or `None` if its key is taken."""
        begun = None
        self.beginning += 1
        try:
            if not self._ended:
                begun = await self._accept(call)
        finally:
            self.beginning -= 1
        if self._ended:  # while the row was being written: what runs was ended without this call
            if begun is not None:
                await self._access.sessions.end(begun[0], SessionStep.CLIENT_DELETED, "The server is stopping")
            raise Refused(Refusal.STOPPING)
        return begun

    async def _accept(self, call: Asked) -> tuple[Session, Call] | None:
        if self._context.journal.refuses:
            raise Refused(Refusal.STORE_FAILS)
        if self._context.running.lacks(call.caller, 1):
            await self._give_up_round(call.caller)
        self._access.refuse_calls(call.caller, 1)
        try:
            return await self._find_room(call)
        except TooManyKeys:
            raise Refused(Refusal.TOO_MANY_KEYS, limit=self._calls.keys.of_caller) from None

    async def _find_room(self, call: Asked) -> tuple[Session, Call] | None:
        """Accept a call, in place of others of its caller that have ended if need be."""
        with self._access.refusing(Refusal.STORE_FAILS):
            with contextlib.suppress(TooManySessions):
                return await self._calls.begin(call)
            async with self._making_room:  # one after the other, or all would give up the same call
                of_caller = False
                for _ in range(MAKE_ROOM_MOST):
                    try:
                        return await self._calls.begin(call)
                    except TooManySessions as full:
                        of_caller = full.of_caller
                    if not await self._calls.make_room(call.caller) and not await self._give_up_round(call.caller):
                        break
        if of_caller:
            raise Refused(Refusal.TOO_MANY_TASKS, limit=self._settings.max_principal_tasks)
        raise Refused(Refusal.TOO_MANY_TASKS_IN_ALL, limit=self._settings.max_tasks)

    async def _give_up_round(self, caller: Caller) -> bool:
        """Cancel the call of a caller that has waited longest here for what its client was asked by a round, and whose
        client may never come again. Tells whether there was one."""
        rounds = [session for session in self._access.sessions if session.asks_by_round]
        own = [session for session in rounds if (session.record.owner, session.record.address) == caller]
        if not own:
            return False
        record = min(own, key=attrgetter("seen")).record
        with self._access.refusing(Refusal.STORE_FAILS):
            await self._known.cancel_call(record, "its client did not answer, and there was no room for others")
            await self._calls.wait(record, attrgetter("is_over"), seconds=GIVEN_UP_SECONDS)
        sentence = "a call whose client was asked something was given up for newer ones of its caller"
        self._context.peers.log_event(logging.WARNING, "round.given_up", sentence, session=record.id[:8])
        return True

    # A call that runs here

    async def _show(
        self,
        asked: ModernRequest,
        session: Session,
        call: Call,
        after: float | None,
        response: EventStream,
    ) -> None:
        has_key = session.record.initialized
        try:
            with session.in_use(), call.stream.pinned():
                self._access.credentials.bring(session.id, asked.http.scope)
                ending = await self._read(asked, session, call, after, response, begins=True)
                if ending is Ending.LATE and not await self._end_late(session, call, response):
                    # The store fails, and cannot keep what a handle stands for: the answer itself is waited for.
                    after, ending = None, await self._read(asked, session, call, None, response)
                match ending:
                    case Ending.WRITTEN | Ending.LATE:
                        pass
                    case _ if await self._answer_unkept(session, call, response):
                        pass
                    case Ending.LEFT:
                        await self._on_left(session, call)
                    case _ if after is not None and await self._hand_out(session, call, response):
                        pass
                    case Ending.ASKED:
                        await self._round(session, call, response)
                    case _:
                        await self._known.say_stopped(asked, response, is_kept=has_key)
        finally:
            self._calls.leave(session)

    async def _read(
        self,
        asked: ModernRequest,
        session: Session,
        call: Call,
        after: float | None,
        response: EventStream,
        *,
        begins: bool = False,
    ) -> Ending:
        """Show a call to its client, on from where the last reader was. `begins`: its tool runs from now on."""
        hub, stream = self._context.hub, call.stream
        connection = CallReader(response, token=progress_token(asked.request) is not None)
        cursor = stream.readers.delivered
        reader = Reader(
            hub,
            stream,
            SessionHistory(session),
            cursor=cursor,
            arrival=hub.arrive(),
            caller=session.link.calls.caller,
            frame=connection.frame,
        )
        hub.attach(reader)
        if begins:
            session.link.start(call, asked.http)
        self._shown.add(connection)
        try:
            return await connection.read(reader, after=after)
        finally:
            self._shown.discard(connection)

    async def _end_late(self, session: Session, call: Call, response: EventStream) -> bool:
        """A call takes longer than its client waits: give a handle, unless the answer is there by now. Tells whether
        the client has the one or the other."""
        return await self._answer_unkept(session, call, response) or await self._hand_out(session, call, response)

    async def _answer_unkept(self, session: Session, call: Call, response: EventStream) -> bool:
        """Give the answer that came in the same moment in which its reader ended, and that is not kept. Tells whether
        there is one: none, if another process has taken the call over."""
        finals = call.stream.tail.finals
        if session.record.initialized or not call.stream.is_over or not finals:
            return False
        await response.answer(finals[-1].payload)
        return True

    async def _on_left(self, session: Session, call: Call) -> None:
        """The client closed the connection: it cancels the call by that, unless it can ask for it again."""
        if session.record.initialized:
            return
        session.link.cancel(call.request.id, incarnation=1, params={"reason": "the client has left"})

    async def _hand_out(self, session: Session, call: Call, response: EventStream) -> bool:
        """Give the client a handle in place of the answer, if the store has what it stands for. Tells whether."""
        try:
            await session.show_to_client()
        except StoreError:
            return False
        if self._context.journal.state is LogState.DEGRADED:
            return False
        with self._access.refusing(Refusal.STORE_FAILS):
            facts = await self._calls.facts(session.record)
        if facts is None:
            raise Refused(Refusal.NO_TASK)
        self._context.counters.tasks_handed_out += 1
        view = handle_view(self._known.view(facts))
        await response.result(call.request.id, self._known.stamped({"resultType": "task", **view}))
        return True

    async def _round(self, session: Session, call: Call, response: EventStream) -> None:
        """Ask a client without tasks what its call wants to know; it comes again with the answers."""
        with self._access.refusing(Refusal.STORE_FAILS):
            await session.show_to_client()
            facts = await self._calls.facts(session.record)
        await self._known.write_round(call.request.id, session.record, facts, response)

    def hand_out(self) -> None:
        """The process is about to stop: clients that take handles get theirs now, and go on elsewhere."""
        for connection in list(self._shown):
            connection.hand_out()

    def end_all(self) -> None:
        """The process stops: answer the requests that wait for calls of others, and run nothing more."""
        self._ended = True
        self._known.end_all()

    async def cancel(self, asked: ModernRequest, receive: Receive, send: Send) -> None:
        """Cancel the call with a key."""
        given = asked.params.get("key")
        if not is_key(given):
            raise Refused(Refusal.BAD_KEY, where="key", limit=MAX_KEY, seen=repr(given))
        with self._access.refusing(Refusal.STORE_FAILS):
            record = await self._calls.find(self._names(asked, given)[0], asked.owner)
            if record is not None:
                await self._known.cancel_call(record, "it was cancelled by its key")
            elif await self._calls.given_up(self._names(asked, given)[0], asked.owner) is None:
                raise Refused(Refusal.NO_KEY)
        response = EventStream(receive, send, streams=False)
        await response.result(asked.request.id, self._known.stamped({"resultType": "complete"}))

    # Rounds

    async def _go_on(self, asked: ModernRequest, handle: str, response: EventStream) -> None:
        """A further round of a call: its client brings what it was asked for."""
        with self._access.refusing(Refusal.STORE_UNREADABLE):
            record = await self._calls.find(handle, asked.owner)
            row = None if record is None else await self._calls.row(record)
        begun = {name: value for name, value in asked.params.items() if name != "inputResponses"}
        if record is None or row is None or row.digest != call_digest(asked.request.method, begun):
            raise Refused(Refusal.BAD_STATE)
        await self._known.take_responses(record, asked)
        await self._known.join(asked, record, None, response, gone=Refusal.BAD_STATE)


def _check_param_headers(asked: ModernRequest, tool: JsonObject) -> InboundLadderRejection | None:
    arguments = asked.params.get("arguments") or {}
    if not isinstance(arguments, Mapping):
        return None
    return validate_mcp_param_headers(tool.get("inputSchema"), arguments, asked.http.headers)
