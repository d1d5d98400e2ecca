"""A Hypothesis state machine that makes up histories and compares a store with its model, `MemoryStore`.

The two are driven together and compared. Fences and keys of mail are each store's own, so what shows one is spelled
twice, for the one and for the other.

Times never go back, as in a server; stores may keep an event whose time lies before its neighbours' a little longer.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from perdure._core.ids import Fence, Kind, NodeId, SessionId, StreamId
from perdure._core.jsonrpc import coerce_id
from perdure._core.retention import Cutoffs
from perdure._core.states import CallState, SessionState
from perdure.store.interface import Store, open_call, stream_by_id
from perdure.store.memory import MemoryStore
from perdure.store.records import Event, Forwarded, NodeRecord, SessionRecord, StreamRecord
from perdure.store.steps import (
    Append,
    ChangeSession,
    CloseAsk,
    DropStream,
    EndSession,
    Forward,
    LeaveReader,
    MailReceived,
    OpenAsk,
    OpenStream,
    PutCall,
    PutReader,
    PutSession,
    PutToolStep,
    Reached,
    Release,
    SendMail,
    Step,
    Trim,
)
from perdure.testing import _values as values
from perdure.testing._values import (
    NODE,
    Make,
    a_call,
    a_reader,
    a_session,
    a_sticky,
    a_stream,
    a_tool_step,
    an_append,
    an_ask,
    an_end,
    some_events,
)

T = TypeVar("T")

START = 100.0

SESSIONS = (SessionId("s1"), SessionId("s2"))
STREAMS = tuple(map(StreamId, "abc"))
REQUESTS: tuple[int | str, ...] = (1, "1", 2)
"""Few names, so that histories meet each other."""

_names = itertools.count()

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


class _Twins(RuleBasedStateMachine):
    """A store and its model, compared after each rule."""

    make: ClassVar[Make]
    durable: ClassVar[bool]

    def __init__(self) -> None:
        super().__init__()
        self.now = START
        self._name = f"machine-{next(_names)}"
        self._runner = asyncio.Runner()
        self.history: list[tuple[Step, Step]] = []
        """Steps that may be put again."""
        self.model = MemoryStore()
        self.store: Store = type(self).make(self._name)
        self.run(self.store.open())
        self.fences: list[tuple[Fence, Fence]] = []
        """In the model and in the store; a writer is a place in this list."""
        self.writer: dict[str, int] = {}
        self.nodes: list[tuple[NodeId, int]] = []
        """The nodes that have joined, with the fence that they got."""
        self.join(NODE)
        self.join(NodeId("other"))

    def teardown(self) -> None:
        self.run(self.store.aclose())
        self._runner.close()

    @rule()
    def reopen(self) -> None:
        if self.durable:
            self.run(self.store.aclose())
            self.store = type(self).make(self._name)
            self.run(self.store.open())

    @invariant()
    def the_store_shows_what_the_model_shows(self) -> None:
        wanted, seen = self.both(self._picture)
        assert seen == wanted, f"the store shows {seen}, where the model shows {wanted}"

    async def _picture(self, store: Store) -> dict[str, Any]:
        seen = await values.picture(store, sessions=SESSIONS)
        asked: dict[str, Awaitable[Any]] = {"going on": values.count_open(store), "dormant": store.longest_dormant()}
        for session in SESSIONS:
            for key in (f"{session}: unread", f"{session}: streams"):
                seen[key] = [replace(stream, fence=Fence(0)) for stream in seen[key]]
            for id_ in REQUESTS:
                asked[f"{session}: {id_!r}"] = open_call(store, session, incarnation=1, request_id=id_)
            for stream in seen[key]:
                asked[f"{stream.id}: forwarded"] = store.forwarded(stream.id)
        for node, _ in self.nodes:
            asked[f"{node}: mail"] = values.messages(store, node)
            asked[f"{node}: forwarded to"] = store.written_by(node, forwarded=True)
            asked[f"{node}: streams"] = store.written_by(node)
        asked["nodes"] = store.nodes()
        for name, answer in (await values.together(store, asked)).items():
            match answer:  # fences, keys and beats are each store's own
                case [Forwarded(), *_]:
                    seen[name] = [message.payload for message in answer]
                case [StreamRecord(), *_]:
                    seen[name] = [stream.id for stream in answer]
                case [NodeRecord(), *_]:
                    seen[name] = sorted(node.id for node in answer)
                case SessionRecord():
                    seen[name] = answer.active
                case _:
                    seen[name] = answer
        return seen

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def both(self, ask: Callable[[Store], Coroutine[Any, Any, T]]) -> tuple[T, T]:
        return self.run(ask(self.model)), self.run(ask(self.store))

    def agree(
        self, ask: Callable[[Store], Coroutine[Any, Any, T]], key: Callable[[T], object] | None = None
    ) -> tuple[T, T]:
        """Ask both for the same; `key` returns the part of an answer that must be equal, by default all of it."""
        ours, theirs = self.both(ask)
        assert (key(ours) == key(theirs)) if key else (ours == theirs), f"{theirs}, where the model has {ours}"
        return ours, theirs

    def put(self, step: Step) -> None:
        self.put_pairs([(step, step)])

    def put_pairs(self, steps: Sequence[tuple[Step, Step]], *, patient: bool = False) -> bool:
        """Commit each store's own spelling of the same steps; whether none was refused."""
        wanted = [type(refusal) for refusal in self.model.commit_now([step for step, _ in steps])]
        theirs = [step for _, step in steps]
        seen = self.run(self.store.commit(theirs) if patient else values.put(self.store, *theirs))
        assert [type(refusal) for refusal in seen] == wanted, f"refused: {seen}, of {theirs}, where {wanted} was due"
        self.history += steps
        return set(wanted) <= {type(None)}

    def write(
        self, step: Append | PutCall | PutToolStep | Release, writer: int | None = None, *, patient: bool = False
    ) -> None:
        """What shows a fence, with that of a writer, the right one if none is given.

        A stream that was released has none, and stays as it is.
        """
        record = self.stream(step.stream)
        if record is None or record.node:
            ours, theirs = self.fences_of(step.stream, writer)
            self.put_pairs([(replace(step, fence=ours), replace(step, fence=theirs))], patient=patient)
        if isinstance(step, Release):
            self.history.clear()

    def fences_of(self, stream: str, writer: int | None) -> tuple[Fence, Fence]:
        place = self.writer.get(stream, 0) if writer is None else writer
        return self.fences[place % len(self.fences)]

    def stream(self, stream: str) -> StreamRecord | None:
        return self.run(stream_by_id(self.model, StreamId(stream)))

    def join(self, node: NodeId) -> None:
        self.nodes.append((node, len(self.fences)))
        self.fences.append(self.both(lambda store: store.join(node)))

    def claim_as(self, node: NodeId, stream: StreamId, writer: int | None) -> None:
        """Claim as a node that has seen the fence of a writer, of the right one if none is given."""
        fences = dict(zip((self.model, self.store), self.fences_of(stream, writer), strict=True))
        ours, theirs = self.agree(lambda store: store.claim(stream, node=node, held=fences[store]), lambda r: r is None)
        if ours is not None and theirs is not None:
            self.writer[stream] = len(self.fences)
            self.fences.append((ours.fence, theirs.fence))
        self.history.clear()


