"""`perdure backup`, `check` and `store restored`, each in a process of its own, on real stores."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import stat
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from perdure._core.ids import SKIPPED, Kind, StreamId
from perdure.store import open_store
from perdure.store.interface import Store, stream_by_id
from perdure.store.records import KEPT_GENERATIONS
from perdure.store.sqlite import backup
from perdure.store.sqlite.file import BACKUP_ID
from perdure.store.steps import OpenStream, PutSession
from perdure.testing._values import NODE, SESSION, a_call, a_session, a_stream, an_append, an_end, put, some_events
from tests.cli.test_sessions import done, ended, lines, names, objects, refusal
from tests.support.processes.starting import Program, start_other
from tests.support.stores.postgres import store_url

pytestmark = pytest.mark.anyio

HOME = StreamId(f"{SESSION}-standalone")


async def fill(store: Store, *, calls: int = 1) -> None:
    """A session with calls that have ended; its node lives as long as the store is open."""
    fence = await store.join(NODE)
    standalone = OpenStream(record=a_stream(fence, HOME, kind=Kind.STANDALONE))
    await put(store, PutSession(record=a_session()), standalone, an_append(fence, some_events(1, 4), stream=HOME))
    for number in range(calls):
        name = f"call-{number}"
        opened = OpenStream(record=a_stream(fence, name), calls=(a_call(number, stream=name),))
        events = [event._replace(payload=b"x" * 1_000) for event in some_events(1, 10, final=True)]
        await put(store, opened, an_append(fence, events, stream=name, ends=(an_end(number),), seal=True))


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Store]:
    """The store of a node that lives; it is `perdure.db` in the folder, which commands find by themselves."""
    async with open_store(f"sqlite:{tmp_path / 'perdure.db'}") as store:
        await fill(store, calls=40)
        yield store


def sizes(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_file()}


# Backup


async def test_a_backup_of_a_served_store_is_whole_private_and_one_file(tmp_path: Path, served: Store) -> None:
    before = sizes(tmp_path)
    [told] = await objects(tmp_path, "backup", "copy.db")
    copy = tmp_path / "copy.db"
    assert told.pop("seconds") > 0
    assert told == {
        "store": "sqlite:perdure.db",
        "file": str(copy),
        "bytes": copy.stat().st_size,
        "checked": True,
        **{"sessions": 1, "streams": 41, "calls": 40, "events": 364, "answers": 40},
    }
    assert sizes(tmp_path) == {*before, "copy.db"}
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    with contextlib.closing(sqlite3.connect(copy)) as file:
        assert file.execute("PRAGMA application_id").fetchone() == (BACKUP_ID,)
    # It can be looked at as any store, and stays a backup.
    [session] = await objects(tmp_path, "sessions", "--store", "sqlite:copy.db")
    assert session["id"] == SESSION
    assert (await lines(tmp_path, "check", "--store", "sqlite:copy.db"))[-1] == "sound     yes"
    assert sizes(tmp_path) == {*before, "copy.db"}


async def test_a_backup_overwrites_nothing_and_refuses_what_it_cannot_copy(tmp_path: Path, served: Store) -> None:
    (tmp_path / "there.db").write_text("mine")
    (tmp_path / "folder").mkdir()
    found = names(tmp_path)
    assert "exists already, and is not overwritten" in await refusal(tmp_path, "backup", "there.db")
    assert "is a folder; give the path of a file" in await refusal(tmp_path, "backup", "folder")
    assert "there is no folder" in await refusal(tmp_path, "backup", "nowhere/copy.db")
    assert "there is no SQLite file" in await refusal(tmp_path, "backup", "copy.db", "--store", "sqlite:nothing.db")
    said = await refusal(tmp_path, "backup", "copy dump", "--store", "postgresql://app:secret@db/app?schema=mine")
    assert said.endswith("pg_dump --format=custom --schema=mine '--file=copy dump' postgresql://app@db/app")
    assert names(tmp_path) == found
    assert (tmp_path / "there.db").read_text() == "mine"


async def test_a_damaged_store_is_copied_only_if_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "perdure.db"
    async with open_store(f"sqlite:{path}") as store:
        await fill(store)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as file:
        file.execute("DELETE FROM event WHERE seq = 3")
    said = await refusal(tmp_path, "backup", "copy.db")
    assert "the store is damaged, and so would be its copy: stream session- lacks 1 of the events 1 to 4 (gaps)" in said
    assert sizes(tmp_path) == {"perdure.db"}
    assert (await lines(tmp_path, "backup", "copy.db", "--no-check"))[-1] == "not checked"
    assert (tmp_path / "copy.db").exists()


SLOW = """
import sys, time
from perdure.store.sqlite.backup import back_up
def on_copied(done, total):
    print("copied", flush=True)
    time.sleep(600)
