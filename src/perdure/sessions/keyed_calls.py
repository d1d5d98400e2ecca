"""Joins the requests of sessions that name the same key to one call.

The first request with a key is a call of its session like all others, but the id of its stream is made of principal and
key, so that one stream at most exists for them. A later request, in any session of the principal, has a row and a
stream of its own, and is answered with the answer of the first. Like every read it goes on elsewhere if its process
dies, so each of the two resumes as any call does.

The stream ends with its session, or with its time. A record of the key outlives it (`RecordKind.KEY`), because a key
that is forgotten too early lets its call run twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from perdure._core.codes import ANSWER_GIVEN_UP
from perdure._core.durable_calls import call_digest, key_names
from perdure._core.envelope import KEY
from perdure._core.ids import RecordKind, SessionId, StreamId
from perdure._core.jsonrpc import Request, error_payload
from perdure._core.states import SessionState
from perdure.errors import PerdureError, StoreError
from perdure.log.chores import start
from perdure.log.nodes import mail_to
from perdure.sessions.call_quota import ALL, CallQuota
from perdure.sessions.calls_by_id import cancellation, final_answer, is_waiting, last_progress
from perdure.sessions.ledger import Call, encode
from perdure.store.interface import stream_by_id
from perdure.store.records import SessionRecord
from perdure.store.steps import ChangeSession, PutSession

if TYPE_CHECKING:
    from perdure._core.limits import Caller
    from perdure.sessions.context import ServerContext
    from perdure.sessions.runtime_link import RuntimeLink

MAX_KEYS = 10_000_000
"""Keys that are kept of calls whose answers may be gone, about 300 bytes each on disk, until `task_ttl` has passed.
Beyond, new calls are refused: to forget a key before its time would let its call run twice."""

KEY_SHARE = 10
"""A caller may have a tenth of all keys, so that no caller uses up the room of all others."""

GIVEN_UP = "This call has ended, and does not run again; its answer is no longer kept"


class TooManyKeys(Exception):
    """As many keys are kept as may be, so no answer of a call can be given up."""

    def __init__(self, limit: int) -> None:
        self.limit = limit


class KeyTaken(Exception):
    """The key belongs to a call with another tool or other arguments."""


class AnswerGone(Exception):
    """The call of the key has ended, and its answer is no longer kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallKey:
    """The key of a request in a session, in the form in which the store knows it."""

    record: SessionId
    stream: StreamId
    digest: bytes
    is_taken: bool = False
    """The call exists: the request is joined to it."""
    waits_in: SessionId | None = None
    """The session of a call that waits for its principal."""


