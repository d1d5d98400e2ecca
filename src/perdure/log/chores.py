"""Keeps chores going: what fails costs its own item, is logged once, and is tried again with the next round."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from perdure.errors import StoreError
from perdure.telemetry.events import log_event

MOST_TOLD = 1_000
"""Failing items that are remembered. A store in trouble makes all of them fail at once, and the log need not say that
more often."""

AGAIN = 1.0
"""Seconds until a chore that broke down as a whole begins again."""


class Chores:
    """Remembers which items of some chores fail."""

    def __init__(self) -> None:
        self._failing: set[tuple[str, object]] = set()

    @contextmanager
    def surviving(self, what: str, item: object = None) -> Iterator[None]:
        """Go on behind the block, whatever happens in it. `what` says what could not be done, `item` for which one."""
        key = (what, item)
        try:
            yield
        except Exception as failure:
            # The journal logs that the store fails; anything else is a fault of ours, or of the item.
            level = logging.WARNING if isinstance(failure, StoreError) else logging.ERROR
            if key in self._failing or len(self._failing) >= MOST_TOLD:
                level = logging.DEBUG
            else:
                self._failing.add(key)
            log_event(level, "chore.failed", f"{what}: {failure!r}")
        else:
            self._failing.discard(key)


async def keep_going(chore: Callable[[], Awaitable[None]]) -> None:
    """Run a chore that is meant to run for ever; if it breaks down, that is logged and it begins again."""
    chores = Chores()
    while True:
        with chores.surviving("a chore broke down, and begins again"):
            await chore()
            return
        await asyncio.sleep(AGAIN)
