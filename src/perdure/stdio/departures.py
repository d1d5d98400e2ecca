"""The order of what leaves for the server: each message when the one before has departed."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import anyio

#: Messages that wait to leave. Beyond that the host's pipe is not read, and the host has to wait.
MAX_WAITING = 100
#: Characters beyond which a message is waited for before the next one is read: so at most one large one waits.
LARGE = 1 << 20
#: Seconds for what the host said last before it closed the pipe.
FAREWELL = 0.5

Job = Callable[[anyio.Event], Coroutine[Any, Any, None]]


class Departures:
    """A queue of jobs. Each sets its event when the next may begin, and may go on after that."""

    def __init__(self, start: Callable[[Job, anyio.Event], None]) -> None:
        self._start = start
        self._at_once: set[anyio.Event] = set()
        self._put, self._waiting = anyio.create_memory_object_stream[tuple[anyio.Event, Job]](MAX_WAITING)

    async def run(self) -> None:
        with self._put, self._waiting:
            async for left, job in self._waiting:
                if not left.is_set():
                    self._start(job, left)
                    await left.wait()

    async def add(self, left: anyio.Event, job: Job, *, weight: int = 0) -> None:
        """Waits while too much waits already."""
        await self._put.send((left, job))
        if weight > LARGE:
            await left.wait()

    def at_once(self, left: anyio.Event, job: Job) -> None:
        """For what waits for nobody."""
        self._at_once = {earlier for earlier in self._at_once if not earlier.is_set()} | {left}
        self._start(job, left)

    async def empty(self) -> None:
        """Wait until everything has departed, or `FAREWELL` is over."""
        last = anyio.Event()

        async def mark(left: anyio.Event) -> None:
            left.set()

        with anyio.move_on_after(FAREWELL):
            await self.add(last, mark)
            for left in (last, *self._at_once):
                await left.wait()
