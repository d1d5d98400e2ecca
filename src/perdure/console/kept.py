"""Keeps what was read last, and reads it again when a caller wants it and it is due.

Nothing is read while no page is open. A read that takes long is done less often, and callers are given an older value
meanwhile, so that reading takes a bounded share of the time, however much there is to read.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")

LAG = 3.0
"""A value may be given for so many times as long as it took to read: what is read soon is waited for."""


class Kept(Generic[T]):
    """A value that is read in the background.

    `pause`: seconds between the end of a read and the next one, at least. `rest`: as many times the last read's own
    time, at least.
    """

    def __init__(
        self, read: Callable[[], Awaitable[T]], *, pause: float, monotonic: Callable[[], float], rest: float = 0.0
    ) -> None:
        self._read = read
        self._pause = pause
        self._rest = rest
        self._monotonic = monotonic
        self._reading: asyncio.Task[T] | None = None
        self._value: T | None = None
        self._due = self._until = float("-inf")
        self._waiting = 0

    @property
    def is_awaited(self) -> bool:
        """Whether a caller waits for the read that is under way."""
        return self._waiting > 0

    async def get(self) -> T:
        """Give the last value, or wait for the next one. Raises what the read raised, to the callers that waited for it
        and to no other one; the next caller begins another read."""
        now = self._monotonic()
        is_good = self._value is not None and now <= self._until
        if self._reading is None and (now >= self._due or not is_good):
            self._reading = asyncio.create_task(self._run())
            self._reading.add_done_callback(_retrieve)
        if is_good or self._reading is None:
            assert self._value is not None
            return self._value
        self._waiting += 1
        try:
            return await asyncio.shield(self._reading)
        finally:
            self._waiting -= 1

    async def _run(self) -> T:
        began = self._monotonic()
        try:
            self._value = value = await self._read()
        except BaseException:
            self._value = None
            raise
        finally:
            self._reading = None
            now = self._monotonic()
            self._due = now + max(self._pause, self._rest * (now - began))
            self._until = self._due + max(self._pause, LAG * (now - began))
        return value

    async def aclose(self) -> None:
        """End the read that is under way."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])


def _retrieve(done: "asyncio.Task[T]") -> None:
    """A failure that no caller waited for is told to the next one, by its own read."""
    if not done.cancelled():
        done.exception()
