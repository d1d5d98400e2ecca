"""Reads the store for the console: a view without write access, and values that are read again when they are due."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from perdure.errors import StoreError
from perdure.store import Inspect, existing_store, maintenance_of

T = TypeVar("T")

PATIENCE = 5.0
"""Seconds that one read may take: a person waits for it, and no client."""


class StoreView:
    """Opens the store at an address. No server waits for a lock of it, because it is opened without write access."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._store: Inspect | None = None
        self._turn = asyncio.Lock()
        self.upkeep = maintenance_of(address)

    async def current(self) -> Inspect:
        """Return the store, open. Raises `StoreError` if it does not exist or cannot be read.

        A SQLite file that was deleted or replaced is closed, and the file in its place is opened."""
        async with self._turn:
            if self._store is not None:
                try:
                    self._store.stamp()
                except StoreError:
                    await self._close()
            if self._store is None:
                store = existing_store(self._address, writes=False, busy_timeout=PATIENCE)
                await store.open()
                self._store = store
            return self._store

    def writing(self) -> Inspect:
        """Return the same store with write access, not opened yet, for ending a session."""
        return existing_store(self._address, writes=True, busy_timeout=PATIENCE)

    async def aclose(self) -> None:
        async with self._turn:
            await self._close()

    async def _close(self) -> None:
        if self._store is not None:
            store, self._store = self._store, None
            with contextlib.suppress(StoreError):
                await store.aclose()


class CachedRead(Generic[T]):
    """Caches a value that is read again when a caller wants it and it is due; nothing is read while no page is open.

    `pause`: seconds between the end of a read and the next one, at least. `rest`: as many times the last read's own
    time, at least, so that reading takes a bounded share of the time. A failure is raised to the caller whose read it
    was; the next caller reads again.
    """

    def __init__(
        self, read: Callable[[], Awaitable[T]], *, pause: float, rest: float, monotonic: Callable[[], float]
    ) -> None:
        self._read = read
        self._pause = pause
        self._rest = rest
        self._monotonic = monotonic
        self._turn = asyncio.Lock()
        self._value: T | None = None
        self._due = float("-inf")

    async def get(self) -> T:
        """Return the last value, or read the next one."""
        async with self._turn:
            began = self._monotonic()
            if self._value is None or began >= self._due:
                self._value = None
                self._value = await self._read()
                now = self._monotonic()
                self._due = now + max(self._pause, self._rest * (now - began))
            return self._value
