"""A store in a database that other roles use as well: the attempts of a real second role, and their outcomes."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg
import pytest

from perdure._core.ids import NodeId
from perdure.errors import StoreError
from perdure.store.postgres import layout
from perdure.store.postgres.address import parse_address
from perdure.store.postgres.listen_connection import channel_of
from perdure.store.postgres.store import PostgresStore
from perdure.store.records import Event
from perdure.store.steps import Append, OpenStream, PutSession
from perdure.testing._values import NODE, OTHER, STREAM, a_session, a_stream
from tests.support.processes.nodes_behind_proxies import town
from tests.support.proxies.pgbouncer import bouncing
from tests.support.servers.in_process import until
from tests.support.stores.postgres import server_url
from tests.support.stores.postgres_roles import Operator, role_with

pytestmark = pytest.mark.anyio

if TYPE_CHECKING:
    Connection = Operator

LEASE = 1_000.0


@asynccontextmanager
async def stranger(operator: Operator, *grants: str) -> AsyncIterator[Connection]:
    """A connection of a role that may connect to the database, and no more than what is granted to it."""
    role = f"stranger_{secrets.token_hex(6)}"
    await operator.execute(f"CREATE ROLE {role} LOGIN")
    try:
        for grant in grants:
            await operator.execute(f"GRANT {grant} TO {role}")
        connection = await asyncpg.connect(f"postgresql://{role}@{server_url().partition('?')[0].partition('@')[2]}")
        try:
            yield connection
        finally:
            await connection.close()
    finally:
        await operator.execute(f"DROP OWNED BY {role} CASCADE; DROP ROLE {role}")


# --- Functions of another role in a schema that is searched


TRAPS = """
    CREATE TABLE {schema}.loot (role text, what text);
    GRANT INSERT ON {schema}.loot TO PUBLIC;
    CREATE FUNCTION {schema}.cardinality(things text[]) RETURNS int LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO {schema}.loot VALUES (current_user, 'cardinality');
        RETURN coalesce(array_length(things, 1), 0);
    END $$;
    CREATE FUNCTION {schema}.collect(kept int[], one int) RETURNS int[] LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO {schema}.loot VALUES (current_user, 'array_agg');
        RETURN array_append(kept, one);
    END $$;
    CREATE AGGREGATE {schema}.array_agg(int) (SFUNC = {schema}.collect, STYPE = int[], INITCOND = '{{}}');
"""
"""Functions that fit the calls of the store's functions and statements better than the server's own."""


@asynccontextmanager
async def trapped(operator: Operator) -> AsyncIterator[tuple[str, str]]:
    """The address of a store whose role searches a schema in which a stranger has put its functions; and that
    schema."""
    schema = f"common_{secrets.token_hex(6)}"
    await operator.execute(f"CREATE SCHEMA {schema}; GRANT USAGE ON SCHEMA {schema} TO PUBLIC")
    try:
        async with (
            stranger(operator, f"CREATE ON SCHEMA {schema}") as theirs,
            role_with(operator, search_path=schema) as url,
        ):
            await theirs.execute(TRAPS.format(schema=schema))
            yield url, schema
    finally:
        await operator.execute(f"DROP SCHEMA {schema} CASCADE")


async def test_no_function_of_another_role_runs_as_the_stores(operator: Operator) -> None:
    """Neither in the store's functions nor in its statements."""
    async with trapped(operator) as (url, schema):
        async with PostgresStore(url, timeout=20.0) as store:
            fence = await store.join(NODE)
            events = (Event(1, 0.0, b"{}"),)
            append = Append(stream=STREAM, fence=fence, events=events)
            await store.commit([PutSession(record=a_session()), OpenStream(record=a_stream(fence)), append])
            found = (await store.follow({STREAM: 0}, limit=9))[STREAM].events
            assert [event.seq for event in found or ()] == [1]
            await store.leave(NODE)
        assert await operator.fetch(f"SELECT * FROM {schema}.loot") == []


