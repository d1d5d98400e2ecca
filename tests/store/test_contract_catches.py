"""The contract suite finds what it is for: stores that break one promise each are reported by its number."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from perdure._core.ids import Fence, Generation, NodeId, SessionId, StreamId
from perdure._core.leases import Claim
from perdure._core.states import SessionState
from perdure.store.memory import MemoryLiveness, MemoryStore
from perdure.store.records import (
    CallRecord,
    Event,
    Mail,
    SessionRecord,
    StreamRecord,
)
from perdure.store.steps import (
    Append,
    DropStream,
    MailReceived,
    OpenStream,
    PutCall,
    PutSession,
    PutToolStep,
    Reached,
    Refusals,
    Release,
    SendMail,
    Step,
    StepRejected,
    Trim,
)
from perdure.testing import check_store
from perdure.testing._values import count_open
from tests.store.machine import store_machine

pytestmark = pytest.mark.anyio


class CommitsStepByStep(MemoryStore):
    """Lets others in between the steps of one commit."""

    async def commit(self, steps: Sequence[Step]) -> Refusals:
        refusals: list[object] = []
        for step in steps:
            refusals += self.commit_now([step])
            await asyncio.sleep(0)
        return refusals  # type: ignore[return-value]


class TakesAnyFence(MemoryStore):
    def commit_now(self, steps: Sequence[Step]) -> Refusals:
        return super().commit_now([self._with_the_right_fence(step) for step in steps])

    def _with_the_right_fence(self, step: Step) -> Step:
        if isinstance(step, Append | PutCall | Release) and (found := self._streams.get(step.stream)):
            return replace(step, fence=found.record.fence)
        return step


class ReadsFromThePosition(MemoryStore):
    """One event twice for every reader that resumes."""

    async def read(self, stream: StreamId, *, after: int, limit: int) -> Sequence[Event]:
        return await super().read(stream, after=max(0, after - 1), limit=limit)


class OpensAnew(MemoryStore):
    """A stream that is opened twice loses what was in it."""

    def commit_now(self, steps: Sequence[Step]) -> Refusals:
        refusals: list[object] = []
        for step in steps:
            if isinstance(step, OpenStream):
                super().commit_now([DropStream(stream=step.record.id)])
            refusals += super().commit_now([step])
        return refusals  # type: ignore[return-value]


class ForgetsGenerations(MemoryStore):
    async def generations(self, stream: StreamId) -> Sequence[Generation]:
        return ()


class LetsEverybodyClaim(MemoryStore):
    """Reads the fence that the caller has seen, and takes the stream when others have read it as well."""

    async def claim(self, stream: StreamId, *, node: NodeId, held: Fence, known: int = 0) -> StreamRecord | None:
        if self._streams[stream].record.fence != held:
            return None
        await asyncio.sleep(0)
        return await super().claim(stream, node=node, held=self._streams[stream].record.fence, known=known)


class HandsMailOutOnce(MemoryStore):
    """Mail is lost with a node that read it and died before it did anything."""

    async def mail(self, node: NodeId, *, after: int = 0) -> Sequence[Mail]:
        mail = await super().mail(node, after=after)
        if mail:
            self.commit_now([MailReceived(node=node, through=mail[-1].key)])
        return mail


class InheritsUnderOldKeys(MemoryStore):
    """What the heir has received takes away what it has never seen."""

    async def bury(self, node: NodeId, *, heir: NodeId, beat: int | None = None) -> Sequence[StreamRecord] | None:
        if (row := self._nodes.get(node)) is not None and (inheriting := self._nodes.get(heir)) is not None:
            inheriting.mail = sorted([*inheriting.mail, *row.mail])
            row.mail = []
        return await super().bury(node, heir=heir, beat=beat)


class ForgetsWhatItTook(MemoryStore):
    """A message that is forwarded again after it was appended is appended once more."""

    def _apply(self, step: Step) -> StepRejected | None:
        refusal = super()._apply(step)
        if isinstance(step, Append) and step.taken:
            self._streams[step.stream].senders.clear()
        return refusal


class ShowsMailOutOfOrder(MemoryStore):
    """Keys come from a sequence, and commits come in another order than their keys."""

    posts = 0

    async def commit(self, steps: Sequence[Step]) -> Refusals:
        [step] = steps if len(steps) == 1 else [None]
        if not isinstance(step, SendMail) or (row := self._nodes.get(step.node)) is None:
            return await super().commit(steps)
        key = self._next_key()
        self.posts += 1
        for _ in range(self.posts % 5):
            await asyncio.sleep(0)
        row.mail = sorted([*row.mail, Mail(key, step.message)])
        return [None]


class TakesEveryHole(MemoryStore):
    def _append(self, step: Append) -> StepRejected | None:
        return super()._append(replace(step, lost=True))


class FillsHoles(MemoryStore):
    """Numbers that were lost get other events."""

    def _append(self, step: Append) -> StepRejected | None:
        found = self._streams.get(step.stream)
        ours = found is not None and found.record.fence == step.fence and found.record.node and not found.record.sealed
        if step.lost and found is not None and ours:
            known = {event.seq for event in found.events}
            found.events = sorted([*found.events, *(event for event in step.events if event.seq not in known)])
            last = max([found.record.last, *(event.seq for event in step.events)])
            found.record = replace(found.record, last=last)
        return super()._append(step)


class CountsCallsAsSessions(MemoryStore):
    """Sessions and durable calls take each other's room."""

    def _put_session(self, step: PutSession) -> StepRejected | None:
        if step.limits is None:
            return super()._put_session(step)
        kept = self._sessions
        self._sessions = {name: replace(record, kind=step.record.kind) for name, record in kept.items()}
        refusal = super()._put_session(step)
        if refusal is None:
            kept.setdefault(step.record.id, step.record)
        self._sessions = kept
        return refusal


