"""Makes the store's schema in a database, migrates it, and refuses what this release cannot use.

A version of the schema is what a release needs: its tables and its functions. Two releases write at once while a
deployment is being replaced, so the functions of a release have its version in their names (`commit_1`), and a later
release adds others beside them (`commit_2`). A later migration drops what no running release uses.
"""

import asyncio
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

import asyncpg

from perdure._core.text import see
from perdure.errors import StoreError, StoreTooNew, StoreUnavailable
from perdure.store.maintenance import Fact
from perdure.store.postgres.address import DEFAULT_SCHEMA, Address
from perdure.store.postgres.connections import AGAIN, ISOLATION, Connection
from perdure.store.rows import shared_sql, statements_by_name

OLDEST: Mapping[int, int] = {
    1: 1,
}
"""For each version, which has a file `schema_N.sql`: the oldest version whose releases can use the schema afterwards.
Older ones refuse it when they start, so all their processes have to be stopped before."""

VERSION = max(OLDEST)

OLDEST_SERVER = 15
"""The oldest major version of PostgreSQL that is tested."""

MADE_MEANWHILE = (asyncpg.DuplicateSchemaError, asyncpg.DuplicateTableError, asyncpg.UniqueViolationError)
"""Of several processes that make a schema one succeeds; the others wait for it and then find it."""

SHORT_LOCKS = "SET LOCAL lock_timeout = '500ms'"
"""A migration that waits for a table, for example during a backup, keeps all commits waiting. So it gives up before
they fail (the default of `store_timeout` is a second), lets them pass, and tries again."""

PAUSE = 0.5
"""Seconds between two tries: as long as commits were kept waiting."""

TRIES = 60
"""About a minute. A lock that is held for longer needs an operator."""

_MADE = re.compile(rf"^CREATE (?:UNLOGGED )?(?:TABLE|VIEW|FUNCTION) {DEFAULT_SCHEMA}\.(\w+)", re.MULTILINE)

IN_THE_WAY = "another program keeps it locked; find it in pg_stat_activity, and start again when it has ended"

WRITES = "writes"
"""The fact that a server takes writes."""

_SERVER = """
SELECT current_setting('server_version'), current_setting('server_encoding'),
       pg_is_in_recovery() OR current_setting('transaction_read_only')::bool
"""

_STRANGE = """
SELECT min(relname) FROM pg_class
WHERE relnamespace = to_regnamespace($1)::oid AND relkind IN ('r', 'p', 'v', 'm', 'f', 'S')
"""
"""A table of another program in the schema. (Functions are allowed: extensions put theirs into any schema.)"""

_MISSING = """
SELECT right_ || ' on ' || relname
FROM pg_class, unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE']) AS right_
WHERE (relname = ANY ($2) OR relname ~ '^(event|answer)_[0-9]+$') AND relnamespace = to_regnamespace($1)::oid
    AND NOT has_table_privilege(pg_class.oid, right_)
    AND (relkind IN ('r', 'p') OR relkind = 'v' AND right_ = 'SELECT')
    AND (right_ <> 'TRUNCATE' OR relname ~ '^(event|answer)_')
UNION ALL
SELECT 'EXECUTE on ' || proname FROM pg_proc
WHERE proname = ANY ($2) AND pronamespace = to_regnamespace($1)::oid AND NOT has_function_privilege(oid, 'EXECUTE')
ORDER BY 1
"""

_OPEN_TO_OTHERS = """
SELECT min(nspname) FROM pg_namespace, aclexplode(nspacl) AS a
WHERE nspname = ANY (current_schemas(false)) AND a.privilege_type = 'CREATE'
    AND a.grantee NOT IN (nspowner, (SELECT oid FROM pg_roles WHERE rolname = current_user))
"""
"""A schema of the search path in which roles besides its owner and this one may create."""


@cache
def queries(schema: str) -> Mapping[str, str]:
    """Return the statements of the files `queries.sql` by name, for one schema."""
    return _statements_of("queries.sql", schema)


@cache
def checks(schema: str) -> Mapping[str, str]:
    """Return the statements of the files `checks.sql` by name, for one schema."""
    return _statements_of("checks.sql", schema)


