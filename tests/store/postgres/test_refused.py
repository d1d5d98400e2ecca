"""What is wrong with an address, a server or its rights is told in one line at the start, and nothing is changed."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import asyncpg
import pytest

from perdure.errors import BadSetting, StoreError, StoreTooNew, StoreUnavailable
from perdure.store import existing_store, open_store
from perdure.store.notes import probe
from perdure.store.postgres import layout
from perdure.store.postgres.address import parse_address
from perdure.testing._values import NODE
from tests.support.processes.starting import ROOT
from tests.support.stores.postgres import ROLE_WITH_PASSWORD, Server, connection, new_schema, server_url, store_url

pytestmark = pytest.mark.anyio


def served(url: str) -> subprocess.CompletedProcess[str]:
    """`perdure serve` on a store, which must not start."""
    command = [
        sys.executable,
        "-m",
        "perdure",
        "serve",
        "tests.support.servers.basic_tools:server",
        "--port",
        "0",
        "--store",
        url,
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def schemas() -> set[str]:
    with connection(server_url()) as run:
        return {row[0] for row in run("SELECT nspname FROM pg_namespace")}


def in_database(name: str, schema: str, user: str = "postgres") -> str:
    base = server_url().partition("?")[0].rpartition("/")[0].partition("@")[2]
    return f"postgresql://{user}@{base}/{name}?schema={schema}"


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("postgresql:", "allowed: postgresql://"),
        ("postgresql:///", "without the name of a database"),
        ("postgresql://host", "without the name of a database"),
        ("postgresql://host:port/db", "allowed: postgresql://"),
        ("postgresql://host/db?schema=", "schema is ''"),
        ("postgresql://host/db?schema=Shouting", "schema is 'Shouting'"),
        ("postgresql://host/db?schema=a.b", "schema is 'a.b'"),
        ("postgresql://host/db?schema=pg_mine", "schema is 'pg_mine'"),
        ("postgresql://host/db?schema=" + "a" * 41, "up to 40"),
        ("postgresql://host/db?listen=sqlite:x", "allowed: postgresql://"),
    ],
)
def test_an_address_that_names_no_database_is_refused_in_one_sentence(url: str, hint: str) -> None:
    with pytest.raises(BadSetting) as caught:
        open_store(url)
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["postgresql://me:hidden@host", "postgresql://me:hid@den@host/?x", "postgresql://h/?password=hidden"]
)
def test_a_password_is_never_shown(url: str) -> None:
    with pytest.raises(BadSetting) as caught:
        open_store(url)
    assert "hid" not in str(caught.value)
    assert "***" in str(caught.value)


@pytest.mark.parametrize(
    ("written", "sentence"),
    [("[ours]\n", "there is no service 'other' in"), ("[other]\npassword=100%\n", "cannot be read: Interpolation")],
)
def test_a_service_that_is_not_in_the_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, sentence: str
) -> None:
    """The driver would take the default database of this machine instead."""
    file = tmp_path / "services"
    file.write_text(written)
    monkeypatch.setenv("PGSERVICEFILE", str(file))
    with pytest.raises(BadSetting, match=sentence):
        open_store("postgresql:///?service=other")


def test_a_schema_name_of_forty_characters_is_allowed() -> None:
    open_store("postgresql://host/db?schema=" + "a" * 40)


def test_without_the_driver_the_command_that_installs_it_is_named(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['asyncpg'] = None\n"
        "from perdure.cli.entry import main; main(['sessions', '--store', 'postgresql://here/db'])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "perdure: a store in PostgreSQL needs its driver: pip install 'perdure[postgres]'\n"


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(StoreUnavailable, match=r"cannot be opened: .*onnect"):
        await open_store("postgresql://postgres@127.0.0.1:1/postgres").open()


async def test_what_is_not_postgres_is_said_to_be_so() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as web:
        port = web.sockets[0].getsockname()[1]
        with pytest.raises(StoreError, match="cannot be opened"):
            await open_store(f"postgresql://me@127.0.0.1:{port}/db").open()


@pytest.mark.parametrize("password", ["", ":wrong"])
async def test_a_wrong_password_is_refused_and_not_shown(password: str) -> None:
    with connection(server_url()) as run:
        run(f"DROP ROLE IF EXISTS {ROLE_WITH_PASSWORD}")
        run(f"CREATE ROLE {ROLE_WITH_PASSWORD} LOGIN PASSWORD 'right'")
    schema = new_schema()
    url = in_database("postgres", schema, user=f"{ROLE_WITH_PASSWORD}{password}")
    with pytest.raises(StoreError) as caught:
        await open_store(url).open()
    assert "wrong" not in str(caught.value)
    assert "password" in str(caught.value)
    assert schema not in schemas()


async def test_an_unknown_database_is_refused() -> None:
    with pytest.raises(StoreError, match='database "nowhere" does not exist'):
        await open_store(in_database("nowhere", "s")).open()


async def test_a_role_that_may_not_make_the_schema_is_told_what_to_grant() -> None:
    role, schema = f"r_{secrets.token_hex(4)}", new_schema()
    with connection(server_url()) as run:
        run(f"CREATE ROLE {role} LOGIN")
    with pytest.raises(StoreError, match=f"may not make the schema {schema}.*grant CREATE on the database"):
        await open_store(in_database("postgres", schema, user=role)).open()
    assert schema not in schemas()


async def test_a_role_without_rights_on_a_schema_is_told_what_to_grant() -> None:
    role, schema = f"r_{secrets.token_hex(4)}", new_schema()
    async with open_store(store_url(schema)):
        pass
    with connection(server_url()) as run:
        run(f"CREATE ROLE {role} LOGIN")
    with pytest.raises(StoreError, match=f"may not use the schema {schema}.*USAGE"):
        await open_store(in_database("postgres", schema, user=role)).open()


async def test_a_role_with_the_rights_of_the_docs_serves() -> None:
    role, schema = f"r_{secrets.token_hex(4)}", new_schema()
    async with open_store(store_url(schema)):
        pass
    with connection(server_url()) as run:
        run(f"CREATE ROLE {role} LOGIN")
        page = (ROOT / "docs" / "deploying.md").read_text()
        for line in page.partition("```sql\n")[2].partition("```")[0].strip().splitlines():
            run(line.replace("perdure_app", role).replace("perdure", schema).rstrip(";"))
    async with open_store(in_database("postgres", schema, user=role)) as store:
        await store.join(NODE)
        await probe(store, 10)
        assert [node.id for node in await store.nodes()] == [NODE]


async def test_a_newer_schema_is_refused_by_name_and_a_compatible_one_is_not() -> None:
    schema = new_schema()
    async with open_store(store_url(schema)):
        pass
    with connection(server_url()) as run:
        run(f"UPDATE {schema}.version SET version = 9")
        async with open_store(store_url(schema)) as store:
            await probe(store, 1)
        run(f"UPDATE {schema}.version SET oldest = 9")
        with pytest.raises(StoreTooNew, match=f"schema {schema} .* has version 9, written by a newer release"):
            await open_store(store_url(schema)).open()
        assert [tuple(row) for row in run(f"SELECT version, oldest FROM {schema}.version")] == [(9, 9)]


async def test_tables_of_another_program_are_not_mistaken_for_a_store() -> None:
    schema = new_schema()
    with connection(server_url()) as run:
        run(f"CREATE SCHEMA {schema}")
        run(f"CREATE TABLE {schema}.version (number int)")
        with pytest.raises(StoreError, match="is not a Perdure store"):
            await open_store(store_url(schema)).open()
        assert run(f"SELECT count(*) FROM pg_tables WHERE schemaname = '{schema}'")[0][0] == 1


async def test_a_server_that_only_reads_is_refused() -> None:
    schema = new_schema()
    with pytest.raises(StoreError, match="only reads"):
        await open_store(store_url(schema) + "&default_transaction_read_only=on").open()
    assert schema not in schemas()


async def test_a_database_of_another_encoding_is_refused() -> None:
    name = f"latin_{secrets.token_hex(4)}"
    with connection(server_url()) as run:
        run(f"CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    with pytest.raises(StoreError, match="has the encoding LATIN1; Perdure needs UTF8"):
        await open_store(in_database(name, "s")).open()


async def test_an_operators_command_makes_nothing() -> None:
    schema = new_schema()
    with pytest.raises(StoreError, match=f"has no Perdure store in schema {schema}"):
        await existing_store(store_url(schema), writes=False).open()
    assert schema not in schemas()


def test_the_command_says_it_in_one_line_and_ends_with_2() -> None:
    schema = new_schema()
    for url in (
        in_database("nowhere", schema),
        store_url(schema) + "&default_transaction_read_only=on",
        "postgresql://postgres@127.0.0.1:1/postgres",
    ):
        done = served(url)
        assert done.returncode == 2
        assert done.stderr.startswith("perdure: the ")
        assert done.stderr.count("\n") == 1
    assert schema not in schemas()


async def test_a_schema_that_another_program_keeps_locked_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A migration that was begun by hand and left open, for example."""
    monkeypatch.setattr(layout, "TRIES", 1)
    schema = new_schema()
    address = replace(parse_address(store_url(schema)), patience=0.2)
    starting = await asyncpg.connect(server_url().partition("?")[0])
    with connection(server_url()) as run:
        run("BEGIN")
        run(f"CREATE SCHEMA {schema}")
        with pytest.raises(StoreUnavailable, match=f"schema {schema} .* cannot be made now: another program keeps"):
            await layout.prepare(starting, replace(address, patience=20.0), makes=True)
        run("ROLLBACK")
        assert schema not in schemas()
        await layout.prepare(starting, replace(address, patience=20.0), makes=True)
        run("BEGIN")
        run(f"LOCK TABLE {schema}.version")
        with pytest.raises(StoreUnavailable, match=f"schema {schema} .* could not be read within 0.2 s: another"):
            await layout.prepare(starting, address, makes=True)
        run("ROLLBACK")
    await starting.close()


