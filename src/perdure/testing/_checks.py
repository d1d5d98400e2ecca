"""The contract: one small story for each thing promised. Their names carry the promise's number."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from functools import partial
from types import ModuleType
from typing import Any

from perdure.testing import (
    _chain_checks,
    _fence_checks,
    _forward_checks,
    _keeping_checks,
    _limit_checks,
    _log_checks,
    _node_checks,
    _session_checks,
)
from perdure.testing._case import Case
from perdure.testing._values import NODE, Make

Check = Callable[[Case], Coroutine[Any, Any, None]]


def _checks(module: ModuleType) -> list[Check]:
    """A module's own public coroutines, in their order."""
    found = inspect.getmembers(module, inspect.iscoroutinefunction)
    own = [check for name, check in found if check.__module__ == module.__name__ and not name.startswith("_")]
    return sorted(own, key=lambda check: check.__code__.co_firstlineno)


_MODULES = (
    _log_checks,
    _fence_checks,
    _keeping_checks,
    _node_checks,
    _session_checks,
    _chain_checks,
    _limit_checks,
    _forward_checks,
)
CHECKS: tuple[Check, ...] = tuple(check for module in _MODULES for check in _checks(module))


async def check_store(make: Make, *, durable: bool = True) -> None:
    """Check every promise, on a fresh store each.

    `make(name)` gives a store that is not open yet; with the same name again, one on the same data. `durable=False`
    says that nothing outlives the object, and leaves out what closes and opens again.
    """
    for check in CHECKS:
        name = check.__name__
        store = make(name)
        await store.open()
        again = partial(make, name) if durable else None
        case = Case(store=store, fence=await store.join(NODE), again=again)
        try:
            await check(case)
        except AssertionError as error:
            raise AssertionError(f"{name.replace('_', ' ')}: {error}") from error
        finally:
            await case.store.aclose()
