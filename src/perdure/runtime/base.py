"""The interface between a session and what answers its requests."""

from __future__ import annotations

from typing import Protocol


class Flow(Protocol):
    """Where a writer waits before it goes on."""

    @property
    def is_full(self) -> bool: ...

    async def wait_for_room(self) -> None: ...
