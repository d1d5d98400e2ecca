"""The file of a SQLite store: how it is made, brought up to date, and refused."""

from __future__ import annotations

import re
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest

from perdure.errors import StoreError, StoreTooNew, StoreUnavailable
from perdure.store.sqlite import SqliteStore
from perdure.store.sqlite import sql_files as _sql
from perdure.store.sqlite.file import NAMED, bring_up_to_date, failure
from perdure.store.steps import OpenStream, PutSession
from perdure.testing._values import NODE, SESSION, a_call, a_session, a_stream, picture

pytestmark = pytest.mark.anyio


def layout(connection: sqlite3.Connection) -> set[tuple[str, str, str]]:
    """What `sqlite_master` says, without comments, spaces and quotes."""
    rows = connection.execute("SELECT type, name, coalesce(sql, '') FROM sqlite_master").fetchall()
    return {(kind, name, re.sub(r"--[^\n]*|[\s\"]+", "", sql)) for kind, name, sql in rows}


async def made(path: Path) -> Path:
    """A file with a session and a stream in it."""
    async with SqliteStore(str(path)) as store:
        fence = await store.join(NODE)
        await store.commit([PutSession(record=a_session()), OpenStream(record=a_stream(fence), calls=(a_call(),))])
    return path


def alter(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def modes(folder: Path) -> dict[str, int]:
    return {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in folder.iterdir()}


async def refused(path: Path, error: type[StoreError]) -> str:
    store = SqliteStore(str(path))
    with pytest.raises(error) as caught:
        await store.open()
    await store.aclose()
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_migrations_are_numbered_without_holes() -> None:
    assert [migration.version for migration in _sql.migrations()] == list(range(1, _sql.schema_version() + 1))


def test_every_query_fits_the_schema_and_none_of_the_serving_ones_scans_a_table() -> None:
    may_scan = {
        "last_key",  # of the two tables of messages
        "count_sessions",
        "longest_dormant",  # in its order, and stops at the first
        "newest",  # for the console, of two indexes
        "open_calls",  # the index has no others
        "oldest_retained",  # for the console; both stop at a number of rows
        "count_events",
        "forget_ended",  # the same
        "all_nodes",
        "all_secrets",  # a few
        "streams_of_node",
        "leave_node",
        "streams_read_from",
        "drop_readers",
        "forget_sender",
        "forwarded_to",
        "end_generations",  # once, of a file that was put back
        "skip_generations",
    }
    with closing(sqlite3.connect(":memory:")) as connection:
        bring_up_to_date(connection)
        for name, query in _sql.queries().items():
            names = set(re.findall(r":(\w+)", query))
            numbered = set(re.findall(r"\?\d+", query))
            values = dict.fromkeys(names, 0) if names else (0,) * (len(numbered) or query.count("?"))
            plan = connection.execute(f"EXPLAIN QUERY PLAN {query}", values).fetchall()
            scans = [detail for *_, detail in plan if detail.startswith("SCAN") and detail != "SCAN CONSTANT ROW"]
            assert name in may_scan or not scans, f"{name}: {scans}"


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("forget_ended", "session_ended"),
        ("longest_dormant", "session_dormant"),
        ("longest_dormant_of", "session_of_caller"),
        ("stale_sessions", "session_dormant"),
    ],
)
def test_room_is_made_without_a_look_at_all_sessions(name: str, index: str) -> None:
    """A client that opens sessions in a loop, at a limit, must not have all of them sorted each time."""
    with closing(sqlite3.connect(":memory:")) as connection:
        bring_up_to_date(connection)
        query = _sql.queries()[name]
        names = set(re.findall(r":(\w+)", query))
        values = dict.fromkeys(names, 0) if names else (0,) * query.count("?")
        plan = [detail for *_, detail in connection.execute(f"EXPLAIN QUERY PLAN {query}", values)]
        assert any(f"session USING INDEX {index}" in detail for detail in plan), plan
        assert not any("ORDER BY" in detail for detail in plan), plan


@pytest.mark.parametrize(
    ("name", "index"), [("count_of_caller", "session_of_caller"), ("count_states", "session_state")]
)
def test_records_that_rest_are_counted_without_a_look_at_any(name: str, index: str) -> None:
    """A million calls under keys are counted in the index alone."""
    with closing(sqlite3.connect(":memory:")) as connection:
        bring_up_to_date(connection)
        query = _sql.queries()[name]
        values = (0,) * query.count("?")
        plan = [detail for *_, detail in connection.execute(f"EXPLAIN QUERY PLAN {query}", values)]
        assert any(f"session USING COVERING INDEX {index}" in detail for detail in plan), plan


