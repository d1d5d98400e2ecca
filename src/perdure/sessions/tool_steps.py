"""Keeps the steps of a call's tool in the store: the `StepLog` of `perdure.steps`.

Nothing is held in memory while the store fails: a step that is only in memory is no step. So a step waits for the
store, and for a stream whose claim is in doubt, until the call ends or is taken over by another node.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from perdure._core.ids import StreamId
from perdure._core.states import TOOL_STEP, CallState, ToolStepState, ToolStepStep, advance
from perdure._core.tool_steps import LOST, Mark, StepHistory, StepPlace, StepProblem, StepRefusal, ToolStepKind
from perdure._core.unknown_outcome import Outline
from perdure.errors import Behind, Misuse, PerdureError, StaleFence, StepLimit, StepMismatch, StoreUnavailable
from perdure.log.chores import start
from perdure.sessions.ledger import encode
from perdure.store.records import ToolStepRecord
from perdure.store.steps import PutToolStep, Step
from perdure.telemetry.log_records import log_event

if TYPE_CHECKING:
    from perdure.sessions.context import ServerContext
    from perdure.sessions.ledger import Call

_RETRY_FIRST = 0.02
_RETRY_MOST = 0.5
"""Seconds between attempts to write a step, as the journal has them while the store fails."""

_LONGEST_SLEEP = 60.0
"""Seconds after which a sleep reads the store's clock again."""

_KEYS = uuid.UUID("6a0c7f0e-3f0b-5d0b-9c43-2d6f6b1a7d11")
"""The name space of `step_key`."""

CALL_ENDED = "the call of this step has ended; a step begins while its tool runs"

_ERRORS: dict[StepProblem, type[PerdureError]] = {
    StepProblem.MISUSE: Misuse,
    StepProblem.LIMIT: StepLimit,
    StepProblem.MISMATCH: StepMismatch,
}


