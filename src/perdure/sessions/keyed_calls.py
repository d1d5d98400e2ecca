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
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from perdure._core import heartbeats, mail
from perdure._core.codes import ANSWER_GIVEN_UP
from perdure._core.durable_calls import call_digest, key_names
from perdure._core.envelope import KEY
from perdure._core.ids import RecordKind, SessionId, StreamId
from perdure._core.jsonrpc import error_payload
from perdure._core.states import CallState, SessionState
from perdure.errors import PerdureError, StoreError
from perdure.log.chores import cancel_all
from perdure.log.peers import mail_to
from perdure.sessions.call_quota import ALL, CallQuota
from perdure.sessions.ledger import Call, encode
from perdure.store.interface import paged, stream_by_id
from perdure.store.records import SessionRecord, StreamRecord
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

LOOK_AGAIN = 2.0
"""Seconds after which a request that follows a call reads again: for its progress, and in case it missed a hint."""

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


def has_key(params: Mapping[str, Any] | None) -> bool:
    """Whether a request gives a key, of whatever form."""
    meta = (params or {}).get("_meta")
    return isinstance(meta, dict) and KEY in meta


def key_in(params: Mapping[str, Any] | None) -> object:
    """The key of a request, unchecked; `None` without one."""
    meta = (params or {}).get("_meta")
    return meta.get(KEY) if isinstance(meta, dict) else None


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
        self._following: dict[Call, asyncio.Task[None]] = {}
        self._cancelling: set[asyncio.Task[None]] = set()

    async def aclose(self) -> None:
        await cancel_all([*self._following.values(), *self._cancelling])

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

    async def look(self, context: ServerContext, owner: str, method: str, params: Mapping[str, Any]) -> CallKey:
        """Look whether the call of a request's key exists. Raises `KeyTaken`, `AnswerGone` and `StoreError`."""
        record_id, stream_id = self.names(owner, str(key_in(params)))
        key = CallKey(record=record_id, stream=stream_id, digest=call_digest(method, params))
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
        waits = rows[0].state is CallState.WAITING and bool(owner)
        return replace(key, is_taken=True, waits_in=stream.session if waits else None)

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
        if call.stream.id in self._running and isinstance(key := key_in(call.request.params), str):
            record = self.names(link.keeper.record.owner, key)[0]
            link.context.put(ChangeSession(session=record, active=link.context.clock()))

    def on_settled(self, stream: StreamId) -> bool:
        """A stream has left memory. Returns whether requests may wait for it because of its key."""
        has_key = stream in self._running
        self._running.discard(stream)
        return has_key

    def take(self, link: RuntimeLink, call: Call) -> bool:
        """Look at a call that is about to run. Returns whether it is answered here, with the answer of another one."""
        key = key_in(call.request.params)
        if not isinstance(key, str) or link.keeper.is_durable_call:
            return False
        stream = self.names(link.keeper.record.owner, key)[1]
        if stream == call.stream.id:
            self._running.add(stream)
            return False
        self._following[call] = task = asyncio.create_task(link.answer_here(call, self._answer(link, call, stream)))
        task.add_done_callback(lambda _: self._following.pop(call, None))
        return True

    # A request that was joined to a call

    def stop(self, link: RuntimeLink, call: Call, *, cancels: bool) -> bool:
        """Stop a request that is joined to a call. `cancels`: its client cancels the call. Returns whether it is."""
        if (following := self._following.get(call)) is None:
            return False
        following.cancel()
        key = key_in(call.request.params)
        if cancels and isinstance(key, str):
            stream = self.names(link.keeper.record.owner, key)[1]
            task = asyncio.create_task(_cancel(link.context, stream))
            self._cancelling.add(task)
            task.add_done_callback(self._cancelling.discard)
        return True

    async def _answer(self, link: RuntimeLink, call: Call, stream_id: StreamId) -> bytes:
        """Wait for the end of a call, at whatever node it runs, and show its progress."""
        context, shown = link.context, 0
        with context.waiters.watch(stream_id) as changed:
            while True:
                changed.clear()
                with contextlib.suppress(StoreError):  # it may come back
                    stream = await stream_by_id(context.store, stream_id)
                    if stream is None:
                        return error_payload(call.request.id, ANSWER_GIVEN_UP, GIVEN_UP)
                    if stream.sealed:
                        return await _copy_of_answer(context, call, stream)
                    shown = await self._show_progress(link, call, stream, shown)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_AGAIN):
                        await changed.wait()

    async def _show_progress(self, link: RuntimeLink, call: Call, stream: StreamRecord, shown: int) -> int:
        """Show the last progress of the call. Returns how far its stream was read."""
        if call.token is not None and stream.last > shown:
            events = paged(lambda after: link.context.store.read(stream.id, after=max(after, shown), limit=1_000))
            said = [params async for event in events if (params := heartbeats.progress_params(event.payload))]
            if said and said[-1].get("progress") != heartbeats.FIRST:
                link.notify(heartbeats.PROGRESS, {**said[-1], "progressToken": call.number}, call=call.number)
        return stream.last


async def _copy_of_answer(context: ServerContext, call: Call, stream: StreamRecord) -> bytes:
    events = paged(lambda after: context.store.read(stream.id, after=after, limit=1_000))
    finals = [event.payload async for event in events if event.final]
    if not finals:
        return error_payload(call.request.id, ANSWER_GIVEN_UP, GIVEN_UP)
    return encode({**json.loads(finals[-1]), "id": call.request.id})


async def _cancel(context: ServerContext, stream_id: StreamId) -> None:
    """Cancel the call of a key, at whatever node it runs."""
    with contextlib.suppress(PerdureError):  # as any cancellation, it may come too late
        stream = await stream_by_id(context.store, stream_id)
        if stream is None or stream.sealed:
            return
        for row in await context.store.calls(stream.session, stream=stream_id):
            params = {"requestId": row.request_id, "reason": "it was cancelled by its key"}
            cancelled = mail.Cancelled(
                session=stream.session, incarnation=row.incarnation, request_id=row.request_id, params=params
            )
            await context.journal.write(*mail_to([stream.node], cancelled))
