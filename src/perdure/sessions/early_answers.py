"""Answers a session's call before it ends, where a rule says so, and serves the tools that lead to its result.

The early answer is an event on the call's stream; later events follow it. The tools of Perdure's own are requests
of the session like all others: they have a row and a stream, resume, and run again elsewhere if their process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from perdure._core import early_answers as texts
from perdure._core import heartbeats
from perdure._core.durable_calls import CallClient, client_of, tools_on
from perdure._core.envelope import KEY
from perdure._core.session_tasks import wants_task
from perdure._core.settling import UpstreamCall
from perdure._core.states import CallState
from perdure.errors import StoreError
from perdure.log.chores import cancel_all
from perdure.log.stream import Stream
from perdure.sessions.calls_by_id import CallsById, KnownCall, resume_if_waiting
from perdure.sessions.context import ServerContext
from perdure.sessions.ledger import Call, encode, encode_answer, name_of
from perdure.store.records import Event, SessionRecord

if TYPE_CHECKING:
    from perdure.sessions.runtime_link import RuntimeLink

OWN_CALL = UpstreamCall(may_run_again=True, own=True)
"""Perdure's own tools change nothing that a second run would change again."""

NAMES_SECONDS = 1.0
"""By how much an early answer may be late, where it is due before the server has listed its tools."""