def _puts(step: type[Step], **fields: Any) -> Any:
    """A rule that puts a step of this kind."""

    def put(self: _Twins, **drawn: Any) -> None:
        self.put(step(**drawn))

    put.__name__ = step.__name__  # histories are shown by the names of their rules
    made: Any = rule(**fields)
    return made(put)


class _SessionRules(_Twins):
    stick = _puts(ChangeSession, session=sessions, stick=sticky_requests)

    @rule(session=sessions, state=going_on)
    def put_session(self, session: SessionId, state: SessionState) -> None:
        self.put(PutSession(record=a_session(session, active=self.now, state=state)))

    @rule(session=sessions, back=few, state=st.none() | going_on, initialized=st.none() | flags)
    def change_session(self, session: SessionId, back: int, **changed: Any) -> None:
        self.put(ChangeSession(session=session, active=self.now - back, **changed))

    @rule(session=sessions, reason=st.sampled_from(["deleted", "expired"]))
    def end_session(self, session: SessionId, reason: str) -> None:
        self.put(EndSession(session=session, time=self.now, reason=reason))

    @rule(session=sessions)
    def reattach(self, session: SessionId) -> None:
        self.agree(lambda store: store.reattach(session))

    @rule(session=st.just("") | sessions, name=asks, seen=st.none() | short, value=st.none() | short, right=flags)
    def change_note(self, session: str, name: str, seen: bytes | None, value: bytes | None, right: bool) -> None:
        """From an existing record, or from a guess."""
        seen = self.run(self.model.notes(name)).get(name) if right else seen
        if seen is not None or value is not None:
            self.agree(lambda store: store.change_note(name, seen=seen, value=value, session=session))


