"""Operations on durable calls of any node: wait for them, answer what they ask, cancel them, let them run again."""

import contextlib
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from perdure._core import mail
from perdure._core.durable_calls import TaskFacts, task_view
from perdure._core.jsonrpc import JsonObject, Response
from perdure._core.states import CallState
from perdure.sessions.context import ServerContext
from perdure.sessions.durable_calls import DurableCalls
from perdure.sessions.registry import SessionRegistry
from perdure.sessions.session import Session
from perdure.store.records import SessionRecord

ANSWERED_SECONDS = 1.0
"""How long a request waits until its answers have arrived at the node that asked. A client asks its user again for
every ask that the next poll still shows, at whatever node."""


class WaitingCalls(Protocol):
    """The calls that wait for their principal at this node."""

    async def resume(self, session: Session, origin: object) -> None: ...

    async def cancel(self, cancelled: mail.Cancelled) -> None: ...


class CallAccess:
    """The durable calls on the log, whichever node runs them. Every method raises `StoreError`."""

    def __init__(
        self, context: ServerContext, sessions: SessionRegistry, calls: DurableCalls, waiting: WaitingCalls
    ) -> None:
        self._context = context
        self._sessions = sessions
        self.calls = calls
        self._waiting = waiting

    async def follow(self, record: SessionRecord, *, answered: Collection[str], seconds: float) -> TaskFacts | None:
        """Wait until a call has ended or asks its client something, for some time at most. `answered`: asks that the
        client has answered, although the node that asked may not have the answers yet. `None`: the call is gone."""
        facts = await self.calls.wait(record, partial(needs_its_client, answered=answered), seconds=seconds)
        if facts is None:
            return None
        return replace(facts, asks={name: ask for name, ask in facts.asks.items() if name not in answered})

    async def waits_for_principal(self, record: SessionRecord) -> bool:
        """Whether a call runs again only with a request of its principal."""
        if not record.owner or self.calls.is_here(record):
            return False
        row = await self.calls.row(record)
        return row is not None and row.state is CallState.WAITING

    async def run_again(self, record: SessionRecord, origin: object) -> None:
        """Let a call go on that waits for its principal: the request `origin` brings the credentials."""
        async with self._loaded(record) as session:
            if session is not None:
                await self._waiting.resume(session, origin)

    async def cancel(self, record: SessionRecord, reason: str) -> None:
        """Cancel a call, wherever it runs or waits; one that has ended stays as it is."""
        row = await self.calls.row(record)
        if row is None:
            return
        params = {"requestId": row.request_id, "reason": reason}
        cancelled = mail.Cancelled(session=record.id, incarnation=1, request_id=row.request_id, params=params)
        async with self._loaded(record) as session:
            if session is not None:
                await session.cancel_call(cancelled, self._waiting.cancel)

    async def answer(self, record: SessionRecord, responses: Mapping[str, Any], origin: object) -> None:
        """Hand the client's answers to the node that asked."""
        async with self._loaded(record) as session:
            for name, result in responses.items() if session is not None else ():
                assert session is not None
                answer = Response(id=name, raw={"jsonrpc": "2.0", "id": name, "result": result})
                await session.receive(answer, origin, size=0, cancel_waiting=self._waiting.cancel)

    async def wait_answered(self, record: SessionRecord, names: Collection[str]) -> None:
        """Wait, for a short time, until the node that asked has the answers."""
        await self.calls.wait(record, lambda facts: facts.asks.keys().isdisjoint(names), seconds=ANSWERED_SECONDS)

    def view(self, facts: TaskFacts) -> JsonObject:
        """A call as its client sees it as a task."""
        settings = self._context.settings
        return task_view(facts, now=self._context.clock(), ttl=min(settings.task_ttl, settings.replay_window))

    @contextlib.asynccontextmanager
    async def _loaded(self, record: SessionRecord) -> AsyncIterator[Session | None]:
        """The session of a call, in memory as long as the block runs, and for its call if that runs here."""
        session = await self._sessions.load(record.id)
        if session is None:
            yield None
            return
        try:
            with session.in_use():
                yield session
        finally:
            self._sessions.let_go(session)


def needs_its_client(facts: TaskFacts, *, answered: Collection[str] = ()) -> bool:
    """Whether a call has ended, or waits for an answer that its client has not given."""
    return facts.is_over or any(name not in answered for name in facts.asks)