def _statements_of(name: str, schema: str) -> Mapping[str, str]:
    """Return the statements that both databases run, and those of PostgreSQL alone."""
    return {**statements_by_name(_in_schema(shared_sql(name), schema)), **statements_by_name(_read(name, schema))}


def migration(version: int, schema: str) -> str:
    """Return the script that leads to a version, and records the version."""
    return f"""{_read(f"schema_{version}.sql", schema)}
INSERT INTO {schema}.version (version, oldest) VALUES ({version}, {OLDEST[version]})
ON CONFLICT (one) DO UPDATE SET version = excluded.version, oldest = excluded.oldest;
"""


@cache
def made() -> frozenset[str]:
    """Return the names of the tables, views and functions that this release makes."""
    scripts = (migration(version, DEFAULT_SCHEMA) for version in OLDEST)
    return frozenset(name for script in scripts for name in _MADE.findall(script))


def _read(name: str, schema: str) -> str:
    return _in_schema(files("perdure.store.postgres").joinpath("sql", name).read_text(encoding="utf-8"), schema)


def _in_schema(text: str, schema: str) -> str:
    """Name a schema in a file. The files are written for the schema `perdure`; nothing else in them is spelled so."""
    return text.replace(f"{DEFAULT_SCHEMA}.", f"{schema}.")


async def prepare(connection: Connection, address: Address, *, makes: bool, writes: bool = True) -> None:
    """Check the database, and bring its schema to this release's version. Without `makes` nothing is made or changed;
    without `writes` a server that only reads is enough.

    Several processes may do this at once: the first makes the schema, the others wait for it.
    """
    try:
        async with asyncio.timeout(address.patience):
            for fact in await server_facts(connection):
                if fact.problem and (writes or fact.name != WRITES):
                    refusal = StoreUnavailable if fact.name == WRITES else StoreError
                    raise refusal(f"the database {address.shown} cannot be used: {fact.problem}")
            version = await schema_version(connection, address)
            missing = await missing_rights(connection, address.schema) if version == VERSION and writes else ""
    except TimeoutError as error:
        raise StoreUnavailable(
            f"the schema {address.schema} of {address.shown} could not be read within {address.patience:g} s:"
            f" {IN_THE_WAY}"
        ) from error
    if missing:
        raise StoreError(
            f"the role may not serve from the schema {address.schema} of {address.shown}: it lacks {missing}; let"
            " the schema's owner run `perdure store init --grant ROLE`"
        )
    if version == VERSION:
        return
    if not makes:
        raise StoreError(
            f"the database {address.shown} has no Perdure store in schema {address.schema}; `perdure store init` makes"
            " one"
            if version == 0
            else f"the schema {address.schema} of {address.shown} has version {version}, written by an older release; a"
            f" server of this one brings it to version {VERSION} when it starts, and so does `perdure store"
            " migrate`"
        )
    try:
        for attempt in range(1, TRIES + 1):
            try:
                await _migrate(connection, address)
                return
            except (*AGAIN, *MADE_MEANWHILE, asyncpg.LockNotAvailableError):
                if attempt == TRIES:
                    raise
                await asyncio.sleep(PAUSE)
    except asyncpg.InsufficientPrivilegeError as error:
        done, command = ("migrate", "migrate") if version else ("make", "init")
        raise StoreError(
            f"the role may not {done} the schema {address.schema} in {address.shown} ({error}); let a role that may run"
            f" `perdure store {command}`, or grant CREATE on the database"
        ) from error
    except asyncpg.LockNotAvailableError as error:
        raise StoreUnavailable(
            f"the schema {address.schema} of {address.shown} cannot be {'migrated' if version else 'made'} now:"
            f" {IN_THE_WAY} ({error})"
        ) from error


