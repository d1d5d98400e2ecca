"""Makes, migrates and checks the schema of a PostgreSQL store for an operator."""

import asyncio
import contextlib
import re
import secrets
import shlex
from collections.abc import AsyncIterator, Callable, Sequence

import asyncpg

from perdure._core.ids import NodeId, generations_skipped
from perdure._core.leases import FREE_SECONDS
from perdure.errors import Misuse, StoreError
from perdure.store.maintenance import CHECK_VALUES, INVARIANTS, MOST_SHOWN, BackedUp, CheckResult, Fact, check_result
from perdure.store.postgres import layout
from perdure.store.postgres.address import parse_address, without_password
from perdure.store.postgres.connections import Connection, Connections, Connector, named
from perdure.store.postgres.listen_connection import delivers_notifications
from perdure.store.postgres.wakeups import MANY_NODES
from perdure.store.time_limit import TimeLimit

RECENTLY = 60.0
"""Seconds since its last beat for which a node without a lock counts as alive: longer than most leases."""

_GRANTS = (
    "GRANT USAGE ON SCHEMA {schema} TO {role};",
    "GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON ALL TABLES IN SCHEMA {schema} TO {role};",
    "GRANT USAGE ON ALL SEQUENCES IN SCHEMA {schema} TO {role};",
    "GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {schema} TO {role};",
)
"""The rights that a role needs to serve. TRUNCATE removes expired events and answers."""

_ROLE = "SELECT current_user::text, has_database_privilege(current_database(), 'CREATE')"

_OWNS = """
SELECT pg_has_role(c.relowner, 'USAGE') AND has_schema_privilege(n.oid, 'CREATE')
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = $1 AND c.relname = 'version'
"""

_HAS_ROLE = "SELECT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = $1)"