class ForgetsTheDigest(MemoryStore):
    async def calls(
        self, session: SessionId, *, stream: StreamId | None = None, only_open: bool = False
    ) -> Sequence[CallRecord]:
        found = await super().calls(session, stream=stream, only_open=only_open)
        return [replace(row, digest=row.digest if row.request else b"") for row in found]


class BuriesWhoIsBack(MemoryStore):
    """Does not check whether the node has beaten since it was found dead."""

    async def bury(self, node: NodeId, *, heir: NodeId, beat: int | None = None) -> Sequence[StreamRecord] | None:
        return await super().bury(node, heir=heir)


class TakesTheBuriedBack(MemoryStore):
    """A node that was buried continues, with its streams claimed and its mail gone."""

    def liveness(self, node: NodeId, *, lease: float, monotonic: Callable[[], float]) -> MemoryLiveness:
        store = self

        class StaysHolding(Claim):
            def bury(self) -> None:
                pass

        class View(MemoryLiveness):
            async def beat(self, facts: bytes) -> None:
                if node in store._nodes:
                    await super().beat(facts)

        view = View(store, node, lease=lease, monotonic=monotonic)
        view.node_claim = StaysHolding()
        return view


class TellsOfNobodyWhoHolds(MemoryStore):
    def liveness(self, node: NodeId, *, lease: float, monotonic: Callable[[], float]) -> MemoryLiveness:
        class View(MemoryLiveness):
            async def holders(self) -> Sequence[NodeId]:
                return []

        return View(self, node, lease=lease, monotonic=monotonic)


class HoldsForEver(MemoryStore):
    """A node that has held once counts as a holder until it leaves."""

    def liveness(self, node: NodeId, *, lease: float, monotonic: Callable[[], float]) -> MemoryLiveness:
        class View(MemoryLiveness):
            def hold(self, holding: bool) -> None:
                super().hold(True)

        return View(self, node, lease=lease, monotonic=monotonic)


class ComparesIdsAsTheyAre(MemoryStore):
    """8 and "8" run side by side."""

    def _apply(self, step: Step) -> StepRejected | None:
        if isinstance(step, OpenStream) and step.record.id not in self._streams:
            taken = {repr(call.request_id) for row in self._streams.values() for call in row.calls.values()}
            if not taken & {repr(call.request_id) for call in step.calls}:
                self._open_calls.clear()
        return super()._apply(step)


class OpensForEveryWriter(MemoryStore):
    """Two writers that know the name of a stream both take it for theirs."""

    def _apply(self, step: Step) -> StepRejected | None:
        return super()._apply(replace(step, unique=False) if isinstance(step, OpenStream) else step)


class OpensStreamsOfEndedSessions(MemoryStore):
    def _apply(self, step: Step) -> StepRejected | None:
        record = self._sessions.get(step.record.session) if isinstance(step, OpenStream) else None
        if record is not None:
            self._sessions[record.id] = replace(record, state=SessionState.ACTIVE)
        refusal = super()._apply(step)
        if record is not None:
            self._sessions[record.id] = record
        return refusal


class ChangesWhateverIsThere(MemoryStore):
    """Reads a note, and changes it when others have read it as well."""

    async def change_note(self, name: str, *, seen: bytes | None, value: bytes | None, session: str = "") -> bool:
        if self._notes.get(name, ("", None))[1] != seen:
            return False
        await asyncio.sleep(0)
        there = self._notes.get(name, ("", None))[1]
        return await super().change_note(name, seen=there, value=value, session=session)


