"""Makes the store's schema in a database, migrates it, and refuses what this release cannot use."""

import asyncio

import asyncpg

from perdure._core.text import see
from perdure.errors import StoreError, StoreTooNew, StoreUnavailable
from perdure.store.postgres import sql_files
from perdure.store.postgres.address import Address
from perdure.store.postgres.connections import ISOLATION, Connection
from perdure.store.postgres.failures import AGAIN

OLDEST_SERVER = 15
"""The oldest major version of PostgreSQL that is tested."""

MADE_MEANWHILE = (asyncpg.DuplicateSchemaError, asyncpg.DuplicateTableError, asyncpg.UniqueViolationError)
"""Of several that make a schema one succeeds; the others wait for it, and find it then."""

SHORT_LOCKS = "SET LOCAL lock_timeout = '500ms'"
"""A migration that waits for a table, behind a backup for example, keeps all commits waiting behind itself. So it gives
up before they fail (the default of `store_timeout` is a second), lets them pass, and tries again."""

PAUSE = 0.5
"""Seconds between two tries: as long as commits were kept waiting."""

TRIES = 60
"""About a minute. What is in the way for longer is for people to look at."""

IN_THE_WAY = "another program keeps it locked; find it in pg_stat_activity, and start again when it has ended"

_STRANGE = """
SELECT min(relname) FROM pg_class
WHERE relnamespace = to_regnamespace($1)::oid AND relkind IN ('r', 'p', 'v', 'm', 'f', 'S')
"""
"""A table of another program in the schema. (Functions may be there: extensions put theirs into any schema.)"""

_MISSING = """
SELECT right_ || ' on ' || relname
FROM pg_class, unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE']) AS right_
WHERE relname = ANY ($2) AND relnamespace = to_regnamespace($1)::oid AND NOT has_table_privilege(pg_class.oid, right_)
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


async def prepare(connection: Connection, address: Address, *, makes: bool, writes: bool = True) -> None:
    """Check the database, and bring its schema to this release's version. Without `makes` nothing is made or changed;
    without `writes` a server that only reads will do.

    Several processes may do this at once: the first makes, the others wait for it.
    """
    try:
        async with asyncio.timeout(address.patience):
            version = await _check(connection, address, writes=writes)
    except TimeoutError as error:
        raise StoreUnavailable(
            f"the schema {address.schema} of {address.shown} could not be read within {address.patience:g} s:"
            f" {IN_THE_WAY}"
        ) from error
    if version == sql_files.VERSION:
        return
    if not makes:
        raise StoreError(
            f"the database {address.shown} has no Perdure store in schema {address.schema}; `perdure store init` makes"
            " one"
            if version == 0
            else f"the schema {address.schema} of {address.shown} has version {version}, written by an older release; a"
            f" server of this one brings it to version {sql_files.VERSION} when it starts, and so does `perdure store"
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


async def _check(connection: Connection, address: Address, *, writes: bool) -> int:
    """Raise unless this release can use the server and, where the schema is of its version, may. Gives the version."""
    await _check_server(connection, address, writes=writes)
    version = await schema_version(connection, address)
    if version == sql_files.VERSION and writes and (missing := await missing_rights(connection, address.schema)):
        raise StoreError(
            f"the role may not serve from the schema {address.schema} of {address.shown}: it lacks {missing}; let"
            " the schema's owner run `perdure store init --grant ROLE`"
        )
    return version


async def _migrate(connection: Connection, address: Address) -> None:
    """Make the schema, or bring it further, as one transaction, while processes of the release before it serve."""
    # At a stricter level, what another process has made while this one waited would not be seen.
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
        for number in range(before + 1, sql_files.VERSION + 1):
            await connection.execute(sql_files.migration(number, address.schema))


async def _check_server(connection: Connection, address: Address, *, writes: bool) -> None:
    version = connection.get_server_version()
    if version.major < OLDEST_SERVER:
        raise StoreError(
            f"{address.shown} is PostgreSQL {version.major}; Perdure needs version {OLDEST_SERVER} or later"
        )
    [(encoding, reads_only)] = await connection.fetch(
        "SELECT current_setting('server_encoding'),"
        " pg_is_in_recovery() OR current_setting('transaction_read_only')::bool"
    )
    if encoding != "UTF8":
        raise StoreError(
            f"the database {address.shown} has the encoding {encoding}; Perdure needs UTF8: make one with"
            " CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0"
        )
    if reads_only and writes:
        raise StoreUnavailable(
            f"the server of {address.shown} only reads (a standby, or default_transaction_read_only); give the primary,"
            " or several hosts with target_session_attrs=read-write"
        )


async def check_settings(connection: Connection, address: Address) -> None:
    """Refuse a stricter isolation than the store's, and names that are looked for where other roles may put theirs. For
    a pooler, to which a process cannot say what it wants."""
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
    """Name some of the rights that the role lacks to serve; nothing if it has all."""
    missing = [row[0] for row in await connection.fetch(_MISSING, schema, list(sql_files.made()))]
    return ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")


async def schema_version(connection: Connection, address: Address) -> int:
    """The version of the schema; 0 if there is none. Raises `StoreTooNew` for one that this release cannot use."""
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
    if oldest > sql_files.VERSION:
        raise StoreTooNew(
            f"the schema {address.schema} of {address.shown} has version {version}, written by a newer release; this"
            f" one knows versions up to {sql_files.VERSION}; {see('operating', 'upgrading-and-rolling-back')}"
        )
    # A newer release may have brought it further, in a way that this one can live with.
    return min(int(version), sql_files.VERSION)
