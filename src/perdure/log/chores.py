"""Runs chores that continue after a failure: it costs its own item, is logged once, and is tried again in the next
round."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field

from perdure.errors import StoreError
from perdure.telemetry.log_records import log_event

MOST_TOLD = 1_000
"""Failing items that are remembered: a store in trouble makes all of them fail at once, and the log need not grow more.
"""

AGAIN = 1.0
"""Seconds until a chore that broke down as a whole begins again."""


class Chores:
    """Remembers which items of some chores fail."""

    def __init__(self) -> None:
        self._failing: set[tuple[str, object]] = set()

    @contextmanager
    def surviving(self, what: str, item: object = None) -> Iterator[None]:
        """Log an exception of the block and continue. `what` names the failed work, `item` its item."""
        key = (what, item)
        try:
            yield
        except Exception as failure:
            # The journal logs that the store fails; anything else is a fault of ours, or of the item.
            level = logging.WARNING if isinstance(failure, StoreError | TimeoutError) else logging.ERROR
            if key in self._failing or len(self._failing) >= MOST_TOLD:
                level = logging.DEBUG
            else:
                self._failing.add(key)
            log_event(level, "chore.failed", f"{what}: {failure!r}")
        else:
            self._failing.discard(key)


async def keep_going(chore: Callable[[], Awaitable[None]]) -> None:
    chores = Chores()
    while True:
        with chores.surviving("a chore broke down, and begins again"):
            await chore()
            return
        await asyncio.sleep(AGAIN)


@dataclass(eq=False)
class OnDemand:
    """Runs a job whenever it is wanted, one run at a time. `want` during a run causes one more run."""

    _job: Callable[[], Awaitable[None]]
    _: KW_ONLY
    name: str
    failure: str
    """Says in the log what could not be done."""
    on_failure: Callable[[], None] = field(default=lambda: None)
    _chores: Chores = field(default_factory=Chores)
    _is_wanted: bool = False
    _is_closed: bool = False
    _task: asyncio.Task[None] | None = None

    def want(self) -> None:
        self._is_wanted = True
        if self._task is None and not self._is_closed:
            self._task = asyncio.create_task(self._run(), name=self.name)

    async def _run(self) -> None:
        try:
            while self._is_wanted:
                self._is_wanted, has_failed = False, True
                with self._chores.surviving(self.failure):
                    await self._job()
                    has_failed = False
                if has_failed:
                    self.on_failure()
        finally:
            self._task = None

    async def aclose(self) -> None:
        self._is_closed = True
        if self._task is not None:
            await cancel_all([self._task])


_started: set[asyncio.Task[None]] = set()


def start(work: Coroutine[None, None, None]) -> asyncio.Task[None]:
    """Start a task for which no object waits, and keep it from being collected while it runs."""
    task = asyncio.create_task(work)
    _started.add(task)
    task.add_done_callback(_started.discard)
    return task


async def cancel_all(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