class _StreamRules(_Twins):
    drop_stream = _puts(DropStream, stream=streams)

    @rule(stream=streams, session=sessions, calls=st.lists(requests, unique_by=coerce_id, max_size=3), node=places)
    def open_stream(self, stream: StreamId, session: SessionId, calls: Sequence[int | str], node: int) -> None:
        """In a session that exists."""
        rows = tuple(a_call(id_, stream=stream, session=session) for id_ in calls)
        name, writer = self.nodes[node]
        kind = Kind.CALL if calls else Kind.STANDALONE
        record = a_stream(Fence(0), stream, session=session, kind=kind, opened=self.now, node=name)
        ours, theirs = (OpenStream(record=replace(record, fence=f), calls=rows) for f in self.fences[writer])
        known = self.stream(stream)
        self.put(PutSession(record=a_session(session, active=self.now)))
        if self.put_pairs([(ours, theirs)]) and known is None:
            self.writer[stream] = writer

    @rule(stream=streams, count=few, answers=st.sets(few), end=requests, patient=flags)
    def append(self, stream: StreamId, count: int, answers: set[int], end: int | str, patient: bool) -> None:
        """What comes next, by the right writer, on a stream that is opened if need be; the last answer seals."""
        record = self.stream(stream)
        if record is None:
            self.open_stream(stream=stream, session=SESSIONS[0], calls=REQUESTS[1:], node=0)
        last = record.last if record else 0
        self.now += 1
        events = [
            Event(last + place, self.now, b"%d" % (last + place), place in answers) for place in range(1, count + 1)
        ]
        ends = (replace(an_end(end), stepped=patient),) if answers else ()
        seal = bool(count) and count in answers
        self.write(an_append(Fence(0), events, stream=stream, ends=ends, seal=seal), patient=patient)

    @rule(stream=streams, first=st.integers(1, 12), count=few, writer=stale, seal=flags, lost=flags)
    def append_anything(self, stream: StreamId, first: int, count: int, writer: int | None, **fields: bool) -> None:
        """Known events, holes that are taken and such that are not, stale fences."""
        self.now += 1
        events = some_events(first, first + count - 1, time=self.now)
        ends = (an_end(2, CallState.CANCELLED),)
        self.write(an_append(Fence(0), events, stream=stream, ends=ends, **fields), writer)

    @rule(writer=stale, stream=streams, request_id=requests, state=running, attempt=st.integers(1, 2))
    def put_call(self, writer: int | None, **fields: Any) -> None:
        self.write(PutCall(fence=Fence(0), incarnation=1, progress=self.now, **fields), writer)

    @rule(
        writer=stale,
        stream=streams,
        number=st.integers(1, 2),
        id_=requests,
        value=st.none() | short,
        own=flags,
        after=st.integers(0, 2),
    )
    def put_tool_step(
        self,
        writer: int | None,
        stream: StreamId,
        number: int,
        id_: int | str,
        value: bytes | None,
        own: bool,
        after: int,
    ) -> None:
        done = {} if value is None else {"value": value}
        record = a_tool_step(number, stream=stream, request_id=id_, own=own, **done)
        self.write(PutToolStep(fence=Fence(0), record=record, after=after, after_ended=own), writer)

    @rule(stream=streams, writer=stale)
    def release(self, stream: StreamId, writer: int | None) -> None:
        self.write(Release(stream=stream, fence=Fence(0)), writer)

    @rule(stream=streams, node=places, writer=stale)
    def claim(self, stream: StreamId, node: int, writer: int | None) -> None:
        self.claim_as(self.nodes[node][0], stream, writer)

    @rule(count=st.integers(1, 6))
    def put_again(self, count: int) -> None:
        """Promise 5, also after a reopening."""
        if steps := self.history[-count:]:
            self.put_pairs(steps)
            del self.history[-len(steps) :]

    @rule(stream=streams, kept=few)
    def trim(self, stream: StreamId, kept: int) -> None:
        record = self.stream(stream)
        self.put(Trim(stream=stream, through=max(0, record.last - kept) if record else kept))

    @rule(events=st.floats(0, 1), answers=st.floats(0, 1))
    def sweep(self, events: float, answers: float) -> None:
        """Cutoffs somewhere between the beginning and now, that of the answers before that of the events."""
        begin = START - 0.5
        cutoff = begin + (self.now + 1 - begin) * events
        self.now += 1
        cutoffs = Cutoffs(events=cutoff, answers=begin + (cutoff - begin) * answers)
        self.agree(lambda store: store.sweep(cutoffs), bool)
        self.history.clear()


