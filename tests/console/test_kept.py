"""What is read in the background: how often, and what callers get meanwhile."""

from __future__ import annotations

import asyncio

import pytest
from anyio import wait_all_tasks_blocked

from perdure.console.kept import Kept
from perdure.errors import StoreUnavailable

pytestmark = pytest.mark.anyio


class Source:
    """Counts its reads; each takes as long as it is told to."""

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
    kept = Kept(source.read, pause=1.0, monotonic=lambda: source.now)
    assert [await kept.get(), await kept.get()] == [1, 1]
    source.now = 1.0  # due: the last value is still given, while the next one is read
    assert await kept.get() == 1
    await wait_all_tasks_blocked()
    assert [await kept.get(), source.reads] == [2, 2]
    source.now = 100.0  # no caller came for long: the next one waits for a new value
    assert [await kept.get(), source.reads] == [3, 3]


async def test_what_takes_long_is_read_less_often_and_callers_do_not_wait_for_it() -> None:
    source = Source()
    source.takes = 4.0
    kept = Kept(source.read, pause=1.0, rest=2.0, monotonic=lambda: source.now)
    assert await kept.get() == 1
    source.now += 7.9
    assert [await kept.get(), source.reads] == [1, 1], "it rests for twice as long as it took"
    source.now += 0.1
    source.gate.clear()
    assert [await kept.get(), await kept.get()] == [1, 1]
    assert not kept.is_awaited
    source.now += 12.1  # three times as long as it took
    waiting = asyncio.create_task(kept.get())
    await wait_all_tasks_blocked()
    assert kept.is_awaited
    source.gate.set()
    assert [await waiting, source.reads] == [2, 2]


async def test_a_failure_is_told_to_those_that_wait_and_the_next_caller_tries_again() -> None:
    source = Source()
    kept = Kept(source.read, pause=1.0, monotonic=lambda: source.now)
    source.failure = StoreUnavailable("the disk is gone")
    for reads in (1, 2):
        with pytest.raises(StoreUnavailable, match="the disk is gone"):
            await kept.get()
        assert source.reads == reads
    source.failure = None
    assert await kept.get() == 3