async def test_several_processes_that_start_at_once_make_one_schema(tmp_path: Path) -> None:
    url = store_url()
    stores = [open_store(url, busy_timeout=20.0) for _ in range(6)]
    await asyncio.gather(*(store.open() for store in stores))
    fences = await asyncio.gather(*(store.join(NODE) for store in stores))
    assert len(set(fences)) == 6
    await asyncio.gather(*(store.aclose() for store in stores))


async def test_a_migration_that_was_cut_off_leaves_nothing(tmp_path: Path) -> None:
    """All of it is one transaction: the next start begins from the beginning."""
    server = Server(tmp_path)
    server.make()
    server.start()
    try:
        store = open_store(f"{server.url}?schema=cut")
        opening = asyncio.create_task(store.open())
        with connection(server.url) as run:
            making = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'perdure' AND query LIKE '%TABLE cut.%'"
            while not opening.done() and not run(making):  # noqa: ASYNC110 - the server has no event for it
                await asyncio.sleep(0)
            run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'perdure'")
            await asyncio.gather(opening, return_exceptions=True)
            tables = run("SELECT count(*) FROM pg_tables WHERE schemaname = 'cut'")[0][0]
            assert (tables == 0) == (opening.exception() is not None)
        async with open_store(f"{server.url}?schema=cut") as again:
            await probe(again, 1)
        await store.aclose()
    finally:
        server.stop()