class _ReaderRules(_Twins):
    """Rules of asks and readers."""

    close_ask = _puts(CloseAsk, session=sessions, id=asks)
    leave_reader = _puts(LeaveReader, stream=streams, reader=readers)
    reach = _puts(Reached, stream=streams, generation=some, through=few, unread=flags)

    @rule(stream=streams, ask=asks)
    def open_ask(self, stream: StreamId, ask: str) -> None:
        if (record := self.stream(stream)) is not None:
            self.put(OpenAsk(record=an_ask(ask, stream=stream, session=record.session)))

    @rule(stream=streams, reader=readers, seq=few, node=places, attaches=flags)
    def put_reader(self, stream: StreamId, reader: str, seq: int, node: int, attaches: bool) -> None:
        record = a_reader(reader, stream=stream, seq=seq, node=self.nodes[node][0])
        self.put(PutReader(record=record, attaches=attaches))


class StoreMachine(_SessionRules, _StreamRules, _ReaderRules):
    """All rules: those above, and those of nodes and their mail."""

    @rule(node=st.none() | places, message=short)
    def post(self, node: int | None, message: bytes) -> None:
        """To a node, or to one that is not known."""
        self.put(SendMail(node=NodeId("unknown") if node is None else self.nodes[node][0], message=message))
        self.history.clear()  # a message that is posted twice is two

    @rule(stream=streams, node=places, first=st.integers(1, 4), payloads=st.lists(short, max_size=3).map(tuple))
    def forward(self, node: int, **fields: Any) -> None:
        self.put(Forward(node=self.nodes[node][0], sender="s", **fields))

    @rule(stream=streams, count=some)
    def take_forwarded(self, stream: StreamId, count: int) -> None:
        """As its writer does: the messages become events."""
        self.now += 1
        ours, theirs = self.both(lambda store: store.forwarded(stream))
        record = self.stream(stream)
        if record is None or not record.node or record.sealed or not ours or len(ours) != len(theirs):
            return
        place = min(count, len(ours))
        events = tuple(Event(record.last + n, self.now, ours[n - 1].payload) for n in range(1, place + 1))
        fences = self.fences[self.writer[stream]]
        one, other = (
            Append(stream=record.id, fence=fence, events=events, taken=waiting[place - 1].key)
            for fence, waiting in zip(fences, (ours, theirs), strict=True)
        )
        self.put_pairs([(one, other)])

    @rule(node=places, count=some)
    def receive(self, node: int, count: int) -> None:
        name, _ = self.nodes[node]
        ours, theirs = self.both(lambda store: store.mail(name))
        if ours and len(ours) == len(theirs):
            place = min(count, len(ours)) - 1
            one, other = (MailReceived(node=name, through=mail[place].key) for mail in (ours, theirs))
            self.put_pairs([(one, other)])

    @rule()
    def bury_the_other(self) -> None:
        """One node leaves; the other settles what it left, and a third comes."""
        node, _ = self.nodes.pop()
        self.both(lambda store: store.leave(node))
        for record in self.run(self.model.written_by(node)):
            self.claim_as(NODE, record.id, None)
        self.agree(lambda store: store.bury(node, heir=NODE), lambda read: {stream.id for stream in read or ()})
        self.join(NodeId(f"other-{len(self.fences)}"))
        self.history.clear()


def store_machine(make: Make, *, durable: bool = True) -> type[StoreMachine]:
    """Return the state machine for the stores that `make` returns."""
    return type("StoreMachine", (StoreMachine,), {"make": staticmethod(make), "durable": durable})
