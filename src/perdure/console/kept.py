"""Keeps what was read last, and reads it again when a caller wants it and it is due.

Nothing is read while no page is open. A read that took long is due again later, so that reading takes a bounded share
of the time, however much there is to read.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Kept(Generic[T]):
    """A value that is read in the background.

    `pause`: seconds between the end of a read and the next one, at least. `rest`: as many times the last read's own
    time, at least. `stale`: an older value is not given any more; the caller waits for the next read.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[T]],
        *,
        pause: float,
        stale: float,
        monotonic: Callable[[], float],
        rest: float = 0.0,
    ) -> None:
        self._read = read
        self._pause = pause
        self._rest = rest
        self._stale = stale
        self._monotonic = monotonic
        self._reading: asyncio.Task[None] | None = None
        self._value: T | None = None
        self._read_at = 0.0
        self._due = 0.0
        self.reads = 0
        """How often it was read."""

    async def get(self) -> T:
        """Give the last value, or wait for the next one. Raises what the read raised, to the callers that waited for it
        and to no other one; the next caller begins another read."""
        if self._reading is None and self._monotonic() >= self._due:
            self._reading = asyncio.create_task(self._run())
            self._reading.add_done_callback(_retrieve)
        if self._value is None or self._monotonic() - self._read_at > self._stale:
            if self._reading is None:  # it is not due: the last read took long
                self._reading = asyncio.create_task(self._run())
                self._reading.add_done_callback(_retrieve)
            await asyncio.shield(self._reading)
        assert self._value is not None
        return self._value

    async def _run(self) -> None:
        began = self._monotonic()
        try:
            self._value = await self._read()
            self._read_at = self._monotonic()
            self.reads += 1
        except BaseException:
            self._value = None
            raise
        finally:
            self._reading = None
            now = self._monotonic()
            self._due = now + max(self._pause, self._rest * (now - began))

    async def aclose(self) -> None:
        """End the read that is under way."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])


def _retrieve(done: "asyncio.Task[None]") -> None:
    """A failure that no caller waited for is told to the next one, by its own read."""
    if not done.cancelled():
        done.exception()
