"""Makes a store answer, or fail by name, within its time (promise 20), so that no caller has to limit a call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, cast

from perdure.errors import StoreError, StoreUnavailable
from perdure.store.base import Liveness, Store
from perdure.store.time_limit import TimeLimit


def within_time(store: Store, seconds: float) -> Store:
    """Give `store` with every call limited to `seconds`; one that keeps its time itself is only kept from breaking."""
    limit = None if store.keeps_time else TimeLimit(seconds)
    return cast("Store", _Limited(store, limit))


class _Limited:
    """Hands everything on to a store, or to its `Liveness`. What is asynchronous is limited."""

    def __init__(self, inner: Store | Liveness, limit: TimeLimit | None) -> None:
        self._inner = inner
        self._limit = limit

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if inspect.iscoroutinefunction(found):
            found = self._limited(found)
        elif name == "liveness":
            return lambda *arguments, **named: _Limited(found(*arguments, **named), self._limit)
        elif not callable(found):
            return found  # it may change
        setattr(self, name, found)  # so that the next caller finds it at once
        return found

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
