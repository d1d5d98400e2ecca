"""The queue of what leaves for the server: starts each message when the one before it has left."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import anyio

#: Messages that wait to leave. Beyond that the host's pipe is not read, and the host has to wait.
MAX_WAITING = 100
#: Characters beyond which a message is waited for before the next one is read: so at most one large one waits.
LARGE = 1 << 20
#: Seconds for what the host said last before it closed the pipe.
FLUSH_SECONDS = 0.5

Job = Callable[[anyio.Event], Coroutine[Any, Any, None]]


class SendQueue:
    """A queue of jobs. Each sets its event when the next may begin, and may go on after that."""

    def __init__(self, start: Callable[[Job, anyio.Event], None]) -> None:
        self._start = start
        self._urgent: set[anyio.Event] = set()
        self._put, self._waiting = anyio.create_memory_object_stream[tuple[anyio.Event, Job]](MAX_WAITING)

    async def run(self) -> None:
        with self._put, self._waiting:
            async for departed, job in self._waiting:
                if not departed.is_set():
                    self._start(job, departed)
                    await departed.wait()

    async def add(self, departed: anyio.Event, job: Job, *, weight: int = 0) -> None:
        """Waits while too much waits already."""
        await self._put.send((departed, job))
        if weight > LARGE:
            await departed.wait()

    def start_now(self, departed: anyio.Event, job: Job) -> None:
        """Start a job that does not wait for those in front of it: they may be waiting for it."""
        self._urgent = {earlier for earlier in self._urgent if not earlier.is_set()} | {departed}
        self._start(job, departed)

    async def flush(self) -> None:
        """Wait until everything has departed, or `FLUSH_SECONDS` are over."""
        last = anyio.Event()

        async def mark(departed: anyio.Event) -> None:
            departed.set()

        with anyio.move_on_after(FLUSH_SECONDS):
            await self.add(last, mark)
            for departed in (last, *self._urgent):
                await departed.wait()