async def test_every_function_of_the_store_says_where_it_looks(operator: Operator) -> None:
    """So it does the same for every caller, however that role is set."""
    async with role_with(operator) as url:
        async with PostgresStore(url):
            pass
        found = await operator.fetch(
            "SELECT proname, proconfig FROM pg_proc WHERE pronamespace = to_regnamespace($1)::oid",
            parse_address(url).schema,
        )
        assert {name for name, _ in found} <= layout.made()
        assert {name: config for name, config in found if config != ["search_path=pg_catalog, pg_temp"]} == {}
        await operator.execute(f"DROP SCHEMA {parse_address(url).schema} CASCADE")


async def test_a_store_behind_a_pooler_refuses_to_search_where_others_may_create(
    operator: Operator, tmp_path: Path
) -> None:
    """A pooler takes no settings, so the role must have them."""
    async with trapped(operator) as (url, _), bouncing(tmp_path) as bouncer:
        role = url.partition("//")[2].partition("@")[0]
        (tmp_path / "users").write_text(f'"{role}" ""\n"postgres" ""\n')
        await bouncer.command("RELOAD")
        behind = f"postgresql://{role}@{bouncer.url.partition('@')[2]}?schema={parse_address(url).schema}"
        with pytest.raises(StoreError, match=r"ALTER ROLE .* SET search_path"):
            async with PostgresStore(behind):
                pass
        await operator.execute(f"ALTER ROLE {role} SET search_path = pg_catalog")
        await bouncer.command("RECONNECT")
        async with PostgresStore(behind) as store:
            await store.join(NODE)
            await store.leave(NODE)


# --- Notifications of another role


async def test_an_answer_that_another_role_has_made_up_is_not_shown(operator: Operator, tmp_path: Path) -> None:
    """It may read the tables, so it knows the nodes and the stream. A hint brings nothing that is believed."""
    async with town(tmp_path) as it:
        schema = parse_address(it.url).schema
        near, far = await it.add(), await it.add()
        client = it.client(near, far)
        client.has_gate = True
        await client.open()
        await client.ask_for_survey()
        grants = (f"USAGE ON SCHEMA {schema}", f"SELECT ON ALL TABLES IN SCHEMA {schema}")
        async with (
            stranger(operator, *grants) as theirs,
            await client.at(client.far).resume(client.call.position) as call,
        ):
            assert await call.head() == 200
            columns = "id, session, kind, node, fence, opened, generation, last, sealed, delivered, unread"
            found = f"SELECT {columns} FROM {schema}.stream WHERE kind = 'c' AND NOT sealed"
            [stream] = await theirs.fetch(found)
            number = stream["last"] + 1
            answer = b'{"jsonrpc":"2.0","id":1,"result":{"content":[{"type":"text","text":"made up"}]}}'
            row = [*stream.values()]
            row[columns.split(", ").index("last")], row[columns.split(", ").index("sealed")] = number, True
            brought = json.dumps([[row, [[number, 0.0, base64.b64encode(answer).decode(), True]]]])
            for (node,) in await theirs.fetch(f"SELECT id FROM {schema}.node"):
                channel = channel_of(schema, NodeId(node))
                for word in (f"e1 {brought}", f"h {stream['id']}"):
                    await theirs.execute("SELECT pg_notify($1, $2)", channel, word)
            client.gate.touch()
            while not client.asked and await client.call.read(call):
                pass
            assert [message.get("method") for message in client.call.messages[-1:]] == ["elicitation/create"]
        await client.reply(client.far)
        await client.read(client.far, client.call, lambda: bool(client.call.answers))
        assert client.call.answers[0]["result"]["content"][0]["text"] == f"reply to {client.key}"


