"""Passes messages between a session and its runtime.

Inwards, the client's request ids and progress tokens become numbers of the session. Outwards they are put back, and
each message is appended to its stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from perdure._core import heartbeats, session_tasks, settling, sticky
from perdure._core.codes import CLIENT_AWAY, INTERNAL_ERROR
from perdure._core.durable_calls import TaskFacts
from perdure._core.early_answers import OwnTools, is_cancelled_by_id, resumes
from perdure._core.handshakes import announce_keys
from perdure._core.ids import NodeId, SessionId, StreamId
from perdure._core.jsonrpc import Envelope, JsonObject, Notification, Request, Response, coerce_id, error_payload
from perdure._core.limits import Caller
from perdure._core.listening import METHODS
from perdure._core.losses import Visits
from perdure._core.revisions import REVISIONS
from perdure._core.settling import Occasion, UpstreamCall, Verdict
from perdure._core.states import SESSION, CallState, CallStep, SessionState, SessionStep, ToolStepState, advance
from perdure._core.tool_steps import StepHistory, StepPlace
from perdure.errors import Misuse, PerdureError, StoreError
from perdure.log.chores import start
from perdure.log.journal import Steps
from perdure.log.stream import Stream, Streams
from perdure.runtime.base import CallEnded, Flow, Runtime
from perdure.sessions.context import ServerContext
from perdure.sessions.home import Home, NoHome, read_record
from perdure.sessions.ledger import (
    Call,
    Calls,
    cancelled,
    encode_answer,
    encode_ask,
    encode_notification,
    end_of_call,
    name_of,
    unknown_outcome,
)
from perdure.sessions.record_keeper import RecordKeeper, share
from perdure.sessions.second_run import said_before
from perdure.sessions.tool_steps import CALL_ENDED, ToolSteps, course_of
from perdure.steps import call_steps, is_in_step, is_own_task
from perdure.store.records import AskRecord
from perdure.store.steps import ChangeSession, CloseAsk, EndSession, OpenAsk, PutCall, Step
from perdure.telemetry import tracing as spans
from perdure.telemetry.log_records import CallIds, current_call, is_logged, log_event

_ASK = re.compile(r"ask-([A-Za-z0-9_-]{22})-[0-9]+")
"""The id of an ask names the node that waits. Because of the letters in front it is no integer."""

_NO_TOOLS = frozenset[str]()
"""One for all sessions: each empty set takes 200 bytes."""

OnEnd = Callable[[SessionId, str], None]
"""Ends a session soon; the text is for its client."""


class RuntimeLink:
    """Links one session and its runtime: the runtime's `Outlet`."""

    __slots__ = (
        "_as_json",
        "_call_streams",
        "_on_end",
        "_visits",
        "announces",
        "asks",
        "calls",
        "context",
        "home",
        "keeper",
        "listed",
        "own_tools",
        "runtime",
    )

    def __init__(
        self,
        context: ServerContext,
        keeper: RecordKeeper,
        home: Home | NoHome,
        call_streams: Streams,
        visits: Visits,
        on_end: OnEnd,
    ) -> None:
        self.context = context
        self.keeper = keeper
        self.home = home
        self._call_streams = call_streams
        self._visits = visits
        self._on_end = on_end
        self._as_json = context.settings.json_response
        self.calls = Calls(Caller(keeper.record.owner, keeper.record.address), context.work, context.running)
        self.asks = Asks(self)
        self.runtime = RuntimeSlot(self)
        self.announces: JsonObject | None = None
        """The capability for tasks that the answer to `initialize` declares."""
        self.listed = _NO_TOOLS
        """The server's tools on the pages that the client under a rule of `answer_within` has listed so far."""
        self.own_tools: OwnTools | None = None
        """The names of Perdure's own tools, as such a client knows them."""

    @property
    def streams(self) -> Mapping[StreamId, Stream]:
        """The session's call streams that are in memory."""
        return self._call_streams.of(self.keeper.record.id)

    @property
    def work(self) -> int:
        """Estimated bytes of memory of messages that are being handled."""
        return self.calls.size + self.runtime.notification_bytes

    # Inwards

    def start(self, call: Call, origin: object, *, follows: bool = False) -> None:
        """Hand a call to the runtime, in the context of its HTTP request; a call that runs again, in that of the
        principal's next request or of none. `follows`: it runs already, outside this process."""
        if call.key in self.calls.cancelled:
            self.calls.runtime_done(call.number)
            self._answer_cancelled(call)
            return
        if call.token is not None and self._begins_with_progress and call.stream.tail.last == 0:
            first = {"progressToken": self.token_at_client(call), "progress": heartbeats.FIRST}
            call.stream.append(encode_notification(heartbeats.PROGRESS, first))
        if call.stream.answered:
            call.is_task = self.serves_tasks and session_tasks.wants_task(call.request.params)
        if call.request.method == "tools/call":
            call.origin = origin
            early = self.context.early
            if self.context.keyed.take(self, call) or (early is not None and early.take(self, call, origin)):
                return
        elif not call.stream.answered and call.request.method == session_tasks.RESULT and self.serves_tasks:
            self.answer_here(call, self.context.tasks.result(self, call, origin))
            return
        self.pass_to_runtime(call, origin, follows=follows)

    def answer_here(self, call: Call, finding: Awaitable[bytes | None]) -> None:
        """Answer a call with what this process finds out itself, whatever fails meanwhile. `None`: the runtime has the
        call."""

        async def answer() -> None:
            try:
                if (payload := await finding) is None:
                    return
            except Exception as failure:  # a store with a bug, or a recorded answer that cannot be read
                sentence = f"a request cannot be answered ({call.request.method}): {failure!r}"
                log_event(logging.ERROR, "call.failed", sentence, session=self.keeper.name, stream=call.stream.id)
                payload = error_payload(call.request.id, INTERNAL_ERROR, "Internal server error")
            self.calls.runtime_done(call.number)
            if self.calls.answer(call, CallStep.ANSWER, payload):
                self.context.counters.calls_answered += 1
                self.tell_status(call, payload)

        call.answering = asyncio.create_task(answer())

    def pass_to_runtime(self, call: Call, origin: object, *, follows: bool = False) -> None:
        params = call.request.params
        if call.is_task and params is not None:
            params = {name: value for name, value in params.items() if name != "task"}  # it is none of the server's
        if call.token is not None and params is not None:
            params = {**params, "_meta": {**params["_meta"], "progressToken": call.number}}
        elif params is not None and isinstance(meta := params.get("_meta"), dict) and "progressToken" in meta:
            # It is no token. A server that took `true` for one would report under the number of another call.
            params = {**params, "_meta": {name: value for name, value in meta.items() if name != "progressToken"}}
        request = Request(id=call.number, method=call.request.method, params=params, raw={})
        # The runtime runs the handler in a copy of this context.
        call.origin = origin
        before = current_call.set(CallIds(self.keeper.name, call.stream.id, call.request.id))
        steps = call_steps.set(partial(self.steps_at, call.number) if request.method == "tools/call" else None)
        try:
            self.runtime.send(request, origin=origin, follow=call.upstream.follow if follows else None)
        finally:
            call_steps.reset(steps)
            current_call.reset(before)

    def steps_at(self, number: int) -> ToolSteps:
        """Found by number, because the context of a call may outlive it: a cancelled timer has a copy."""
        if (call := self.calls.by_number.get(number)) is None:
            raise Misuse(CALL_ENDED)
        return self.steps_of(call)

    def steps_of(self, call: Call) -> ToolSteps:
        if call.steps is None:
            call.steps = ToolSteps(self.context, call)
        return call.steps

    def start_again(
        self,
        request: Request,
        origin: object,
        *,
        incarnation: int,
        stream: Stream,
        attempt: int,
        progress: float | None,
        logged: Counter[bytes],
        course: StepHistory,
        upstream: UpstreamCall,
        follows: bool,
        repeats: bool,
    ) -> None:
        """Hand a call of a dead node to the runtime. Its client has seen `progress` and `logged`, and its tool has done
        the steps of `course`."""
        [call] = self.calls.open([(incarnation, coerce_id(request.id))], [request], stream=stream)
        call.attempt, call.progress, call.logged, call.upstream = attempt, progress, logged, upstream
        call.repeats = repeats
        call.steps = ToolSteps(self.context, call, course) if course.marks else None
        try:
            self.start(call, origin, follows=follows)
        except BaseException:
            self.calls.release(call.key)
            self.calls.runtime_done(call.number)
            raise

    def pass_on(self, notification: Notification, origin: object, *, size: int = 0) -> None:
        if notification.method == "notifications/initialized":
            if self.keeper.record.initialized:
                return  # of a reattach: the server has seen it
            self.keeper.update(initialized=True)
        self.runtime.send(notification, origin=origin, size=size)

    def cancel(self, request_id: int | str, *, incarnation: int, params: dict[str, Any]) -> bool:
        """Answer a cancelled call, and make the runtime stop it. Returns whether it runs on this node."""
        key = (incarnation, coerce_id(request_id))
        if (call := self.calls.running(key)) is None:
            return self.calls.cancel_early(key)
        if call.stream.answered and not is_cancelled_by_id(params, call.stream.id):
            return True  # its request has an answer, and the call goes on until it is cancelled by its id
        if call.request.method != "initialize":
            self._answer_cancelled(call)
            self._stop(call, params, cancels=True)
        return True

    def stop_calls(self, stream: Stream) -> None:
        """Make the runtime stop calls that another node has taken over."""
        for call in self.calls.forget(stream):
            self._stop(call, {"reason": "taken over by another node"})

    def _stop(self, call: Call, params: dict[str, Any], *, cancels: bool = False) -> None:
        if call.answering is not None:
            call.answering.cancel()
            self.calls.runtime_done(call.number)
            if cancels:
                self.context.keyed.on_cancelled(self, call)
            return
        if self.runtime.is_loaded:
            stop = {**params, "requestId": call.number}
            self.runtime.send(Notification(method="notifications/cancelled", params=stop, raw={}), origin=None)

    def _answer_cancelled(self, call: Call) -> None:
        if call.state is CallState.RUNNING:
            answer = cancelled(call.request.id, call.outline)
            self.calls.answer(call, CallStep.CANCEL, answer, self._end_step(call))
            self.tell_status(call, answer)
            self.context.counters.calls_cancelled += 1

    def _end_step(self, call: Call, result: bytes | None = None) -> Step | None:
        """The change in the record at the end of a call, to be written together with the answer. `result`: that of a
        successful call."""
        keeper, method = self.keeper, call.request.method
        self.context.keyed.on_answered(self, call)
        if keeper.is_durable_call:
            end = end_of_call(keeper.record, self.context.clock(), "answered")
            if not isinstance(end, EndSession):
                return None if end is None else keeper.change(end)
            # No client can ask for it later, so the answer need not wait for the log.
            for stream in self.streams.values():
                stream.unlog()
            keeper.end(end.reason)
            self.context.put(end)
        if result is None or keeper.is_durable_call:
            return None
        if method == "initialize" and keeper.record.state is SessionState.OPENING:
            version = json.loads(result).get("protocolVersion")
            if version not in REVISIONS:
                return None  # a middleware answered in place of the SDK; the session does not open
            state = advance(SESSION, keeper.record.state, SessionStep.HANDSHAKE_DONE)
            change = ChangeSession(session=keeper.record.id, state=state, version=version, result=share(result))
            return keeper.change(change)
        if method in sticky.METHODS:
            request = sticky.encode(method, call.request.params)
            self.runtime.on_sticky_accepted(request)
            return keeper.change(ChangeSession(session=keeper.record.id, stick=request))
        return None

    # Outwards: the runtime's outlet

    @property
    def closes_early(self) -> bool:
        keeper = self.keeper
        return bool(keeper.record.version) and keeper.revision.closes_early and not self.context.settings.json_response

    @property
    def _begins_with_progress(self) -> bool:
        """The client can come back only to an event with a message. A call with a progress token begins with one, so it
        outlives a cut also while it is silent."""
        keeper = self.keeper
        is_session = bool(keeper.record.version) and not keeper.is_durable_call
        return is_session and not (keeper.revision.primes or self._as_json)

    @property
    def is_task(self) -> bool:
        return self.keeper.record.is_task

    def notify(self, method: str, params: dict[str, Any] | None, *, call: int | None) -> Flow | None:
        record = self.keeper.record
        if record.state is SessionState.ENDED:
            return None
        if method in METHODS:
            self.context.report_change(method, params)
        found = None if call is None else self.calls.by_number.get(call)
        if params is not None:
            if method == "notifications/progress" and isinstance(token := params.get("progressToken"), int):
                # A number of the session, which means nothing outside: drop it if its call has ended, or has no token.
                call, found = token, self.calls.by_number.get(token)
                if found is None or found.token is None:
                    return None
                if params.get("progress") == heartbeats.FIRST and self._begins_with_progress:
                    params["progress"] = heartbeats.BEHIND_FIRST
                if found.repeats and found.is_repeated(method, params):
                    return None
                if self.keeper.is_durable_call:
                    found.say(params)
                params["progressToken"] = self.token_at_client(found)
            elif method == "notifications/cancelled":
                params = self.asks.withdraw(params)
            elif found is not None and found.repeats and found.is_repeated(method, params):
                return None
        if found is None and call is not None:
            return None  # of a call that has ended, or of a repeated sticky request
        if found is not None and found.is_task:
            params = session_tasks.related(params, found.stream.id)
        return self.append(found, encode_notification(method, params))

    def show_progress(self, wait: Call, progress: JsonObject) -> None:
        """Show the progress of another call under the token of a request that waits for that."""
        if wait.token is not None and not heartbeats.is_first(progress):
            shown = {name: value for name, value in progress.items() if name != "_meta"}
            self.notify(heartbeats.PROGRESS, {**shown, "progressToken": wait.number}, call=wait.number)

    def token_at_client(self, call: Call) -> int | str | None:
        """The token under which a call reports progress: the client's own means something within one incarnation."""
        is_known = call.sent_in == self.keeper.record.incarnation and not call.is_displaced
        return call.token if is_known or call.token is None else f"{call.incarnation}:{call.token}"

    def append(self, call: Call | None, payload: bytes, also: Step | None = None) -> Flow | None:
        """Append a message to its stream. Returns where to wait before more is sent, if too much is under way."""
        if call is not None and call.state is not CallState.RUNNING:
            return None
        if (
            call is None
            or call.is_task
            or ((call.stream.readers.reader is None or self._as_json) and self.goes_standalone(call))
        ):
            return self.home.send(payload, also)
        return call.stream if call.stream.append(payload, also=also) else None

    def goes_standalone(self, call: Call) -> bool:
        """Whether a message of this call goes to the standalone stream: no reader is on the call's stream, and its
        client has come back without asking for it (R5); or the response is a JSON body with room for the answer
        only."""
        if self.keeper.is_durable_call:
            return False
        readers = call.stream.readers
        is_orphan = not (readers.present or call.stream.answered) and self._visits.is_orphan(readers.lost_at)
        return self._as_json or is_orphan

    @property
    def serves_tasks(self) -> bool:
        """Whether the session's tasks of 2025-11-25 are Perdure's."""
        return session_tasks.is_ours(self.keeper.record.result)

    def tell_status(self, call: Call, answer: bytes | None = None) -> None:
        """Notify the client of a task's status, if it has changed. `answer`: of a task that has ended."""
        if not call.is_task:
            return
        asks = {name: b"" for name, ask in self.asks.open.items() if ask.call is call}
        stream = call.stream
        facts = TaskFacts(
            id=stream.id,
            created=stream.opened,
            updated=self.context.clock(),
            state=call.state,
            asks=asks,
            answer=answer,
        )
        call.told_status = self.context.tasks.tell(self.home, facts, told=call.told_status)

    def tell_waiters(self) -> None:
        """Wake requests that wait for a change of this durable call, at any node."""
        for stream in self.streams:
            self.context.waiters.tell(stream)

    def new_ask_id(self) -> str:
        return f"ask-{self.context.node}-{next(self.context.ask_ids)}"

    def ask(self, ask_id: str, method: str, params: dict[str, Any] | None, *, call: int | None) -> Flow | None:
        if self.keeper.record.state is SessionState.ENDED:
            return None
        found = None if call is None else self.calls.by_number.get(call)
        if call is not None and (found is None or found.state is not CallState.RUNNING):
            raise CallEnded  # a cancelled call that does not stop must not wait for an answer for ever
        place, steps = None, self._asking(found)
        if steps is not None:
            place = steps.ask(method, params, own=is_own_task())
            if place is not None and (known := place.recorded) is not None and known.state is not ToolStepState.OPEN:
                self.context.counters.tool_steps_replayed += 1
                answer = Response(id=ask_id, raw={"jsonrpc": "2.0", "id": ask_id, **json.loads(known.value)})
                # Not at once: the runtime is about to wait for it.
                asyncio.get_running_loop().call_soon(partial(self.runtime.send, answer, origin=None))
                return None
        return self.asks.put(ask_id, Ask(ask_id, method, params, found, place=place, steps=steps))

    async def begin_round(self, call: int) -> None:
        if (found := self.calls.by_number.get(call)) is not None and found.steps is not None:
            await found.steps.begin_round()

    def _asking(self, call: Call | None) -> ToolSteps | None:
        """The steps of the tool that asks, which may do so on the session's own channel. `None` for other handlers, and
        in a step: its questions are part of it."""
        if is_in_step():
            return None
        if call is not None:
            return self.steps_of(call) if call.request.method == "tools/call" else None
        with contextlib.suppress(Misuse):  # a task of a tool whose call has ended
            if (open_steps := call_steps.get()) is not None and isinstance(steps := open_steps(), ToolSteps):
                # A tool may also ask the client of another session.
                return steps if self.calls.by_number.get(steps.call.number) is steps.call else None
        return None

    def answer(self, call: int, body: bytes, *, failed: bool) -> None:
        if (found := self.calls.by_number.get(call)) is None:
            return  # a sticky request that was repeated
        self.calls.runtime_done(call)
        if found.state is not CallState.RUNNING:
            return
        if found.steps is not None and not self._does_as_before(found, found.steps.course):
            return
        method = found.request.method
        if method == "tools/list" and not failed:
            if self.context.early is not None:
                body = self.context.early.show(self, found, body)
            body = self.context.tasks.show(self, body)
        elif method == "initialize" and not failed:
            body = session_tasks.announce(self._with_keys(body), self.announces)
        also = self._end_step(found, None if failed else body)
        answer = encode_answer(found.request.id, body, failed=failed)
        self.calls.answer(found, CallStep.ANSWER, answer, also)
        if found.is_task:
            self.tell_status(found, answer)
        counters = self.context.counters
        counters.calls_answered += 1
        counters.call_seconds.observe(took := time.perf_counter() - found.begun)
        if is_logged(logging.INFO) and found.request.method == "tools/call":
            said = "gave an error" if failed or b'"isError":true' in body else "has answered"
            ids = {"session": self.keeper.name, "stream": found.stream.id, "call": found.request.id}
            sentence = f"{name_of(found.request.params)} {said} after {took:.3g} s"
            log_event(logging.INFO, "call.answered", sentence, **ids)

    def _does_as_before(self, call: Call, course: StepHistory) -> bool:
        """Whether a tool that has returned did what its earlier runs had done. If not, its call is answered so,
        whatever it returned: the SDK turns errors of tools into results, and tools catch them."""
        if course.mismatch:
            self.answer_unknown(call, course.mismatch)
        elif unused := course.unused:
            sentence = f"a call that ran again did not come to {len(unused)} of its recorded steps: {', '.join(unused)}"
            ids = {"session": self.keeper.name, "stream": call.stream.id, "call": call.request.id}
            log_event(logging.WARNING, "step.unused", sentence, **ids)
        return not course.mismatch

    def interrupted(self, call: int, why: str = "its runtime failed") -> None:
        if (found := self.calls.by_number.get(call)) is None:
            return
        self.calls.runtime_done(call)
        if found.state is CallState.RUNNING:  # otherwise it was cancelled, and has its answer
            self.answer_unknown(found, why)

    def crashed(self, call: int, why: str, *, may_run_again: bool | None) -> None:
        if (found := self.calls.by_number.get(call)) is None:
            return  # a sticky request that was repeated
        if may_run_again is None:
            may_run_again = found.upstream.may_run_again  # as the process knew that began the call
        progressed = 0 if found.steps is None else found.steps.course.progressed
        if any(ask.call is found for ask in self.asks.open.values()):
            progressed = found.attempt  # it waited for its client
        may = settling.rerun(
            found.request.method,
            attempt=found.attempt,
            occasion=Occasion.UPSTREAM_DIED,
            kept=UpstreamCall(may_run_again=may_run_again),
            progressed=progressed,
            claims=found.stream.generation,
        )
        if found.state is CallState.RUNNING and settling.VERDICTS[Occasion.UPSTREAM_DIED][may] is Verdict.RERUN:
            self.context.task_context.run(start, self._run_again(found, why))
            return
        self.calls.runtime_done(call)
        if found.state is CallState.RUNNING:
            self.answer_unknown(found, why)

    async def _run_again(self, call: Call, why: str) -> None:
        """Run a call again in this process. The runtime counts it as running all the time."""
        context, request = self.context, call.request
        try:
            await self.home.caught_up()
            progress, logged = await said_before(
                context,
                request,
                call.stream,
                incarnation=call.incarnation,
                sent=call.progress,
                session=self.keeper.record,
            )
            call.upstream = replace(call.upstream, follow=None)
            if call.steps is not None:
                done = await context.store.tool_steps(call.stream.id)
                call.steps = ToolSteps(context, call, course_of(done, call.incarnation, request.id))
                call.steps.course.goes_on = False  # a tool outside this process says no more than that it may run again
            await context.journal.write(self._call_row(call, attempt=call.attempt + 1, progress=progress))
            if call.state is not CallState.RUNNING or self.keeper.record.state is SessionState.ENDED:
                self.calls.runtime_done(call.number)  # it was cancelled, or another node has it
                return
            call.attempt, call.progress, call.logged, call.repeats = call.attempt + 1, progress, logged, True
            with spans.settle(self.keeper.name, call.stream.id, outcome="rerun"):
                self.start(call, call.origin)
            context.counters.calls_rerun += 1
            ids = {"session": self.keeper.name, "stream": call.stream.id, "call": request.id}
            log_event(logging.INFO, "call.rerun", f"{name_of(request.params)} runs again: {why}", **ids)
        except Exception as failure:
            self.calls.runtime_done(call.number)
            sentence = f"a request cannot run again ({request.method}): {failure!r}"
            log_event(logging.ERROR, "call.poison", sentence, session=self.keeper.name, stream=call.stream.id)
            if call.state is CallState.RUNNING:
                self.answer_unknown(call, why)

    def _call_row(self, call: Call, *, attempt: int, progress: float | None) -> PutCall:
        return PutCall(
            stream=call.stream.id,
            fence=call.stream.fence,
            incarnation=call.incarnation,
            request_id=call.request.id,
            state=CallState.RUNNING,
            attempt=attempt,
            progress=progress,
            upstream=call.upstream.encode(),
        )

    @property
    def is_home(self) -> bool:
        return self.home.is_here

    @property
    def is_listening(self) -> bool:
        return self.home.standalone.readers.present

    @property
    def kept(self) -> bytes:
        return self.keeper.record.upstream

    @property
    def sticky(self) -> Sequence[bytes]:
        return self.keeper.record.sticky

    def _with_keys(self, result: bytes) -> bytes:
        """The result of the handshake as the client sees it: one that sends again what breaks learns of keys."""
        if not resumes(self.keeper.record.client_params):
            return result
        settings = self.context.settings
        return announce_keys(result, min(settings.task_ttl, settings.replay_window))

    def replace_result(self, result: bytes) -> None:
        result = session_tasks.announce_again(self.keeper.record.result, self._with_keys(result))
        if self.keeper.record.state is not SessionState.ENDED and self.keeper.record.result != result:
            self.keeper.update(result=share(result))

    def unsubscribe(self, subscription: bytes) -> None:
        if self.keeper.record.state is not SessionState.ENDED:
            self.keeper.update(stick=sticky.unsubscribe(subscription))

    def end(self, why: str) -> None:
        self._on_end(self.keeper.record.id, why)

    def keep(self, state: bytes) -> None:
        if self.keeper.record.state is not SessionState.ENDED and self.keeper.record.upstream != state:
            self.keeper.update(upstream=state)

    async def take_home(self) -> None:
        await self._notice_home()
        if not self.home.is_here:
            await self.home.take()
            if (stored := await self.context.store.session(self.keeper.record.id)) is not None:
                self.keeper.record = replace(self.keeper.record, upstream=stored.upstream)

    async def keep_as_home(self, state: bytes) -> bool:
        keeper = self.keeper
        await self._notice_home()
        if self.home.is_here and keeper.record.state is not SessionState.ENDED:
            step = keeper.change(ChangeSession(session=keeper.record.id, upstream=state))
            try:
                await self.context.journal.write(step)
            finally:
                keeper.on_written(step)
            await self._notice_home()  # a node that became the home before this was written has not seen it
        return self.home.is_here

    async def _notice_home(self) -> None:
        """Notice that another node has become the home. While the store fails, none can."""
        with contextlib.suppress(StoreError):
            await read_record(self.context, self.home.standalone)

    def keep_call(self, call: int, kept: UpstreamCall) -> None:
        found = self.calls.by_number.get(call)
        if found is not None and found.state is CallState.RUNNING and found.upstream != kept:
            found.upstream = kept
            self.context.put(self._call_row(found, attempt=found.attempt, progress=found.progress))

    def handled(self, size: int) -> None:
        self.runtime.count(-1, -size)

    def close_reader(self, call: int | None) -> None:
        found = None if call is None else self.calls.by_number.get(call)
        stream = self.home.standalone if call is None else None if found is None else found.stream
        if stream is not None and stream.readers.reader is not None:
            stream.readers.reader.stop_here()

    # Answers that the runtime does not give

    def answer_recorded(self, call: Call) -> None:
        """Answer an `initialize` on a session that has had its handshake."""
        self.calls.runtime_done(call.number)
        self.calls.answer(call, CallStep.ANSWER, encode_answer(call.request.id, self.keeper.record.result))
        self.context.counters.calls_answered += 1

    def answer_unknown(self, call: Call, reason: str) -> None:
        """Answer that a call was interrupted (promise 3)."""
        request = call.request
        payload = unknown_outcome(
            request.id, method=request.method, reason=reason, params=request.params, steps=call.outline
        )
        with spans.settle(self.keeper.name, call.stream.id, outcome="unknown"):
            if call.state is CallState.RUNNING:
                self.calls.answer(call, CallStep.SETTLE, payload, self._end_step(call))
                self.tell_status(call, payload)
                self.context.counters.calls_settled += 1

    async def aclose(self, reason: str) -> None:
        """The session has ended: answer its running calls, and drop the runtime."""
        for call in self.calls.all_running():
            self.calls.answer(call, CallStep.CANCEL, cancelled(call.request.id, call.outline, reason))
            if call.answering is not None:
                call.answering.cancel()
        await self.runtime.drop(ended=True)


