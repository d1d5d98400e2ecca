"""Reading, sweeping and checkpoints of a SQLite store do not stand in the way of commits."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from perdure._core.ids import Fence, StreamId
from perdure._core.retention import Cutoffs
from perdure.errors import StoreUnavailable
from perdure.store.records import Event
from perdure.store.sqlite import SqliteStore
from perdure.store.sqlite import sweep as sweep_module
from perdure.store.sqlite import writer as _sqlite_checkpoints
from perdure.store.steps import DropStream, EndSession, OpenStream, PutSession, Release, Trim
from perdure.testing._values import (
    NODE,
    SESSION,
    STREAM,
    a_session,
    a_stream,
    all_events,
    an_append,
    numbers,
    put,
    some_events,
)

pytestmark = pytest.mark.anyio


async def with_events(store: SqliteStore, count: int, *, stream: str = STREAM) -> Fence:
    fence = await store.join(NODE)
    await put(store, PutSession(record=a_session()), OpenStream(record=a_stream(fence, stream)))
    for first in range(1, count + 1, 500):
        await put(store, an_append(fence, some_events(first, min(first + 499, count)), stream=stream))
    return fence


async def test_a_long_replay_lets_commits_go_on(tmp_path: Path) -> None:
    async with SqliteStore(str(tmp_path / "log.db")) as store:
        fence = await with_events(store, 10_000)
        await put(store, OpenStream(record=a_stream(fence, "live")))
        reading = asyncio.create_task(_read(store, 10_000))
        committed = 0
        while not reading.done():
            committed += 1
            step = an_append(fence, some_events(committed, committed), stream="live")
            assert list(await put(store, step)) == [None]
            await asyncio.sleep(0)
        assert await reading == list(some_events(1, 10_000))
        assert committed >= 10
        assert await numbers(store, "live") == list(range(1, committed + 1))


async def _read(store: SqliteStore, limit: int) -> list[Event]:
    return list(await store.read(StreamId(STREAM), after=0, limit=limit))


async def test_a_reader_that_is_cancelled_leaves_its_place_to_the_next(tmp_path: Path) -> None:
    async with SqliteStore(str(tmp_path / "log.db")) as store:
        await with_events(store, 5_000)
        for _ in range(20):
            reading = asyncio.create_task(_read(store, 5_000))
            await asyncio.sleep(0)
            reading.cancel()
        assert len(await _read(store, 5_000)) == 5_000


async def test_a_commit_whose_caller_went_away_is_still_made(tmp_path: Path) -> None:
    """Promise 5 makes that harmless: their holder commits the steps again."""
    async with SqliteStore(str(tmp_path / "log.db")) as store:
        fence = await with_events(store, 0)
        step = an_append(fence, some_events(1, 2))
        committing = asyncio.create_task(store.commit([step]))
        await asyncio.sleep(0)
        committing.cancel()
        assert list(await put(store, step)) == [None]
        assert await numbers(store) == [1, 2]


async def test_what_is_large_is_left_to_the_thread(tmp_path: Path) -> None:
    async with SqliteStore(str(tmp_path / "log.db")) as store:
        fence = await with_events(store, 2_000)
        small = an_append(fence, some_events(2_001, 2_001))
        many = an_append(fence, some_events(2_001, 2_600))
        heavy = an_append(fence, [Event(2_001, 0.0, b"x" * (2 << 20))])
        stream = StreamId(STREAM)
        for steps in (
            [many],
            [heavy],
            [Trim(stream=stream, through=1_500)],
            [DropStream(stream=stream)],
            [EndSession(session=SESSION, time=1.0, reason="client deleted")],
        ):
            assert store.commit_now(steps) is None
        assert store.commit_now([small]) == [None]
        assert store.commit_now([Trim(stream=stream, through=100)]) == [None]
        assert await numbers(store) == list(range(101, 2_002))


async def test_a_long_sweep_lets_commits_in_between(tmp_path: Path) -> None:
    async with SqliteStore(str(tmp_path / "log.db")) as store:
        fence = await with_events(store, 20_000)
        await put(store, OpenStream(record=a_stream(fence, "live", opened=50.0)))
        sweeping = asyncio.create_task(store.sweep(Cutoffs(events=10.0, answers=0.0)))
        committed = 0
        while not sweeping.done():
            committed += 1
            event = some_events(committed, committed, time=50.0)
            assert list(await put(store, an_append(fence, event, stream="live"))) == [None]
            await asyncio.sleep(0)
        assert await sweeping == 20_000
        assert await numbers(store) == []
        assert committed >= 10
        assert len(await all_events(store, "live")) == committed


async def test_a_sweep_finds_what_has_expired_among_many_streams_and_looks_at_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million streams in one query would take longer than a query may: nothing would ever be forgotten."""
    monkeypatch.setattr(sweep_module, "LOOK", 4)
    monkeypatch.setattr(sweep_module, "PAGE", 2)
    old = {0, 1, 2, 3, 4, 9, 10}  # a whole look, both sides of its end, and the last one
    async with SqliteStore(str(tmp_path / "log.db")) as store:
        fence = await store.join(NODE)
        await put(store, PutSession(record=a_session()))
        for number in range(11):
            time = 1.0 if number in old else 50.0
            await put(store, OpenStream(record=a_stream(fence, f"stream-{number}", opened=time)))
            await put(store, an_append(fence, some_events(1, 3, time=time), stream=f"stream-{number}"))
        assert await store.sweep(Cutoffs(events=10.0, answers=0.0)) == 3 * len(old)
        kept = {number for number in range(11) if await numbers(store, f"stream-{number}") == [1, 2, 3]}
        assert kept == set(range(11)) - old


