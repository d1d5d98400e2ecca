"""The rules of the state machine: what may happen to a store, one small thing each.

Times never go back, as in a server; stores may keep an event whose time lies behind its neighbours' a little longer.
"""

import itertools
from dataclasses import replace
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from perdure._core.ids import Fence, NodeId, SessionId, StreamId
from perdure._core.jsonrpc import coerce_id
from perdure._core.retention import Cutoffs
from perdure._core.states import CallState, SessionState
from perdure.store import base
from perdure.testing._twins import REQUESTS, SESSIONS, STREAMS, Twins
from perdure.testing._values import Make, a_chain, a_reader, a_session, a_sticky, an_append, an_ask, an_end, some_events

START = 100.0

sessions, streams = st.sampled_from(SESSIONS), st.sampled_from(STREAMS)
requests, asks, readers = st.sampled_from(REQUESTS), st.sampled_from(["x", "y"]), st.sampled_from(["old", "new"])
few, some, places, flags = st.integers(0, 5), st.integers(1, 3), st.integers(0, 1), st.booleans()
short = st.binary(max_size=3)
stale = st.none() | few
"""A writer that may be another one than the right one, which `None` is."""
going_on = st.sampled_from([SessionState.OPENING, SessionState.ACTIVE, SessionState.DORMANT])
running = st.sampled_from([CallState.RUNNING, CallState.WAITING])
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


def _puts(step: type[base.Step], **fields: Any) -> Any:
    """A rule that puts a step of this kind."""

    def put(self: _Histories, **drawn: Any) -> None:
        self.twins.put(step(**drawn))

    put.__name__ = step.__name__  # histories are shown by the names of their rules
    made: Any = rule(**fields)
    return made(put)


class _SessionRules(_Histories):
    stick = _puts(base.Stick, session=sessions, request=sticky_requests)

    @rule(session=sessions, state=going_on)
    def put_session(self, session: SessionId, state: SessionState) -> None:
        self.twins.put(base.PutSession(record=a_session(session, active=self.now, state=state)))

    @rule(session=sessions, back=few, state=st.none() | going_on, initialized=st.none() | flags)
    def change_session(self, session: SessionId, back: int, **changed: Any) -> None:
        self.twins.put(base.ChangeSession(session=session, active=self.now - back, **changed))

    @rule(session=sessions, reason=st.sampled_from(["deleted", "expired"]))
    def end_session(self, session: SessionId, reason: str) -> None:
        self.twins.put(base.EndSession(session=session, time=self.now, reason=reason))

    @rule(session=sessions)
    def reattach(self, session: SessionId) -> None:
        self.twins.agree(lambda store: store.reattach(session))

    @rule(session=sessions, name=asks)
    def put_chain(self, session: SessionId, name: str) -> None:
        self.twins.agree(lambda store: store.put_chain(a_chain(f"{name} of {session}", session=session)))

    @rule(session=sessions, stale=flags, current=few, next_=few, end=flags)
    def change_chain(self, session: SessionId, stale: bool, current: int, next_: int, end: bool) -> None:
        seen = self.twins.run(self.twins.model.chain_of(session)) or a_chain(session=session)
        seen = replace(seen, current=str(current)) if stale else seen
        after = None if end else replace(seen, current=str(current), next=str(next_))
        self.twins.agree(lambda store: store.change_chain(seen, after))


