"""How often a value of the store is read again, and what callers get meanwhile."""

from __future__ import annotations

import asyncio

import pytest
from anyio import wait_all_tasks_blocked

from perdure.console.sessions import CachedRead
from perdure.errors import StoreUnavailable

pytestmark = pytest.mark.anyio


class Source:
    """Counts its reads; each takes `takes` seconds and waits for the gate."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reads = 0
        self.takes = 0.0
        self.failure: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def read(self) -> int:
        self.reads += 1
        number = self.reads
        await self.gate.wait()
        self.now += self.takes
        if self.failure is not None:
            raise self.failure
        return number


async def test_a_value_is_read_again_only_when_a_caller_wants_it_and_it_is_due() -> None:
    source = Source()
    cached = CachedRead(source.read, pause=1.0, rest=2.0, monotonic=lambda: source.now)
    assert [await cached.get(), await cached.get()] == [1, 1]
    source.now, source.takes = 1.0, 4.0
    assert [await cached.get(), source.reads] == [2, 2]
    source.now += 7.9
    assert [await cached.get(), source.reads] == [2, 2], "it rests for twice as long as it took"
    source.now += 0.1
    source.gate.clear()
    waiting = [asyncio.create_task(cached.get()) for _ in range(2)]
    await wait_all_tasks_blocked()
    source.gate.set()
    assert [await asyncio.gather(*waiting), source.reads] == [[3, 3], 3], "one read for both"


async def test_a_failure_is_raised_to_its_caller_and_the_next_caller_reads_again() -> None:
    source = Source()
    cached = CachedRead(source.read, pause=1.0, rest=0.0, monotonic=lambda: source.now)
    assert await cached.get() == 1
    source.now += 1.0
    source.failure = StoreUnavailable("the disk is gone")
    for reads in (2, 3):
        with pytest.raises(StoreUnavailable, match="the disk is gone"):
            await cached.get()
        assert source.reads == reads
    source.failure = None
    assert await cached.get() == 4
