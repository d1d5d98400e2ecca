"""A fresh store for each check of the contract, and a few ways to say what was promised."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass

from perdure._core.ids import Fence, Kind, StreamId
from perdure.errors import StaleFence
from perdure.store.base import OpenStream, PutSession, Refusals, Step, StepRefusal, Store, StreamRecord, stream_by_id
from perdure.testing._values import NODE, STREAM, a_call, a_session, a_stream, put


@dataclass(kw_only=True)
class Case:
    """A fresh store that is open and that `NODE` has joined, and the way to close and open it again."""

    store: Store
    fence: Fence
    again: Callable[[], Store] | None
    hang: Callable[[], AbstractContextManager[object]] | None
    patience: float
    """Seconds within which something must happen that no promise gives a time for."""

    async def reopen(self) -> bool:
        """Close and open again; `False` where nothing outlives the object."""
        if self.again is None:
            return False
        await self.store.aclose()
        self.store = self.again()
        await self.store.open()
        return True

    @asynccontextmanager
    async def elsewhere(self) -> AsyncIterator[Store]:
        """The store as another process opens it; the same object, where no other process can."""
        if self.again is None or not self.store.shared:
            yield self.store
            return
        async with self.again() as store:
            yield store

    async def put(self, *steps: Step) -> Refusals:
        return await put(self.store, *steps)

    async def accept(self, *steps: Step) -> None:
        """Commit steps of which none is refused."""
        accepted(await put(self.store, *steps))

    async def open_stream(self, name: str = STREAM, *, kind: Kind = Kind.CALL) -> None:
        """With requests of its own: no two streams run one id."""
        record = a_stream(self.fence, name, kind=kind)
        ids: tuple[int | str, ...] = (1, "one") if name == STREAM else (f"{name} 1", f"{name} 2")
        calls = tuple(a_call(id_, stream=name) for id_ in ids) if kind is Kind.CALL else ()
        await self.accept(PutSession(record=a_session()), OpenStream(record=record, calls=calls))

    async def record(self, name: str = STREAM) -> StreamRecord:
        record = await stream_by_id(self.store, StreamId(name))
        if record is None:
            raise AssertionError(f"stream {name} is gone")
        return record

    async def claim(self, name: str = STREAM) -> StreamRecord:
        """Take a stream that can be had, as its present fence says."""
        held = await self.record(name)
        claimed = await self.store.claim(held.id, node=NODE, held=held.fence)
        if claimed is None:
            raise AssertionError(f"a stream that is there, not sealed and held as seen was not to be had: {held}")
        return claimed


def same(what: str, seen: object, wanted: object) -> None:
    if seen != wanted:
        raise AssertionError(f"{what}: {seen!r}, where {wanted!r} was promised")


def accepted(refusals: Refusals) -> None:
    same("refusals", list(refusals), [None] * len(refusals))


def refused(refusals: Refusals, *places: int, why: type[StepRefusal] = StaleFence) -> None:
    """These steps for this reason, and no other step."""
    seen = {place: type(refusal).__name__ for place, refusal in enumerate(refusals) if refusal is not None}
    same("refused steps", seen, dict.fromkeys(places, why.__name__))
