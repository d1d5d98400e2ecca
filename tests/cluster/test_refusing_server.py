"""A PostgreSQL server that refuses: it has no connection left, ends statements early, or undoes a commit."""

from __future__ import annotations

import asyncio
import contextlib
import os
from asyncio.subprocess import STDOUT
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import asyncpg
import pytest

from perdure._core.ids import NodeId
from perdure.store.postgres.address import parse_address
from perdure.store.postgres.store import READERS
from tests.support.clients.survey_client import Client
from tests.support.processes.nodes_behind_proxies import Node, ProxiedNodes, town
from tests.support.processes.serving import BASIC_TOOLS
from tests.support.processes.starting import start
from tests.support.proxies.postgres_proxy import Role
from tests.support.servers.in_process import until
from tests.support.stores.postgres import Server, server_url
from tests.support.stores.postgres_roles import Operator, role_with

pytestmark = pytest.mark.anyio

LEASE = 60.0
"""Long: what is told here is over before any lease is."""


def outages(it: ProxiedNodes) -> list[int]:
    return [node.site.app.counters.outages for node in it.nodes]


async def go_on(client: Client) -> None:
    async with client.listening():
        await client.go_on()
    await client.read_again()


# --- Statements that the server ends --------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["statement_timeout", pytest.param("lock_timeout", marks=pytest.mark.long)])
async def test_a_statement_that_the_server_ends_early_is_named_and_made_again(
    tmp_path: Path, operator: Operator, setting: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Promises 5 and 9: a role's own time limit is shorter than what the statement takes. (And longer than a start on a
    busy machine.)"""
    async with role_with(operator, **{setting: "1500ms"}) as url, town(tmp_path, url) as it:
        near, far = await it.add(lease=LEASE), await it.add(lease=LEASE)
        client = it.client(near, far)
        client.has_gate = True
        await client.open()
        await client.ask_for_survey()
        async with operator.transaction():
            await operator.execute(f"LOCK TABLE {parse_address(url).schema}.stream IN EXCLUSIVE MODE")
            client.gate.touch()
            await until(near.is_degraded)
        await go_on(client)
        await until(near.is_well)
        await it.judge(client)
        reason = f"canceling statement due to {setting.replace('_', ' ')}"
        assert any(reason in record.getMessage() for record in caplog.records if record.levelname == "ERROR")


@pytest.mark.parametrize(
    "setting",
    ["idle_session_timeout", pytest.param("idle_in_transaction_session_timeout", marks=pytest.mark.long)],
)
async def test_connections_that_rest_for_longer_than_the_server_allows_stay(
    tmp_path: Path, operator: Operator, setting: str
) -> None:
    """The store's connections rest between two calls, and the listener between two beats: their own setting says so."""
    rested = """
        SELECT count(*) FROM pg_stat_activity WHERE usename = $1 AND state_change < clock_timestamp() - interval '0.3 s'
    """
    async with role_with(operator, **{setting: "100ms"}) as url, town(tmp_path, url) as it:
        node = await it.add(lease=LEASE)
        await it.tell(node)
        made = set(node.proxy.links())
        role = url.partition("//")[2].partition("@")[0]
        await until(lambda: operator.fetchval(rested, role))
        await it.tell(node)
        assert made <= set(node.proxy.links())
        assert outages(it) == [0]


