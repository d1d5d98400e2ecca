"""A Hypothesis state machine: made-up histories, on a store and on `MemoryStore` as its model, compared step by step.

Fences are each store's own, so every write is spelled twice, with the fence of the one and of the other. Times never go
back, as in a server; stores may keep an event whose time lies behind its neighbours' a little longer.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from perdure._core.ids import Fence, Kind, NodeId, SessionId, StreamId
from perdure._core.retention import Cutoffs
from perdure._core.states import CallState, SessionState
from perdure.store.base import (
    Append,
    CallEnd,
    CloseAsk,
    DropStream,
    EndSession,
    Event,
    LeaveReader,
    OpenAsk,
    OpenStream,
    PutReader,
    PutSession,
    Step,
    Store,
    Trim,
)
from perdure.store.memory import MemoryStore
from perdure.testing._values import (
    NODE,
    Make,
    a_call,
    a_reader,
    a_session,
    a_stream,
    an_ask,
    picture,
    put,
    some_events,
)

if TYPE_CHECKING:
    from hypothesis.stateful import RuleBasedStateMachine

T = TypeVar("T")

SESSIONS = ("s1", "s2")
STREAMS = ("a", "b", "c")
REQUESTS: tuple[int | str, ...] = (1, "1", 2)
"""Few names, so that histories meet each other."""

_names = itertools.count()


class Twins:
    """A store and its model, driven together."""

    def __init__(self, make: Make, *, durable: bool) -> None:
        self._make = make
        self._durable = durable
        self._name = f"machine-{next(_names)}"
        self._runner = asyncio.Runner()
        self._history: list[tuple[Step, Step]] = []
        self.model = MemoryStore()
        self.store: Store = make(self._name)
        self.run(self.store.open())
        self.fences: list[tuple[Fence, Fence]] = []
        self.writer: dict[str, int] = {}
        self.join(NODE)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def close(self) -> None:
        self.run(self.store.aclose())
        self._runner.close()

    def reopen(self) -> None:
        if self._durable:
            self.run(self.store.aclose())
            self.store = self._make(self._name)
            self.run(self.store.open())

    def put(self, *steps: Step, patient: bool = False) -> None:
        self.put_twice([(step, step) for step in steps], patient=patient)

    def put_twice(self, steps: Sequence[tuple[Step, Step]], *, patient: bool = False) -> None:
        """Commit each store's own spelling of the same steps, and compare what was refused."""
        wanted = [bool(refusal) for refusal in self.model.commit_now([step for step, _ in steps])]
        theirs = [step for _, step in steps]
        seen = self.run(self.store.commit(theirs) if patient else put(self.store, *theirs))
        assert [bool(refusal) for refusal in seen] == wanted, f"refused: {seen}, of {theirs}"
        self._history += steps

    def put_again(self, count: int) -> None:
        """Promise 5, also after a reopening."""
        if steps := self._history[-count:]:
            self.put_twice(steps)
            del self._history[-len(steps) :]

    def append(self, writer: int, step: Append, *, patient: bool) -> None:
        ours, theirs = self.fences[writer]
        self.put_twice([(replace(step, fence=ours), replace(step, fence=theirs))], patient=patient)

    def open_stream(self, stream: str, session: str, calls: Sequence[int | str], now: float) -> None:
        rows = tuple(a_call(id_, stream=stream, session=session) for id_ in calls)
        kind = Kind.CALL if calls else Kind.STANDALONE
        ours, theirs = (
            OpenStream(record=a_stream(fence, stream, session=session, kind=kind, opened=now), calls=rows)
            for fence in self.fences[0]
        )
        if self.run(self.model.stream(StreamId(stream))) is None:
            self.writer[stream] = 0
        self.put_twice([(ours, theirs)])

    def claim(self, stream: str) -> None:
        ours, theirs = self.run(self.model.claim(StreamId(stream))), self.run(self.store.claim(StreamId(stream)))
        assert (ours is None) == (theirs is None), f"claimed: {theirs}, where the model has {ours}"
        if ours is not None and theirs is not None:
            self.writer[stream] = len(self.fences)
            self.fences.append((ours.fence, theirs.fence))
        self._history.clear()

    def join(self, node: NodeId) -> None:
        self.fences.append((self.run(self.model.join(node)), self.run(self.store.join(node))))

    def sweep(self, cutoffs: Cutoffs) -> None:
        swept, wanted = self.run(self.store.sweep(cutoffs)), self.run(self.model.sweep(cutoffs))
        assert bool(swept) == bool(wanted), f"{swept} rows swept, where the model has {wanted}"
        self._history.clear()

    def compare(self) -> None:
        seen, wanted = self._picture(self.store), self._picture(self.model)
        assert seen == wanted, f"the store shows {seen}, where the model shows {wanted}"

    def _picture(self, store: Store) -> dict[str, Any]:
        seen = self.run(picture(store, sessions=SESSIONS))
        for session in SESSIONS:
            key = f"{session}: streams"
            seen[key] = [replace(stream, fence=Fence(0)) for stream in seen[key]]
        return seen