class ToolSteps:
    """The steps of one call that runs here."""

    __slots__ = ("_active", "_began", "_context", "_idle", "_last", "call", "course", "thread")

    def __init__(self, context: ServerContext, call: Call, course: StepHistory | None = None) -> None:
        self._context = context
        self.call = call
        self.course = course or StepHistory()
        self._last = max(self.course.marks, default=0)
        """The number of the step that the store was last known to have; 0 if it need have none."""
        self._began: dict[int, float] = {}
        self._active = 0
        """How many steps run."""
        self._idle = 0
        """How many tasks of the tool sleep, or wait for the next process to begin a step."""
        self.thread: int | None = None

    @property
    def has_rows(self) -> bool:
        return bool(self.course.marks)

    @property
    def is_idle(self) -> bool:
        """Whether the tool does nothing that it would not do again in the next process."""
        return self._idle > 0 and self._active == 0

    @property
    def outline(self) -> Outline:
        return self.course.outline(self._context.clock())

    # `perdure.steps.StepLog`

    async def begin(self, kind: ToolStepKind, name: str, *, own: bool, writes: bool, again: bool) -> StepPlace:
        await self._pass_boundary()
        place = self._enter(kind, name, own=own)
        self._active += 1  # before the commit: a stop must not take the call for idle meanwhile
        if place.recorded is not None and place.recorded.state is not ToolStepState.OPEN:
            self._context.counters.tool_steps_replayed += 1
        elif place.recorded is None and writes:
            try:
                await self._record(place, ToolStepState.OPEN, again=again)
            except BaseException as failure:
                self._leave(place)
                if isinstance(failure, asyncio.CancelledError):
                    self._note_open(place, again=True)  # it has not run
                raise
        return place

    async def end(self, place: StepPlace, step: ToolStepStep, value: bytes) -> None:
        state = advance(TOOL_STEP, ToolStepState.OPEN, step)
        try:
            await self._record(place, state, again=False, value=value)
        except asyncio.CancelledError:
            # It has ended all the same, and a tool that goes on may record what follows.
            if place.number not in self.course.marks:
                self._note_open(place, again=True)
            task = start(self._record(place, state, again=False, value=value))

            def on_recorded(task: asyncio.Task[None]) -> None:
                self._leave(place)
                if not task.cancelled():
                    task.exception()  # the call has ended meanwhile

            task.add_done_callback(on_recorded)
            raise
        except BaseException:
            self._leave(place)
            raise
        self._leave(place)
        counters = self._context.counters
        if step is ToolStepStep.END:
            counters.tool_steps_ended += 1
        else:
            counters.tool_steps_failed += 1

    def leave(self, place: StepPlace, *, again: bool) -> None:
        self._leave(place)
        if place.recorded is None and place.number not in self.course.marks:
            self._note_open(place, again=again)

    async def sleep(self, seconds: float, name: str, *, own: bool) -> None:
        await self._pass_boundary()
        place, clock = self._enter(ToolStepKind.SLEEP, name, own=own), self._context.clock
        try:
            if (recorded := place.recorded) is not None and recorded.ended is not None:
                ends = recorded.ended
                self._context.counters.tool_steps_replayed += 1
            else:
                ends = clock() + seconds
                await self._record(place, ToolStepState.OPEN, again=True, ended=ends)
                self._context.counters.tool_steps_slept += 1
            self._idle += 1
            try:
                while (left := ends - clock()) > 0:  # noqa: ASYNC110 - the store's clock has no event
                    await asyncio.sleep(min(left, _LONGEST_SLEEP))
            finally:
                self._idle -= 1
        except asyncio.CancelledError:
            if not self.call.leaves:  # it sleeps no longer, and excuses no death; the next run sleeps the rest
                self._note(place, advance(TOOL_STEP, ToolStepState.OPEN, ToolStepStep.END), again=True, ended=ends)
            raise
        finally:
            self.course.leave(place)

    def reserve(self, place: StepPlace, size: int) -> str:
        return self.course.reserve(place.number, size)

    def key_of(self, place: StepPlace) -> uuid.UUID:
        call = self.call
        step = f"{place.name!a} {place.label!a}"  # another step may have the name `mail #2`
        return uuid.uuid5(_KEYS, f"{call.stream.id} {call.incarnation} {encode(call.request.id)!r} {step}")

    # Questions

    def ask(self, method: str, params: dict[str, Any] | None, *, own: bool) -> StepPlace | None:
        """Enter a question to the client; `None` if the call has so many steps that the answer is not recorded. Raises
        `StepMismatch`."""
        with contextlib.suppress(StepLimit):
            return self._enter(ToolStepKind.ASK, ask_name(method, params), own=own)
        return None

    async def answered(self, place: StepPlace, response: dict[str, Any], *also: Step) -> None:
        """Record the client's answer, in one commit with other steps, and wait until the store has it."""
        state, value = recorded_answer(response)
        if self.reserve(place, len(value)):
            state, value = ToolStepState.OPEN, b""  # it is asked again in the next run
        await self._record(place, state, again=True, value=value, also=also)
        self._context.counters.tool_steps_answered += 1

    def unanswered(self, place: StepPlace) -> Sequence[Step]:
        """The steps that note that the tool no longer waits for an answer: the next run asks again."""
        if self.call.state is not CallState.RUNNING or place.number in self.course.marks:
            return ()
        step = self._step(place, ToolStepState.OPEN, again=True)
        self._put(step.record, place.label)
        return (step,)

    async def begin_round(self) -> None:
        """The tool is called again within this run."""
        done: Sequence[ToolStepRecord] = ()
        while self.has_rows:
            with contextlib.suppress(StoreUnavailable):
                rows = await self._context.store.tool_steps(self.call.stream.id)
                done = steps_of(rows, self.call.incarnation, self.call.request.id)
                break
            await asyncio.sleep(_RETRY_MOST)
        last = next((record for record in done if record.number == self._last), None)
        if self._last and (last is None or (TOOL_STEP[last.state] and self._has_ended(self._last))):
            self.course.mismatch = "the store has lost what it had done"
        self.course.begin_round(done)

    # The store

    def _has_ended(self, number: int) -> bool:
        return not TOOL_STEP[self.course.marks[number].state]

    def _leave(self, place: StepPlace) -> None:
        self._active -= 1
        self.course.leave(place)

    def _note_open(self, place: StepPlace, *, again: bool) -> None:
        """Note a step that was cut short: a tool of which only a part was cancelled goes on, and records what
        follows."""
        self._note(place, ToolStepState.OPEN, again=again)

    def _note(self, place: StepPlace, state: ToolStepState, *, again: bool, ended: float | None = None) -> None:
        """Write a step behind what is written already, without waiting for it."""
        if self.call.state is CallState.RUNNING:
            step = self._step(place, state, again=again, ended=ended)
            self._context.put(step)
            self._put(step.record, place.label)

    def _enter(self, kind: ToolStepKind, name: str, *, own: bool) -> StepPlace:
        place = self.course.begin(kind, name, own=own)
        if not isinstance(place, StepRefusal):
            self._began[place.number] = self._context.clock()
            return place
        if place.why is StepProblem.MISMATCH:
            self._context.counters.tool_step_mismatches += 1
            ids = {"stream": self.call.stream.id, "call": self.call.request.id}
            log_event(logging.ERROR, "step.mismatch", place.sentence, session=self.call.stream.session, **ids)
        raise _ERRORS[place.why](place.sentence)

    async def _pass_boundary(self) -> None:
        """Wait where the tool may stand still: the process stops, and the next one goes on here."""
        if self.call.leaves:
            self._idle += 1
            try:
                while self.call.leaves and self.call.state is CallState.RUNNING:  # noqa: ASYNC110 - seldom, and once
                    await asyncio.sleep(_RETRY_MOST)
            finally:
                self._idle -= 1
        self._check_running()

    def _check_running(self) -> None:
        if self.call.state is not CallState.RUNNING:
            raise Misuse(CALL_ENDED)

    async def _note_loss(self) -> None:
        """The store has lost steps: the call goes on here, but no other process may go on in its place."""
        self._last = 0
        place = StepPlace(self.course.new_number(), ToolStepKind.STEP, LOST, LOST, False, None)
        await self._record(place, ToolStepState.OPEN, again=False)
        sentence = "the store has lost steps of a call, which continues in this process and in no later one"
        stream = self.call.stream
        log_event(logging.ERROR, "step.lost", sentence, session=stream.session, stream=stream.id)

    async def _record(
        self,
        place: StepPlace,
        state: ToolStepState,
        *,
        again: bool,
        value: bytes = b"",
        ended: float | None = None,
        also: Sequence[Step] = (),
    ) -> None:
        delay = 0.0
        while True:
            self._check_running()
            step = self._step(place, state, again=again, value=value, ended=ended, after=self._last)
            try:
                await self._context.journal.write(*also, step, may_be_held=False)
                break
            except Behind:
                if step.after == self._last:  # else it is noted already
                    await self._note_loss()
                continue
            except StoreUnavailable:
                pass
            except StaleFence:
                pass  # another node has the call, and this one is about to learn it; or the store has lost the stream
            delay = min(delay * 2, _RETRY_MOST) or _RETRY_FIRST
            await asyncio.sleep(delay)
        self._put(step.record, place.label)
        self._last = place.number

    def _step(
        self,
        place: StepPlace,
        state: ToolStepState,
        *,
        again: bool,
        value: bytes = b"",
        ended: float | None = None,
        after: int = 0,
    ) -> PutToolStep:
        call, now = self.call, self._context.clock()
        recorded = place.recorded
        if ended is None and not TOOL_STEP[state]:
            ended = now
        record = ToolStepRecord(
            stream=StreamId(call.stream.id),
            incarnation=call.incarnation,
            request_id=call.request.id,
            number=place.number,
            kind=place.kind,
            name=place.name,
            state=state,
            again=again,
            own=place.own,
            attempt=call.attempt,
            began=self._began.get(place.number, now) if recorded is None else recorded.began,
            ended=ended,
            value=value,
        )
        after_ended = after > 0 and self._has_ended(after)
        return PutToolStep(fence=call.stream.fence, record=record, after=after, after_ended=after_ended)

    def _put(self, record: ToolStepRecord, label: str) -> None:
        mark = Mark(record.kind, label, record.state, record.again, record.attempt, record.ended)
        self.course.put(record.number, mark, len(record.value))


def course_of(records: Sequence[ToolStepRecord], incarnation: int, request_id: int | str) -> StepHistory:
    """The course of one call, out of all tool steps of its stream."""
    return StepHistory(steps_of(records, incarnation, request_id))


def steps_of(records: Sequence[ToolStepRecord], incarnation: int, request_id: int | str) -> Sequence[ToolStepRecord]:
    return [record for record in records if (record.incarnation, record.request_id) == (incarnation, request_id)]


def ask_name(method: str, params: dict[str, Any] | None) -> str:
    """The name of a question as a tool step: a digest, so that another question has another one."""
    given = {name: value for name, value in (params or {}).items() if name != "_meta"}
    return hashlib.blake2b(encode([method, given]), digest_size=16).hexdigest()


def recorded_answer(response: dict[str, Any]) -> tuple[ToolStepState, bytes]:
    """The form in which a client's answer is recorded."""
    said = {name: response[name] for name in ("result", "error") if name in response}
    return ToolStepState.FAILED if "error" in said else ToolStepState.ENDED, encode(said)
