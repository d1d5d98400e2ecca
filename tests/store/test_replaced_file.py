"""A server notices that its SQLite file was deleted, replaced, or brought up to date by a newer release."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from urllib.parse import urljoin

import httpx2
import pytest

from perdure._core.ids import NodeId, SessionId
from perdure.errors import StoreError, StoreReplaced
from perdure.store import SqliteStore, existing_store, maintenance_of
from perdure.store.sqlite.backup import back_up
from perdure.store.sqlite.sql_files import schema_version
from perdure.store.steps import PutSession
from perdure.testing._values import NODE, a_session, dead_nodes, put
from tests.support.clients.wire_client import Peer, Web, progress_of, text_of
from tests.support.processes.serving import Served, log_lines, serving
from tests.support.servers.gate_file_tools import open_gate
from tests.support.servers.in_process import Site, serve, until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio

SEE = "see https://perdure.example/docs/errors.html#503-and-what-health-says"


def _backup(path: Path) -> Path:
    """A copy of the file as it is now, made as the documentation says."""
    copy = path.with_name("backup.db")
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    return copy


def _delete(path: Path, _: Path) -> None:
    path.unlink()


def _replace(path: Path, backup: Path) -> None:
    os.replace(backup, path)


def _move_away(path: Path, backup: Path) -> None:
    path.rename(path.with_name("old.db"))
    shutil.copy(backup, path)


LOSSES = [_delete, _replace, _move_away]


async def _ids(store: SqliteStore) -> list[str]:
    return [record.id for record in await store.newest(limit=10)]


# The store


@pytest.mark.parametrize("lose", LOSSES)
async def test_a_store_whose_file_is_not_there_any_more_says_so_for_ever(
    tmp_path: Path, lose: Callable[[Path, Path], None]
) -> None:
    path = tmp_path / "log.db"
    async with SqliteStore(str(path)) as store:
        await store.join(NODE)
        liveness = store.liveness(NODE, lease=15.0, monotonic=lambda: 0.0)
        assert await dead_nodes(liveness) == []
        lose(path, _backup(path))
        with pytest.raises(StoreReplaced, match=r"was deleted|was replaced"):
            await dead_nodes(liveness)
        path.touch()
        step = PutSession(record=a_session())
        for attempt in (
            lambda: dead_nodes(liveness),
            lambda: store.commit([step]),
            lambda: store.session(SessionId("any")),
        ):
            with pytest.raises(StoreReplaced):
                await attempt()
        with pytest.raises(StoreReplaced):
            store.commit_now([step])


async def test_no_connection_reads_another_file_than_the_one_that_is_written(tmp_path: Path) -> None:
    """The first reading connection is opened by the path, when a backup exists already."""
    path = tmp_path / "log.db"
    async with SqliteStore(str(path)) as store:
        await store.join(NODE)
        backup = _backup(path)
        await put(store, PutSession(record=a_session("of the old file")))
        _replace(path, backup)
        with pytest.raises(StoreReplaced, match="was replaced by another one"):
            await _ids(store)


async def test_a_reader_makes_no_file_where_one_was_deleted(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    async with SqliteStore(str(path)) as store:
        path.unlink()
        with pytest.raises(StoreReplaced, match="was deleted"):
            await _ids(store)
        assert not path.exists()


@pytest.mark.parametrize("noticed", [True, False])
async def test_what_was_moved_away_is_whole_and_what_took_its_place_is_not_touched(
    tmp_path: Path, noticed: bool
) -> None:
    """The log beside the file has one name for both: the old one's must not get into the new file, and the old process
    must not remove the new one's when it ends."""
    path = tmp_path / "log.db"
    old = SqliteStore(str(path))
    await old.open()
    await old.join(NODE)
    liveness = old.liveness(NODE, lease=15.0, monotonic=lambda: 0.0)
    await dead_nodes(liveness)
    backup = _backup(path)
    await put(old, PutSession(record=a_session("of the old file")))
    _move_away(path, backup)
    if noticed:
        with pytest.raises(StoreReplaced):
            await dead_nodes(liveness)
    else:
        await old.aclose()
    async with SqliteStore(str(path)) as new:
        await new.join(NodeId("new"))
        assert await _ids(new) == []
        await put(new, PutSession(record=a_session("of the new file")))
        await old.aclose()
        async with SqliteStore(str(path)) as third:
            assert await _ids(third) == ["of the new file"]
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("SELECT id FROM session").fetchall() == [("of the new file",)]
    with closing(sqlite3.connect(tmp_path / "old.db")) as connection:
        assert connection.execute("SELECT id FROM session").fetchall() == [("of the old file",)]


