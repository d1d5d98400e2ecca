"""A store counts as stuck by what it did, never by how late this process read or how many calls wait."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from perdure.errors import StoreUnavailable
from perdure.store.sqlite.file import RETRY, FileIdentity, open_writer, patiently
from perdure.store.sqlite.reads import THREADS, ReaderPool
from perdure.store.sqlite.writer import Writer
from perdure.store.time_limit import TICKS, TimeLimit

pytestmark = pytest.mark.anyio

T = TypeVar("T")

LIMIT = 0.2
STUCK = "did not answer within 0.2 s"


async def never() -> None:
    await asyncio.Event().wait()


async def test_a_late_event_loop_is_not_a_stuck_store() -> None:
    limit = TimeLimit(LIMIT)
    with ThreadPoolExecutor(1) as store:
        for _ in range(3):
            answer = asyncio.get_running_loop().run_in_executor(store, lambda: "answer")
            waiting = asyncio.create_task(limit.wait(answer))
            await asyncio.sleep(0)
            time.sleep(3 * LIMIT)  # noqa: ASYNC251 - the loop stands still, the store has answered long ago
            assert await waiting == "answer"


async def test_a_call_that_is_never_answered_is_told_within_the_limit() -> None:
    limit = TimeLimit(LIMIT)
    started = time.monotonic()
    with pytest.raises(StoreUnavailable, match=STUCK):
        await limit.wait(never())
    assert time.monotonic() - started >= LIMIT


async def test_calls_in_a_queue_are_answered_in_their_turn_however_long_it_is() -> None:
    """Each takes a quarter of the limit, so the last of them comes after ten limits."""
    limit, turn = TimeLimit(LIMIT), asyncio.Lock()

    async def one(number: int) -> int:
        async with turn:
            await asyncio.sleep(LIMIT / 4)
            return number

    answers = await asyncio.gather(*(limit.wait(one(number)) for number in range(40)))
    assert answers == list(range(40))


async def test_everybody_in_the_queue_of_a_stuck_store_is_told_together() -> None:
    limit, stuck = TimeLimit(LIMIT), asyncio.Event()

    async def one() -> None:
        await stuck.wait()

    started = time.monotonic()
    told = await asyncio.gather(*(limit.wait(one()) for _ in range(40)), return_exceptions=True)
    assert {type(answer) for answer in told} == {StoreUnavailable}
    assert time.monotonic() - started < 20 * LIMIT, "one after the other would take 40 limits"


async def test_a_call_that_later_ones_have_passed_is_stuck() -> None:
    limit, answered = TimeLimit(LIMIT), 0
    lost = asyncio.create_task(limit.wait(never()))
    while not lost.done():
        await limit.wait(asyncio.sleep(LIMIT / TICKS))
        answered += 1
    with pytest.raises(StoreUnavailable, match=STUCK):
        await lost
    assert answered > 1


async def test_a_store_that_moves_is_not_stuck_and_one_that_stopped_is() -> None:
    moves = itertools.count()
    at_work, ticks = True, 0

    def moved() -> int:
        nonlocal ticks
        ticks += 1
        return next(moves) if at_work else -1

    limit = TimeLimit(LIMIT, moves=moved)
    waiting = asyncio.create_task(limit.wait(never()))
    while ticks < 3 * TICKS:
        assert not waiting.done()
        await asyncio.sleep(LIMIT / TICKS)
    at_work = False
    with pytest.raises(StoreUnavailable, match=STUCK):
        await waiting


async def test_what_the_store_raises_and_a_callers_leaving_are_their_own() -> None:
    limit = TimeLimit(LIMIT)

    async def fails() -> None:
        raise TimeoutError("the store's own")

    with pytest.raises(TimeoutError, match="the store's own"):
        await limit.wait(fails())
    leaving = asyncio.create_task(limit.wait(never()))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert await limit.wait(asyncio.sleep(0, "answer")) == "answer"


# The threads of a SQLite file


@contextmanager
def blocking() -> Iterator[threading.Event]:
    """Work that waits for this event stands for a thread that the disk keeps."""
    released = threading.Event()
    try:
        yield released
    finally:
        released.set()


def taking(seconds: float, answer: T) -> Callable[..., T]:
    """Work that takes some time and gives this answer."""

    def work(*_: object) -> T:
        time.sleep(seconds)
        return answer

    return work


@asynccontextmanager
async def writing(path: Path) -> AsyncIterator[Writer]:
    writer = Writer(str(path), sync="normal", busy_timeout=LIMIT)
    writer.open()
    try:
        yield writer
    finally:
        writer.stop()
        await asyncio.to_thread(writer.join)


@asynccontextmanager
async def reading(path: Path) -> AsyncIterator[ReaderPool]:
    open_writer(str(path), sync="normal", busy_timeout=LIMIT).close()
    readers = ReaderPool(str(path), busy_timeout=LIMIT, check=lambda: None, identity=FileIdentity(str(path)))
    readers.open()
    try:
        yield readers
    finally:
        await asyncio.to_thread(readers.close)


async def test_a_writer_that_is_stuck_in_one_operation_is_told_and_goes_on_afterwards(tmp_path: Path) -> None:
    async with writing(tmp_path / "log.db") as writer:
        with blocking() as released:
            blocked = asyncio.create_task(writer.run(lambda _, __: released.wait()))
            behind = asyncio.create_task(writer.run(lambda _, __: "too late"))
            told = await asyncio.gather(blocked, behind, return_exceptions=True)
        assert {type(answer) for answer in told} == {StoreUnavailable}
        assert await writer.run(lambda _, __: "works") == "works"


async def test_a_writer_with_much_to_do_is_waited_for(tmp_path: Path) -> None:
    """The last of its jobs is in the queue for five limits."""
    async with writing(tmp_path / "log.db") as writer:
        jobs = (writer.run(taking(LIMIT / 4, number)) for number in range(20))
        assert await asyncio.gather(*jobs) == list(range(20))


async def test_a_writer_that_is_at_work_on_one_long_job_is_waited_for(tmp_path: Path) -> None:
    """On a busy machine a commit takes many times as long as it should; its thread works all the while."""

    def work(*_: object) -> str:
        end = time.thread_time() + 3 * LIMIT
        while time.thread_time() < end:
            pass
        return "done"

    async with writing(tmp_path / "log.db") as writer:
        assert await writer.run(work) == "done"


class Locked:
    """A file that is locked for so many tries, each of which takes a while."""

    def __init__(self, tries: int, *, code: int = sqlite3.SQLITE_BUSY, pause: float = 0.0) -> None:
        self.tries = 0
        self._locked = tries
        self._code = code
        self._pause = pause

    def __call__(self) -> None:
        time.sleep(self._pause)
        self.tries += 1
        if self.tries <= self._locked:
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode = self._code
            raise error


TRIES = 200
PATIENCE = TRIES * RETRY


@pytest.mark.parametrize("pause", [0.0, 2 * RETRY])
def test_a_locked_file_is_tried_so_often_however_slow_the_machine_is(pause: float) -> None:
    free = Locked(TRIES - 2, pause=pause)
    patiently(free, patience=PATIENCE)
    locked = Locked(2 * TRIES, pause=pause)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        patiently(locked, patience=PATIENCE)
    assert abs(locked.tries - TRIES) <= 1


def test_a_file_whose_log_is_recovered_is_tried_ten_times_as_often() -> None:
    patiently(Locked(8 * TRIES, code=sqlite3.SQLITE_BUSY_RECOVERY), patience=PATIENCE)


def test_a_file_that_others_write_is_tried_for_as_long_as_they_do() -> None:
    moves = iter([True] * 10)
    locked = Locked(10 * TRIES)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        patiently(locked, patience=PATIENCE, has_moved=lambda: next(moves, False))
    assert locked.tries > 3 * TRIES


async def test_a_herd_of_readers_is_served_in_its_turn(tmp_path: Path) -> None:
    """The last of them waits for five limits in front of the threads."""
    async with reading(tmp_path / "log.db") as readers:
        reads = (readers.run(taking(LIMIT / 20, number)) for number in range(100 * THREADS))
        assert await asyncio.gather(*reads) == list(range(100 * THREADS))


async def test_a_read_that_is_stuck_is_told_while_the_other_thread_serves(tmp_path: Path) -> None:
    async with reading(tmp_path / "log.db") as readers:
        with blocking() as released:
            blocked = asyncio.create_task(readers.run(lambda _: released.wait()))
            await asyncio.sleep(0)
            served = 0
            while not blocked.done():
                served += await readers.run(taking(LIMIT / 20, 1))
            with pytest.raises(StoreUnavailable):
                await blocked
        assert served > 1
