"""Tests whether a store keeps the promises of `perdure.store.interface`; uses `store` and the rooms below it.

    def make(name: str) -> Store:
        return MyStore(f"/somewhere/{name}")      # the same name: the same data

    async def test_my_store_keeps_the_promises() -> None:
        await check_store(make)

`check_store` runs one check for each thing promised, on a fresh store each, and raises `AssertionError` with the number
of the promise and what was seen.
"""

import asyncio
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from perdure.testing import _checks
from perdure.testing._case import Case
from perdure.testing._values import NODE, Make

_PATIENCE = 10.0
"""Seconds: long enough for a busy machine. A hint may also be lost for good, but then a broken one is not noticed."""

_CHECKS: tuple[tuple[type[Case], str], ...] = tuple(
    (kind, name)
    for kind in vars(_checks).values()
    if inspect.isclass(kind) and issubclass(kind, Case) and kind.__module__ == _checks.__name__
    for name, check in vars(kind).items()
    if inspect.iscoroutinefunction(check) and not name.startswith("_") and name != "set_up"
)
"""Each check, by its class and its name, in the order in which they are written."""


async def check_store(
    make: Make,
    *,
    durable: bool = True,
    hang: Callable[[str], AbstractContextManager[object]] | None = None,
    patience: float = _PATIENCE,
    at_once: int = 1,
    only: str = "",
) -> None:
    """Check every promise, on a fresh store each.

    `make(name)` returns a store that is not open yet; with the same name again, one on the same data. `durable=False`
    declares that nothing outlives the object, and leaves out what closes and opens again. `hang(name)` returns a
    context in which that store's backend takes no writes and does not answer (20); a store without a backend needs
    none. `patience`: seconds that a hint, or such a store, may take. `at_once`: checks that run at the same time,
    which helps with a store on a network. `only`: the first words of the names of the checks, as in `promise 13`.
    """
    left = iter([check for check in _CHECKS if check[1].startswith(only.replace(" ", "_"))])

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
            try:
                await case.set_up()
                await getattr(case, name)()
            except AssertionError as error:
                raise AssertionError(f"{name.replace('_', ' ')}: {error}") from error
            finally:
                await case.store.aclose()

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(work())
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from failed.exceptions[0].__cause__
