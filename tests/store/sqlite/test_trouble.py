"""Full disks, files that may not be written, commits that cannot be stored: real failures, each with its name."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.errors import StoreError, StoreUnavailable
from perdure.store import maintenance_of
from perdure.store.records import Event
from perdure.store.sqlite import SqliteStore, file
from perdure.store.sqlite.writer import WRITER_FAILED
from perdure.store.steps import OpenStream, PutSession, Step
from perdure.testing._values import NODE, SESSION, a_session, a_stream, an_append, existing, numbers, put, some_events

pytestmark = pytest.mark.anyio

SCRIPT = Path(__file__).with_name("full_disk.py")
NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]
NOBODY = 65_534


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def can_mount() -> bool:
    """Whether this system lets us mount a small file system that no other process sees."""
    if shutil.which("unshare") is None:
        return False
    trial = [*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
    return subprocess.run(trial, capture_output=True, check=False).returncode == 0


def test_a_file_that_may_not_grow_fails_by_name_and_works_again_when_it_may(tmp_path: Path) -> None:
    run(sys.executable, str(SCRIPT), str(tmp_path), "limit")


@pytest.mark.skipif(not can_mount(), reason="a small file system cannot be mounted here")
def test_a_full_disk_fails_by_name_and_works_again_when_there_is_room(tmp_path: Path) -> None:
    run(*NAMESPACE, sys.executable, str(SCRIPT), str(tmp_path), "tmpfs")


@pytest.fixture
def as_somebody() -> Iterator[Path]:
    """A folder of a user without privileges, and that user's rights in this process: root may write anything."""
    folder = Path(tempfile.mkdtemp())
    if os.geteuid() != 0:
        yield folder
    else:
        os.chown(folder, NOBODY, NOBODY)
        os.seteuid(NOBODY)
        try:
            yield folder
        finally:
            os.seteuid(0)
    folder.chmod(0o700)
    shutil.rmtree(folder)


async def test_a_file_that_may_only_be_read_is_refused_at_once(as_somebody: Path) -> None:
    path = as_somebody / "log.db"
    async with SqliteStore(str(path)) as store:
        await store.join(NODE)
    os.chmod(path, 0o400)
    with pytest.raises(StoreUnavailable, match="may not be read and written"):
        await SqliteStore(str(path)).open()


@pytest.mark.parametrize("place", ["log.db", "."])
async def test_an_operator_who_may_not_open_the_file_is_told_so(as_somebody: Path, place: str) -> None:
    """SQLite itself only says that it cannot open the file."""
    path = as_somebody / "log.db"
    async with SqliteStore(str(path)):
        pass
    os.chmod(as_somebody / place, 0o500 if place == "." else 0)
    maintenance = maintenance_of(f"sqlite:{path}")
    with pytest.raises(StoreUnavailable, match=f"; this user may not read and write {as_somebody / place}: "):
        await maintenance.check()


async def test_a_file_in_a_folder_that_may_only_be_read_is_refused_at_once(as_somebody: Path) -> None:
    path = as_somebody / "log.db"
    async with SqliteStore(str(path)) as store:
        await store.join(NODE)
    os.chmod(as_somebody, 0o500)
    with pytest.raises(StoreUnavailable, match="cannot be opened"):
        await SqliteStore(str(path)).open()
    with pytest.raises(StoreUnavailable, match="Permission denied"):
        await SqliteStore(str(as_somebody / "other.db")).open()


async def test_an_older_sqlite_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    major, minor, patch = sqlite3.sqlite_version_info
    monkeypatch.setattr(file, "OLDEST_SQLITE", (major, minor, patch + 1))
    with pytest.raises(StoreUnavailable, match=f"is too old; Perdure needs {major}.{minor} or later"):
        await SqliteStore(str(tmp_path / "log.db")).open()
    monkeypatch.setattr(file, "OLDEST_SQLITE", (major, minor, patch))
    async with SqliteStore(str(tmp_path / "log.db")):
        pass


async def test_of_a_commit_that_cannot_be_stored_nothing_is_there(tmp_path: Path) -> None:
    """Promise 1: SQLite has no NaN, so the second step fails after the first was applied."""
    async with SqliteStore(str(tmp_path / "log.db")) as store:
        fence = await store.join(NODE)
        await put(store, PutSession(record=a_session()), OpenStream(record=a_stream(fence)))
        bad: list[Step] = [PutSession(record=a_session("other")), an_append(fence, [Event(1, float("nan"), b"")])]
        with pytest.raises(StoreError) as inline:
            store.commit_now(bad)
        with pytest.raises(StoreError) as threaded:
            await store.commit(bad)
        for caught in (inline, threaded):
            assert not isinstance(caught.value, StoreUnavailable), "trying again does not help"
            assert isinstance(caught.value.__cause__, sqlite3.IntegrityError)
        assert (await existing(store, SESSION, "other"), await numbers(store)) == ([a_session()], [])


async def test_a_commit_that_cannot_be_stored_does_not_take_its_neighbours_along(tmp_path: Path) -> None:
    async with SqliteStore(str(tmp_path / "log.db")) as store:
        fence = await store.join(NODE)
        await put(store, PutSession(record=a_session()), OpenStream(record=a_stream(fence)))
        steps = [an_append(fence, some_events(seq, seq)) for seq in range(1, 31)]
        steps.insert(15, an_append(fence, [Event(16, float("nan"), b"")]))
        told = await asyncio.gather(*(store.commit([step]) for step in steps), return_exceptions=True)
        assert [place for place, answer in enumerate(told) if isinstance(answer, StoreError)] == [15]
        assert await numbers(store) == list(range(1, 31))


async def test_after_a_failure_the_next_commit_goes_through(tmp_path: Path) -> None:
    """A stream that was opened in a commit that failed is not remembered as open."""
    async with SqliteStore(str(tmp_path / "log.db")) as store:
        fence = await store.join(NODE)
        await put(store, PutSession(record=a_session()))
        with pytest.raises(StoreError):
            store.commit_now([OpenStream(record=a_stream(fence)), an_append(fence, [Event(1, float("nan"), b"")])])
        refusals = await put(store, an_append(fence, some_events(1, 1)))
        assert [type(refusal).__name__ for refusal in refusals] == ["Behind"]
        refusals = await put(store, OpenStream(record=a_stream(fence)), an_append(fence, some_events(1, 1)))
        assert list(refusals) == [None, None]


async def test_a_writer_that_fails_unexpectedly_ends_the_process_with_a_reason(tmp_path: Path) -> None:
    """Otherwise nothing would be written any more, and everyone would wait."""
    program = f"""
import asyncio
from perdure.store import SqliteStore
from perdure.store.sqlite.writer import Writer

def fail(self):
    raise RuntimeError("unexpected")

Writer._work_off = fail

async def main():
    store = SqliteStore({str(tmp_path / "log.db")!r})
    await store.open()
    await store.change_note("name", seen=None, value=b"value")

asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stderr=asyncio.subprocess.PIPE)
    _, said = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == WRITER_FAILED
    assert b"RuntimeError: unexpected" in said
    assert said.endswith(b"log.db failed, and the process ends\n")