def store_machine(make: Make, *, durable: bool = True) -> type[RuleBasedStateMachine]:
    """A state machine for the stores that `make` gives; its `TestCase` is what a test runner collects."""
    from hypothesis import strategies as st
    from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

    sessions, streams, nodes = st.sampled_from(SESSIONS), st.sampled_from(STREAMS), st.sampled_from(["node", "other"])
    few = st.integers(0, 5)

    class StoreMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.twins = Twins(make, durable=durable)
            self.now = 100.0

        def teardown(self) -> None:
            self.twins.close()

        @invariant()
        def the_store_shows_what_the_model_shows(self) -> None:
            self.twins.compare()

        @rule(session=sessions, state=st.sampled_from(SessionState))
        def put_session(self, session: str, state: SessionState) -> None:
            self.twins.put(PutSession(record=a_session(session, active=self.now, state=state)))

        @rule(session=sessions)
        def end_session(self, session: str) -> None:
            self.twins.put(EndSession(session=SessionId(session), time=self.now))

        @rule(stream=streams, session=sessions, calls=st.lists(st.sampled_from(REQUESTS), unique_by=repr, max_size=3))
        def open_stream(self, stream: str, session: str, calls: list[int | str]) -> None:
            self.twins.open_stream(stream, session, calls, self.now)

        @rule(stream=streams, count=few, answers=st.sets(few), end=st.sampled_from(REQUESTS), patient=st.booleans())
        def append(self, stream: str, count: int, answers: set[int], end: int | str, patient: bool) -> None:
            """What comes next, by the right writer, on a stream that is opened if need be; the last answer seals."""
            record = self.twins.run(self.twins.model.stream(StreamId(stream)))
            if record is None:
                self.twins.open_stream(stream, SESSIONS[0], REQUESTS, self.now)
            last = record.last if record else 0
            self.now += 1
            events = tuple(
                Event(seq, self.now, b"%d" % seq, seq - last in answers) for seq in range(last + 1, last + count + 1)
            )
            ends = (CallEnd(incarnation=1, request_id=end, state=CallState.ANSWERED),) if answers else ()
            step = Append(
                stream=StreamId(stream), fence=Fence(0), events=events, ends=ends, seal=bool(count) and count in answers
            )
            self.twins.append(self.twins.writer.get(stream, 0), step, patient=patient)

        @rule(stream=streams, first=st.integers(1, 12), count=few, writer=few, seal=st.booleans())
        def append_anything(self, stream: str, first: int, count: int, writer: int, seal: bool) -> None:
            """Known events, holes, stale fences."""
            self.now += 1
            events = some_events(first, first + count - 1, time=self.now)
            end = CallEnd(incarnation=1, request_id=2, state=CallState.CANCELLED)
            step = Append(stream=StreamId(stream), fence=Fence(0), events=events, ends=(end,), seal=seal)
            self.twins.append(writer % len(self.twins.fences), step, patient=False)

        @rule(count=st.integers(1, 6))
        def put_again(self, count: int) -> None:
            self.twins.put_again(count)

        @rule(stream=streams, kept=few)
        def trim(self, stream: str, kept: int) -> None:
            record = self.twins.run(self.twins.model.stream(StreamId(stream)))
            self.twins.put(Trim(stream=StreamId(stream), through=max(0, record.last - kept) if record else kept))

        @rule(stream=streams)
        def drop_stream(self, stream: str) -> None:
            self.twins.put(DropStream(stream=StreamId(stream)))

        @rule(stream=streams)
        def claim(self, stream: str) -> None:
            self.twins.claim(stream)

        @rule(stream=streams, session=sessions, ask=st.sampled_from(["x", "y"]), closed=st.booleans())
        def ask(self, stream: str, session: str, ask: str, closed: bool) -> None:
            if closed:
                self.twins.put(CloseAsk(session=SessionId(session), id=ask))
            elif (record := self.twins.run(self.twins.model.stream(StreamId(stream)))) is not None:
                self.twins.put(OpenAsk(record=an_ask(ask, stream=stream, session=record.session)))

        @rule(stream=streams, reader=st.sampled_from(["old", "new"]), seq=few, leaves=st.booleans())
        def reader(self, stream: str, reader: str, seq: int, leaves: bool) -> None:
            if leaves:
                self.twins.put(LeaveReader(stream=StreamId(stream), reader=reader))
            else:
                self.twins.put(PutReader(record=a_reader(reader, stream=stream, seq=seq)))

        @rule(events=st.floats(0, 1), answers=st.floats(0, 1))
        def sweep(self, events: float, answers: float) -> None:
            """Cutoffs somewhere between the beginning and now, that of the answers before that of the events."""
            cutoff = 99.5 + (self.now + 1 - 99.5) * events
            self.now += 1
            self.twins.sweep(Cutoffs(events=cutoff, answers=99.5 + (cutoff - 99.5) * answers))

        @rule(node=nodes, message=st.binary(max_size=3))
        def post(self, node: str, message: bytes) -> None:
            for store in (self.twins.model, self.twins.store):
                self.twins.run(store.post(NodeId(node), message))

        @rule(node=nodes)
        def collect(self, node: str) -> None:
            seen, wanted = (
                list(self.twins.run(store.collect(NodeId(node)))) for store in (self.twins.store, self.twins.model)
            )
            assert seen == wanted, f"mail {seen}, where the model has {wanted}"

        @rule()
        def reopen(self) -> None:
            self.twins.reopen()

    return StoreMachine