back_up(sys.argv[1], sys.argv[2], on_copied=on_copied)
"""

SMALL = """
import resource, sys
from perdure.store.sqlite.backup import back_up
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
back_up(sys.argv[1], sys.argv[2], on_copied=lambda done, total: None)
"""


async def python(script: str, folder: Path) -> Program:
    arguments = (str(folder / "perdure.db"), str(folder / "copy.db"))
    return await start_other(sys.executable, "-c", script, *arguments, cwd=folder, env=dict(os.environ))


async def test_a_backup_is_of_the_moment_in_which_it_began_however_much_is_written_meanwhile(
    tmp_path: Path, served: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it does not begin again with each commit: under steady traffic it would never end."""
    monkeypatch.setattr(backup, "PAGES", 64)  # several reports of a small file
    path, copy = str(tmp_path / "perdure.db"), str(tmp_path / "copy.db")
    reports: list[tuple[int, int]] = []

    def on_copied(done: int, total: int) -> None:
        """Another process commits after each part: the first pages, which are copied, and new ones at the end."""
        reports.append((done, total))
        if len(reports) <= 20:
            with contextlib.closing(sqlite3.connect(path)) as other, other:
                other.execute("INSERT INTO note VALUES (?, '', zeroblob(20000))", (f"later-{len(reports)}",))

    before = dict(await served.notes(""))
    await asyncio.to_thread(backup.back_up, path, copy, on_copied=on_copied)
    assert len(reports) > 3
    assert len({total for _, total in reports}) == 1
    assert reports == sorted(set(reports))  # it never began again
    assert len(await served.notes("")) > len(before)
    with contextlib.closing(sqlite3.connect(copy)) as file:
        assert {name for (name,) in file.execute("SELECT name FROM note")} == set(before)


async def test_a_backup_that_is_killed_leaves_no_target_and_the_next_one_cleans_up(
    tmp_path: Path, served: Store
) -> None:
    before = sizes(tmp_path)
    killed = await python(SLOW, tmp_path)
    assert killed.stdout is not None
    assert await killed.stdout.readline() == b"copied\n"
    assert "another backup to " in await refusal(tmp_path, "backup", "copy.db")
    assert sizes(tmp_path) >= {*before, "copy.db.part"}
    killed.send_signal(signal.SIGKILL)
    await killed.wait()
    assert "copy.db" not in sizes(tmp_path)
    await lines(tmp_path, "backup", "copy.db")
    assert sizes(tmp_path) == {*before, "copy.db"}


async def test_a_backup_that_finds_no_room_leaves_nothing(tmp_path: Path, served: Store) -> None:
    before = sizes(tmp_path)
    status, said, _ = await ended(await python(SMALL, tmp_path))
    assert (status, said) == (1, "")
    assert sizes(tmp_path) == before


# Check


