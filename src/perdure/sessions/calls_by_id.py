"""Finds, follows, lists and cancels calls of both eras by the ids that their callers were given.

The id of a session's call is that of its stream, the id of a durable call that of its record. Only the store is read,
so it does not matter at which node a call runs.
"""

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from perdure._core import early_answers as texts
from perdure._core import heartbeats, mail, splice
from perdure._core.early_answers import ListedCall, OwnTools
from perdure._core.envelope import SERVER
from perdure._core.eras import result_down, result_up
from perdure._core.ids import Kind, RecordKind, SessionId, parse_session_id, parse_stream_id
from perdure._core.jsonrpc import JsonObject
from perdure._core.limits import Caller
from perdure._core.states import CallState
from perdure.errors import NodeGone, StoreError
from perdure.log.nodes import mail_to
from perdure.sessions.context import ServerContext
from perdure.sessions.ledger import encode
from perdure.store.interface import Store, paged, stream_by_id
from perdure.store.records import AskRecord, CallRecord, Event, SessionRecord, StreamRecord
from perdure.store.steps import Reached

LISTED_MOST = 20
"""Calls that are listed, the newest: a model reads all of them."""

SEARCHED_MOST = 100
"""Sessions, and durable calls, in which a principal's calls are searched, the newest: each takes some reads."""

RESUME = "perdure.resume"
"""In the scope of an HTTP request: runs the calls of a session again that wait for the principal of the request."""


class KnownCall(NamedTuple):
    """A call of a caller's own, as it was read at one moment."""

    record: SessionRecord
    stream: StreamRecord
    row: CallRecord

    @property
    def id(self) -> str:
        return self.record.id if self.is_durable_call else self.stream.id

    @property
    def is_durable_call(self) -> bool:
        return self.record.kind is RecordKind.CALL


@dataclass(frozen=True, kw_only=True, slots=True)
class CallProgress:
    """A running call's latest progress and open asks."""

    progress: JsonObject | None
    asks: Mapping[str, bytes]
    """Its open questions, by their ids."""


async def find_answered(store: Store, owner: str, wanted: object) -> KnownCall | None:
    """A session's call of the owner's own that was answered early. A foreign one is treated as one that does not
    exist."""
    found = await _find_in_session(store, owner, wanted)
    return None if found is None or not found.stream.answered else found


async def _find_in_session(store: Store, owner: str, wanted: object) -> KnownCall | None:
    """A session's call of the owner's own, whether it was answered early or not."""
    named = parse_stream_id(wanted)
    stream = None if named is None else await stream_by_id(store, named)
    if stream is None or stream.kind is not Kind.CALL:
        return None
    record = await store.session(stream.session)
    rows = await store.calls(stream.session, stream=stream.id)
    if record is None or not record.is_own(owner, RecordKind.SESSION):
        return None
    return KnownCall(record, stream, rows[0]) if len(rows) == 1 and rows[0].method == "tools/call" else None


def cancellation(stream: StreamRecord, row: CallRecord, *, by: str) -> mail.Cancelled:
    """Cancels the call itself: its request may have an answer. `by`: what its client has named."""
    params = {"requestId": row.request_id, "reason": f"it was cancelled by its {by}", "_meta": {texts.CALL: stream.id}}
    return mail.Cancelled(session=stream.session, incarnation=row.incarnation, request_id=row.request_id, params=params)


async def final_answer(store: Store, stream: StreamRecord) -> Event | None:
    """The final answer of a call that has a stream of its own: the last event, and after the early answer."""
    start = max(stream.last - 1, stream.answered)
    events = paged(lambda after: store.read(stream.id, after=max(after, start), limit=1_000))
    finals = [event async for event in events if event.final]
    return finals[-1] if finals else None


async def last_progress(store: Store, stream: StreamRecord) -> JsonObject | None:
    """The params of the last progress that a call has reported, if that is not long ago."""
    recent = heartbeats.RECENT
    events = await store.read(stream.id, after=max(0, stream.last - recent), limit=recent)
    return heartbeats.last_progress([event.payload for event in events])


