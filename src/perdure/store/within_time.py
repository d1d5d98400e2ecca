"""Makes a store answer, or fail by name, within its time (promise 20), so that no caller has to limit a call.

The calls to limit are read from the interfaces in `store.base`: what is a coroutine there is limited, however a store
writes it. Forty methods that each hand their arguments on would be checked by the type checker and could still forget
one; a list that is made from the interfaces cannot.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from operator import attrgetter
from typing import Any, Self, cast

from perdure.errors import StoreError, StoreUnavailable
from perdure.store.base import Liveness, Store
from perdure.store.time_limit import TimeLimit

CALLS = frozenset(
    name for interface in (Store, Liveness) for name, _ in inspect.getmembers(interface, inspect.iscoroutinefunction)
)
"""The methods of a store, and of its `Liveness`, that are waited for."""


def within_time(store: Store, seconds: float) -> Store:
    """Give `store` with every call limited to `seconds`; one that keeps its time itself is only kept from breaking."""
    return cast("Store", _Limited(store, None if store.keeps_time else TimeLimit(seconds)))


class _Limited:
    """Hands everything on to a store, or to its `Liveness`, and limits what is waited for."""

    keeps_time = True
    # Asked for with each call or commit: found without `__getattr__`, and they may change.
    holds, shared = property(attrgetter("_inner.holds")), property(attrgetter("_inner.shared"))

    def __init__(self, inner: Store | Liveness, limit: TimeLimit | None) -> None:
        self._inner = inner
        self._limit = limit

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name in CALLS:
            found = self._limited(found)
        elif name == "liveness":
            return lambda *arguments, **named: _Limited(found(*arguments, **named), self._limit)
        elif not callable(found):
            return found  # it may change
        setattr(self, name, found)  # so that the next caller finds it at once
        return found

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _limited(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        limit = self._limit

        @functools.wraps(call)
        async def limited(*arguments: Any, **named: Any) -> Any:
            try:
                asked = call(*arguments, **named)
                return await (asked if limit is None else limit.wait(asked))
            except StoreError:
                raise
            except Exception as error:
                # A store must not raise this; but calls that wait for ever would be worse than a store in trouble.
                raise StoreUnavailable(f"the store broke: {error!r}") from error

        return limited