async def _migrate(connection: Connection, address: Address) -> None:
    """Make or migrate the schema as one transaction, while processes of the previous release serve."""
    # At a stricter level this process would not see what another one has made while it waited.
    async with connection.transaction(isolation="read_committed"):
        await connection.execute(SHORT_LOCKS)
        before = await schema_version(connection, address)
        strange = None if before else await connection.fetchval(_STRANGE, address.schema)
        if strange:  # another process may have made the store between the two reads
            before = await schema_version(connection, address)
        if before:
            await connection.execute(f"LOCK TABLE {address.schema}.version IN EXCLUSIVE MODE")
            before = await schema_version(connection, address)
        elif strange:
            raise StoreError(_not_a_store(address, f"it holds {strange}"))
        if not await connection.fetchval("SELECT to_regnamespace($1)::oid", address.schema):
            await connection.execute(f"CREATE SCHEMA {address.schema}")
        for number in range(before + 1, VERSION + 1):
            await connection.execute(migration(number, address.schema))


async def server_facts(connection: Connection) -> list[Fact]:
    """Return what this release needs of a server."""
    [(server, encoding, reads_only)] = await connection.fetch(_SERVER)
    is_old = connection.get_server_version().major < OLDEST_SERVER
    old = f"its server is PostgreSQL {server}; Perdure needs version {OLDEST_SERVER} or later"
    other = (
        f"it has the encoding {encoding}; Perdure needs UTF8: make one with CREATE DATABASE … ENCODING 'UTF8' TEMPLATE"
        " template0"
    )
    standby = (
        "its server only reads (a standby, or default_transaction_read_only); give the primary, or several hosts with"
        " target_session_attrs=read-write"
    )
    return [
        Fact(name="server", value=f"PostgreSQL {server}", problem=old if is_old else ""),
        Fact(name="encoding", value=encoding, problem="" if encoding == "UTF8" else other),
        Fact(
            name=WRITES,
            value=not reads_only,
            says="no" if reads_only else "yes",
            problem=standby if reads_only else "",
        ),
    ]


async def check_settings(connection: Connection, address: Address) -> None:
    """Refuse a stricter isolation than the store's, and a search path with schemas in which other roles may create
    functions. For a pooler, because it takes no settings of a connection."""
    level = await connection.fetchval("SELECT current_setting('default_transaction_isolation')")
    if level != ISOLATION:
        raise StoreError(
            f"transactions in {address.shown} are {level!r} by default; Perdure needs {ISOLATION!r}, and cannot choose"
            f" it through a pooler: ALTER ROLE … SET default_transaction_isolation = '{ISOLATION}'"
        )
    if (schema := await connection.fetchval(_OPEN_TO_OTHERS)) is not None:
        raise StoreError(
            f"other roles may create functions in the schema {schema} of {address.shown}, in which the role looks for"
            " names; through a pooler Perdure cannot choose where: ALTER ROLE … SET search_path = pg_catalog"
        )


def _not_a_store(address: Address, why: str) -> str:
    return (
        f"the schema {address.schema} of {address.shown} is not a Perdure store; name another one with ?schema=, which"
        f" need not be there yet: {why}"
    )


async def missing_rights(connection: Connection, schema: str) -> str:
    """Return some of the rights that the role lacks to serve; an empty text if it has all."""
    missing = [row[0] for row in await connection.fetch(_MISSING, schema, list(made()))]
    return ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")


async def schema_version(connection: Connection, address: Address) -> int:
    """Return the version of the schema; 0 without one. Raises `StoreTooNew` if this release cannot use it."""
    try:
        if not await connection.fetchval("SELECT to_regclass($1)::oid", f"{address.schema}.version"):
            return 0
        [(version, oldest)] = await connection.fetch(f"SELECT version, oldest FROM {address.schema}.version")
    except asyncpg.InsufficientPrivilegeError as error:
        raise StoreError(
            f"the role may not use the schema {address.schema} of {address.shown}: {error}; grant it USAGE on the"
            " schema, and its rights on the tables"
        ) from error
    except (asyncpg.UndefinedColumnError, asyncpg.WrongObjectTypeError, ValueError) as error:
        raise StoreError(_not_a_store(address, f"its table of versions is another one ({error})")) from error
    if oldest > VERSION:
        raise StoreTooNew(
            f"the schema {address.schema} of {address.shown} has version {version}, written by a newer release; this"
            f" one knows versions up to {VERSION}; {see('operating', 'upgrading-and-rolling-back')}"
        )
    # A newer release may have migrated it in a way that this release can use.
    return min(int(version), VERSION)