class KeepsNotesOfEndedSessions(MemoryStore):
    def commit_now(self, steps: Sequence[Step]) -> Refusals:
        before = self._notes
        refusals = super().commit_now(steps)
        self._notes = before
        return refusals


class CountsBeforehand(MemoryStore):
    """Counts the sessions, and puts another when others have counted as well."""

    async def commit(self, steps: Sequence[Step]) -> Refusals:
        for step in steps:
            if isinstance(step, PutSession) and step.limits is not None:
                if await count_open(self) >= (step.limits.total or 0):
                    return await super().commit(steps)
                await asyncio.sleep(0)
        return await super().commit([replace(s, limits=None) if isinstance(s, PutSession) else s for s in steps])


class LooksAtNoRevision(MemoryStore):
    def _open(self, step: OpenStream) -> StepRejected | None:
        return super()._open(replace(step, seen=None))


class KeepsTheRevision(MemoryStore):
    """Of a record whose client has come back."""

    async def reattach(self, session: SessionId) -> SessionRecord | None:
        before = self._sessions.get(session)
        record = await super().reattach(session)
        if record is not None and before is not None:
            self._sessions[session] = replace(record, revision=before.revision)
        return record


class KeepsTheStamp(MemoryStore):
    def stamp(self) -> object:
        return "always"


class CountsFences(MemoryStore):
    """After a failover to a replica that lags it counts the same again."""

    counted = 0

    def _new_fence(self, generation: int = 1) -> Fence:
        self.counted += 1
        return Fence(self.counted)


class TrimsAnswers(MemoryStore):
    def commit_now(self, steps: Sequence[Step]) -> Refusals:
        refusals = super().commit_now(steps)
        for step in steps:
            if isinstance(step, Trim) and (found := self._streams.get(step.stream)):
                found.events = [event for event in found.events if event.seq > step.through]
        return refusals


class FailsNamelessly(MemoryStore):
    closed = False

    async def aclose(self) -> None:
        self.closed = True

    async def commit(self, steps: Sequence[Step]) -> Refusals:
        if self.closed:
            raise RuntimeError("closed")
        return await super().commit(steps)


class HangsForEver(MemoryStore):
    """Waits as long as its backend does."""

    hangs = False

    async def commit(self, steps: Sequence[Step]) -> Refusals:
        while self.hangs:  # noqa: ASYNC110 - a backend that is polled
            await asyncio.sleep(0.01)
        return await super().commit(steps)

    @contextmanager
    def hanging(self) -> Iterator[None]:
        self.hangs = True
        yield
        self.hangs = False


class AnswersWhileItHangs(HangsForEver):
    """Says that it has written what it could not."""

    async def commit(self, steps: Sequence[Step]) -> Refusals:
        return [None for _ in steps] if self.hangs else await super().commit(steps)


class TakesReadersBack(MemoryStore):
    """Believes the last report of how far readers have got."""

    def commit_now(self, steps: Sequence[Step]) -> Refusals:
        for step in steps:
            if isinstance(step, Reached) and (found := self._streams.get(step.stream)):
                found.record = replace(found.record, delivered=0)
        return super().commit_now(steps)


class CountsLostEventsAsRead(MemoryStore):
    """Takes the number of an event that was lost for the one that has its place now."""

    def commit_now(self, steps: Sequence[Step]) -> Refusals:
        return super().commit_now([self._of_now(step) for step in steps])

    def _of_now(self, step: Step) -> Step:
        if isinstance(step, Reached) and (found := self._streams.get(step.stream)):
            return replace(step, generation=found.record.generation)
        return step


class ReplacesEnds(MemoryStore):
    """Takes the last end of a tool step for its end."""

    def commit_now(self, steps: Sequence[Step]) -> Refusals:
        for step in steps:
            if isinstance(step, PutToolStep) and (found := self._streams.get(step.stream)):
                found.steps.pop((step.record.incarnation, step.record.request_id, step.record.number), None)
        return super().commit_now(steps)


class KeepsValues(MemoryStore):
    """Keeps what tools have done for longer than it may."""

    def commit_now(self, steps: Sequence[Step]) -> Refusals:
        def kept(step: Step) -> Step:
            if not isinstance(step, Append):
                return step
            return replace(step, ends=tuple(replace(end, stepped=False) for end in step.ends))

        return super().commit_now([kept(step) for step in steps])


class TakesStepsOfAnyWriter(MemoryStore):
    """Compares no fence of a tool step."""

    def commit_now(self, steps: Sequence[Step]) -> Refusals:
        def of_now(step: Step) -> Step:
            if isinstance(step, PutToolStep) and (found := self._streams.get(step.stream)):
                return replace(step, fence=found.record.fence)
            return step

        return super().commit_now([of_now(step) for step in steps])


