"""Gives each check of the contract a fresh store, and compares what it sees with what is promised."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from perdure._core.ids import Fence, Kind, StreamId
from perdure.errors import Behind, StaleFence, TooManySessions
from perdure.store.interface import Store, stream_by_id
from perdure.store.records import SessionRecord, StreamRecord
from perdure.store.steps import Append, OpenStream, PutSession, Refusals, Step, StepRejected
from perdure.testing import _values as values
from perdure.testing._values import NODE, OTHER, SESSION, STREAM, a_call, a_session, a_stream, an_end


@dataclass(kw_only=True)
class Case:
    """A fresh store that is open and that `NODE` has joined, and the way to close and open it again.

    A class of checks has one method for each thing promised, named after the promise. Each runs on a case of its own.
    """

    store: Store
    fence: Fence
    again: Callable[[], Store] | None
    hang: Callable[[], AbstractContextManager[object]] | None
    patience: float
    """Seconds within which something must happen for which no promise names a time."""

    async def set_up(self) -> None:
        pass

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
        """Open the store as another process does; the same object, where no other process can."""
        if self.again is None or not self.store.shared:
            yield self.store
            return
        async with self.again() as store:
            yield store

    async def put(self, *steps: Step) -> Refusals:
        return await values.put(self.store, *steps)

    async def accept(self, *steps: Step) -> None:
        """Commit steps of which none is refused."""
        accepted(await self.put(*steps))

    @asynccontextmanager
    async def neighbour(self) -> AsyncIterator[Store]:
        """The store of another process, whose node `OTHER` has joined and leaves at the end."""
        async with self.elsewhere() as store:
            await store.join(OTHER)
            yield store
            await store.leave(OTHER)

    def append(
        self, first: int = 0, last: int = 0, *, fence: Fence | None = None, stream: str = STREAM, **more: Any
    ) -> Append:
        """Return the step that adds events with these numbers, or one, or none."""
        of_events = {name: more.pop(name) for name in ("time", "final") if name in more}
        events = values.some_events(first, last or first, **of_events) if first else ()
        return values.an_append(self.fence if fence is None else fence, events, stream=stream, **more)

    async def open_stream(self, *names: str, kind: Kind = Kind.CALL) -> None:
        """Open streams with different request ids, because no two streams may run one id."""
        await self.accept(PutSession(record=a_session()))
        for name in names or (STREAM,):
            ids: tuple[int | str, ...] = (1, "one") if name == STREAM else (f"{name} 1", f"{name} 2")
            calls = tuple(a_call(id_, stream=name) for id_ in ids) if kind is Kind.CALL else ()
            await self.accept(OpenStream(record=a_stream(self.fence, name, kind=kind), calls=calls))

    async def open_call(self, record: SessionRecord, stream: str = STREAM, **more: Any) -> OpenStream:
        """Open a durable call: its record, and its stream with one call."""
        opened = a_stream(self.fence, stream, session=record.id)
        step = OpenStream(record=opened, calls=(a_call(session=record.id, stream=stream),), **more)
        await self.accept(PutSession(record=record), step)
        return step

    def answer(self, seq: int = 1, **more: Any) -> Append:
        """Return the step that answers request 1 with an event, and seals the stream."""
        return self.append(seq, final=True, ends=(an_end(),), seal=True, **more)

    async def left(self, *sessions: str) -> list[str]:
        """Return the ids of those sessions that exist."""
        return [record.id for record in await values.existing(self.store, *sessions)]

    async def picture(self, *sessions: str) -> dict[str, Any]:
        return await values.picture(self.store, sessions=sessions or (SESSION,))

    async def record(self, name: str = STREAM) -> StreamRecord:
        record = await stream_by_id(self.store, StreamId(name))
        if record is None:
            raise AssertionError(f"stream {name} is gone")
        return record

    async def claim(self, name: str = STREAM) -> StreamRecord:
        """Claim a stream under its present fence."""
        held = await self.record(name)
        claimed = await self.store.claim(held.id, node=NODE, held=held.fence)
        if claimed is None:
            raise AssertionError(f"a stream that exists, is not sealed and has this fence was not claimed: {held}")
        return claimed


class SessionCase(Case):
    """A case in which a session and its neighbour are open."""

    async def set_up(self) -> None:
        await self.put(PutSession(record=a_session()), PutSession(record=a_session("neighbour")))


class StreamCase(Case):
    """A case in which a session and a stream with two calls are open."""

    async def set_up(self) -> None:
        await self.open_stream()


def too_many(refusals: Refusals, *, of_caller: bool) -> None:
    """Expect that the only step is refused by a limit of sessions: of its caller, or of all."""
    refused(refusals, 0, why=TooManySessions)
    same("whether it is the caller's limit", getattr(refusals[0], "of_caller", None), of_caller)


def same(what: str, seen: object, wanted: object) -> None:
    if seen != wanted:
        raise AssertionError(f"{what}: {seen!r}, where {wanted!r} was promised")


def accepted(refusals: Refusals) -> None:
    same("refusals", list(refusals), [None] * len(refusals))


def behind(refusals: Refusals, last: int) -> None:
    """Expect that the only step is refused, because the store has nothing after that number."""
    refused(refusals, 0, why=Behind)
    same("the last that the store has", [refusal.last for refusal in refusals if isinstance(refusal, Behind)], [last])


def refused(refusals: Refusals, *places: int, why: type[StepRejected] = StaleFence) -> None:
    """Expect that these steps are refused for this reason, and no other step."""
    seen = {place: type(refusal).__name__ for place, refusal in enumerate(refusals) if refusal is not None}
    same("refused steps", seen, dict.fromkeys(places, why.__name__))
