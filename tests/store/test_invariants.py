"""A check of a whole store finds each fault that is planted in it, and none in a store that is sound."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from perdure._core.ids import Kind, StreamId
from perdure.store import Store, maintenance_of, open_store
from perdure.store.maintenance import COUNTED, INVARIANTS, MOST_SHOWN, CheckResult
from perdure.store.postgres import layout as postgres_sql
from perdure.store.postgres.maintenance import check_schema
from perdure.store.sqlite import sql_files as sqlite_sql
from perdure.store.sqlite.file import INTEGRITY, check_file
from perdure.store.steps import Forward, OpenAsk, OpenStream, PutReader, PutSession, SendMail, Trim
from perdure.testing._values import (
    NODE,
    OTHER,
    SESSION,
    a_call,
    a_durable_call,
    a_reader,
    a_session,
    a_stream,
    an_append,
    an_ask,
    an_end,
    an_ended_session,
    put,
    some_events,
)
from tests.support.stores.postgres import new_schema, store_url

HOME = StreamId(f"{SESSION}-standalone")


async def fill(store: Store) -> None:
    """One of everything, as servers leave it: two nodes, an old call, a trimmed one, one that runs."""
    fence, other = await store.join(NODE), await store.join(OTHER)

    async def commit(*steps: object) -> None:
        assert not any(await put(store, *steps)), steps  # type: ignore[arg-type]

    await commit(
        PutSession(record=a_session()),
        OpenStream(record=a_stream(fence, HOME, kind=Kind.STANDALONE)),
        PutSession(record=an_ended_session("gone", active=5.0, ended="client deleted")),
        PutSession(record=a_durable_call("single")),
        OpenStream(record=a_stream(fence, "task", session="single"), calls=(a_call(stream="task", session="single"),)),
    )
    for name, opened in (("old", 0.0), ("trimmed", 1_000.0), ("whole", 1_000.0)):
        await commit(OpenStream(record=a_stream(fence, name, opened=opened), calls=(a_call(stream=name),)))
        events = some_events(1, 5, time=opened, final=True)
        await commit(an_append(fence, events, stream=name, ends=(an_end(),), seal=True))
    await commit(Trim(stream=StreamId("trimmed"), through=3))
    both = (a_call(1, stream="batch"), a_call(2, stream="batch"))
    await commit(OpenStream(record=a_stream(fence, "batch"), calls=both))
    await commit(an_append(fence, some_events(1, 2, final=True), stream="batch", ends=(an_end(),)))
    await commit(an_append(fence, some_events(1, 4), stream=HOME))
    claimed = await store.claim(HOME, node=OTHER, held=fence)
    assert claimed is not None
    forward = Forward(stream=HOME, node=NODE, sender="s", first=1, payloads=(b"waits",))
    await commit(an_append(claimed.fence, some_events(5, 6), stream=HOME), forward)
    await commit(OpenAsk(record=an_ask(stream="batch")), PutReader(record=a_reader(stream="batch", seq=2)))
    await commit(SendMail(node=NODE, message=b"mail"))
    assert await store.change_note("n", seen=None, value=b"1", session=SESSION)
    assert other != fence


#: What is done to a store, and the rules that a check then finds broken. `event` and `answer` are one table in SQLite.
FAULTS: dict[str, tuple[str, set[str]]] = {
    "an event of no stream": ("INSERT INTO event VALUES (999, 1, 0, 'x', 0)", {"orphaned"}),
    "an end of a generation of no stream": ("INSERT INTO generation VALUES (999, 1, 0)", {"orphaned"}),
    "a reader of no stream": ("UPDATE reader SET stream = 999", {"orphaned"}),
    "a call of no stream": ("UPDATE call SET stream = 999 WHERE stream = @old", {"orphaned", "ledger", "answers"}),
    "an ask of no stream": ("UPDATE ask SET stream = 999", {"orphaned"}),
    "a message for no stream": ("UPDATE forward SET stream = 999", {"orphaned"}),
    "a sender to no stream": ("UPDATE sender SET stream = 999", {"orphaned"}),
    "a stream of no session": ("UPDATE stream SET session = 'x' WHERE id = 'old'", {"ownerless"}),
    "a stream of an ended session": (
        "UPDATE stream SET session = 'gone' WHERE id = 'whole'",
        {"ownerless", "ledger"},
    ),
    "a session without its standalone stream": (
        "UPDATE session SET standalone = 'x' WHERE id = 'session'",
        {"standalone"},
    ),
    "an event behind the end": ("UPDATE stream SET last = 1 WHERE id = 'batch'", {"beyond"}),
    "a hole": ("DELETE FROM event WHERE stream = @whole AND seq = 3", {"gaps"}),
    "a lost tail": ("DELETE FROM event WHERE stream = @home AND seq = 6", {"gaps"}),
    "an open call on a sealed stream": ("UPDATE stream SET sealed = @true WHERE id = 'batch'", {"sealed"}),
    "a sealed standalone stream": (
        "UPDATE stream SET sealed = @true WHERE id = 'session-standalone'",
        {"sealed", "tail"},
    ),
    "a last event that is no answer": (
        "DELETE FROM @answer WHERE stream = @whole AND seq = 5;"
        "INSERT INTO event (stream, seq, time, payload@slot_) VALUES (@whole, 5, 0, 'x'@slot)",
        {"tail", "unanswered"},
    ),
    "an answer that is missing": ("DELETE FROM @answer WHERE stream = @trimmed AND seq = 5", {"unanswered"}),
    "two answers to one call": (
        "DELETE FROM event WHERE stream = @old AND seq = 4;"
        "INSERT INTO @answer (stream, seq, time, payload@slot_) VALUES (@old, 4, 0, 'x'@slot)",
        {"answers"},
    ),
    "a call of another session": ("UPDATE call SET session = 'single' WHERE stream = @old", {"ledger"}),
    "a call of an incarnation to come": ("UPDATE call SET incarnation = 2 WHERE stream = @old", {"ledger"}),
    "an ended call with its request": ("UPDATE call SET request = '{}' WHERE stream = @old", {"ledger"}),
    "a stream without calls": ("DELETE FROM call WHERE stream = @task", {"ledger"}),
    "a call on a standalone stream": (
        "UPDATE call SET stream = @home WHERE stream = @task",
        {"ledger"},
    ),
    "an ask of another session": ("UPDATE ask SET session = 'single'", {"ledger"}),
    "a call whose node is not there": ("UPDATE stream SET node = 'x' WHERE id = 'task'", {"abandoned"}),
    "a generation that is not over": ("UPDATE generation SET generation = 2", {"generations"}),
    "a generation that ended later than the stream": ('UPDATE generation SET "end" = 7', {"generations"}),
    "generations out of order": (
        "INSERT INTO generation VALUES (@home, 2, 3); UPDATE stream SET generation = 3 WHERE id = 'session-standalone'",
        {"generations"},
    ),
    "readers beyond the end": ("UPDATE stream SET delivered = 6 WHERE id = 'old'", {"delivered"}),
    "mail for no node": ("UPDATE mail SET node = 'x'", {"mail"}),
    "a note of no session": ("UPDATE note SET session = 'x'", {"notes"}),
    "a note of an ended session": ("UPDATE note SET session = 'gone'", {"notes"}),
    "a wrong count": ("UPDATE tally SET ended = 7", {"tally"}),
    "an ended session without a reason": ("UPDATE session SET ended = '' WHERE id = 'gone'", {"ended"}),
    "an ended session with a result": ("UPDATE session SET result = '{}' WHERE id = 'gone'", {"ended"}),
    "a durable call that has ended": (
        "UPDATE session SET state = 'ended' WHERE id = 'single'; UPDATE tally SET open = 1, ended = 1",
        {"durable_calls", "ownerless", "ended"},
    ),
    "a durable call with two streams": (
        "UPDATE stream SET session = 'single' WHERE id = 'old'; UPDATE call SET session = 'single' WHERE stream = @old",
        {"durable_calls"},
    ),
}

ONLY_SQLITE = {"an event of no stream"}
"""In PostgreSQL such rows wait for their slot to be emptied."""

ONLY_POSTGRES: dict[str, tuple[str, set[str]]] = {
    "an event in two slots": (
        "INSERT INTO event SELECT stream, time, seq, 1, payload FROM event WHERE stream = @whole AND seq = 2",
        {"doubled"},
    ),
    "a wrong number of messages": ("UPDATE mailbox SET waiting = 5 WHERE node = 'node'", {"mail"}),
}


def found_in(verdict: CheckResult) -> set[str]:
    return {fault.rule for fault in verdict.faults}


# SQLite


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sqlite3.Connection]:
    path = tmp_path_factory.mktemp("sound") / "perdure.db"

    async def make() -> None:
        async with open_store(f"sqlite:{path}") as store:
            await fill(store)

    asyncio.run(make())
    with contextlib.closing(sqlite3.connect(path)) as file:
        yield file


@pytest.fixture
def copy(sound: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as copy:
        sound.backup(copy)
        yield copy


def in_sqlite(statement: str) -> list[str]:
    for name in ("old", "trimmed", "whole", "task"):
        statement = statement.replace(f"@{name}", f"(SELECT key FROM stream WHERE id = '{name}')")
    statement = statement.replace("@home", f"(SELECT key FROM stream WHERE id = '{HOME}')").replace("@true", "1")
    final = "1" if "INTO @answer" in statement else "0"
    statement = statement.replace("@answer", "event").replace("@slot_", ", final").replace("@slot", f", {final}")
    return statement.split(";")


def test_a_sound_file_has_no_faults(copy: sqlite3.Connection) -> None:
    assert check_file(copy) == CheckResult(
        counts=dict(zip(COUNTED, (3, 6, 6, 16, 4), strict=True)), faults=[], unnamed=[]
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_file_is_found(copy: sqlite3.Connection, fault: str) -> None:
    statement, rules = FAULTS[fault]
    for part in in_sqlite(statement):
        copy.execute(part)
    assert found_in(check_file(copy)) == rules


def test_a_damaged_page_is_found(sound: sqlite3.Connection, tmp_path: Path) -> None:
    """What SQLite cannot read is not asked for anything else."""
    path = tmp_path / "damaged.db"
    with contextlib.closing(sqlite3.connect(path)) as copy:
        sound.backup(copy)
        (root,) = copy.execute("SELECT rootpage FROM sqlite_master WHERE name = 'stream'").fetchone()
        (page,) = copy.execute("PRAGMA page_size").fetchone()
    with path.open("r+b") as file:
        file.seek((root - 1) * page)
        file.write(b"\xff" * page)
    verdict = asyncio.run(maintenance_of(f"sqlite:{path}").verify())
    assert (found_in(verdict), verdict.counts) == ({INTEGRITY}, {})


@pytest.mark.parametrize(("faults", "unnamed"), [(MOST_SHOWN, []), (MOST_SHOWN + 1, ["mail"])])
def test_of_many_faults_of_a_rule_some_are_named(copy: sqlite3.Connection, faults: int, unnamed: list[str]) -> None:
    copy.executemany("INSERT INTO mail (node, message) VALUES ('x', 'x')", [()] * faults)
    verdict = check_file(copy)
    assert (len(verdict.faults), verdict.unnamed) == (MOST_SHOWN, unnamed)


def test_every_rule_is_asked_of_both_kinds_of_store_and_has_a_fault() -> None:
    asked = set(INVARIANTS)
    assert set(postgres_sql.checks("perdure")) == {*asked, "counts"}
    # A number names one event because it is the key of the table, which SQLite checks.
    assert set(sqlite_sql.checks()) == {*asked, "counts"} - {"doubled"}
    planted = [rules for _, rules in (*FAULTS.values(), *ONLY_POSTGRES.values())]
    assert set().union(*planted) == asked


# PostgreSQL


def in_postgres(statement: str, schema: str, keys: dict[str, int]) -> str:
    for name, key in keys.items():
        statement = statement.replace(f"@{name}", str(key))
    slot = ", 0" if "@slot" in statement else ""
    statement = statement.replace("@answer", "answer").replace("@slot_", ", slot").replace("@slot", slot)
    return f"SET LOCAL search_path = {schema}; " + statement.replace("@true", "true").replace("'{}'", "'{}'::bytea")


@pytest.mark.anyio
async def test_each_fault_in_a_schema_is_found() -> None:
    schema = new_schema()
    url = store_url(schema)
    async with open_store(url) as store:
        await fill(store)
        verdict = await maintenance_of(url).verify()
        assert verdict == CheckResult(counts=dict(zip(COUNTED, (3, 6, 6, 16, 4), strict=True)), faults=[], unnamed=[])
    connection = await asyncpg.connect(url.partition("?")[0])
    try:
        names = {"session-standalone": "home"}
        rows = await connection.fetch(f"SELECT id, key FROM {schema}.stream")
        keys = {names.get(row[0], row[0]): row[1] for row in rows}
        planted = {name: fault for name, fault in (FAULTS | ONLY_POSTGRES).items() if name not in ONLY_SQLITE}
        found: dict[str, set[str]] = {}
        for name, (statement, _) in planted.items():
            undone = connection.transaction()
            await undone.start()
            await connection.execute(in_postgres(statement, schema, keys))
            found[name] = found_in(await check_schema(connection, schema))
            await undone.rollback()
        assert found == {name: rules for name, (_, rules) in planted.items()}
    finally:
        await connection.close()
