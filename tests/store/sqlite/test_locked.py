"""Another program holds the SQLite file: commits fail by name and in time, reading goes on, nothing is done twice."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from perdure._core.ids import NodeId
from perdure.errors import StoreUnavailable
from perdure.store.sqlite import SqliteStore
from perdure.store.steps import OpenStream, PutSession
from perdure.testing._values import NODE, a_session, a_stream, an_append, numbers, put, some_events

pytestmark = pytest.mark.anyio

HOLD = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.readline()
connection.execute("ROLLBACK")
print("freed", flush=True)
"""


WRITE = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("held", flush=True)
for _ in range(40):
    connection.execute("UPDATE node SET beat = beat + 1")
    time.sleep(0.05)
    connection.execute("COMMIT")
    connection.execute("BEGIN IMMEDIATE")
connection.execute("ROLLBACK")
print("freed", flush=True)
"""


class Holder:
    """Another process that holds the file for writing, until a test has it free the file."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.wait_for("held")

    def wait_for(self, word: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == word

    def tell(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def free(self) -> None:
        self.tell()
        self.wait_for("freed")


@contextmanager
def held(path: Path, program: str = HOLD) -> Iterator[Holder]:
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Holder(process)


async def test_a_commit_fails_within_the_busy_timeout_and_works_when_the_file_is_free(tmp_path: Path) -> None:
    async with SqliteStore(str(tmp_path / "log.db"), busy_timeout=0.2) as store:
        fence = await store.join(NODE)
        await put(store, PutSession(record=a_session()), OpenStream(record=a_stream(fence)))
        await put(store, an_append(fence, some_events(1, 3)))
        step = an_append(fence, some_events(4, 5))
        with held(tmp_path / "log.db") as holder:
            assert store.commit_now([step]) is None
            started = time.monotonic()
            with pytest.raises(StoreUnavailable, match="locked"):
                await store.commit([step])
            assert 0.2 <= time.monotonic() - started < 5.0
            assert await numbers(store) == [1, 2, 3], "reading goes on"
            holder.free()
            assert list(await put(store, step)) == [None]
        assert list(await store.commit([step])) == [None]
        assert await numbers(store) == [1, 2, 3, 4, 5]


async def test_a_file_that_another_process_keeps_writing_is_busy_and_does_not_fail(tmp_path: Path) -> None:
    """It is locked for four times the busy timeout, but never for all of it by one commit, also on a busy machine."""
    async with SqliteStore(str(tmp_path / "log.db"), busy_timeout=0.5) as store:
        fence = await store.join(NODE)
        await put(store, PutSession(record=a_session()), OpenStream(record=a_stream(fence)))
        with held(tmp_path / "log.db", WRITE) as other:
            for seq in range(1, 4):
                assert list(await store.commit([an_append(fence, some_events(seq, seq))])) == [None]
            other.wait_for("freed")
        assert await numbers(store) == [1, 2, 3]


async def test_everybody_who_waits_is_told(tmp_path: Path) -> None:
    async with SqliteStore(str(tmp_path / "log.db"), busy_timeout=0.1) as store:
        fence = await store.join(NODE)
        await put(store, PutSession(record=a_session()), OpenStream(record=a_stream(fence)))
        with held(tmp_path / "log.db") as holder:
            steps = [an_append(fence, some_events(seq, seq)) for seq in range(1, 21)]
            told = await asyncio.gather(*(store.commit([step]) for step in steps), return_exceptions=True)
            assert {type(answer) for answer in told} == {StoreUnavailable}
            holder.free()
        assert list(await put(store, *steps)) == [None] * 20
        assert await numbers(store) == list(range(1, 21))


async def test_a_commit_waits_for_a_file_that_is_soon_free_and_keeps_its_place(tmp_path: Path) -> None:
    async with SqliteStore(str(tmp_path / "log.db"), busy_timeout=60.0) as store:
        fence = await store.join(NODE)
        await put(store, PutSession(record=a_session()), OpenStream(record=a_stream(fence)))
        with held(tmp_path / "log.db") as holder:
            first = asyncio.create_task(store.commit([an_append(fence, some_events(1, 1))]))
            await asyncio.sleep(0)
            assert store.commit_now([an_append(fence, some_events(2, 2))]) is None, "not before the first"
            second = asyncio.create_task(store.commit([an_append(fence, some_events(2, 2))]))
            await asyncio.sleep(0)
            assert not first.done()
            holder.free()
            assert [list(await first), list(await second)] == [[None], [None]]
        assert await numbers(store) == [1, 2]


async def test_a_new_file_that_another_program_holds_is_refused_in_time(tmp_path: Path) -> None:
    with held(tmp_path / "log.db") as holder:
        store = SqliteStore(str(tmp_path / "log.db"), busy_timeout=0.1)
        with pytest.raises(StoreUnavailable, match="locked"):
            await store.open()
        holder.free()
        async with store:
            assert await store.join(NODE)


async def test_two_open_the_same_new_file_at_once_and_both_work(tmp_path: Path) -> None:
    stores = [SqliteStore(str(tmp_path / "log.db"), busy_timeout=30.0) for _ in range(4)]
    await asyncio.gather(*(store.open() for store in stores))
    joining = (store.join(NodeId(f"node-{number}")) for number, store in enumerate(stores))
    fences = await asyncio.gather(*joining)
    assert len(set(fences)) == 4
    await asyncio.gather(*(store.aclose() for store in stores))
