"""Answers a session's call before it ends, where a rule says so, and serves the tools that lead to its result.

The early answer is an event on the call's own stream, which goes on behind it. The tools of Perdure's own are requests
of the session like all others: they have a row and a stream, resume, and run again elsewhere if their process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from perdure._core import early_answers as texts
from perdure._core import heartbeats, mail
from perdure._core.codes import REQUEST_CANCELLED
from perdure._core.envelope import KEY
from perdure._core.ids import Kind, StreamId, parse_stream_id
from perdure._core.jsonrpc import JsonObject
from perdure._core.settling import UpstreamCall
from perdure._core.states import CallState, CallStep, SessionState
from perdure.errors import NodeGone, StoreError
from perdure.log.chores import cancel_all
from perdure.log.peers import mail_to
from perdure.sessions.ledger import Call, encode, encode_answer, name_of
from perdure.store.interface import Store, paged, stream_by_id
from perdure.store.records import CallRecord, Event, SessionRecord, StreamRecord

if TYPE_CHECKING:
    from perdure.sessions.runtime_link import RuntimeLink

IS_READ = UpstreamCall(may_run_again=True)
"""Perdure's own tools change nothing that a second run would change again."""

LOOK_AGAIN = 2.0
"""Seconds after which a wait reads again, in case it missed a hint."""

LISTED_MOST = 20
"""Calls that the wait tool lists, the newest: a model reads all of them."""

_RECENT = 16
"""Events at the end of a stream in which the last progress is searched."""


class AnsweredCall(NamedTuple):
    """A call that was answered early."""

    stream: StreamRecord
    row: CallRecord


async def find_answered(store: Store, owner: str, wanted: object) -> AnsweredCall | None:
    """A session's call of the owner's own that was answered early. A foreign one is treated as one that does not
    exist."""
    named = parse_stream_id(wanted)
    stream = None if named is None else await stream_by_id(store, named)
    if stream is None or stream.kind is not Kind.CALL or not stream.answered:
        return None
    record = await store.session(stream.session)
    rows = await store.calls(stream.session, stream=stream.id)
    is_own = record is not None and record.owner == owner
    if record is None or not is_own or record.state is SessionState.ENDED or len(rows) != 1:
        return None
    return AnsweredCall(stream, rows[0])


def cancelled_by_id(found: AnsweredCall) -> mail.Cancelled:
    """Cancels the call itself: its request has an answer."""
    stream, row = found
    params = {"requestId": row.request_id, "reason": "it was cancelled by its id", "_meta": {texts.CALL: stream.id}}
    return mail.Cancelled(session=stream.session, incarnation=row.incarnation, request_id=row.request_id, params=params)


async def final_answer(store: Store, stream: StreamRecord) -> Event | None:
    """The final answer of a call that was answered early."""
    events = paged(lambda after: store.read(stream.id, after=max(after, stream.answered), limit=1_000))
    finals = [event async for event in events if event.final]
    return finals[-1] if finals else None


