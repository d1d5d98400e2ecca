"""A store and its model, `MemoryStore`, driven together and compared.

Fences and keys of mail are each store's own, so what shows one is spelled twice, for the one and for the other.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from perdure._core.ids import Fence, Kind, NodeId, SessionId, StreamId
from perdure._core.retention import Cutoffs
from perdure.store import base
from perdure.store.memory import MemoryStore
from perdure.testing._values import (
    NODE,
    Make,
    a_call,
    a_session,
    a_stream,
    count_open,
    messages,
    picture,
    put,
    together,
)

T = TypeVar("T")

SESSIONS = (SessionId("s1"), SessionId("s2"))
STREAMS = tuple(map(StreamId, "abc"))
REQUESTS: tuple[int | str, ...] = (1, "1", 2)
"""Few names, so that histories meet each other."""

_names = itertools.count()


class Twins:
    def __init__(self, make: Make, *, durable: bool) -> None:
        self._make = make
        self._durable = durable
        self._name = f"machine-{next(_names)}"
        self._runner = asyncio.Runner()
        self._history: list[tuple[base.Step, base.Step]] = []
        self.model = MemoryStore()
        self.store: base.Store = make(self._name)
        self.run(self.store.open())
        self.fences: list[tuple[Fence, Fence]] = []
        """In the model and in the store; a writer is a place in this list."""
        self.writer: dict[str, int] = {}
        self.nodes: list[tuple[NodeId, int]] = []
        """The nodes that have joined, with the fence that they got."""
        self.join(NODE)
        self.join(NodeId("other"))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def both(self, ask: Callable[[base.Store], Coroutine[Any, Any, T]]) -> tuple[T, T]:
        return self.run(ask(self.model)), self.run(ask(self.store))

    def agree(
        self, ask: Callable[[base.Store], Coroutine[Any, Any, T]], key: Callable[[T], object] | None = None
    ) -> tuple[T, T]:
        """Ask both for the same; `key` gives what must be equal in the two answers, which is all of them otherwise."""
        ours, theirs = self.both(ask)
        assert (key(ours) == key(theirs)) if key else (ours == theirs), f"{theirs}, where the model has {ours}"
        return ours, theirs

    def close(self) -> None:
        self.run(self.store.aclose())
        self._runner.close()

    def reopen(self) -> None:
        if self._durable:
            self.run(self.store.aclose())
            self.store = self._make(self._name)
            self.run(self.store.open())

    # Steps

    def put(self, *steps: base.Step, patient: bool = False) -> bool:
        return self.put_pairs([(step, step) for step in steps], patient=patient)

    def put_pairs(self, steps: Sequence[tuple[base.Step, base.Step]], *, patient: bool = False) -> bool:
        """Commit each store's own spelling of the same steps; whether none was refused."""
        wanted = [type(refusal) for refusal in self.model.commit_now([step for step, _ in steps])]
        theirs = [step for _, step in steps]
        seen = self.run(self.store.commit(theirs) if patient else put(self.store, *theirs))
        assert [type(refusal) for refusal in seen] == wanted, f"refused: {seen}, of {theirs}, where {wanted} was due"
        self._history += steps
        return set(wanted) <= {type(None)}

    def put_again(self, count: int) -> None:
        """Promise 5, also after a reopening."""
        if steps := self._history[-count:]:
            self.put_pairs(steps)
            del self._history[-len(steps) :]

    def write(
        self, step: base.Append | base.PutCall | base.Release, writer: int | None = None, *, patient: bool = False
    ) -> None:
        """What shows a fence, with that of a writer, the right one if none is given.

        A stream that was let go of has none, and is left alone.
        """
        record = self.stream(step.stream)
        if record is None or record.node:
            ours, theirs = self._fences_of(step.stream, writer)
            self.put_pairs([(replace(step, fence=ours), replace(step, fence=theirs))], patient=patient)
        if isinstance(step, base.Release):
            self._history.clear()

    def _fences_of(self, stream: str, writer: int | None) -> tuple[Fence, Fence]:
        place = self.writer.get(stream, 0) if writer is None else writer
        return self.fences[place % len(self.fences)]

    def open_stream(self, stream: str, session: str, calls: Sequence[int | str], now: float, node: int = 0) -> None:
        """In a session that is there."""
        rows = tuple(a_call(id_, stream=stream, session=session) for id_ in calls)
        name, writer = self.nodes[node]
        record = a_stream(
            Fence(0), stream, session=session, kind=Kind.CALL if calls else Kind.STANDALONE, opened=now, node=name
        )
        ours, theirs = (base.OpenStream(record=replace(record, fence=f), calls=rows) for f in self.fences[writer])
        known = self.stream(stream)
        self.put(base.PutSession(record=a_session(session, active=now)))
        if self.put_pairs([(ours, theirs)]) and known is None:
            self.writer[stream] = writer

    def post(self, node: NodeId, message: bytes) -> None:
        self.put(base.SendMail(node=node, message=message))
        self._history.clear()  # a message that is posted twice is two

    def take_forwarded(self, stream: str, count: int, now: float) -> None:
        """As its writer does: the messages become events."""
        ours, theirs = self.both(lambda store: store.forwarded(StreamId(stream)))
        record = self.stream(stream)
        if record is None or not record.node or record.sealed or not ours or len(ours) != len(theirs):
            return
        place = min(count, len(ours))
        events = tuple(base.Event(record.last + n, now, ours[n - 1].payload) for n in range(1, place + 1))
        fences = self.fences[self.writer[stream]]
        pair = [
            base.Append(stream=record.id, fence=fence, events=events, taken=waiting[place - 1].key)
            for fence, waiting in zip(fences, (ours, theirs), strict=True)
        ]
        self.put_pairs([(pair[0], pair[1])])

    def receive(self, node: NodeId, count: int) -> None:
        ours, theirs = self.both(lambda store: store.mail(node))
        if ours and len(ours) == len(theirs):
            place = min(count, len(ours)) - 1
            pair = (base.MailReceived(node=node, through=mail[place].key) for mail in (ours, theirs))
            self.put_pairs([(next(pair), next(pair))])

    # What is not a step

    def stream(self, stream: str) -> base.StreamRecord | None:
        return self.run(base.stream_by_id(self.model, StreamId(stream)))

    def join(self, node: NodeId) -> None:
        self.nodes.append((node, len(self.fences)))
        self.fences.append(self.both(lambda store: store.join(node)))

    def claim(self, stream: StreamId, *, node: NodeId, held: int | None) -> None:
        """Claim as a node that has seen the fence of a writer, of the right one if none is given."""
        fences = dict(zip((self.model, self.store), self._fences_of(stream, held), strict=True))
        ours, theirs = self.agree(lambda store: store.claim(stream, node=node, held=fences[store]), lambda r: r is None)
        if ours is not None and theirs is not None:
            self.writer[stream] = len(self.fences)
            self.fences.append((ours.fence, theirs.fence))
        self._history.clear()

    def bury_the_other(self, name: str) -> None:
        """One node leaves; the other settles what it left, and a third comes."""
        node, _ = self.nodes.pop()
        self.both(lambda store: store.leave(node))
        for record in self.run(self.model.written_by(node)):
            self.claim(record.id, node=NODE, held=None)
        self.agree(lambda store: store.bury(node, heir=NODE), lambda read: {stream.id for stream in read})
        self.join(NodeId(name))
        self._history.clear()

    def sweep(self, cutoffs: Cutoffs) -> None:
        self.agree(lambda store: store.sweep(cutoffs), bool)
        self._history.clear()

    # Comparing

    def compare(self) -> None:
        wanted, seen = self.both(self._picture)
        assert seen == wanted, f"the store shows {seen}, where the model shows {wanted}"

    async def _picture(self, store: base.Store) -> dict[str, Any]:
        seen = await picture(store, sessions=SESSIONS)
        asked: dict[str, Awaitable[Any]] = {"going on": count_open(store), "dormant": store.longest_dormant()}
        for session in SESSIONS:
            for key in (f"{session}: unread", f"{session}: streams"):
                seen[key] = [replace(stream, fence=Fence(0)) for stream in seen[key]]
            for id_ in REQUESTS:
                asked[f"{session}: {id_!r}"] = store.open_call(session, incarnation=1, request_id=id_)
            for stream in seen[key]:
                asked[f"{stream.id}: forwarded"] = store.forwarded(stream.id)
        for node, _ in self.nodes:
            asked[f"{node}: mail"] = messages(store, node)
            asked[f"{node}: forwarded to"] = store.forwarded_to(node)
            asked[f"{node}: streams"] = store.written_by(node)
        asked["nodes"] = store.nodes()
        for name, answer in (await together(store, asked)).items():
            match answer:  # fences, keys and beats are each store's own
                case [base.Forwarded(), *_]:
                    seen[name] = [message.payload for message in answer]
                case [base.StreamRecord(), *_]:
                    seen[name] = [stream.id for stream in answer]
                case [base.NodeRecord(), *_]:
                    seen[name] = sorted(node.id for node in answer)
                case base.SessionRecord():
                    seen[name] = answer.active
                case _:
                    seen[name] = answer
        return seen