class RuntimeSlot:
    """Loads a session's runtime with the first message, drops it when it is idle, and repeats sticky requests to it."""

    __slots__ = ("_link", "_runtime", "_sent", "_subscribed", "notification_bytes", "notifications")

    def __init__(self, link: RuntimeLink) -> None:
        self.notifications = 0
        """How many are not handled yet."""
        self.notification_bytes = 0
        """Their estimated bytes of memory."""
        self._link = link
        self._runtime: Runtime | None = None
        self._sent = link.keeper.record.active
        self._subscribed: tuple[bytes, ...] = ()
        """Subscriptions that are alive in this runtime; the record may differ."""

    @property
    def is_loaded(self) -> bool:
        return self._runtime is not None

    @property
    def begun(self) -> asyncio.Future[None] | None:
        return None if self._runtime is None else self._runtime.begun

    def send(self, message: Envelope, *, origin: object, size: int = 0, follow: dict[str, Any] | None = None) -> None:
        """Hand a message to the runtime, and load the runtime if necessary. `size`: the bytes of memory that a
        notification takes until it is handled. `follow`: how the runtime goes on with a request that runs already."""
        link = self._link
        if link.keeper.record.state is SessionState.ENDED:
            return  # a runtime that is loaded now would never be dropped
        self._sent = link.context.clock()
        runtime = self._runtime or self._load()
        if size:
            self.count(1, size)
        if follow is not None and isinstance(message, Request):
            runtime.follow(message, follow, origin=origin)
        else:
            runtime.send(message, origin=origin, size=size)

    def count(self, notifications: int, size: int) -> None:
        self.notifications += notifications
        self.notification_bytes += size
        self._link.context.work.take(self._link.calls.caller, size)

    def _load(self) -> Runtime:
        link, record = self._link, self._link.keeper.record
        self._runtime = link.context.runtimes.load(record, link)
        subscriptions = sticky.subscriptions(record.sticky) if record.sticky else ()
        self._subscribed = subscriptions if link.home.is_here else ()
        for request in () if link.context.runtimes.repeats_sticky else record.sticky:
            if link.home.is_here or request not in subscriptions:
                self.repeat(request)
        return self._runtime

    def repeat(self, request: bytes) -> None:
        """Send a sticky request once more, if a runtime is loaded. Its answer is dropped."""
        if self._runtime is not None:
            body = json.loads(request)
            number = self._link.calls.new_number()
            message = Request(id=number, method=body["method"], params=body.get("params"), raw={})
            context = self._link.context.task_context.copy()
            context.run(self._runtime.send, message, origin=None)

    def on_sticky_accepted(self, request: bytes) -> None:
        self._subscribed = sticky.subscriptions(sticky.after(self._subscribed, request))

    def on_home_moved(self) -> None:
        """Move the subscriptions: they live at the session's home, and none may be alive twice."""
        runtimes, record = self._link.context.runtimes, self._link.keeper.record
        if runtimes.repeats_sticky and self._runtime is not None:
            self._runtime.on_home_moved()
            return
        if not self._link.home.is_here:
            subscribed, self._subscribed = self._subscribed, ()
            for request in subscribed:
                self.repeat(sticky.unsubscribe(request))
            return
        subscriptions = sticky.subscriptions(record.sticky)
        if self._runtime is None:
            is_needed = subscriptions or (runtimes.outlives_runtimes and record.initialized)
            if is_needed and record.state is not SessionState.ENDED:
                self._load()
            return
        self._subscribed = subscriptions
        for request in subscriptions:
            self.repeat(request)

    def mark_initialized(self) -> None:
        if self._runtime is not None:
            self._runtime.mark_initialized()

    def is_idle(self, idle: float) -> bool:
        """Whether it was not used for `idle` seconds, and loading it again restores everything."""
        runtime, link = self._runtime, self._link
        return (
            runtime is not None
            and link.context.clock() - self._sent >= idle
            and not link.calls.by_number
            and not link.asks.open
            and not self.notifications
            and not runtime.keeps_state
            and not (link.home.is_here and sticky.subscriptions(link.keeper.record.sticky))
        )

    def forget(self) -> Runtime | None:
        """Forget the runtime; the next message loads another. Handlers that still run count no longer."""
        runtime, self._runtime = self._runtime, None
        self.count(-self.notifications, -self.notification_bytes)
        return runtime

    def leave(self) -> None:
        """Drop the runtime without waiting for handlers that do not stop."""
        if (runtime := self.forget()) is not None and self._link.calls.by_number:
            self._link.calls.runtime_gone()
            start(runtime.aclose(ended=True))

    async def drop(self, *, ended: bool = False) -> None:
        if (runtime := self.forget()) is not None:
            self._link.calls.runtime_gone()
            await runtime.aclose(ended=ended)


