"""A store that is slow to answer one read, in the moment that a test chooses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.stores.shared_store import SharedStore


class HeldReads(SharedStore):
    """Keeps back, once, what a method has read: set `hold`, wait for `reached`, and set `go`."""

    def __init__(self, path: Path, method: str, holds: Callable[[Any], object] = lambda _: True) -> None:
        super().__init__(str(path))
        self.hold, self.reached, self.go = False, asyncio.Event(), asyncio.Event()
        read = getattr(self, method)

        async def held(*args: Any, **kwargs: Any) -> Any:
            found = await read(*args, **kwargs)
            if self.hold and holds(found):
                self.hold = False
                self.reached.set()
                await self.go.wait()
            return found

        setattr(self, method, held)