class PostgresMaintenance:
    """Does the operator's work on the schema that an address names."""

    def __init__(self, url: str) -> None:
        self._address = parse_address(url)
        self.shown = self._address.shown
        self.latest = layout.VERSION

    @contextlib.asynccontextmanager
    async def _connected(self, doing: str) -> AsyncIterator[Connection]:
        """Lend a connection on which nothing is prepared, because a pooler may be between."""
        with named(self.shown, doing):
            async with self._connector(self._address.dsn).connected() as connection:
                yield connection

    def _connector(self, dsn: str) -> Connector:
        connector = Connector(dsn, self.shown, timeout=self._address.patience)
        connector.is_pooled = True
        return connector

    async def version(self) -> int:
        async with self._connected("read") as connection:
            return await layout.schema_version(connection, self._address)

    def script(self, version: int, *, grant: str | None) -> str:
        schema = self._address.schema
        lines = [
            f"-- Perdure: what leads from version {version} of the schema {schema} to version {self.latest}.",
            "-- Run it in the database, as the role that is to own the schema; it is one transaction.",
            "BEGIN;",
            f"{layout.SHORT_LOCKS};\nLOCK TABLE {schema}.version IN EXCLUSIVE MODE;"
            if version
            else f"CREATE SCHEMA IF NOT EXISTS {schema};",
            *(layout.migration(number, schema) for number in range(version + 1, self.latest + 1)),
            *self._grants(grant),
            "COMMIT;",
        ]
        return "\n\n".join(lines)

    def _grants(self, role: str | None) -> list[str]:
        if role is None:
            return []
        quoted = '"' + role.replace('"', '""') + '"'
        return [grant.format(schema=self._address.schema, role=quoted) for grant in _GRANTS]

    async def make(self, *, grant: str | None) -> None:
        async with self._connected("changed") as connection:
            if grant is not None and not await connection.fetchval(_HAS_ROLE, grant):
                raise StoreError(f'role "{grant}" does not exist in {self.shown}; nothing was made')
            await layout.prepare(connection, self._address, makes=True)
            async with connection.transaction():
                for statement in self._grants(grant):
                    await connection.execute(statement)

    async def check(self) -> Sequence[Fact]:
        async with self._connected("checked") as connection:
            facts = await layout.server_facts(connection)
            [(role, may_make)] = await connection.fetch(_ROLE)
            writes = not any(fact.problem for fact in facts if fact.name == layout.WRITES)
            facts += [Fact(name="role", value=role), Fact(name="schema", value=self._address.schema)]
            return [*facts, *await self._check_schema(connection, may_make=may_make, writes=writes)]

    async def _check_schema(self, connection: Connection, *, may_make: bool, writes: bool) -> list[Fact]:
        schema = self._address.schema
        try:
            version = await layout.schema_version(connection, self._address)
        except StoreError as error:
            return [Fact(name="version", value=None, says="unknown", problem=str(error))]
        says = f"{version or 'none'} (this release makes {self.latest})"
        if version == 0:
            who = "this role may" if may_make else "a role with CREATE on the database may"
            problem = f"the database is not prepared: `perdure store init` does it, which {who} run"
            return [Fact(name="version", value=0, says=says, problem=problem)]
        older = f"it is older: `perdure store migrate` brings it to version {self.latest}"
        owns = bool(await connection.fetchval(_OWNS, schema))
        missing = await layout.missing_rights(connection, schema)
        facts = [
            Fact(name="version", value=version, says=says, problem=older if version < self.latest else ""),
            Fact(
                name="rights",
                value=not missing,
                says=f"lacks {missing}" if missing else "all that serving needs",
                problem=f"the role lacks {missing}: `perdure store init --grant ROLE` grants it what it needs"
                if missing
                else "",
            ),
            Fact(name="migrates", value=owns, says="yes" if owns else "no: `perdure store migrate` needs the owner"),
        ]
        if not missing and version == self.latest:
            looked = await self._look(connection)
            living = await self._living(connection)
            if writes:  # a standby takes no notifications
                facts.append(await self._wakeups(len(living)))
            says = f"{len(living)} live, {len(looked) - len(living)} dead"
            facts.append(Fact(name="nodes", value=len(living), says=says))
        return facts

    async def _wakeups(self, nodes: int) -> Fact:
        limit = TimeLimit(self._address.patience)
        readers = Connections(self._connector(self._address.dsn), limit, size=1)
        readers.open()
        try:
            async with self._connector(self._address.listen).connected() as direct:
                has_notifications = await delivers_notifications(direct, readers, limit, self._address.schema)
        finally:
            await readers.aclose()
        if not has_notifications:
            says = "polling: a pooler keeps notifications back; name a direct connection with ?listen="
        elif nodes > MANY_NODES:
            says = f"polling: there are more than {MANY_NODES} nodes"
        else:
            return Fact(name="wakeups", value="notifications")
        return Fact(name="wakeups", value="polling", says=says)

    async def living(self, *, patiently: bool = True) -> Sequence[NodeId]:
        async with self._connected("read") as connection:
            return await self._living(connection, patiently=patiently)

    async def holders(self) -> None:
        """Only another node can ask a node for that."""

    async def _living(self, connection: Connection, *, patiently: bool = True) -> list[NodeId]:
        """Return the nodes whose lock is held. A process that lost its connection takes another lock at once, so a free
        lock is read twice. A node without a lock is alive if it has beaten recently."""
        looked = await self._look(connection)
        if patiently and any(held is False and not gone for _, gone, held, _ in looked):
            await asyncio.sleep(FREE_SECONDS)
            looked = await self._look(connection)
        return [NodeId(node) for node, gone, held, recent in looked if not gone and (recent if held is None else held)]

    async def _look(self, connection: Connection) -> list[asyncpg.Record]:
        return await connection.fetch(layout.queries(self._address.schema)["node_locks"], RECENTLY)

    async def verify(self) -> CheckResult:
        async with (
            self._connected("checked") as connection,
            connection.transaction(isolation="repeatable_read", readonly=True),
        ):
            return await check_schema(connection, self._address.schema)

    async def put_back(self) -> None:
        skipped = generations_skipped(secrets.randbelow)
        async with self._connected("written") as connection:
            await connection.execute(layout.queries(self._address.schema)["skip_generations"], skipped)

    def back_up(self, target: str, *, checks: bool, on_copied: Callable[[int, int], None]) -> BackedUp:
        dsn = re.sub(r"(://[^/@:?]*):\*\*\*@", r"\1@", without_password(self._address.dsn))
        command = ["pg_dump", "--format=custom", f"--schema={self._address.schema}", f"--file={target}", dsn]
        raise Misuse(
            f"a PostgreSQL store is backed up with the database's own program, while servers run: {shlex.join(command)}"
        )


async def check_schema(connection: Connection, schema: str) -> CheckResult:
    """Check everything within a transaction that sees one moment. The server returns a few sentences only."""
    checks = layout.checks(schema)
    [counts] = await connection.fetch(checks["counts"])
    found: dict[str, list[str]] = {}
    for rule in INVARIANTS:
        query = f"SELECT * FROM ({checks[rule].rstrip(';')}) AS broken LIMIT {MOST_SHOWN + 1}"
        found[rule] = [where for (where,) in await connection.fetch(query, *CHECK_VALUES.get(rule, ()))]
    return check_result(tuple(counts), found)