async def test_another_role_cannot_say_that_a_node_holds_nothing(operator: Operator) -> None:
    """Promise 15: a node that does not answer counts as a holder, also if another role answers in its place."""
    async with role_with(operator) as url:
        schema = parse_address(url).schema
        async with PostgresStore(url, timeout=20.0) as here, PostgresStore(url, timeout=20.0) as there:
            await here.join(NODE)
            await there.join(OTHER)
            mine, other = (
                store.liveness(node, lease=LEASE, monotonic=lambda: 0.0)
                for store, node in ((here, NODE), (there, OTHER))
            )
            other.hold(True)
            async with stranger(
                operator, f"USAGE ON SCHEMA {schema}", f"SELECT ON ALL TABLES IN SCHEMA {schema}"
            ) as theirs:

                def answer(_: object, __: int, ___: str, word: object) -> None:
                    number = [*str(word).split(" ")[1:2], "1"][0]
                    said.append(asyncio.create_task(say(number)))

                async def say(number: object) -> None:
                    word = f"! {number} {OTHER} nothing"
                    await theirs.execute("SELECT pg_notify($1, $2)", channel_of(schema, NODE), word)

                said: list[asyncio.Task[None]] = []
                await theirs.add_listener(channel_of(schema, OTHER), answer)
                for _ in range(3):
                    assert list(await mine.holders()) == [OTHER]
                await asyncio.gather(*said, return_exceptions=True)
            other.hold(False)
            assert list(await mine.holders()) == []
        await operator.execute(f"DROP SCHEMA {schema} CASCADE")


# --- Locks of another role


async def test_another_role_cannot_keep_a_node_from_writing_by_its_locks(operator: Operator) -> None:
    """Every role that may connect sees which locks are held, and may take each of them as well."""
    async with role_with(operator) as url:
        schema = parse_address(url).schema
        async with (
            stranger(operator) as theirs,
            PostgresStore(url, timeout=2.0) as store,
            PostgresStore(url, timeout=2.0) as second,
        ):
            fence = await store.join(NODE)
            await second.join(OTHER)
            await store.commit([PutSession(record=a_session())])
            held = """
                SELECT DISTINCT classid::bigint << 32 | objid::bigint AS key FROM pg_locks WHERE locktype = 'advisory'
                AND objsubid = 1 AND pid IN (SELECT pid FROM pg_stat_activity WHERE usename = $1)
            """
            role = url.partition("//")[2].partition("@")[0]
            stranger_ = await theirs.fetchval("SELECT current_user")
            blocked = await asyncpg.connect(server_url().partition("?")[0])
            async with blocked.transaction():
                await blocked.execute(f"LOCK TABLE {schema}.stream IN EXCLUSIVE MODE")
                opening = asyncio.create_task(store.commit([OpenStream(record=a_stream(fence, "first"))]))
                await until(
                    lambda: operator.fetchval(
                        "SELECT count(*) > 0 FROM pg_stat_activity WHERE usename = $1 AND wait_event_type = 'Lock'",
                        role,
                    )
                )
                keys = [row["key"] for row in await theirs.fetch(held, role)]
                taking = [asyncio.create_task(_take(url, stranger_, key)) for key in keys]
                await asyncio.sleep(0)
            assert list(await opening) == [None]
            await blocked.close()
            taken = [connection for connection in await asyncio.gather(*taking) if connection is not None]
            for number in range(3):
                assert list(await store.commit([OpenStream(record=a_stream(fence, f"later {number}"))])) == [None]
            # Its names can be guessed: nothing is waited for.
            for name in (f"{schema}.sweep", f"{schema}.migration"):
                await theirs.execute("SELECT pg_advisory_lock(hashtextextended($1, 0))", name)
            async with PostgresStore(url, timeout=2.0):
                pass
            for connection in taken:
                await connection.close()
        await operator.execute(f"DROP SCHEMA {schema} CASCADE")


async def _take(url: str, role: str, key: int) -> Connection | None:
    """Take a lock for good, if it is to be had; a shared one is held by the listener for as long as it lives."""
    connection = await asyncpg.connect(f"postgresql://{role}@{url.partition('?')[0].partition('@')[2]}")
    with contextlib.suppress(TimeoutError):
        await connection.fetchval("SELECT pg_advisory_lock($1)", key, timeout=1.0)
        return connection
    await connection.close()
    return None
