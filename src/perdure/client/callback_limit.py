"""Limits the callbacks that run at once, so that slow ones slow their server down.

The SDK's client runs the callbacks for each notification in a task of their own and reads on. Where they are slower
than the server, the tasks would pile up without end; so no further notification is handed over while `ROOM` of them
run. Then the stream is not read, and the server, if it is Perdure, lets the call wait that feeds it (promise 6).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, TypeVar, cast

import anyio

#: Callbacks that may run at once: far more than a program waits for, and a few megabytes.
ROOM = 1_000

Callback = TypeVar("Callback", bound=Callable[..., Awaitable[None]])


class CallbackLimit:
    """Counts the callbacks that run."""

    def __init__(self) -> None:
        self._running = 0
        self._ended = anyio.Event()

    async def room(self) -> None:
        """Wait until there is room for one more."""
        while self._running >= ROOM:
            await self._ended.wait()

    def counted(self, callback: Callback) -> Callback:
        """The callback, counted while it runs."""

        @wraps(callback)
        async def run(*args: Any, **kwargs: Any) -> None:
            self._running += 1
            try:
                await callback(*args, **kwargs)
            finally:
                self._running -= 1
                self._ended.set()
                self._ended = anyio.Event()

        return cast("Callback", run)
