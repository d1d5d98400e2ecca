"""Wake-ups between processes: a datagram, and where it is lost, a poll of the file (promise 8)."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from perdure._core.ids import NodeId, StreamId
from perdure.errors import StoreTooNew
from perdure.store.sqlite import SqliteStore
from perdure.store.sqlite import sql_files as _sql
from perdure.store.sqlite import wakeups as _sqlite_hints
from perdure.store.steps import ChangeSession
from perdure.testing._values import NODE, SESSION, STREAM, put
from tests.store.processes import process

pytestmark = pytest.mark.anyio

EVERYTHING: tuple[StreamId, ...] = ()


class Heard:
    """The calls of a listener, to be waited for."""

    def __init__(self) -> None:
        self._calls: asyncio.Queue[tuple[StreamId, ...]] = asyncio.Queue()

    def __call__(self, streams: Sequence[StreamId]) -> None:
        self._calls.put_nowait(tuple(streams))

    async def next(self) -> tuple[StreamId, ...]:
        async with asyncio.timeout(20):
            return await self._calls.get()

    def nothing(self) -> bool:
        return self._calls.empty()


@pytest.fixture
def only_datagrams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sqlite_hints, "POLL", 10_000.0)


@pytest.fixture
def no_datagrams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sqlite_hints.SqliteHints, "_bind", lambda self, node: None)


@pytest.mark.usefixtures("only_datagrams")
async def test_a_hint_names_the_streams(store: SqliteStore, path: Path) -> None:
    heard = Heard()
    store.subscribe(NODE, heard)
    with process(path, "other") as other:
        other.does("hint", NODE, "a", "b")
        assert set(await heard.next()) == {"a", "b"}
        other.does("hint", NODE)
        assert await heard.next() == EVERYTHING
        other.does("hint", NODE, *(f"{number:022d}" for number in range(1_000)))
        assert await heard.next() == EVERYTHING, "too many to be named"


@pytest.mark.usefixtures("only_datagrams")
async def test_mail_brings_a_hint(store: SqliteStore, path: Path) -> None:
    heard = Heard()
    store.subscribe(NODE, heard)
    with process(path, "other") as other:
        other.does("post", NODE, "hello")
        assert await heard.next() == EVERYTHING
        assert [mail.message for mail in await store.mail(NODE)] == [b"hello"]


@pytest.mark.usefixtures("only_datagrams")
async def test_a_path_that_is_too_long_for_a_socket_is_reached_all_the_same(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    async with SqliteStore(str(deep / "log.db")) as store:
        await store.join(NODE)
        heard = Heard()
        store.subscribe(NODE, heard)
        with process(deep / "log.db", "other") as other:
            other.does("hint", NODE, STREAM)
            assert await heard.next() == (STREAM,)


async def test_what_no_hint_told_of_is_found_by_looking(store: SqliteStore, path: Path) -> None:
    heard = Heard()
    store.subscribe(NODE, heard)
    with process(path, "other") as other:
        await heard.next()  # it has joined
        other.does("open", STREAM)
        assert await heard.next() == EVERYTHING


@pytest.mark.usefixtures("no_datagrams")
async def test_where_there_are_no_sockets_looking_is_enough(store: SqliteStore, path: Path) -> None:
    heard = Heard()
    store.subscribe(NODE, heard)
    with process(path, "other") as other:
        await heard.next()
        other.does("post", NODE, "hello")
        assert await heard.next() == EVERYTHING


async def test_what_this_process_writes_wakes_nobody_in_it(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sqlite_hints, "POLL", 0.001)
    looked = asyncio.Event()
    heard = Heard()
    store.subscribe(NODE, heard)
    for active in range(50):
        await put(store, ChangeSession(session=SESSION, active=float(active)))
        await asyncio.sleep(0.002)
    asyncio.get_running_loop().call_later(0.02, looked.set)
    await looked.wait()
    assert heard.nothing()


async def test_after_stopping_nobody_is_told(store: SqliteStore, path: Path) -> None:
    heard, second = Heard(), Heard()
    stop = store.subscribe(NODE, heard)
    store.subscribe(NODE, second)
    stop()
    stop()
    with process(path, "other") as other:
        other.does("hint", NODE, STREAM)
        while STREAM not in await second.next():
            pass
    assert heard.nothing()


async def test_hints_to_who_stands_still_or_is_gone_never_wait(store: SqliteStore, path: Path) -> None:
    with process(path, "other") as other, other.stopped():
        for number in range(2_000):
            store.hint(other.node, [StreamId(f"{number}")])
            store.hint(NodeId("nobody"), [StreamId(f"{number}")])
            await asyncio.sleep(0)


async def test_the_stamp_stays_while_nobody_else_writes(store: SqliteStore, path: Path) -> None:
    before = store.stamp()
    await put(store, ChangeSession(session=SESSION, active=1.0))
    await store.commit([ChangeSession(session=SESSION, active=2.0)])
    assert store.stamp() == before
    with process(path, "other") as other:
        joined = store.stamp()
        assert joined != before
        assert store.stamp() == joined
        other.does("open", STREAM)
        assert store.stamp() != joined


async def test_a_newer_release_that_takes_the_file_over_is_named(store: SqliteStore, path: Path) -> None:
    heard = Heard()
    store.subscribe(NODE, heard)
    newer = _sql.schema_version() + 1
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {newer}")
    store.stamp()
    for _ in range(2):
        with pytest.raises(StoreTooNew, match=f"version {newer}, written by a newer release"):
            store.commit_now([ChangeSession(session=SESSION, active=1.0)])
        with pytest.raises(StoreTooNew, match=f"version {newer}"):
            await store.commit([ChangeSession(session=SESSION, active=1.0)])
        with pytest.raises(StoreTooNew, match=f"version {newer}"):
            await store.session(SESSION)


async def test_columns_of_a_newer_release_are_told_as_that(store: SqliteStore, path: Path) -> None:
    """Also before anybody has looked at the version."""
    newer = _sql.schema_version() + 1
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("ALTER TABLE session RENAME COLUMN active TO used")
        connection.execute(f"PRAGMA user_version = {newer}")
        connection.commit()
    with pytest.raises(StoreTooNew, match=f"version {newer}"):
        await store.session(SESSION)
    with pytest.raises(StoreTooNew, match=f"version {newer}"):
        store.commit_now([ChangeSession(session=SESSION, active=1.0)])
