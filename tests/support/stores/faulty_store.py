"""A real store with a switch: it fails, hangs or answers late when a test says so."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Never, Self

from perdure._core.ids import Fence, Generation, NodeId, RecordKind, SessionId, StreamId
from perdure._core.leases import Claim
from perdure._core.retention import Cutoffs
from perdure._core.states import ClaimState, SessionState
from perdure.errors import StoreUnavailable
from perdure.store.interface import HintListener, Liveness, Store
from perdure.store.records import (
    AskRecord,
    CallRecord,
    CallSnapshot,
    Event,
    Followed,
    Forwarded,
    Loaded,
    Mail,
    NodeRecord,
    Overview,
    ReaderRecord,
    SessionRecord,
    StreamRecord,
    UsageRecord,
)
from perdure.store.steps import Refusals, Step


class Fault(enum.Enum):
    NONE = "works"
    RAISES = "raises, and has done nothing"
    HANGS = "never answers, and has done nothing"
    LATE = "does what is asked, and never says so"
    BREAKS = "raises something that a store must not raise"


class FaultyStore:
    """Hands everything on to a real store, unless `writes` or `reads` say otherwise."""

    def __init__(self, inner: Store, *, timeout: float = 0.2) -> None:
        self._timeout = timeout
        """Seconds after which a call that hangs fails (promise 20)."""
        self.writes = Fault.NONE
        self.reads = Fault.NONE
        self.every = 1
        """Only each so manyth write is faulty. Beats are writes too."""
        self.asked = 0
        """Writes that were asked for."""
        self.ahead = 0.0
        """Seconds by which the clock for leases is ahead: a test lets time pass by raising it."""
        self.burials = 0
        """Burials that were asked for."""
        self.before_burial: asyncio.Event | None = None
        """Given: burials wait for it."""
        self.shared = inner.shared
        self._inner = inner

    def works(self) -> None:
        self.writes = self.reads = Fault.NONE

    async def _write_fault(self) -> bool:
        """Raise, hang, or tell whether the answer is to be held back."""
        self.asked += 1
        if self.writes is Fault.NONE or self.asked % self.every:
            return False
        if self.writes is Fault.LATE:
            return True
        await self._fail(self.writes)
        return False

    async def _time_out(self) -> Never:
        await asyncio.sleep(self._timeout)
        raise StoreUnavailable(f"the store did not answer within {self._timeout:g} s")

    async def _fail(self, fault: Fault) -> None:
        match fault:
            case Fault.RAISES:
                raise StoreUnavailable("the switch is off")
            case Fault.BREAKS:
                raise ZeroDivisionError("a store with a bug")
            case Fault.HANGS:
                await self._time_out()

    async def commit(self, steps: Sequence[Step]) -> Refusals:
        late = await self._write_fault()
        refusals = await self._inner.commit(steps)
        if late:
            await self._time_out()
        return refusals

    def commit_now(self, steps: Sequence[Step]) -> Refusals | None:
        if self.writes is not Fault.NONE:
            return None  # the other way meets the fault
        return self._inner.commit_now(steps)

    async def join(self, node: NodeId) -> Fence:
        await self._write_fault()
        return await self._inner.join(node)

    async def leave(self, node: NodeId) -> None:
        await self._write_fault()
        await self._inner.leave(node)

    async def bury(self, node: NodeId, *, heir: NodeId, beat: int | None = None) -> Sequence[StreamRecord] | None:
        await self._write_fault()
        self.burials += 1
        if self.before_burial is not None:
            await self.before_burial.wait()
        return await self._inner.bury(node, heir=heir, beat=beat)

    async def claim(self, stream: StreamId, *, node: NodeId, held: Fence, known: int = 0) -> StreamRecord | None:
        await self._write_fault()
        return await self._inner.claim(stream, node=node, held=held, known=known)

    async def reattach(self, session: SessionId) -> SessionRecord | None:
        await self._write_fault()
        return await self._inner.reattach(session)

    async def sweep(self, cutoffs: Cutoffs) -> int:
        await self._write_fault()
        return await self._inner.sweep(cutoffs)

    async def read(self, stream: StreamId, *, after: int, limit: int) -> Sequence[Event]:
        await self._fail(self.reads)
        return await self._inner.read(stream, after=after, limit=limit)

    async def streams(self, session: SessionId, *, only_unread: bool = False) -> Sequence[StreamRecord]:
        await self._fail(self.reads)
        return await self._inner.streams(session, only_unread=only_unread)

    async def streams_by_id(self, streams: Sequence[StreamId]) -> Mapping[StreamId, StreamRecord]:
        await self._fail(self.reads)
        return await self._inner.streams_by_id(streams)

    async def follow(self, after: Mapping[StreamId, int], *, limit: int) -> Mapping[StreamId, Followed]:
        await self._fail(self.reads)
        return await self._inner.follow(after, limit=limit)

    async def written_by(self, node: NodeId) -> Sequence[StreamRecord]:
        await self._fail(self.reads)
        return await self._inner.written_by(node)

    async def forwarded(self, stream: StreamId, *, after: int = 0) -> Sequence[Forwarded]:
        await self._fail(self.reads)
        return await self._inner.forwarded(stream, after=after)

    async def forwarded_to(self, node: NodeId) -> Sequence[StreamRecord]:
        await self._fail(self.reads)
        return await self._inner.forwarded_to(node)

    async def kept(self, session: SessionId) -> Sequence[UsageRecord]:
        await self._fail(self.reads)
        return await self._inner.kept(session)

    async def generations(self, stream: StreamId) -> Sequence[Generation]:
        await self._fail(self.reads)
        return await self._inner.generations(stream)

    async def session(self, session: SessionId) -> SessionRecord | None:
        await self._fail(self.reads)
        return await self._inner.session(session)

    async def load(self, session: SessionId) -> Loaded | None:
        await self._fail(self.reads)
        return await self._inner.load(session)

    async def single_call(self, session: SessionId, *, recent: int) -> CallSnapshot | None:
        await self._fail(self.reads)
        return await self._inner.single_call(session, recent=recent)

    async def sessions(self, *, after: SessionId | None, limit: int) -> Sequence[SessionRecord]:
        await self._fail(self.reads)
        return await self._inner.sessions(after=after, limit=limit)

    async def count_states(self, kind: RecordKind = RecordKind.SESSION) -> Mapping[SessionState, int]:
        await self._fail(self.reads)
        return await self._inner.count_states(kind)

    async def longest_dormant(
        self,
        owner: str | None = None,
        address: str = "",
        *,
        kind: RecordKind = RecordKind.SESSION,
        delivered: bool = False,
    ) -> SessionRecord | None:
        await self._fail(self.reads)
        return await self._inner.longest_dormant(owner, address, kind=kind, delivered=delivered)

    async def count_of(self, owner: str, address: str, *, kind: RecordKind) -> int:
        await self._fail(self.reads)
        return await self._inner.count_of(owner, address, kind=kind)

    async def bytes_of(self, owner: str, address: str) -> int:
        await self._fail(self.reads)
        return await self._inner.bytes_of(owner, address)

    async def notes(self, prefix: str) -> Mapping[str, bytes]:
        await self._fail(self.reads)
        return await self._inner.notes(prefix)

    async def change_note(self, name: str, *, seen: bytes | None, value: bytes | None, session: str = "") -> bool:
        late = await self._write_fault()
        changed = await self._inner.change_note(name, seen=seen, value=value, session=session)
        if late:
            await self._time_out()
        return changed

    async def calls(
        self, session: SessionId, *, stream: StreamId | None = None, only_open: bool = False
    ) -> Sequence[CallRecord]:
        await self._fail(self.reads)
        return await self._inner.calls(session, stream=stream, only_open=only_open)

    async def asks(self, session: SessionId) -> Sequence[AskRecord]:
        await self._fail(self.reads)
        return await self._inner.asks(session)

    async def reader(self, stream: StreamId) -> ReaderRecord | None:
        await self._fail(self.reads)
        return await self._inner.reader(stream)

    async def nodes(self) -> Sequence[NodeRecord]:
        await self._fail(self.reads)
        return await self._inner.nodes()

    async def mail(self, node: NodeId, *, after: int = 0) -> Sequence[Mail]:
        await self._fail(self.reads)
        return await self._inner.mail(node, after=after)

    def subscribe(self, node: NodeId, listener: HintListener) -> Callable[[], None]:
        return self._inner.subscribe(node, listener)

    def hint(self, node: NodeId, streams: Sequence[StreamId]) -> None:
        self._inner.hint(node, streams)

    def clock(self) -> float:
        return self._inner.clock()

    def stamp(self) -> object:
        return self._inner.stamp()

    def liveness(self, node: NodeId, *, lease: float, monotonic: Callable[[], float]) -> Liveness:
        inner = self._inner.liveness(node, lease=lease, monotonic=lambda: monotonic() + self.ahead)
        return FaultyLiveness(self, inner)

    async def beat(self, inner: Liveness, facts: bytes) -> None:
        late = await self._write_fault()
        await inner.beat(facts)
        if late:
            await self._time_out()

    async def look_round(self, inner: Liveness, mail_after: int) -> Overview:
        await self._fail(self.reads)
        return await inner.overview(mail_after=mail_after)

    def claim_as_told(self, claim: ClaimState) -> ClaimState:
        """A store that does not answer does not tell a node that it was buried: its lease tells it to wait."""
        return ClaimState.FROZEN if claim is ClaimState.BURIED and self.writes is not Fault.NONE else claim

    async def open(self) -> None:
        await self._inner.open()

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class FaultyClaim(Claim):
    __slots__ = ("_inner", "_store")

    def __init__(self, store: FaultyStore, inner: Claim) -> None:
        self._store = store
        self._inner = inner

    @property
    def until(self) -> float:  # type: ignore[override]
        return self._inner.until - self._store.ahead

    def at(self, now: float) -> ClaimState:
        return self._store.claim_as_told(self._inner.at(now + self._store.ahead))


class FaultyLiveness:
    """Beats are writes, looking for the dead is a read."""

    def __init__(self, store: FaultyStore, inner: Liveness) -> None:
        self._store = store
        self._inner = inner

    @property
    def lapses(self) -> bool:
        return self._inner.lapses

    @property
    def node_claim(self) -> Claim:
        return FaultyClaim(self._store, self._inner.node_claim)

    @property
    def own_claim(self) -> ClaimState:
        return self._store.claim_as_told(self._inner.own_claim)

    async def beat(self, facts: bytes) -> None:
        await self._store.beat(self._inner, facts)

    async def overview(self, *, mail_after: int) -> Overview:
        return await self._store.look_round(self._inner, mail_after)

    def hold(self, holding: bool) -> None:
        self._inner.hold(holding)

    async def holders(self) -> Sequence[NodeId]:
        return await self._inner.holders()

    def ages(self) -> dict[NodeId, float]:
        return self._inner.ages()
