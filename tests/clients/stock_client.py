"""Stock MCP clients behind one small face, so that one story can be told with each of them.

Nothing here reconnects, counts or repairs: what a story sees is what the client's own callbacks were given.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

#: What a story waits for comes within milliseconds, or never; seconds are for a busy machine.
PATIENCE = 30

#: What every client answers when it is asked.
USER_SAYS = "forty-two"
MODEL_SAYS = "a poem"


def named(*names: str, in_all: Iterable[str]) -> list[Any]:
    """Names of clients as parameters; those in `in_all` have their stories in `make test-all` alone."""
    return [*names, *(pytest.param(name, marks=pytest.mark.long) for name in in_all)]


@dataclass(kw_only=True, eq=False)
class Call:
    """One tool call and what its caller has seen of it."""

    progress: list[int] = field(default_factory=list)
    #: The text of the result, or `error: …` when the call failed.
    answer: str | None = None
    #: Of a JSON-RPC error: its code and its data.
    code: int | None = None
    data: Any = None
    #: The positions that the client told its caller; only the TypeScript clients do, the Python ones stay at none.
    tokens: list[str] = field(default_factory=list)


class StockClient(ABC):
    """A connected client: the calls it made, the notices and questions it was given."""

    def __init__(self) -> None:
        self.protocol = ""
        self.notices: list[str] = []
        self.asked: list[str] = []
        #: What the client reported through an error callback, where it has one.
        self.errors: list[str] = []
        self._changed = asyncio.Event()

    @abstractmethod
    async def knows(self, call: Call, positions: int) -> None:
        """Wait until the client has taken in that many positions of a call, which the proxy has seen on their way."""

    @abstractmethod
    async def call(self, tool: str, /, **arguments: Any) -> Call:
        """Begin a call; the client reports on it as it goes."""

    async def until(self, state: Callable[[], bool]) -> None:
        """Wait until a state of what was seen is reached."""
        async with asyncio.timeout(PATIENCE):
            while not state():
                self._changed.clear()
                await self._changed.wait()

    async def saw(self, call: Call, progress: list[int]) -> None:
        """Wait until exactly these reports have come, in this order."""
        await self.until(lambda: call.progress == progress)

    async def answer(self, call: Call) -> str:
        await self.until(lambda: call.answer is not None)
        assert call.answer is not None
        return call.answer

    async def result(self, tool: str, /, **arguments: Any) -> str:
        return await self.answer(await self.call(tool, **arguments))

    def changed(self) -> None:
        self._changed.set()
