"""What every check of the contract stands on: a fresh store, and a few ways to say what was promised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from perdure._core.ids import Fence, Kind
from perdure.errors import StaleFence
from perdure.store.base import OpenStream, PutSession, Refusals, Store
from perdure.testing._values import STREAM, a_call, a_session, a_stream, put


@dataclass(kw_only=True)
class Case:
    """A fresh store that is open and has been joined, and the way to close and open it again."""

    store: Store
    fence: Fence
    again: Callable[[], Store] | None

    async def reopen(self) -> bool:
        """Close and open again; `False` where nothing outlives the object."""
        if self.again is None:
            return False
        await self.store.aclose()
        self.store = self.again()
        await self.store.open()
        return True

    async def open_stream(self, name: str = STREAM, *, kind: Kind = Kind.CALL) -> None:
        record = a_stream(self.fence, name, kind=kind)
        calls = (a_call(1, stream=name), a_call("1", stream=name)) if kind is Kind.CALL else ()
        await put(self.store, PutSession(record=a_session()), OpenStream(record=record, calls=calls))


def same(what: str, seen: object, wanted: object) -> None:
    if seen != wanted:
        raise AssertionError(f"{what}: {seen!r}, where {wanted!r} was promised")


def accepted(refusals: Refusals) -> None:
    same("refusals", list(refusals), [None] * len(refusals))


def refused(refusals: Refusals, *places: int) -> None:
    refused = [place for place, refusal in enumerate(refusals) if isinstance(refusal, StaleFence)]
    same("refused steps", refused, list(places))