class _StreamRules(_Histories):
    drop_stream = _puts(base.DropStream, stream=streams)

    @rule(stream=streams, session=sessions, calls=st.lists(requests, unique_by=coerce_id, max_size=3), node=places)
    def open_stream(self, stream: StreamId, session: SessionId, calls: list[int | str], node: int) -> None:
        self.twins.open_stream(stream, session, calls, self.now, node)

    @rule(stream=streams, count=few, answers=st.sets(few), end=requests, patient=flags)
    def append(self, stream: StreamId, count: int, answers: set[int], end: int | str, patient: bool) -> None:
        """What comes next, by the right writer, on a stream that is opened if need be; the last answer seals."""
        record = self.twins.stream(stream)
        if record is None:
            self.twins.open_stream(stream, SESSIONS[0], REQUESTS[1:], self.now)
        last = record.last if record else 0
        self.now += 1
        events = [
            base.Event(last + place, self.now, b"%d" % (last + place), place in answers)
            for place in range(1, count + 1)
        ]
        ends = (an_end(end),) if answers else ()
        seal = bool(count) and count in answers
        self.twins.write(an_append(Fence(0), events, stream=stream, ends=ends, seal=seal), patient=patient)

    @rule(stream=streams, first=st.integers(1, 12), count=few, writer=stale, seal=flags, lost=flags)
    def append_anything(self, stream: StreamId, first: int, count: int, writer: int | None, **fields: bool) -> None:
        """Known events, holes that are taken and such that are not, stale fences."""
        self.now += 1
        events = some_events(first, first + count - 1, time=self.now)
        ends = (an_end(2, CallState.CANCELLED),)
        self.twins.write(an_append(Fence(0), events, stream=stream, ends=ends, **fields), writer)

    @rule(writer=stale, stream=streams, request_id=requests, state=running, attempt=st.integers(1, 2))
    def put_call(self, writer: int | None, **fields: Any) -> None:
        self.twins.write(base.PutCall(fence=Fence(0), incarnation=1, progress=self.now, **fields), writer)

    @rule(stream=streams, writer=stale)
    def release(self, stream: StreamId, writer: int | None) -> None:
        self.twins.write(base.Release(stream=stream, fence=Fence(0)), writer)

    @rule(stream=streams, node=places, writer=stale)
    def claim(self, stream: StreamId, node: int, writer: int | None) -> None:
        self.twins.claim(stream, node=self.twins.nodes[node][0], held=writer)

    @rule(count=st.integers(1, 6))
    def put_again(self, count: int) -> None:
        self.twins.put_again(count)

    @rule(stream=streams, kept=few)
    def trim(self, stream: StreamId, kept: int) -> None:
        record = self.twins.stream(stream)
        self.twins.put(base.Trim(stream=stream, through=max(0, record.last - kept) if record else kept))

    @rule(events=st.floats(0, 1), answers=st.floats(0, 1))
    def sweep(self, events: float, answers: float) -> None:
        """Cutoffs somewhere between the beginning and now, that of the answers before that of the events."""
        begin = START - 0.5
        cutoff = begin + (self.now + 1 - begin) * events
        self.now += 1
        self.twins.sweep(Cutoffs(events=cutoff, answers=begin + (cutoff - begin) * answers))


class _ReaderRules(_Histories):
    """Rules of asks and readers."""

    close_ask = _puts(base.CloseAsk, session=sessions, id=asks)
    move_reader = _puts(base.MoveReader, stream=streams, reader=readers, seq=few)
    leave_reader = _puts(base.LeaveReader, stream=streams, reader=readers)
    reach = _puts(base.Reached, stream=streams, generation=some, through=few, unread=flags)

    @rule(stream=streams, ask=asks)
    def open_ask(self, stream: StreamId, ask: str) -> None:
        if (record := self.twins.stream(stream)) is not None:
            self.twins.put(base.OpenAsk(record=an_ask(ask, stream=stream, session=record.session)))

    @rule(stream=streams, reader=readers, seq=few, node=places)
    def put_reader(self, stream: StreamId, reader: str, seq: int, node: int) -> None:
        self.twins.put(base.PutReader(record=a_reader(reader, stream=stream, seq=seq, node=self.twins.nodes[node][0])))


class StoreMachine(_SessionRules, _StreamRules, _ReaderRules):
    """All rules: those above, and those of nodes and their mail."""

    @rule(node=places, message=short)
    def post(self, node: int, message: bytes) -> None:
        self.twins.post(self.twins.nodes[node][0], message)

    @rule(message=short)
    def post_to_an_unknown_node(self, message: bytes) -> None:
        self.twins.post(NodeId("unknown"), message)

    @rule(stream=streams, node=places, first=st.integers(1, 4), payloads=st.lists(short, max_size=3).map(tuple))
    def forward(self, node: int, **fields: Any) -> None:
        self.twins.put(base.Forward(node=self.twins.nodes[node][0], sender="s", **fields))

    @rule(stream=streams, count=some)
    def take_forwarded(self, stream: StreamId, count: int) -> None:
        self.now += 1
        self.twins.take_forwarded(stream, count, self.now)

    @rule(node=places, count=some)
    def receive(self, node: int, count: int) -> None:
        self.twins.receive(self.twins.nodes[node][0], count)

    @rule()
    def bury_the_other(self) -> None:
        self.twins.bury_the_other(f"other-{next(self._names)}")

    @rule()
    def reopen(self) -> None:
        self.twins.reopen()
