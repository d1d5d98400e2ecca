"""The rules of the state machine: what may happen to a store, one small thing each.

Times never go back, as in a server; stores may keep an event whose time lies behind its neighbours' a little longer.
"""

from __future__ import annotations

import itertools
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from perdure._core.ids import Fence, NodeId, SessionId, StreamId
from perdure._core.jsonrpc import coerce_id
from perdure._core.retention import Cutoffs
from perdure._core.states import CallState, SessionState
from perdure.store import base
from perdure.testing._twins import REQUESTS, SESSIONS, STREAMS, Twins
from perdure.testing._values import Make, a_chain, a_reader, a_session, a_sticky, an_ask, some_events

START = 100.0

sessions, streams, requests = st.sampled_from(SESSIONS), st.sampled_from(STREAMS), st.sampled_from(REQUESTS)
few, places = st.integers(0, 5), st.integers(0, 1)
going_on = st.sampled_from([SessionState.OPENING, SessionState.ACTIVE, SessionState.DORMANT])
running = st.sampled_from([CallState.RUNNING, CallState.WAITING])
calls = st.lists(requests, unique_by=coerce_id, max_size=3)
sticky_requests = st.sampled_from(
    [a_sticky("logging/setLevel", level=level) for level in ("info", "debug")]
    + [a_sticky(f"resources/{verb}", uri=uri) for verb in ("subscribe", "unsubscribe") for uri in ("a://", "b://")]
)


class _Histories(RuleBasedStateMachine):
    """A store and its model, compared after each rule."""

    make: ClassVar[Make]
    durable: ClassVar[bool]

    def __init__(self) -> None:
        super().__init__()
        self.twins = Twins(type(self).make, durable=self.durable)
        self.now = START
        self._names = itertools.count()

    def teardown(self) -> None:
        self.twins.close()

    @invariant()
    def the_store_shows_what_the_model_shows(self) -> None:
        self.twins.compare()


class _SessionRules(_Histories):
    @rule(session=sessions, state=going_on)
    def put_session(self, session: str, state: SessionState) -> None:
        self.twins.put(base.PutSession(record=a_session(session, active=self.now, state=state)))

    @rule(session=sessions, state=st.none() | going_on, initialized=st.none() | st.booleans(), back=few)
    def change_session(self, session: str, state: SessionState | None, initialized: bool | None, back: int) -> None:
        active = self.now - back
        self.twins.put(
            base.ChangeSession(session=SessionId(session), active=active, state=state, initialized=initialized)
        )

    @rule(session=sessions, request=sticky_requests)
    def stick(self, session: str, request: bytes) -> None:
        self.twins.put(base.Stick(session=SessionId(session), request=request))

    @rule(session=sessions, reason=st.sampled_from(["deleted", "expired"]))
    def end_session(self, session: str, reason: str) -> None:
        self.twins.put(base.EndSession(session=SessionId(session), time=self.now, reason=reason))

    @rule(session=sessions)
    def reattach(self, session: str) -> None:
        self.twins.reattach(session)

    @rule(session=sessions, name=st.sampled_from(["x", "y"]))
    def put_chain(self, session: str, name: str) -> None:
        self.twins.put_chain(a_chain(f"{name} of {session}", session=session))

    @rule(session=sessions, stale=st.booleans(), current=few, next_=few, end=st.booleans())
    def change_chain(self, session: str, stale: bool, current: int, next_: int, end: bool) -> None:
        self.twins.change_chain(session, stale=stale, current=str(current), next_=str(next_), end=end)