async def test_what_an_operator_takes_away_and_gives_back_is_an_outage(tmp_path: Path, operator: Operator) -> None:
    """A role's login or rights, or the schema, which is put back from a dump: nothing is refused for good."""
    async with role_with(operator) as url, town(tmp_path, url) as it:
        role, schema = url.partition("//")[2].partition("@")[0], parse_address(url).schema
        near, far = await it.add(lease=LEASE), await it.add(lease=LEASE)
        for taken, given in (
            (f"ALTER ROLE {role} NOLOGIN", f"ALTER ROLE {role} LOGIN"),
            (f"REVOKE ALL ON SCHEMA {schema} FROM {role}", f"GRANT ALL ON SCHEMA {schema} TO {role}"),
            (f"ALTER SCHEMA {schema} RENAME TO dumped_{schema}", f"ALTER SCHEMA dumped_{schema} RENAME TO {schema}"),
        ):
            client = it.client(near, far)
            client.has_gate = True
            await client.open()
            await client.ask_for_survey()
            failed = near.site.app.counters.outages
            await operator.execute(taken)
            if "LOGIN" in taken:
                near.proxy.cut()
            client.gate.touch()
            await until(near.is_degraded)
            await operator.execute(given)
            await go_on(client)
            await until(near.is_well)
            await it.judge(client)
            assert near.site.app.counters.outages == failed + 1


# --- Commits that are undone ----------------------------------------------------------------------------------------


async def test_a_commit_that_a_deadlock_undoes_is_made_again_and_done_once(tmp_path: Path, operator: Operator) -> None:
    """Another program wants what the commit holds, and holds what the commit wants last.

    PostgreSQL undoes the transaction that sees the circle, which it looks for once in each wait. So the commit's last
    wait must begin when the other program waits already: until then a third one holds the commit up."""
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(role_with(operator, deadlock_timeout="50ms"))
        it = await stack.enter_async_context(town(tmp_path, url))
        third = await asyncpg.connect(server_url().partition("?")[0])
        stack.push_async_callback(third.close)
        schema = parse_address(url).schema
        near, far = await it.add(lease=LEASE), await it.add(lease=LEASE)
        client = it.client(near, far)
        client.has_gate = True
        await client.open()
        await client.ask_for_survey()
        [place, *_] = client.call.positions
        [writer] = await operator.fetch(
            f"SELECT writer FROM {schema}.node JOIN {schema}.stream ON stream.node = node.id WHERE stream.id = $1",
            place.stream,
        )
        unread = f"SELECT 1 FROM {schema}.stream WHERE id = $1 AND unread"
        await until(lambda: operator.fetchval(unread, place.stream))  # the next commit for this stream has events
        async with operator.transaction():
            await operator.execute("SET LOCAL deadlock_timeout = '60s'")  # the commit is to be undone, not this
            await operator.execute(f"LOCK TABLE {schema}.event IN SHARE MODE")
            async with third.transaction():
                await third.execute(f"SELECT 1 FROM {schema}.stream WHERE id = '{place.stream}' FOR UPDATE")
                client.gate.touch()
                waits = "SELECT 1 FROM pg_locks WHERE NOT granted AND transactionid = pg_current_xact_id()::xid"
                await until(lambda: third.fetchval(waits))
                turn = f"SELECT 1 FROM {schema}.turn WHERE writer = $1 FOR UPDATE"
                taken = asyncio.create_task(operator.execute(turn, writer[0]))
                waits = "SELECT 1 FROM pg_locks WHERE NOT granted AND pid = $1"
                await until(lambda: third.fetchval(waits, operator.get_server_pid()))
            await taken  # not before the commit is undone
        await go_on(client)
        await it.judge(client)
        assert outages(it) == [0, 0], "the store has made it again by itself"


@pytest.mark.parametrize("level", ["serializable", pytest.param("repeatable read", marks=pytest.mark.long)])
async def test_a_stricter_isolation_of_a_role_is_not_the_stores(tmp_path: Path, operator: Operator, level: str) -> None:
    """Statements wait for locks and look then: with the view from before the wait they would see what is over."""
    async with role_with(operator, default_transaction_isolation=level) as url, town(tmp_path, url) as it:
        near, far = await it.add(lease=LEASE), await it.add(lease=LEASE)
        clients = [it.client(near, far) for _ in range(4)]
        await asyncio.gather(*(client.tell() for client in clients))
        await it.judge(*clients)
        assert outages(it) == [0, 0]
        assert sum(client.refused for client in clients) == 0


# --- No connection left ---------------------------------------------------------------------------------------------

