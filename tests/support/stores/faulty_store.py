"""A real store with a switch: it fails, hangs or answers late when a test says so."""

from __future__ import annotations

import asyncio
import enum
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Never, TypeVar

from perdure._core.ids import NodeId
from perdure._core.leases import Claim
from perdure._core.states import ClaimState
from perdure.errors import StoreUnavailable
from perdure.store import SqliteStore
from perdure.store.interface import Liveness, Store
from perdure.store.records import Overview, StreamRecord
from perdure.store.steps import Refusals, Step

T = TypeVar("T")

WRITES = ("commit", "join", "leave", "claim", "reattach", "sweep", "change_note")


class Fault(enum.Enum):
    NONE = "works"
    RAISES = "raises, and has done nothing"
    HANGS = "never answers, and has done nothing"
    LATE = "does what is asked, and never says so"
    BREAKS = "raises something that a store must not raise"


if TYPE_CHECKING:
    _Base = SqliteStore
else:
    _Base = object


class FaultyStore(_Base):
    """Passes everything on to a real store, unless `writes` or `reads` say otherwise."""

    def __init__(self, inner: Store, *, timeout: float = 0.2) -> None:
        self._timeout = timeout
        """Seconds after which a call that hangs fails (promise 20)."""
        self.writes = Fault.NONE
        self.reads = Fault.NONE
        self.every = 1
        """One of so many writes is faulty. Beats are writes too."""
        self.asked = 0
        """Writes that were asked for."""
        self.ahead = 0.0
        """Seconds by which the clock for leases is ahead: a test lets time pass by raising it."""
        self.burials = 0
        """Burials that were asked for."""
        self.before_burial: asyncio.Event | None = None
        """Given: burials wait for it."""
        self.shared = inner.shared
        self.lapses = inner.lapses
        self._inner = inner

    def works(self) -> None:
        self.writes = self.reads = Fault.NONE

    async def write(self, method: Callable[..., Awaitable[T]], *arguments: Any, may_be_late: bool, **named: Any) -> T:
        self.asked += 1
        fault = Fault.NONE if self.asked % self.every else self.writes
        await self._fail(fault)
        done = await method(*arguments, **named)
        if fault is Fault.LATE and may_be_late:
            await self._time_out()
        return done

    async def look(self, method: Callable[..., Awaitable[T]], *arguments: Any, **named: Any) -> T:
        await self._fail(self.reads)
        return await method(*arguments, **named)

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

    def commit_now(self, steps: Sequence[Step]) -> Refusals | None:
        if self.writes is not Fault.NONE:
            return None  # the other way meets the fault
        return self._inner.commit_now(steps)

    async def bury(self, node: NodeId, *, heir: NodeId, beat: int | None = None) -> Sequence[StreamRecord] | None:
        async def bury() -> Sequence[StreamRecord] | None:
            self.burials += 1
            if self.before_burial is not None:
                await self.before_burial.wait()
            return await self._inner.bury(node, heir=heir, beat=beat)

        return await self.write(bury, may_be_late=False)

    def liveness(self, node: NodeId, *, lease: float, monotonic: Callable[[], float]) -> Liveness:
        inner = self._inner.liveness(node, lease=lease, monotonic=lambda: monotonic() + self.ahead)
        return FaultyLiveness(self, inner)

    def claim_as_told(self, claim: ClaimState) -> ClaimState:
        """Return the claim as the node sees it. A store that does not answer reports no burial, and the lease
        has the node wait."""
        return ClaimState.FROZEN if claim is ClaimState.BURIED and self.writes is not Fault.NONE else claim

    async def open(self) -> None:
        await self._inner.open()

    async def aclose(self) -> None:
        await self._inner.aclose()


def _handing_on(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method of that name, which calls the real store."""

    async def write(self: FaultyStore, *arguments: Any, **named: Any) -> Any:
        may_be_late = name in ("commit", "change_note")
        return await self.write(getattr(self._inner, name), *arguments, may_be_late=may_be_late, **named)

    async def look(self: FaultyStore, *arguments: Any, **named: Any) -> Any:
        return await self.look(getattr(self._inner, name), *arguments, **named)

    def ask(self: FaultyStore, *arguments: Any, **named: Any) -> Any:
        return getattr(self._inner, name)(*arguments, **named)

    if name in WRITES:
        return write
    return look if inspect.iscoroutinefunction(method) else ask


for _name, _method in vars(Store).items():
    if inspect.isfunction(_method) and _name not in {*vars(FaultyStore), "__init__"}:
        is_context = _name in ("__aenter__", "__aexit__")  # they open and close
        setattr(FaultyStore, _name, _method if is_context else _handing_on(_name, _method))


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
    """Beats are writes, an overview is a read."""

    def __init__(self, store: FaultyStore, inner: Liveness) -> None:
        self._store = store
        self._inner = inner

    @property
    def node_claim(self) -> Claim:
        return FaultyClaim(self._store, self._inner.node_claim)

    async def beat(self, facts: bytes) -> None:
        await self._store.write(self._inner.beat, facts, may_be_late=True)

    async def overview(self, *, mail_after: int) -> Overview:
        return await self._store.look(self._inner.overview, mail_after=mail_after)

    def hold(self, holding: bool) -> None:
        self._inner.hold(holding)

    async def holders(self) -> Sequence[NodeId]:
        return await self._inner.holders()

    def ages(self) -> dict[NodeId, float]:
        return self._inner.ages()