async def test_an_older_file_gets_the_migrations_it_lacks_and_keeps_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = await made(tmp_path / "log.db")
    async with SqliteStore(str(path)) as store:
        before = await picture(store)
    added = _sql.Migration(version=_sql.schema_version() + 1, statements=("CREATE TABLE extra (x)",))
    later = (*_sql.migrations(), added)
    monkeypatch.setattr(_sql, "migrations", lambda: later)
    async with SqliteStore(str(path)) as store:
        assert await picture(store) == before
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (added.version,)
        assert ("table", "extra", "CREATETABLEextra(x)") in layout(connection)


async def test_a_migration_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = await made(tmp_path / "log.db")
    version = _sql.schema_version()
    broken = _sql.Migration(version=version + 1, statements=("CREATE TABLE extra (x)", "CREATE TABLE extra (x)"))
    later = (*_sql.migrations(), broken)
    with monkeypatch.context() as patch:
        patch.setattr(_sql, "migrations", lambda: later)
        assert "table extra already exists" in await refused(path, StoreUnavailable)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (version,)
    async with SqliteStore(str(path)) as store:
        assert await store.session(SESSION) == a_session()


async def test_a_newer_file_is_refused_by_name_and_not_touched(tmp_path: Path) -> None:
    path = await made(tmp_path / "log.db")
    ours = _sql.schema_version()
    alter(path, f"PRAGMA user_version = {ours + 7}")
    before = path.read_bytes()
    message = await refused(path, StoreTooNew)
    assert f"version {ours + 7}" in message
    assert f"up to {ours}" in message
    assert path.read_bytes() == before


async def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("Dear diary, " * 500)
    assert "not a database" in await refused(path, StoreUnavailable)
    assert path.read_text() == "Dear diary, " * 500


async def test_another_programs_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "theirs.db"
    alter(path, "CREATE TABLE theirs (x)")
    assert "another program" in await refused(path, StoreUnavailable)
    alter(path, "PRAGMA user_version = 1")
    assert "another program" in await refused(path, StoreUnavailable)
    with closing(sqlite3.connect(path)) as connection:
        assert layout(connection) == {("table", "theirs", "CREATETABLEtheirs(x)")}


async def test_a_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    path = await made(tmp_path / "log.db")
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(StoreUnavailable) as caught:
        async with SqliteStore(str(path)) as store:
            await store.session(SESSION)
    assert isinstance(caught.value.__cause__, sqlite3.DatabaseError)


async def test_a_folder_that_is_not_there_is_one_clear_sentence(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "log.db"
    message = await refused(path, StoreUnavailable)
    assert message == f"the SQLite file {path} cannot be opened: No such file or directory"
    assert "cannot be opened" in await refused(tmp_path, StoreUnavailable)


async def test_the_file_and_its_log_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    async with SqliteStore(str(path)) as store:
        await store.join(NODE)
        files = {"log.db": 0o600, "log.db-wal": 0o600, "log.db-shm": 0o600}
        assert modes(tmp_path) == files | {"log.db-nodes": 0o700}
        assert modes(tmp_path / "log.db-nodes") == {f"{NODE}.lock": 0o600, f"{NODE}.well": 0o600}


async def test_closing_leaves_one_file(tmp_path: Path) -> None:
    await made(tmp_path / "log.db")
    assert modes(tmp_path) == {"log.db": 0o600}


async def test_a_file_named_from_another_folder_stays_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = SqliteStore("log.db")
    monkeypatch.chdir("/")
    async with store:
        pass
    assert (tmp_path / "log.db").is_file()


def test_bringing_an_up_to_date_file_up_to_date_changes_nothing() -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        bring_up_to_date(connection)
        before = layout(connection)
        bring_up_to_date(connection)
        assert layout(connection) == before


@pytest.mark.parametrize(
    "error", [value for value in vars(sqlite3).values() if isinstance(value, type) and issubclass(value, Exception)]
)
def test_every_exception_of_the_driver_leaves_as_ours(error: type[Exception]) -> None:
    """Promise 9."""
    assert issubclass(error, NAMED)
    ours = failure(error("boom"), "log.db", "written")
    assert isinstance(ours, StoreError)
    assert str(ours) == "the SQLite file log.db cannot be written: boom"


def test_what_trying_again_may_help_is_told_from_what_it_cannot() -> None:
    assert isinstance(failure(sqlite3.OperationalError("disk full"), "f", "written"), StoreUnavailable)
    assert isinstance(failure(sqlite3.DatabaseError("malformed"), "f", "read"), StoreUnavailable)
    assert not isinstance(failure(sqlite3.DataError("too big"), "f", "written"), StoreUnavailable)
