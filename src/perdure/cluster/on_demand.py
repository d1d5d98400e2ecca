"""Runs a job in a task of its own whenever it is wanted, one run at a time."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence


class OnDemand:
    """A job that is wanted now and then. What is wanted while it runs makes it run once more."""

    def __init__(
        self, job: Callable[[], Awaitable[None]], *, name: str, on_failure: Callable[[Exception, bool], None]
    ) -> None:
        """`on_failure` gets what went wrong, and whether the run before that failed too."""
        self._job = job
        self._name = name
        self._on_failure = on_failure
        self._is_wanted = self._is_closed = False
        self._failed = False
        self._task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        return self._task is not None

    def want(self) -> None:
        self._is_wanted = True
        if self._task is None and not self._is_closed:
            self._task = asyncio.create_task(self._run(), name=self._name)

    async def _run(self) -> None:
        try:
            while self._is_wanted:
                self._is_wanted = False
                try:
                    await self._job()
                    self._failed = False
                except Exception as failure:
                    self._on_failure(failure, self._failed)
                    self._failed = True
        finally:
            self._task = None

    async def aclose(self) -> None:
        self._is_closed = True
        if self._task is not None:
            await cancel_all([self._task])


async def cancel_all(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