class KeyedCalls:
    """The calls with a key in the sessions of this process, and the requests that were joined to one."""

    def __init__(self, secret: bytes, clock: Callable[[], float]) -> None:
        """`secret`: of the store; the ids of calls with a key are made with it."""
        self.secret = secret
        self._keys = CallQuota(MAX_KEYS, clock)
        self._own_keys = CallQuota(MAX_KEYS // KEY_SHARE, clock)
        self._beginning: dict[StreamId, asyncio.Lock] = {}
        self._waiting = Counter[StreamId]()
        """Requests that begin the call of a key, or wait until they may."""
        self._running: set[StreamId] = set()
        """Streams of calls with a key that run here."""

    def names(self, owner: str, key: str) -> tuple[SessionId, StreamId]:
        return key_names(self.secret, owner, key, None)

    # Before a request is written

    @contextlib.asynccontextmanager
    async def one_at_a_time(self, stream: StreamId) -> AsyncIterator[None]:
        """Begin the call of a key alone in this process: the store does not refuse a stream to its own writer."""
        lock = self._beginning.setdefault(stream, asyncio.Lock())
        self._waiting[stream] += 1
        try:
            async with lock:
                yield
        finally:
            self._waiting[stream] -= 1
            if not self._waiting[stream]:
                del self._waiting[stream], self._beginning[stream]

    def is_running(self, stream: StreamId) -> bool:
        return stream in self._running

    async def find(self, context: ServerContext, owner: str, request: Request) -> CallKey:
        """Look whether the call of a request's key exists. Raises `KeyTaken`, `AnswerGone` and `StoreError`."""
        record_id, stream_id = self.names(owner, str(request.meta.get(KEY)))
        key = CallKey(record=record_id, stream=stream_id, digest=call_digest(request.method, request.params or {}))
        store, record = context.store, None
        if (stream := await stream_by_id(store, stream_id)) is None:
            if (record := await store.session(record_id)) is None:
                return key
            stream = await stream_by_id(store, stream_id)  # another node may have begun the call between the two reads
        rows = () if stream is None else await store.calls(stream.session, stream=stream_id)
        if stream is None or not rows:
            raise KeyTaken if record is not None and record.digest != key.digest else AnswerGone
        if rows[0].digest != key.digest:
            raise KeyTaken
        return replace(key, is_taken=True, waits_in=stream.session if is_waiting(rows[0]) else None)

    async def check_room(self, context: ServerContext, caller: Caller) -> None:
        """Raise `TooManyKeys` if no more keys may be kept, of this caller or of all."""

        async def count(caller: Caller | None = None) -> int:
            return sum((await context.store.count_states(RecordKind.KEY, caller)).values())

        of_caller: Callable[[], Awaitable[int]] = lambda: count(caller)  # noqa: E731
        if not await self._own_keys.has_room(caller, of_caller) or not await self._keys.has_room(ALL, count):
            raise TooManyKeys(self._own_keys.limit)

    # A call that has a key

    def keep(self, context: ServerContext, session: SessionRecord, key: CallKey) -> None:
        """Keep the key beyond the stream of its call, which is written."""
        now = context.clock()
        record = SessionRecord(
            id=key.record,
            owner=session.owner,
            address=session.address,
            state=SessionState.DORMANT,
            is_task=True,
            standalone=StreamId(""),
            created=now,
            active=now,
            kind=RecordKind.KEY,
            digest=key.digest,
            revision=1,  # as that of no call that begins: a durable call of this key is refused
        )
        context.put(PutSession(record=record))

    def on_answered(self, link: RuntimeLink, call: Call) -> None:
        """A call is answered: the time of its key begins."""
        if call.stream.id in self._running and isinstance(key := call.request.meta.get(KEY), str):
            record = self.names(link.keeper.record.owner, key)[0]
            link.context.put(ChangeSession(session=record, active=link.context.clock()))

    def on_settled(self, stream: StreamId) -> bool:
        """A stream has left memory. Returns whether requests may wait for it because of its key."""
        has_key = stream in self._running
        self._running.discard(stream)
        return has_key

    def take(self, link: RuntimeLink, call: Call) -> bool:
        """Look at a call that is about to run. Returns whether it is answered here, with the answer of another one."""
        key = call.request.meta.get(KEY)
        if not isinstance(key, str) or link.keeper.is_durable_call:
            return False
        stream = self.names(link.keeper.record.owner, key)[1]
        if stream == call.stream.id:
            self._running.add(stream)
            return False
        link.answer_here(call, self._answer(link, call, stream))
        return True

    # A request that was joined to a call

    def on_cancelled(self, link: RuntimeLink, call: Call) -> None:
        """The client cancels a request; with one that was joined to a call, it cancels that call."""
        if isinstance(key := call.request.meta.get(KEY), str):
            stream = self.names(link.keeper.record.owner, key)[1]
            if stream != call.stream.id:
                start(_cancel(link.context, stream))

    async def _answer(self, link: RuntimeLink, call: Call, stream_id: StreamId) -> bytes:
        """Wait for the end of a call, at whatever node it runs, and show its progress."""
        context, shown = link.context, None
        with context.waiters.watch(stream_id) as watch:
            while True:
                with contextlib.suppress(StoreError):  # it may come back
                    stream = await stream_by_id(context.store, stream_id)
                    if stream is None:
                        return error_payload(call.request.id, ANSWER_GIVEN_UP, GIVEN_UP)
                    if stream.sealed:
                        if (final := await final_answer(context.store, stream)) is None:
                            return error_payload(call.request.id, ANSWER_GIVEN_UP, GIVEN_UP)
                        return encode({**json.loads(final.payload), "id": call.request.id})
                    said = None if call.token is None else await last_progress(context.store, stream)
                    if said is not None and said != shown:
                        link.show_progress(call, shown := said)
                await watch.again()


async def _cancel(context: ServerContext, stream_id: StreamId) -> None:
    """Cancel the call of a key, at whatever node it runs."""
    with contextlib.suppress(PerdureError):  # as any cancellation, it may come too late
        stream = await stream_by_id(context.store, stream_id)
        if stream is None or stream.sealed:
            return
        for row in await context.store.calls(stream.session, stream=stream_id):
            await context.journal.write(*mail_to([stream.node], cancellation(stream, row, by="key")))