async def test_a_large_session_is_swept_whole(tmp_path: Path) -> None:
    async with SqliteStore(str(tmp_path / "log.db")) as store:
        fence = await with_events(store, 5_000)
        await put(store, Release(stream=StreamId(STREAM), fence=fence))  # what a living node writes is in use
        assert await store.sweep(Cutoffs(events=-1.0, answers=1.0)) > 5_000
        assert (await store.session(SESSION), list(await store.streams(SESSION))) == (None, [])
    with closing(sqlite3.connect(tmp_path / "log.db")) as connection:
        assert connection.execute("SELECT count(*) FROM event").fetchone() == (0,)


async def test_the_log_beside_the_file_begins_again_under_steady_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite begins it again only if all of it is copied when the next commit comes. Under steady load there is always
    another commit before that, as here; without the writer's own checkpoint the log would grow for ever."""
    monkeypatch.setattr(_sqlite_checkpoints, "STEP", 64 << 10)
    monkeypatch.setattr(_sqlite_checkpoints, "MAX_LOG", 256 << 10)
    path, copy, copies = tmp_path / "log.db", _sqlite_checkpoints._copy, 0

    def copy_under_load(connection: sqlite3.Connection) -> int:
        nonlocal copies
        copies += 1
        size = copy(connection)
        with closing(sqlite3.connect(path, timeout=30)) as other, other:
            other.execute("UPDATE tally SET open = open")
        return size

    monkeypatch.setattr(_sqlite_checkpoints, "_copy", copy_under_load)
    async with SqliteStore(str(path)) as store:
        fence = await with_events(store, 0)
        seq = 0
        while begun_again(tmp_path) < 3:
            # Counted in checkpoints (about 12 are needed), not in commits: on a busy machine their thread is late.
            assert copies < 30, "the log only grows"
            seq += 1
            await put(store, an_append(fence, [Event(seq, 0.0, b"x" * 4_000)]))
        assert await numbers(store) == list(range(1, seq + 1))


async def test_a_log_that_a_reader_held_back_is_small_again_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old read transaction of another program keeps the log growing; nothing fails, and closing makes up for it."""
    monkeypatch.setattr(_sqlite_checkpoints, "STEP", 64 << 10)
    monkeypatch.setattr(_sqlite_checkpoints, "MAX_LOG", 256 << 10)
    async with SqliteStore(str(tmp_path / "log.db")) as store:
        fence = await with_events(store, 1)
        with closing(sqlite3.connect(tmp_path / "log.db", isolation_level=None)) as other:
            other.execute("BEGIN")
            assert other.execute("SELECT count(*) FROM event").fetchone() == (1,)
            for seq in range(2, 502):
                await put(store, an_append(fence, [Event(seq, 0.0, b"x" * 4_000)]))
            assert log_size(tmp_path) > 2_000_000
            assert other.execute("SELECT count(*) FROM event").fetchone() == (1,)
        assert await numbers(store) == list(range(1, 502))
    assert not (tmp_path / "log.db-wal").exists() or log_size(tmp_path) <= 256 << 10


def begun_again(folder: Path) -> int:
    """How often: it stands in the header of the log, as fourth number."""
    with (folder / "log.db-wal").open("rb") as log:
        return int.from_bytes(log.read(16)[12:], "big")


def log_size(folder: Path) -> int:
    return (folder / "log.db-wal").stat().st_size


async def test_a_store_that_is_closed_or_not_yet_open_says_so(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "log.db"))
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="closed"):
            await store.commit([])
        with pytest.raises(StoreUnavailable, match="closed"):
            await store.session(SESSION)
        assert store.commit_now([]) is None
        async with store:
            assert await store.session(SESSION) is None


async def test_several_may_close_at_once(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "log.db"))
    await store.open()
    fence = await with_events(store, 0)
    waiting = [asyncio.create_task(store.commit([an_append(fence, some_events(n, n))])) for n in range(1, 101)]
    await asyncio.sleep(0)
    await asyncio.gather(store.aclose(), store.aclose())
    assert [list(await commit) for commit in waiting] == [[None]] * 100
    async with store:
        assert await numbers(store) == list(range(1, 101))