class _StreamRules(_Histories):
    @rule(stream=streams, session=sessions, calls=calls, node=places)
    def open_stream(self, stream: str, session: str, calls: list[int | str], node: int) -> None:
        self.twins.open_stream(stream, session, calls, self.now, node)

    @rule(stream=streams, count=few, answers=st.sets(few), end=requests, patient=st.booleans())
    def append(self, stream: str, count: int, answers: set[int], end: int | str, patient: bool) -> None:
        """What comes next, by the right writer, on a stream that is opened if need be; the last answer seals."""
        record = self.twins.stream(stream)
        if record is None:
            self.twins.open_stream(stream, SESSIONS[0], REQUESTS[1:], self.now)
        last = record.last if record else 0
        self.now += 1
        events = tuple(
            base.Event(seq, self.now, b"%d" % seq, seq - last in answers) for seq in range(last + 1, last + count + 1)
        )
        ends = (base.CallEnd(incarnation=1, request_id=end, state=CallState.ANSWERED),) if answers else ()
        seal = bool(count) and count in answers
        step = base.Append(stream=StreamId(stream), fence=Fence(0), events=events, ends=ends, seal=seal)
        self.twins.write(self.twins.writer.get(stream, 0), step, patient=patient)

    @rule(stream=streams, first=st.integers(1, 12), count=few, writer=few, seal=st.booleans())
    def append_anything(self, stream: str, first: int, count: int, writer: int, seal: bool) -> None:
        """Known events, holes, stale fences."""
        self.now += 1
        events = some_events(first, first + count - 1, time=self.now)
        end = base.CallEnd(incarnation=1, request_id=2, state=CallState.CANCELLED)
        step = base.Append(stream=StreamId(stream), fence=Fence(0), events=events, ends=(end,), seal=seal)
        self.twins.write(writer, step)

    @rule(stream=streams, request=requests, state=running, attempt=st.integers(1, 2), stale=st.none() | few)
    def put_call(self, stream: str, request: int | str, state: CallState, attempt: int, stale: int | None) -> None:
        step = base.PutCall(
            stream=StreamId(stream),
            fence=Fence(0),
            incarnation=1,
            request_id=request,
            state=state,
            attempt=attempt,
            progress=self.now,
        )
        self.twins.write(self.twins.writer.get(stream, 0) if stale is None else stale, step)

    @rule(stream=streams, stale=st.none() | few)
    def release(self, stream: str, stale: int | None) -> None:
        writer = self.twins.writer.get(stream, 0) if stale is None else stale
        self.twins.write(writer, base.Release(stream=StreamId(stream), fence=Fence(0)))

    @rule(stream=streams, node=places, stale=st.none() | few)
    def claim(self, stream: str, node: int, stale: int | None) -> None:
        held = self.twins.writer.get(stream, 0) if stale is None else stale
        self.twins.claim(stream, node=self.twins.nodes[node][0], held=held)

    @rule(count=st.integers(1, 6))
    def put_again(self, count: int) -> None:
        self.twins.put_again(count)

    @rule(stream=streams, kept=few)
    def trim(self, stream: str, kept: int) -> None:
        record = self.twins.stream(stream)
        self.twins.put(base.Trim(stream=StreamId(stream), through=max(0, record.last - kept) if record else kept))

    @rule(stream=streams)
    def drop_stream(self, stream: str) -> None:
        self.twins.put(base.DropStream(stream=StreamId(stream)))

    @rule(events=st.floats(0, 1), answers=st.floats(0, 1))
    def sweep(self, events: float, answers: float) -> None:
        """Cutoffs somewhere between the beginning and now, that of the answers before that of the events."""
        begin = START - 0.5
        cutoff = begin + (self.now + 1 - begin) * events
        self.now += 1
        self.twins.sweep(Cutoffs(events=cutoff, answers=begin + (cutoff - begin) * answers))


class _ReaderRules(_Histories):
    """Rules of asks and readers."""

    @rule(stream=streams, ask=st.sampled_from(["x", "y"]))
    def open_ask(self, stream: str, ask: str) -> None:
        if (record := self.twins.stream(stream)) is not None:
            self.twins.put(base.OpenAsk(record=an_ask(ask, stream=stream, session=record.session)))

    @rule(session=sessions, ask=st.sampled_from(["x", "y"]))
    def close_ask(self, session: str, ask: str) -> None:
        self.twins.put(base.CloseAsk(session=SessionId(session), id=ask))

    @rule(stream=streams, reader=st.sampled_from(["old", "new"]), seq=few, node=places)
    def put_reader(self, stream: str, reader: str, seq: int, node: int) -> None:
        self.twins.put(base.PutReader(record=a_reader(reader, stream=stream, seq=seq, node=self.twins.nodes[node][0])))

    @rule(stream=streams, reader=st.sampled_from(["old", "new"]), seq=few)
    def move_reader(self, stream: str, reader: str, seq: int) -> None:
        self.twins.put(base.MoveReader(stream=StreamId(stream), reader=reader, seq=seq))

    @rule(stream=streams, reader=st.sampled_from(["old", "new"]))
    def leave_reader(self, stream: str, reader: str) -> None:
        self.twins.put(base.LeaveReader(stream=StreamId(stream), reader=reader))

    @rule(stream=streams, generation=st.integers(1, 3), through=few, unread=st.booleans())
    def reach(self, stream: str, generation: int, through: int, unread: bool) -> None:
        self.twins.put(base.Reached(stream=StreamId(stream), generation=generation, through=through, unread=unread))


class StoreMachine(_SessionRules, _StreamRules, _ReaderRules):
    """All rules: those above, and those of nodes and their mail."""

    @rule(node=places, message=st.binary(max_size=3))
    def post(self, node: int, message: bytes) -> None:
        self.twins.post(self.twins.nodes[node][0], message)

    @rule(message=st.binary(max_size=3))
    def post_to_an_unknown_node(self, message: bytes) -> None:
        self.twins.post(NodeId("unknown"), message)

    @rule(stream=streams, node=places, first=st.integers(1, 4), payloads=st.lists(st.binary(max_size=3), max_size=3))
    def forward(self, stream: str, node: int, first: int, payloads: list[bytes]) -> None:
        self.twins.forward(stream, self.twins.nodes[node][0], first, payloads)

    @rule(stream=streams, count=st.integers(1, 3))
    def take_forwarded(self, stream: str, count: int) -> None:
        self.now += 1
        self.twins.take_forwarded(stream, count, self.now)

    @rule(node=places, count=st.integers(1, 3))
    def receive(self, node: int, count: int) -> None:
        self.twins.receive(self.twins.nodes[node][0], count)

    @rule()
    def bury_the_other(self) -> None:
        self.twins.bury_the_other(f"other-{next(self._names)}")

    @rule()
    def reopen(self) -> None:
        self.twins.reopen()