FEW = 20
"""Connections of a small server."""


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[str]:
    """The address of a store on a small server."""
    server = Server(tmp_path, max_connections=str(FEW), superuser_reserved_connections="0")
    await asyncio.to_thread(server.make)
    await asyncio.to_thread(server.start)
    yield f"{server.url}?schema=small"
    await asyncio.to_thread(server.stop)


@asynccontextmanager
async def others_hold_the_rest(url: str) -> AsyncIterator[None]:
    """Other programs have all connections that are left."""
    async with AsyncExitStack() as stack:
        with contextlib.suppress(asyncpg.TooManyConnectionsError):
            while True:
                one = await asyncpg.connect(url.partition("?")[0])
                stack.push_async_callback(one.close)
        yield


@pytest.mark.long
async def test_a_server_without_a_connection_left_is_told_at_the_start_and_outlived_later(
    tmp_path: Path, small: str
) -> None:
    """A process does not start, with a sentence. One that runs goes on with the connections that it has; without any it
    is degraded, and comes back by itself."""
    async with others_hold_the_rest(small):
        process = await start(
            "perdure", "serve", BASIC_TOOLS, "--port", "0", "--store", small, env=os.environ, errors=STDOUT
        )
        assert process.stdout is not None
        [line] = (await process.stdout.read()).decode().splitlines()
        assert await process.wait() == 2
        assert "too many clients" in line
    async with town(tmp_path, small) as it:
        node = await it.add(lease=2.0)
        await it.tell(node)
        client = it.client(node)
        client.has_gate = True
        await client.open()
        await client.ask_for_survey()
        async with lost(node, small, Role.READER):
            reading = asyncio.create_task(go_on(client))
            await until(lambda: client.refused)
            await until(has_beaten(it))
            assert await node.health() == "ok", "what is to be written is written"
            client.gate.touch()
        await reading
        await it.judge(client)
        client = it.client(node)
        client.has_gate = True
        await client.open()
        await client.ask_for_survey()
        async with lost(node, small):
            client.gate.touch()
            await until(node.is_degraded)
        await go_on(client)
        await until(node.is_well)
        await it.judge(client)


@asynccontextmanager
async def lost(node: Node, url: str, *roles: Role) -> AsyncIterator[None]:
    """A node has lost connections, and other programs have got all that are left."""
    node.proxy.hang(Role.NEW)
    node.proxy.cut(*roles)
    async with others_hold_the_rest(url):
        node.proxy.heal()
        yield


def has_beaten(it: ProxiedNodes) -> Callable[[], Awaitable[bool]]:
    """Whether all nodes have beaten since now."""
    first: dict[NodeId, int] = {}

    async def ask() -> bool:
        beats = {node.id: node.beat for node in await it.look.nodes()}
        first.update({id_: beat for id_, beat in beats.items() if id_ not in first})
        return all(beats[id_] > beat for id_, beat in first.items())

    return ask


async def test_readers_that_are_all_busy_keep_no_call_and_no_beat_waiting(tmp_path: Path) -> None:
    """More replays than there are connections for reading, and none of them gets on."""
    async with town(tmp_path) as it:
        node = await it.add(lease=2.0)
        old = [await it.tell(node) for _ in range(READERS + 1)]
        client = it.client(node)
        await client.open()
        node.proxy.hang(Role.READER)
        replays = [asyncio.create_task(one.read_again()) for one in old]
        await until(lambda: len(node.proxy.links(Role.READER)) == READERS)
        body = client.session.call_body("survey", id=1, key=client.key, log=str(tmp_path / "diary"))
        async with await client.session.begin("POST", body) as exchange:
            while not client.asked:  # each event is shown when it is written
                await client.call.read(exchange)
        await until(has_beaten(it))
        assert not any(replay.done() for replay in replays)
        node.proxy.heal()
        await asyncio.gather(*replays)
        await go_on(client)
        await it.judge(client)
        assert outages(it) == [0]
