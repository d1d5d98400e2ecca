"""A real store with a switch: it fails, hangs or answers late when a test says so."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Sequence
from typing import Self

from perdure._core.ids import Fence, NodeId, SessionId, StreamId
from perdure._core.retention import Cutoffs
from perdure.errors import StoreUnavailable
from perdure.store.base import (
    AskRecord,
    CallRecord,
    Event,
    Generation,
    ReaderRecord,
    Refusals,
    SessionRecord,
    Step,
    Store,
    StreamRecord,
)


class Fault(enum.Enum):
    NONE = "works"
    RAISES = "raises, and has done nothing"
    HANGS = "never answers, and has done nothing"
    LATE = "does what is asked, and never says so"
    BREAKS = "raises something that a store must not raise"


class FaultyStore:
    """Hands everything on to a real store, unless `writes` or `reads` say otherwise."""

    def __init__(self, inner: Store) -> None:
        self.writes = Fault.NONE
        self.reads = Fault.NONE
        self.every = 1
        """Only each so manyth write is faulty."""
        self.asked = 0
        """Writes that were asked for."""
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
        await _fail(self.writes)
        return False

    async def commit(self, steps: Sequence[Step]) -> Refusals:
        late = await self._write_fault()
        refusals = await self._inner.commit(steps)
        if late:
            await asyncio.Event().wait()
        return refusals

    def commit_now(self, steps: Sequence[Step]) -> Refusals | None:
        if self.writes is not Fault.NONE:
            return None  # the other way meets the fault
        return self._inner.commit_now(steps)

    async def post(self, node: NodeId, message: bytes) -> None:
        if await self._write_fault():
            await asyncio.Event().wait()
        await self._inner.post(node, message)

    async def collect(self, node: NodeId) -> Sequence[bytes]:
        if await self._write_fault():
            await asyncio.Event().wait()
        return await self._inner.collect(node)

    async def join(self, node: NodeId) -> Fence:
        await self._write_fault()
        return await self._inner.join(node)

    async def claim(self, stream: StreamId) -> StreamRecord | None:
        await self._write_fault()
        return await self._inner.claim(stream)

    async def sweep(self, cutoffs: Cutoffs) -> int:
        await self._write_fault()
        return await self._inner.sweep(cutoffs)

    async def read(self, stream: StreamId, *, after: int, limit: int) -> Sequence[Event]:
        await _fail(self.reads)
        return await self._inner.read(stream, after=after, limit=limit)

    async def stream(self, stream: StreamId) -> StreamRecord | None:
        await _fail(self.reads)
        return await self._inner.stream(stream)

    async def streams(self, session: SessionId) -> Sequence[StreamRecord]:
        await _fail(self.reads)
        return await self._inner.streams(session)

    async def generations(self, stream: StreamId) -> Sequence[Generation]:
        await _fail(self.reads)
        return await self._inner.generations(stream)

    async def session(self, session: SessionId) -> SessionRecord | None:
        await _fail(self.reads)
        return await self._inner.session(session)

    async def sessions(self, *, after: SessionId | None, limit: int) -> Sequence[SessionRecord]:
        await _fail(self.reads)
        return await self._inner.sessions(after=after, limit=limit)

    async def calls(self, session: SessionId) -> Sequence[CallRecord]:
        await _fail(self.reads)
        return await self._inner.calls(session)

    async def requests(self, stream: StreamId) -> Sequence[tuple[int | str, str]]:
        await _fail(self.reads)
        return await self._inner.requests(stream)

    async def asks(self, session: SessionId) -> Sequence[AskRecord]:
        await _fail(self.reads)
        return await self._inner.asks(session)

    async def reader(self, stream: StreamId) -> ReaderRecord | None:
        await _fail(self.reads)
        return await self._inner.reader(stream)

    def subscribe(self, listener: Callable[[StreamId], None]) -> Callable[[], None]:
        return self._inner.subscribe(listener)

    async def open(self) -> None:
        await self._inner.open()

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


async def _fail(fault: Fault) -> None:
    match fault:
        case Fault.RAISES:
            raise StoreUnavailable("the switch is off")
        case Fault.BREAKS:
            raise ZeroDivisionError("a store with a bug")
        case Fault.HANGS:
            await asyncio.Event().wait()