class EarlyAnswers:
    """The rules of one process, the timers of its calls, and its waits. Calls of 2026-07-28 are not concerned."""

    def __init__(self, rules: Mapping[str, float]) -> None:
        self._rules = rules
        self._served: dict[Call, asyncio.Task[None]] = {}
        """Calls of Perdure's own tools."""
        self._answering: set[asyncio.Task[None]] = set()
        self._waits: dict[StreamId, Call] = {}
        """The newest open wait for a call, of those that run here."""

    async def aclose(self) -> None:
        await cancel_all([*self._served.values(), *self._answering])

    def within(self, record: SessionRecord) -> float | None:
        """After how many seconds the client of a session is answered early, if it is."""
        return texts.time_for(self._rules, record.client_params)

    # Calls

    def take(self, link: RuntimeLink, call: Call, origin: object) -> bool:
        """Look at a call that is about to run: set its timer, or serve it if its tool is one of Perdure's own. Returns
        whether it is served here, or is passed on to the runtime later."""
        within = self.within(link.keeper.record)
        if within is None or link.keeper.is_durable_call:
            return False
        params = call.request.params or {}
        if texts.may_be_own(params.get("name")):
            self._served[call] = asyncio.create_task(self._serve(link, call, origin, within))
            return True
        meta = params.get("_meta")
        has_key = isinstance(meta, dict) and KEY in meta
        if call.stream.has_one_call and not call.stream.answered and not has_key:
            left = call.stream.opened + within - link.context.clock()
            loop = asyncio.get_running_loop()
            call.timer = loop.call_later(max(0.0, left), self._on_time, link, call, origin, within)
        return False

    def stop(self, call: Call) -> bool:
        """Stop a call that is served here. Returns whether it was."""
        task = self._served.get(call)
        if task is not None:
            task.cancel()
        return task is not None

    def wait_for(self, call: Call) -> Call | None:
        """The open wait for a call, on whose stream its client can be asked."""
        wait = self._waits.get(call.stream.id)
        return wait if wait is not None and wait.state is CallState.RUNNING else None

    def show(self, link: RuntimeLink, call: Call, body: bytes) -> bytes:
        """A result of `tools/list` as its client sees it."""
        if (within := self.within(link.keeper.record)) is None:
            return body
        page = json.loads(body)
        if (call.request.params or {}).get("cursor") is None:
            link.listed = frozenset()
        link.listed |= {str(tool.get("name")) for tool in page.get("tools") or [] if isinstance(tool, dict)}
        if page.get("nextCursor") is None:
            link.own_tools = texts.own_tools(link.listed)
        return encode(texts.listed(page, link.own_tools or texts.OwnTools(), within))

    def _on_time(self, link: RuntimeLink, call: Call, origin: object, within: float) -> None:
        if call.state is CallState.RUNNING:
            task = asyncio.create_task(self._answer(link, call, origin, within))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def _answer(self, link: RuntimeLink, call: Call, origin: object, within: float) -> None:
        names = await self._names(link, origin)
        stream = call.stream
        events: Sequence[Event] = ()
        with contextlib.suppress(StoreError):  # then its text says nothing of its progress
            events = await stream.read(after=max(0, stream.tail.last - _RECENT), limit=_RECENT)
        if call.state is not CallState.RUNNING or stream.writer is None or stream.is_sealed or stream.answered:
            return
        said = [heartbeats.progress_params(event.payload) for event in reversed(events)]
        result = texts.still_running(
            name_of(call.request.params) or "",
            stream.id,
            age=link.context.clock() - stream.opened,
            seconds=within,
            names=names,
            progress=next(filter(None, said), None),
            asks=any(ask.call is call for ask in link.asks.open.values()),
        )
        stream.append(encode_answer(call.request.id, encode(result)), early=True)

    async def _names(self, link: RuntimeLink, origin: object) -> texts.OwnTools:
        """The names of Perdure's own tools beside those of the server."""
        if link.own_tools is None:
            context = link.context
            try:
                async with asyncio.timeout(context.runtimes.answers_within):
                    tools = await context.runtimes.tools(link.keeper.record, origin)
            except Exception:  # whatever the server's handler raises: it lists nothing
                return texts.OwnTools()
            link.own_tools = texts.own_tools(tools)
        return link.own_tools

    # Perdure's own tools

    async def _serve(self, link: RuntimeLink, call: Call, origin: object, within: float) -> None:
        try:
            names, name = await self._names(link, origin), name_of(call.request.params)
            if name not in names:
                del self._served[call]
                link.pass_to_runtime(call, origin)
                return
            link.keep_call(call.number, IS_READ)  # so that it goes on elsewhere if this process dies
            result = await self._result(link, call, names, within)
        except StoreError:
            result = texts.failure(texts.STORE_FAILS)
        finally:
            self._served.pop(call, None)
        link.calls.runtime_done(call.number)
        if link.calls.answer(call, CallStep.ANSWER, encode_answer(call.request.id, encode(result))):
            link.context.counters.calls_answered += 1

    async def _result(self, link: RuntimeLink, call: Call, names: texts.OwnTools, within: float) -> JsonObject:
        given = (call.request.params or {}).get("arguments")
        wanted = given.get("call") if isinstance(given, dict) else None
        if name_of(call.request.params) == names.cancel:
            return await self._cancel(link, wanted)
        return await self._list(link) if wanted is None else await self._wait(link, call, wanted, names, within)

    async def _find(self, link: RuntimeLink, wanted: object) -> AnsweredCall | None:
        return await find_answered(link.context.store, link.keeper.record.owner, wanted)

    async def _wait(
        self, link: RuntimeLink, call: Call, wanted: object, names: texts.OwnTools, within: float
    ) -> JsonObject:
        """Wait for the end of a call, at whatever node it runs."""
        context, loop = link.context, asyncio.get_running_loop()
        deadline = loop.time() + within
        if (found := await self._find(link, wanted)) is None:
            return texts.failure(texts.UNKNOWN_CALL)
        stream_id = found.stream.id
        self._waits[stream_id] = call
        link.asks.repeat([name for name, ask in link.asks.open.items() if ask.call and ask.call.stream.id == stream_id])
        try:
            with context.waiters.watch(stream_id) as changed:
                while True:
                    changed.clear()
                    if (found := await self._find(link, wanted)) is None:
                        return texts.failure(texts.UNKNOWN_CALL)
                    if found.stream.sealed:
                        return await self._outcome(link, found)
                    if (left := deadline - loop.time()) <= 0 or context.waiters.is_over:
                        break
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(min(left, LOOK_AGAIN)):
                            await changed.wait()
        finally:
            if self._waits.get(stream_id) is call:
                del self._waits[stream_id]
        stream, store = found.stream, context.store
        events = await store.read(stream_id, after=max(0, stream.last - _RECENT), limit=_RECENT)
        said = [heartbeats.progress_params(event.payload) for event in reversed(events)]
        return texts.still_running(
            found.row.name,
            stream_id,
            age=context.clock() - stream.opened,
            seconds=within,
            names=names,
            progress=next(filter(None, said), None),
            asks=any(ask.stream in (stream_id, call.stream.id) for ask in await store.asks(stream.session)),
        )

    async def _outcome(self, link: RuntimeLink, found: AnsweredCall) -> JsonObject:
        if (final := await final_answer(link.context.store, found.stream)) is None:
            return texts.failure(texts.UNKNOWN_CALL)
        response = json.loads(final.payload)
        cancelled = response.get("error", {}).get("code") == REQUEST_CANCELLED
        return texts.result_for_model(found.row.name, response, cancelled=cancelled)

    async def _list(self, link: RuntimeLink) -> JsonObject:
        context, session = link.context, link.keeper.record.id
        streams = [stream for stream in await context.store.streams(session) if stream.answered]
        newest = sorted(streams, key=lambda stream: stream.opened, reverse=True)[:LISTED_MOST]
        lines = []
        for stream in newest:
            for row in await context.store.calls(session, stream=stream.id):
                age, state = context.clock() - stream.opened, "has ended" if stream.sealed else "still running"
                lines.append(texts.call_line(row.name, stream.id, age=age, state=state))
        return texts.call_list(lines)

    async def _cancel(self, link: RuntimeLink, wanted: object) -> JsonObject:
        if (found := await self._find(link, wanted)) is None:
            return texts.failure(texts.UNKNOWN_CALL)
        row, stream = found.row, found.stream
        if not stream.sealed:
            cancelled = cancelled_by_id(found)
            try:
                await link.context.journal.write(*mail_to([stream.node], cancelled))
            except NodeGone:
                return texts.failure(texts.NOT_NOW)
        return texts.cancelling(row.name, is_over=stream.sealed)