@pytest.mark.parametrize(
    ("broken", "promise"),
    [
        (CommitsStepByStep, "promise 1"),
        (TakesAnyFence, "promise 2"),
        (ReadsFromThePosition, "promise"),
        (OpensAnew, "promise 5"),
        (ForgetsGenerations, "promise 6"),
        (CountsFences, "promise 6 fences are not counted"),
        (LetsEverybodyClaim, "promise 6 of several"),
        (TrimsAnswers, "promise 7"),
        (TakesEveryHole, "promise 2 an append that leaves a hole"),
        (FillsHoles, "promise 4 the writer of a store that lost events"),
        (HandsMailOutOnce, "promise 10 mail stays"),
        (ShowsMailOutOfOrder, "promise 10 mail becomes visible"),
        (InheritsUnderOldKeys, "promise 10 the heir"),
        (ForgetsWhatItTook, "promise 16 a message is appended and taken away"),
        (BuriesWhoIsBack, "promise 11 a node that has beaten since"),
        (TakesTheBuriedBack, "promise 11 a node that (left|was buried)"),
        (TellsOfNobodyWhoHolds, "promise 15 a node that holds"),
        (ComparesIdsAsTheyAre, "promise 12 no two calls"),
        (OpensForEveryWriter, "promise 12 of several writers"),
        (OpensStreamsOfEndedSessions, "promise 12 a session that has ended"),
        (CountsBeforehand, "promise 14 of many sessions at once"),
        (LooksAtNoRevision, "promise 21 a call is refused"),
        (KeepsTheRevision, "promise 21 whatever changes"),
        (CountsCallsAsSessions, "promise 22 durable calls and sessions"),
        (ForgetsTheDigest, "a call keeps its name and what stands for its request"),
        (ChangesWhateverIsThere, "promise 13 of several"),
        (KeepsNotesOfEndedSessions, "promise 13 a note of a session ends"),
        (ReplacesEnds, "promise 23 an ended step keeps its first end"),
        (KeepsValues, "promise 23 the end of a call empties"),
        (TakesStepsOfAnyWriter, "promise 23 a writer that lost its claim"),
        (TakesReadersBack, "promise 19 how far"),
        (CountsLostEventsAsRead, "promise 19 an event in the place"),
        (KeepsTheStamp, "equal stamps"),
    ],
)
async def test_a_store_that_breaks_a_promise_is_told_by_its_number(broken: type[MemoryStore], promise: str) -> None:
    with pytest.raises(AssertionError, match=f"^{promise}"):
        await check_store(lambda name: broken(), durable=False, only=promise.partition(" (")[0])


async def test_a_store_whose_nodes_hold_for_ever_is_told_by_its_number() -> None:
    """By waiting, so it is given little time."""
    with pytest.raises(AssertionError, match=r"^promise 15 a node that holds"):
        await check_store(lambda name: HoldsForEver(), durable=False, patience=1.0, only="promise 15")


@pytest.mark.parametrize(
    ("broken", "seen"),
    [
        (HangsForEver, r"a call neither answered nor failed within 1\.0 seconds"),
        (AnswersWhileItHangs, r"what a commit raises while the store hangs: <class 'list'>"),
    ],
)
async def test_a_store_that_says_it_keeps_its_time_and_does_not_is_told(broken: type[HangsForEver], seen: str) -> None:
    stores: dict[str, HangsForEver] = {}

    def make(name: str) -> HangsForEver:
        stores[name] = broken()
        return stores[name]

    with pytest.raises(AssertionError, match=rf"^promise 20 .*: {seen}"):
        await check_store(
            make, durable=False, hang=lambda name: stores[name].hanging(), patience=1.0, only="promise 20"
        )


async def test_a_store_that_claims_to_be_durable_and_is_not_is_told() -> None:
    with pytest.raises(AssertionError, match=r"^promise 3"):
        await check_store(lambda name: MemoryStore(), durable=True, only="promise 3")


async def test_a_failure_without_a_name_is_not_taken_for_one() -> None:
    with pytest.raises(RuntimeError, match="closed"):
        await check_store(lambda name: FailsNamelessly(), durable=False, only="promise 9")


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(OpensAnew, marks=pytest.mark.long),  # takes seconds to find
        TrimsAnswers,
        HandsMailOutOnce,
    ],
)
def test_histories_find_what_is_broken(broken: type[MemoryStore]) -> None:
    machine = store_machine(lambda name: broken(), durable=False)
    quick = settings(
        max_examples=3_000,  # it ends with the first that finds the fault
        derandomize=True,
        stateful_step_count=30,
        phases=[Phase.generate],
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=quick)
