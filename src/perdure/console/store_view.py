"""Holds the console's view of the store: read only, opened again when the store was lost and is back."""

import asyncio
import contextlib

from perdure.errors import StoreError
from perdure.store import Store, existing_store, upkeep_of

PATIENCE = 5.0
"""Seconds that one read may take: a person waits for it, and no client."""


class StoreView:
    """The store at an address. No server waits for a lock of it, because it is opened without write access."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._store: Store | None = None
        self._turn = asyncio.Lock()
        self.upkeep = upkeep_of(address)

    async def current(self) -> Store:
        """Give the store, open. Raises `StoreError` if it is not there, or cannot be read.

        A SQLite file that was deleted or replaced is let go of, and what is in its place is opened."""
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

    def writing(self) -> Store:
        """The same store with write access, not opened yet, for ending a session."""
        return existing_store(self._address, writes=True, busy_timeout=PATIENCE)

    async def aclose(self) -> None:
        async with self._turn:
            await self._close()

    async def _close(self) -> None:
        if self._store is not None:
            store, self._store = self._store, None
            with contextlib.suppress(StoreError):
                await store.aclose()
