"""Tells of single calls that any node has begun, and does to them what their clients ask: waits for them, joins them,
answers what they ask, cancels them."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import replace
from functools import partial

from starlette.requests import Request as HttpRequest

from perdure._core import mail
from perdure._core.codes import STOPPING
from perdure._core.durable_calls import STATE_PREFIX, TaskFacts, handle_view, input_requests, task_view
from perdure._core.jsonrpc import JsonObject, Response, error_payload
from perdure._core.states import CallState
from perdure.http.access import SessionAccess
from perdure.http.credentials import caller_of
from perdure.http.event_stream import Ending, EventStream
from perdure.http.modern_request import ModernRequest
from perdure.http.refusals import Refusal, Refused
from perdure.runtime.own_requests import ToolCatalog
from perdure.sessions.client_messages import cancel_call
from perdure.sessions.client_messages import receive as receive_message
from perdure.sessions.durable_calls import DurableCalls
from perdure.sessions.ledger import encode, unknown_outcome
from perdure.sessions.session import Session
from perdure.store.records import SessionRecord

FIRST_SIGN = 1.0
"""Seconds until the first comment to a client that waits for a call that another request began: it shows that its
request has arrived."""

ANSWERED_SECONDS = 1.0
"""How long a request waits for the answers that it brought to arrive. Clients ask their users again for what is still
shown, at whatever node they look next."""

MAX_RESPONSES = 100
"""Answers that one request may bring: each may be looked for in the store. As many as a batch may have messages; a call
that asks for more at once is answered with several requests."""


class KnownCalls:
    """The calls that are on the log."""

    def __init__(self, access: SessionAccess, calls: DurableCalls, tools: ToolCatalog) -> None:
        self._access = access
        self._context = access.context
        self._settings = access.settings
        self._calls = calls
        self._tools = tools
        self._joined: set[asyncio.Task[None]] = set()
        """Requests that wait for a call that another one began."""

    def end_all(self) -> None:
        """The process stops: answer the requests that wait for calls of others."""
        for waiting in self._joined:
            waiting.cancel()

    async def write_round(
        self, request_id: int | str, record: SessionRecord, facts: TaskFacts | None, response: EventStream
    ) -> None:
        result: JsonObject = {"resultType": "input_required", "requestState": STATE_PREFIX + record.id}
        if facts is not None and facts.asks:
            result["inputRequests"] = input_requests(facts.asks)
        await response.result(request_id, self.stamped(result))

    async def say_stopped(self, asked: ModernRequest, response: EventStream, *, is_kept: bool) -> None:
        """The process stops, and the call is left to the next one: only a key finds it there."""
        request = asked.request
        if is_kept:
            message = "This server is stopping; ask again with the same key"
            await response.answer(error_payload(request.id, STOPPING, message), 503)
        else:
            reason = "the server is stopping"
            await response.answer(
                unknown_outcome(request.id, method=request.method, reason=reason, params=request.params), 200
            )

    async def refuse_given_up(self, text: object, owner: str, digest: bytes | None = None) -> None:
        """Say so if the answer of a caller's own call was given up. `digest`: what the request asks for, if it asks
        again."""
        with self._access.refusing(Refusal.STORE_UNREADABLE):
            key = await self._calls.given_up(text, owner)
        if key is not None:
            if digest is not None and key.result != digest:
                raise Refused(Refusal.KEY_TAKEN)
            self._context.counters.keys_given_up += 1
            raise Refused(Refusal.ANSWER_GIVEN_UP)

    # A call that another request began

    async def join(
        self,
        asked: ModernRequest,
        record: SessionRecord,
        after: float | None,
        response: EventStream,
        *,
        gone: Refusal = Refusal.STORE_UNREADABLE,
    ) -> None:
        """Wait for the answer of a call, wherever it runs; until this process stops, or the client leaves. `gone`: what
        is said if the call's time passes in this moment."""
        # What this request answers may still be on its way to the node that asked: its client is not asked that again.
        responses = asked.params.get("inputResponses")
        answered = frozenset(responses) if isinstance(responses, Mapping) else frozenset()
        waiting = asyncio.create_task(self._outcome(asked, record, after, response, answered, gone))
        self._joined.add(waiting)
        caller = caller_of(asked.owner, asked.http.scope)
        self._context.work.take(caller, asked.size)
        try:
            ending = await response.serve(waiting, end=waiting.cancel)
            if waiting.cancelled() and ending is not Ending.LEFT:
                await self.say_stopped(asked, response, is_kept=True)
        finally:
            self._joined.discard(waiting)
            self._context.work.take(caller, -asked.size)

    async def _outcome(
        self,
        asked: ModernRequest,
        record: SessionRecord,
        after: float | None,
        response: EventStream,
        answered: Collection[str],
        gone: Refusal,
    ) -> None:
        loop = asyncio.get_running_loop()
        deadline, silent = (
            None if after is None else loop.time() + after,
            min(FIRST_SIGN, self._settings.keepalive_interval),
        )
        while True:
            seconds = silent if deadline is None else max(0.0, min(silent, deadline - loop.time()))
            with self._access.refusing(Refusal.STORE_UNREADABLE):
                await self.run_again(record, asked.http)
                facts = await self._calls.wait(record, partial(needs_its_client, answered=answered), seconds=seconds)
            if facts is None:
                await self.refuse_given_up(record.id, asked.owner)
                raise Refused(gone)
            facts = replace(facts, asks={name: ask for name, ask in facts.asks.items() if name not in answered})
            if facts.is_over and facts.answer is not None:
                await response.answer(encode({**json.loads(facts.answer), "id": asked.request.id}))
                return
            if facts.is_over or (deadline is not None and (facts.asks or loop.time() >= deadline)):
                view = self.view(facts)
                await response.result(asked.request.id, self.stamped({"resultType": "task", **handle_view(view)}))
                return
            if facts.asks:
                await self.write_round(asked.request.id, record, facts, response)
                return
            await response.keep_alive()
            silent = self._settings.keepalive_interval

    async def run_again(self, record: SessionRecord, origin: HttpRequest) -> None:
        """Let a call go on that waits for its principal: this request brings the credentials."""
        if not record.owner or self._calls.is_here(record):
            return
        row = await self._calls.row(record)
        if row is not None and row.state is CallState.WAITING:
            async with self._loaded(record) as session:
                if session is not None:
                    self._access.credentials.bring(session.id, origin.scope)
                    await self._access.waiting.resume(session, origin)

    @contextlib.asynccontextmanager
    async def _loaded(self, record: SessionRecord) -> AsyncIterator[Session | None]:
        """The session of a call, in memory as long as the block runs, and for its call if that runs here."""
        session = await self._access.sessions.load(record.id)
        if session is None:
            yield None
            return
        try:
            with session.in_use():
                yield session
        finally:
            self._access.sessions.let_go(session)

    async def cancel_call(self, record: SessionRecord, reason: str) -> None:
        """Cancel a call, wherever it runs or waits; one that has ended stays as it is."""
        row = await self._calls.row(record)
        if row is None:
            return
        params = {"requestId": row.request_id, "reason": reason}
        cancelled = mail.Cancelled(session=record.id, incarnation=1, request_id=row.request_id, params=params)
        async with self._loaded(record) as session:
            if session is not None:
                await cancel_call(session, cancelled, self._access.waiting.cancel)

    async def take_responses(self, record: SessionRecord, asked: ModernRequest) -> None:
        """Hand the client's answers to the node that asked, and wait, for a short time, until it has them."""
        responses = asked.params.get("inputResponses")
        if responses is None:
            return
        if not isinstance(responses, Mapping) or not all(isinstance(value, dict) for value in responses.values()):
            raise Refused(Refusal.BAD_RESPONSES, seen=repr(responses))
        if len(responses) > MAX_RESPONSES:
            raise Refused(Refusal.TOO_MANY_RESPONSES, limit=MAX_RESPONSES, seen=len(responses))
        with self._access.refusing(Refusal.STORE_FAILS):
            async with self._loaded(record) as session:
                for name, result in responses.items() if session is not None else ():
                    assert session is not None
                    answer = Response(id=name, raw={"jsonrpc": "2.0", "id": name, "result": result})
                    cancel = self._access.waiting.cancel
                    await receive_message(session, answer, asked.http, size=0, cancel_waiting=cancel)
        with self._access.refusing(Refusal.STORE_UNREADABLE):
            names = responses.keys()
            await self._calls.wait(record, lambda facts: not names & facts.asks.keys(), seconds=ANSWERED_SECONDS)

    # What is shown

    def view(self, facts: TaskFacts) -> JsonObject:
        settings = self._settings
        return task_view(facts, now=self._context.clock(), ttl=min(settings.task_ttl, settings.replay_window))

    def stamped(self, result: JsonObject) -> JsonObject:
        return {**result, "_meta": {**(result.get("_meta") or {}), **self._tools.server_info}}


def needs_its_client(facts: TaskFacts, *, answered: Collection[str] = ()) -> bool:
    """Whether a call has ended, or waits for an answer that its client has not given."""
    return facts.is_over or any(name not in answered for name in facts.asks)