# Mounted in a user's application


async def _health(site: Site) -> tuple[int, str]:
    response = await site.http.get(urljoin(site.url, "/healthz"))
    return response.status_code, response.json()["status"]


async def _says(site: Site, word: str) -> bool:
    return await _health(site) == (503, word)


@pytest.mark.parametrize("lose", LOSSES)
async def test_an_app_whose_file_is_gone_says_so_and_refuses_everything(
    tmp_path: Path, lose: Callable[[Path, Path], None]
) -> None:
    path = tmp_path / "log.db"
    store = SqliteStore(str(path))
    async with serve(ToolServer().server, store=store, complaint="can serve nothing|chore|steps") as site:
        peer = await site.join()
        standalone = await peer.get()
        assert await _health(site) == (200, "ok")
        lose(path, _backup(path))
        await until(lambda: _says(site, "store replaced"))
        assert await standalone.rest() == []
        refused = await peer.send(peer.tool("count", n=1))
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        error = refused.json()["error"]
        assert (error["code"], error["message"]) == (-31005, f"This server has lost its log: store replaced; {SEE}")
        assert (await peer.try_get()).status_code == 503


async def test_an_app_whose_file_a_newer_release_has_taken_over_says_so(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    store = SqliteStore(str(path))
    async with serve(ToolServer().server, store=store, complaint="can serve nothing|chore|steps") as site:
        peer = await site.join()
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(f"PRAGMA user_version = {schema_version() + 1}")
        await until(lambda: _says(site, "store too new"))
        refused = await peer.send(peer.tool("count", n=1))
        assert refused.json()["error"]["message"] == f"This server has lost its log: store too new; {SEE}"


# Served


@pytest.mark.parametrize("lose", LOSSES)
async def test_a_server_whose_file_is_gone_ends_and_says_why(
    tmp_path: Path, lose: Callable[[Path, Path], None]
) -> None:
    path = tmp_path / "log.db"
    async with serving("tests.support.servers.gate_file_tools:server", "--store", f"sqlite:{path}") as served:
        web = Web(served.url)
        await web.join()
        lose(path, _backup(path))
        assert await served.wait() == 1
        await web.aclose()
    [line] = [line for line in log_lines(served.output) if line.action == "serve.failed"]
    assert line.sentence.startswith("the server ends: the SQLite file")
    assert line.sentence.endswith(f"while it was open; start the server again; {SEE}")


@pytest.mark.parametrize("lose", [_delete, _replace])
@pytest.mark.parametrize("on_failure", ["hold", "refuse"])
async def test_a_call_that_runs_when_the_file_goes_is_finished_from_memory(
    tmp_path: Path, lose: Callable[[Path, Path], None], on_failure: str
) -> None:
    """Promise 3: one final answer, also of a process that has lost its log and leaves."""
    path, gate = tmp_path / "log.db", tmp_path / "gate"
    options = ("--store", f"sqlite:{path}", "--on-store-failure", on_failure)
    async with serving("tests.support.servers.gate_file_tools:server", *options) as served:
        web = Web(served.url)
        peer = await web.join()
        call = await peer.call("pay", token="p", n=3, gate=str(gate), pauses=[1])
        first = [await call.message()]
        lose(path, await asyncio.to_thread(_backup, path))
        await until(lambda: any(line.action == "store.lost" for line in log_lines(served.output)))
        open_gate(f"{gate}.1")
        *progress, answer = first + await call.rest()
        assert (progress_of(progress), text_of(answer)) == ([1, 2, 3], "counted to 3")
        assert await served.wait() == 1
        await web.aclose()


async def test_a_call_that_does_not_finish_in_time_is_answered_before_the_server_leaves(tmp_path: Path) -> None:
    """Also one that another process could run again: there is no other process that knows of it (promise 3)."""
    path = tmp_path / "log.db"
    options = ("--store", f"sqlite:{path}", "--drain-timeout", "0")
    async with serving("tests.support.servers.gate_file_tools:server", *options) as served:
        web = Web(served.url)
        peer = await web.join()
        calls = [
            await peer.call(tool, token=tool, n=1, gate=str(tmp_path / "never"), pauses=[1]) for tool in ("pay", "put")
        ]
        assert [progress_of([await call.message()]) for call in calls] == [[1], [1]]
        path.unlink()
        assert [[message["error"]["code"] for message in await call.rest()] for call in calls] == [[-31001], [-31001]]
        assert await served.wait() == 1
        await web.aclose()


async def test_a_backup_beside_the_log_of_a_killed_server_is_left_as_it_is(tmp_path: Path) -> None:
    """SQLite would write that log into it: the store would be as before the restore, or a mixture."""
    path, left = tmp_path / "log.db", tmp_path / "left"
    left.mkdir()
    async with SqliteStore(str(path)) as store:
        await put(store, PutSession(record=a_session("kept")))
        back_up(str(path), str(tmp_path / "backup.db"), on_copied=lambda done, total: None, checks=False)
        await put(store, PutSession(record=a_session("later")))
        shutil.copy(f"{path}-wal", left / "log.db-wal")  # as `kill -9` leaves it
    restored = left / "log.db"
    shutil.copy(tmp_path / "backup.db", restored)
    before = {file: file.read_bytes() for file in left.iterdir()}
    sentence = f"{restored} is a backup, and {restored}-wal is the log of the file that was there before; "
    with pytest.raises(StoreError, match=sentence):
        await SqliteStore(str(restored)).open()
    with pytest.raises(StoreError, match=sentence):
        await existing_store(f"sqlite:{restored}", writes=False).open()
    problems = [fact.problem for fact in await maintenance_of(f"sqlite:{restored}").check() if fact.problem]
    assert [problem.startswith(sentence) for problem in problems] == [True]
    assert {file: file.read_bytes() for file in left.iterdir()} == before
    (left / "log.db-wal").unlink()
    async with SqliteStore(str(restored)) as store:
        assert await _ids(store) == ["kept"]
        # A server that is killed now leaves a log of its own.
        await put(store, PutSession(record=a_session("new")))
        for suffix in ("", "-wal"):
            shutil.copy(f"{restored}{suffix}", f"{path}{suffix}")
    async with SqliteStore(str(path)) as store:
        assert await _ids(store) == ["kept", "new"]


async def test_workers_go_on_with_the_backup_that_was_moved_into_place(tmp_path: Path) -> None:
    """The session of the backup is served again, and what was opened after it is unknown; nothing is mixed."""
    path = tmp_path / "log.db"
    options = ("--store", f"sqlite:{path}", "--workers", "2")
    async with serving("tests.support.servers.gate_file_tools:server", *options) as served:
        web = Web(served.url)
        kept = await web.join()
        await asyncio.to_thread(_wait_for, path, kept.session)
        backup = await asyncio.to_thread(_backup, path)
        later = await web.join()
        _replace(path, backup)
        await until(lambda: _ended_workers(served) == 2)
        await until(lambda: _answers(kept, 200))
        assert await _answers(later, 404)
        await web.aclose()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def _wait_for(path: Path, session: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        while connection.execute("SELECT 1 FROM session WHERE id = ?", (session,)).fetchone() is None:
            pass


def _ended_workers(served: Served) -> int:
    return sum("another one takes its place" in line for line in served.output)


async def _answers(peer: Peer, status: int) -> bool:
    try:
        response = await peer.send(peer.request("tools/list"))
    except httpx2.HTTPError:
        return False
    return response.status_code == status
