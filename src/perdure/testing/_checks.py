"""The contract: one small story for each thing promised. Their names carry the promise's number."""

import asyncio
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from perdure.testing import _session_checks, _stream_checks
from perdure.testing._case import Case
from perdure.testing._values import NODE, Make

Hang = Callable[[str], AbstractContextManager[object]]

PATIENCE = 10.0
"""Seconds: long enough for a busy machine. A hint may also be lost for good, but then a broken one is not noticed."""

CHECKS: tuple[tuple[type[Case], str], ...] = tuple(
    (kind, name)
    for module in (_stream_checks, _session_checks)
    for kind in vars(module).values()
    if inspect.isclass(kind) and issubclass(kind, Case) and kind.__module__ == module.__name__
    for name, check in vars(kind).items()
    if inspect.iscoroutinefunction(check) and not name.startswith("_")
)
"""Each check, by its class and its name, in the order in which they are written."""


async def check_store(
    make: Make, *, durable: bool = True, hang: Hang | None = None, patience: float = PATIENCE, at_once: int = 1
) -> None:
    """Check every promise, on a fresh store each.

    `make(name)` gives a store that is not open yet; with the same name again, one on the same data. `durable=False`
    says that nothing outlives the object, and leaves out what closes and opens again. `hang(name)` gives a context in
    which that store's backend takes no writes and does not say so (20); a store without a backend needs none.
    `patience`: seconds that a hint, or such a store, may take. `at_once`: checks that run at the same time, which a
    store behind a network can make use of.
    """
    left = iter(CHECKS)

    async def work() -> None:
        for kind, name in left:
            store = make(name)
            await store.open()
            case = kind(
                store=store,
                fence=await store.join(NODE),
                again=partial(make, name) if durable else None,
                hang=partial(hang, name) if hang else None,
                patience=patience,
            )
            await _check(case, name)

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(work())
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from failed.exceptions[0].__cause__


async def _check(case: Case, name: str) -> None:
    try:
        await case.set_up()
        await getattr(case, name)()
    except AssertionError as error:
        raise AssertionError(f"{name.replace('_', ' ')}: {error}") from error
    finally:
        await case.store.aclose()