class CallsById:
    """The calls on the log. Every method that reads or writes raises `StoreError`."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    @property
    def unknown(self) -> JsonObject:
        settings = self._context.settings
        return texts.unknown_call(min(settings.task_ttl, settings.replay_window))

    # Finding

    async def find(self, wanted: object, owner: str, *, session: SessionId | None = None) -> KnownCall | None:
        """A call of the caller's own that it was given the id of, or that it could list: one of its principal's, or of
        its `session`. A foreign one is treated as one that does not exist."""
        return await self._context.nodes.found(partial(self._find, wanted, owner, session))

    async def _find(self, wanted: object, owner: str, session: SessionId | None) -> KnownCall | None:
        store = self._context.store
        if (record_id := parse_session_id(wanted)) is None:
            found = await _find_in_session(store, owner, wanted)
            # Its caller was given the id with an early answer, or by a list, which shows the calls of its principal and
            # of its session.
            is_shown = found is not None and (found.stream.answered or owner or found.record.id == session)
            return found if is_shown else None
        record = await store.session(record_id)
        if record is None or not record.is_task or not record.is_own(owner, RecordKind.CALL):
            return None
        rows = await store.calls(record_id)
        stream = await stream_by_id(store, rows[0].stream) if rows else None
        return None if stream is None else KnownCall(record, stream, rows[0])

    async def follow(
        self, wanted: object, owner: str, *, seconds: float, session: SessionId | None = None
    ) -> AsyncGenerator[KnownCall | None]:
        """Yield a call as it is, and again after each change, until it has ended, the time has passed, or this process
        stops. `None` if it does not exist."""
        waiters, until = self._context.waiters, asyncio.get_running_loop().time() + seconds
        found = await self.find(wanted, owner, session=session)
        if found is None:
            yield None
            return
        with waiters.watch(found.stream.id, until=until) as watch:
            while True:
                found = await self.find(wanted, owner, session=session)
                yield found
                if found is None or found.stream.sealed or waiters.is_over or not await watch.again():
                    return

    # Describing

    async def progress(self, call: KnownCall) -> CallProgress:
        store, stream = self._context.store, call.stream
        progress = await last_progress(store, stream)
        asks = [ask for ask in await store.asks(stream.session) if _is_of(call, ask)]
        return CallProgress(progress=progress, asks={ask.id: ask.request for ask in asks})

    async def outcome(self, call: KnownCall, server_info: JsonObject | None) -> bytes:
        """The result of a call that has ended, as JSON: its tool's own, or a text. `server_info`: the server's entry in
        results of 2026-07-28, if the caller speaks that."""
        stream = call.stream
        final = await final_answer(self._context.store, stream)
        response = None if final is None else final.payload.decode()
        error = None if response is None else splice.cut(response, "error")
        result = ("" if response is None else splice.cut(response, "result")) or "{}"
        if response is None:
            result = encode(self.unknown).decode()
        elif error is not None:
            result = encode(texts.error_for_model(call.row.name, splice.decode(error))).decode()
        elif splice.cut(result, "resultType") == '"input_required"':
            result = encode(texts.unanswered_round(call.row.name)).decode()
        if server_info is not None and splice.cut(result, "resultType") is None:
            result = result_up("tools/call", result, server_info[SERVER])
        elif server_info is None and call.is_durable_call:
            result = result_down("tools/call", result)
        return result.encode()

    def fetched(self, call: KnownCall) -> None:
        """The caller has got the end of a call: it is not listed again."""
        stream = call.stream
        self._context.put(Reached(stream=stream.id, generation=stream.generation, through=stream.last))

    async def listed(self, owner: str, session: SessionId | None, names: Collection[str]) -> JsonObject:
        """List a known caller's calls: those that run, and those that have ended and whose end it has not
        seen. `names`: of Perdure's own tools."""
        store, calls = self._context.store, []
        records = [] if session is None else [await store.session(session)]
        if owner:
            for kind in (RecordKind.SESSION, RecordKind.CALL):
                records += await store.newest_of(Caller(owner), kind=kind, limit=SEARCHED_MOST)
        for record in {record.id: record for record in records if record is not None}.values():
            for stream in await store.streams(record.id):
                # Of a call whose reader came to the end, nothing is noted.
                is_unseen = stream.delivered < stream.last if stream.answered else stream.unread
                if stream.kind is not Kind.CALL or (stream.sealed and not is_unseen):
                    continue
                rows = [row for row in await store.calls(record.id, stream=stream.id) if row.method == "tools/call"]
                known = KnownCall(record, stream, rows[0]) if len(rows) == 1 else None
                if known is not None and known.row.name not in names:
                    calls.append(known)
        listed = []
        for call in sorted(calls, key=lambda call: call.stream.opened, reverse=True)[:LISTED_MOST]:
            stream, row, ended, waits = call.stream, call.row, None, False
            if stream.sealed:
                last = await store.read(stream.id, after=stream.last - 1, limit=1)
                ended = last[-1].time if last else None
            else:
                waits = any(_is_of(call, ask) for ask in await store.asks(call.record.id))
            listed.append(
                ListedCall(tool=row.name, id=call.id, began=stream.opened, ended=ended, state=row.state, waits=waits)
            )
        return texts.call_list(listed, self._context.clock())

    def still_running(
        self,
        call: KnownCall,
        said: CallProgress,
        names: OwnTools,
        *,
        seconds: float,
        asks: bool,
        is_elsewhere: bool,
    ) -> JsonObject:
        """What a wait of so many seconds is answered while its call runs. `is_elsewhere`: its client is not asked what
        the call asks."""
        return texts.still_running(
            call.row.name,
            call.id,
            age=self._context.clock() - call.stream.opened,
            seconds=seconds,
            names=names,
            progress=said.progress,
            asks=asks,
            is_elsewhere=is_elsewhere,
        )

    # Acting

    async def list_or_cancel(
        self, name: object, wanted: object, names: OwnTools, owner: str, session: SessionId | None = None
    ) -> JsonObject:
        """Serve one of Perdure's own tools, unless it waits."""
        try:
            if name == names.cancel:
                found = await self.find(wanted, owner, session=session)
                return self.unknown if found is None else await self.cancel(found)
            if owner or session is not None:
                return await self.listed(owner, session, names)
            return texts.failure(texts.GIVE_ID)
        except StoreError:
            return texts.failure(texts.STORE_FAILS)

    async def cancel(self, call: KnownCall) -> JsonObject:
        """Cancel a call, at whatever node it runs or waits."""
        row, stream = call.row, call.stream
        if not stream.sealed:
            try:
                await self._context.journal.write(*mail_to([stream.node], cancellation(stream, row, by="id")))
            except NodeGone:
                return texts.failure(texts.NOT_NOW)
        return texts.cancelling(row.name, is_over=stream.sealed)


def _is_of(call: KnownCall, ask: AskRecord) -> bool:
    """Whether a question is one of this call's. It may stand on the stream of a wait."""
    return call.is_durable_call or ask.call == call.stream.id


def is_waiting(row: CallRecord) -> bool:
    """Whether a call runs again only with a request of its principal."""
    return row.state is CallState.WAITING and bool(row.principal)


async def resume_if_waiting(row: CallRecord, origin: object) -> None:
    """Let a call that waits for its principal run again with the credentials of a request, in whatever session that
    came."""
    resume = getattr(origin, "scope", {}).get(RESUME)
    if is_waiting(row) and resume is not None:
        await resume(row.session, origin)