async def checked(folder: Path, store: str, *, status: int) -> dict[str, Any]:
    """What a check finds, as an object; the lines for people say the same."""
    ending, said, errors = await done(folder, "check", "--store", store, "--json")
    assert (ending, errors) == (status, "")
    found: dict[str, Any] = json.loads(said)
    ending, said, errors = await done(folder, "check", "--store", store)
    assert (ending, errors) == (status, "")
    shown = said.splitlines()
    assert shown[-1].startswith("sound     yes" if found["sound"] else "sound     no")
    assert len([line for line in shown if line.startswith("fault")]) == len(found["faults"])
    return found


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_check_looks_at_everything_while_a_node_lives(tmp_path: Path, kind: str) -> None:
    url = f"sqlite:{tmp_path / 'perdure.db'}" if kind == "sqlite" else store_url()
    async with open_store(url) as store:
        await fill(store)
        found = await checked(tmp_path, url, status=0)
        assert (found["sound"], found["nodes"], found["problems"], found["faults"]) == (True, 1, [], [])
        assert found["counts"] == {"sessions": 1, "streams": 2, "calls": 1, "events": 13, "answers": 1}


async def test_a_check_names_faults_and_promises_and_what_is_no_store(tmp_path: Path) -> None:
    path = tmp_path / "perdure.db"
    async with open_store(f"sqlite:{path}") as store:
        await fill(store)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as file:
        file.execute("DELETE FROM event WHERE seq = 3 AND stream = 1")
    [fault] = (await checked(tmp_path, "sqlite:perdure.db", status=1))["faults"]
    where = "stream session- lacks 1 of the events 1 to 4"
    assert fault == {"rule": "gaps", "promise": 4, "where": where}
    missing = await checked(tmp_path, "sqlite:nothing.db", status=1)
    assert (missing["sound"], len(missing["problems"])) == (False, 1)
    assert "a store in memory can be read only" in await refusal(tmp_path, "check", "--store", "memory:")


def letter(path: Path) -> None:
    path.write_text("Dear reader, this is a letter and not a database. " * 100)


def half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def lost_tables(path: Path) -> None:
    """The first page, which lists the tables, but for the header."""
    with path.open("r+b") as file:
        file.seek(100)
        file.write(bytes(2_048 - 100))


def of_another_program(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as file:
        file.execute("PRAGMA application_id = 7")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (letter, "file is not a database; see https://perdure.example/docs/operating.html#if-a-store-is-damaged"),
        (
            half,
            "database disk image is malformed; see https://perdure.example/docs/operating.html#if-a-store-is-damaged",
        ),
        (
            lost_tables,
            "database disk image is malformed; see https://perdure.example/docs/operating.html#if-a-store-is-damaged",
        ),
        (of_another_program, "is not a Perdure store; give "),
    ],
)
async def test_a_file_that_no_server_can_open_is_unsound_and_named(
    tmp_path: Path, spoil: Callable[[Path], None], reason: str
) -> None:
    path = tmp_path / "perdure.db"
    async with open_store(f"sqlite:{path}") as store:
        await fill(store)
    spoil(path)
    before = path.read_bytes()
    found = await checked(tmp_path, "sqlite:perdure.db", status=1)
    assert [reason in problem for problem in found["problems"]] == [True]
    said = await refusal(tmp_path, "backup", "copy.db")
    assert said.startswith(f"the SQLite file {path} ")
    assert reason in said
    assert (sizes(tmp_path), path.read_bytes()) == ({"perdure.db"}, before)


# Put back


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_store_that_was_put_back_begins_new_generations(tmp_path: Path, kind: str) -> None:
    """Promise 6: no generation that the lost part may have begun comes again."""
    url = f"sqlite:{tmp_path / 'perdure.db'}" if kind == "sqlite" else store_url()
    async with open_store(url) as store:
        await fill(store)
        assert "is in use by node " in await refusal(tmp_path, "store", "restored", url)
        await store.leave(NODE)
    assert await lines(tmp_path, "store", "restored", url) == [
        f"{url} begins again: positions from after the copy are answered as lost"
    ]
    async with open_store(url) as store:
        home, call = await stream_by_id(store, HOME), await stream_by_id(store, StreamId("call-0"))
        assert home is not None
        assert call is not None
        assert (home.generation - 1 in SKIPPED, call.generation) == (True, 1)
        assert [(end.generation, end.end) for end in await store.generations(HOME)] == [(1, 4)]
    assert SKIPPED.stop < KEPT_GENERATIONS
    assert (await lines(tmp_path, "check", "--store", url))[-1] == "sound     yes"