class EarlyAnswers:
    """The rules of one process; in sessions also early answers and Perdure's own tools (for 2026-07-28: the edge)."""

    def __init__(self, rules: Mapping[str, float]) -> None:
        self._rules = rules
        self._tasks: set[asyncio.Task[None]] = set()

    async def aclose(self) -> None:
        await cancel_all(list(self._tasks))

    def within(self, record: SessionRecord) -> float | None:
        """After how many seconds the client of a session is answered early, if it is."""
        return self.at_call(client_of(record.client_params), for_host=True)

    def at_call(self, client: CallClient, *, for_host: bool) -> float | None:
        """After how many seconds a client is answered early at a call, if it is (`texts.time_at_call`)."""
        return texts.time_at_call(self._rules, client, for_host=for_host)

    def keeps(self, record: SessionRecord) -> bool:
        """Whether a durable call whose connection broke is kept: a rule applies, and its caller can list it."""
        return bool(record.owner) and self.within(record) is not None

    # Calls

    def take(self, link: RuntimeLink, call: Call, origin: object) -> bool:
        """Look at a call that is about to run: set its timer, or serve it if its tool is one of Perdure's own. Returns
        whether it is served here, or is passed on to the runtime later."""
        within = self.within(link.keeper.record)
        if within is None or link.keeper.is_durable_call:
            return False
        params = call.request.params or {}
        if texts.may_be_own(params.get("name")):
            link.answer_here(call, self._serve(link, call, origin, within))
            return True
        is_exempt = KEY in call.request.meta or wants_task(params)
        if call.stream.has_one_call and not call.stream.answered and not is_exempt:
            left = _left(link, call, within)
            if link.own_tools is None:
                left -= link.context.runtimes.answers_within  # so that their names are known in time
            answer = partial(self._answer, link, call, origin, within)
            call.timer = asyncio.get_running_loop().call_later(max(0.0, left), lambda: self._start(answer()))
        return False

    def show(self, link: RuntimeLink, call: Call, body: bytes) -> bytes:
        """A result of `tools/list` as its client sees it."""
        if (within := self.within(link.keeper.record)) is None:
            return body
        page = json.loads(body)
        if (call.request.params or {}).get("cursor") is None:
            link.listed = frozenset()
        link.listed |= texts.names_of(tool for tool in tools_on(page) or () if isinstance(tool, dict))
        if page.get("nextCursor") is None:
            link.own_tools = texts.own_tools(link.listed)
        return encode(texts.listed(page, link.own_tools or texts.OwnTools(), within))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        self._tasks.add(task := asyncio.create_task(work))
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, link: RuntimeLink, call: Call, origin: object, within: float) -> None:
        stream = call.stream
        if call.state is not CallState.RUNNING:
            return
        names = await self._names(link, call, origin, within)
        await asyncio.sleep(_left(link, call, within))
        events: Sequence[Event] = ()
        with contextlib.suppress(StoreError):  # then its text says nothing of its progress
            events = await stream.read(after=max(0, stream.tail.last - heartbeats.RECENT), limit=heartbeats.RECENT)
        if call.state is not CallState.RUNNING or stream.writer is None or stream.is_sealed or stream.answered:
            return
        result = texts.still_running(
            name_of(call.request.params) or "",
            stream.id,
            age=link.context.clock() - stream.opened,
            seconds=within,
            names=names,
            progress=heartbeats.last_progress([event.payload for event in events]),
            asks=any(ask.call is call for ask in link.asks.open.values()),
        )
        stream.append(encode_answer(call.request.id, encode(result)), early=True)
        link.context.counters.calls_answered_early += 1

    async def _names(self, link: RuntimeLink, call: Call, origin: object, within: float) -> texts.OwnTools:
        """The names of Perdure's own tools beside those of the server, if it lists them before a call is due."""
        if link.own_tools is None:
            context = link.context
            try:
                seconds = max(_left(link, call, within), NAMES_SECONDS)
                async with asyncio.timeout(min(seconds, context.runtimes.answers_within)):
                    tools = await context.runtimes.tools(link.keeper.record, origin)
            except Exception:  # whatever the server's handler raises: it lists nothing
                return texts.OwnTools()
            link.own_tools = texts.own_tools(tools)
        return link.own_tools

    # Perdure's own tools

    async def _serve(self, link: RuntimeLink, call: Call, origin: object, within: float) -> bytes | None:
        names, name = await self._names(link, call, origin, within), name_of(call.request.params)
        if name not in names:
            call.answering = None
            link.pass_to_runtime(call, origin)
            return None
        link.keep_call(call.number, OWN_CALL)  # so that it goes on elsewhere if this process dies
        wanted, calls, record = texts.call_named(call.request.params), CallsById(link.context), link.keeper.record
        if wanted is None or name == names.cancel:
            result = encode(await calls.list_or_cancel(name, wanted, names, record.owner, record.id))
        else:
            try:
                result = await self._wait(link, call, origin, calls, wanted, names, within)
            except StoreError:
                result = encode(texts.failure(texts.STORE_FAILS))
        return encode_answer(call.request.id, result)

    async def _wait(
        self,
        link: RuntimeLink,
        call: Call,
        origin: object,
        calls: CallsById,
        wanted: object,
        names: texts.OwnTools,
        within: float,
    ) -> bytes:
        """Wait for the end of a call, at whatever node it runs."""
        record, last, waits = link.keeper.record, None, link.context.waits
        follow = calls.follow(wanted, record.owner, seconds=_left(link, call, within), session=record.id)
        try:
            async with contextlib.aclosing(follow) as states:
                async for found in states:
                    if found is None:
                        return encode(calls.unknown)
                    if found.stream.sealed:
                        outcome = await calls.outcome(found, None)
                        self._start(_note_fetched(link.context, call.stream, calls, found))
                        return outcome
                    await resume_if_waiting(found.row, origin)
                    if last is None or waits.of(found.stream.id) is None:
                        waits.put(found.stream, call)
                        link.asks.repeat(link.asks.of(found.stream.id))
                    said = await calls.progress(found)
                    if said.progress is not None and (last is None or said.progress != last[1].progress):
                        link.show_progress(call, said.progress)
                    last = found, said
        finally:
            if last is not None:
                waits.remove(last[0].stream.id, call)
        assert last is not None, "a call that is followed was found"
        found, said = last
        asks, is_elsewhere = bool(said.asks or link.asks.of(found.stream.id)), found.record.id != record.id
        return encode(calls.still_running(found, said, names, seconds=within, asks=asks, is_elsewhere=is_elsewhere))


def _left(link: RuntimeLink, call: Call, within: float) -> float:
    """Seconds until a request is to be answered, counted from when it came."""
    return call.stream.opened + within - link.context.clock()


async def _note_fetched(context: ServerContext, wait: Stream, calls: CallsById, found: KnownCall) -> None:
    """Note that a result was fetched, once the client of the wait has it. Where the wait loses its reader before, the
    call stays in the list. A reader at another node is trusted to come to the end."""
    readers = wait.readers
    while readers.reader is not None and not (wait.is_over and readers.delivered >= wait.tail.last):
        await readers.wait()
    is_trusted = context.settings.json_response or readers.remote is not None
    if is_trusted or (wait.is_over and readers.delivered >= wait.tail.last):
        calls.fetched(found)