class Ask(NamedTuple):
    """An ask that waits: the id by which the runtime knows it, and its request."""

    inner: str
    method: str
    params: dict[str, Any] | None
    call: Call | None
    on: StreamId = StreamId("")
    """The stream on which the client is asked."""
    place: StepPlace | None = None
    """Its place among the steps of its tool; `None`: its answer is not recorded."""
    steps: ToolSteps | None = None
    """Of the tool that asks."""

    @property
    def caller(self) -> Call | None:
        """The call whose tool asks, perhaps on the session's own channel."""
        return self.call if self.steps is None else self.steps.call


class Asks:
    """Keeps the asks for which this node waits, until they are answered or withdrawn."""

    __slots__ = ("_link", "open")

    def __init__(self, link: RuntimeLink) -> None:
        self._link = link
        self.open: dict[str, Ask] = {}
        """By the present ids at the client."""

    def of(self, stream: StreamId) -> list[str]:
        """The ids of the asks of the calls that a stream answers."""
        return [name for name, ask in self.open.items() if ask.call is not None and ask.call.stream.id == stream]

    def put(self, name: str, ask: Ask) -> Flow | None:
        """Ask the client. Returns where to wait before more is sent."""
        link, on = self._link, self._place(ask.call)
        stream = link.home.standalone if on is None or link.goes_standalone(on) else on.stream
        params = ask.params
        if ask.call is not None and ask.call.is_task:
            params = session_tasks.related(params, ask.call.stream.id)
        payload = encode_ask(name, ask.method, params)
        session, node = link.keeper.record.id, link.context.node
        record = AskRecord(session=session, id=name, stream=stream.id, request=payload, node=node)
        if (of := ask.caller) is not None:
            record = replace(record, call=of.stream.id, incarnation=of.incarnation, request_id=of.request.id)
        self.open[name] = ask._replace(on=stream.id)
        flow = link.append(on, payload, also=OpenAsk(record=record))
        if ask.call is not None:
            link.tell_status(ask.call)
        return flow

    def _place(self, call: Call | None) -> Call | None:
        """The call on whose stream the client reads what an ask says; `None`: on the standalone stream. A call whose
        request has its early answer is read by an open wait; without one, its next wait repeats its asks."""
        if call is None or not call.stream.answered:
            return call
        wait, is_read = self._link.context.waits.of(call.stream.id), self._link.home.standalone.readers.present
        if call.is_task:
            return None if is_read else wait
        return wait if wait is not None or is_read else call

    async def answer(self, response: Response, origin: object) -> bool:
        """Take the client's answer, and return when the runtime has it: the answer of a tool's question is in the store
        before that. Returns whether the ask waits here."""
        name = response.id
        if not isinstance(name, str) or (ask := self.open.get(name)) is None:
            return False
        if ask.place is None or ask.steps is None:
            self._close(name)
            self._hand_over(ask, response, origin)
            return True
        self._forget(name)
        # The client may leave before the answer is written, and does not send it again.
        await asyncio.shield(start(self._record(name, ask, ask.steps, ask.place, response, origin)))
        return True

    async def _record(
        self, name: str, ask: Ask, steps: ToolSteps, place: StepPlace, response: Response, origin: object
    ) -> None:
        link = self._link
        close = CloseAsk(session=link.keeper.record.id, id=name)
        try:
            await steps.answered(place, response.raw, close)
        except PerdureError:  # the call has ended, or another node has it
            link.context.put(close)
            if steps.call.state is not CallState.ANSWERED:
                return
            # A server may ask for itself while a call runs, and wait for the answer after the call's end.
        if link.keeper.is_durable_call:
            link.tell_waiters()
        self._hand_over(ask, response, origin)

    def _hand_over(self, ask: Ask, response: Response, origin: object) -> None:
        self._link.runtime.send(Response(id=ask.inner, raw={**response.raw, "id": ask.inner}), origin=origin)

    def give_up(self) -> None:
        """Answer the runtime in place of a client that has been away for too long."""
        error = {"code": CLIENT_AWAY, "message": "The client has been away for too long to answer"}
        for name, ask in list(self.open.items()):
            self._close(name)
            self._hand_over(ask, Response(id=name, raw={"jsonrpc": "2.0", "error": error}), None)

    def repeat(self, names: Iterable[str], *, why: str = "the client came again") -> None:
        """Repeat asks that the client or the store has forgotten: cancel the old ids, ask under new ones."""
        for name in [name for name in names if name in self.open]:
            ask = self.open.pop(name)
            close = CloseAsk(session=self._link.keeper.record.id, id=name)
            params = {"requestId": name, "reason": f"{why}; it is asked again under a new id"}
            on = self._place(ask.call)
            self._link.append(on, encode_notification("notifications/cancelled", params), also=close)
            self.put(self._link.new_ask_id(), ask)

    def withdraw(self, params: dict[str, Any]) -> dict[str, Any]:
        """Close an ask for which the runtime no longer waits. Returns the params with the client's id of it."""
        for name, ask in list(self.open.items()):
            if ask.inner == params.get("requestId"):
                self._close(name)
                return {**params, "requestId": name}
        return params

    def _close(self, name: str) -> None:
        ask, link = self._forget(name), self._link
        steps: list[Step] = [CloseAsk(session=link.keeper.record.id, id=name)]
        if ask.place is not None and ask.steps is not None:
            steps += ask.steps.unanswered(ask.place)
        if link.keeper.is_durable_call:
            # Requests may wait for that, at any node.
            link.context.journal.put(Steps(steps, on_end=lambda _: link.tell_waiters()))
        else:
            link.context.put(*steps)

    def _forget(self, name: str) -> Ask:
        ask = self.open.pop(name)
        self.open = self.open or {}  # a dictionary does not shrink
        if ask.call is not None and ask.call.state is CallState.RUNNING:
            self._link.tell_status(ask.call)
        return ask


def node_of_ask(ask: object) -> NodeId | None:
    match = _ASK.fullmatch(ask) if isinstance(ask, str) else None
    return None if match is None else NodeId(match[1])
