"""Connections to a PostgreSQL server that are lost, at each statement of a call and again and again."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from tests.support.processes.nodes_behind_proxies import ProxiedNodes, town
from tests.support.proxies.postgres_proxy import Role, When
from tests.support.servers.in_process import until
from tests.support.stores.postgres_roles import Operator

pytestmark = pytest.mark.anyio

LEASE = 60.0
"""Long: what is told here is over before any lease is."""

LEAST = {Role.WRITER: 8, Role.READER: 10, Role.LISTENER: 3, Role.NEW: 2}
"""Requests of each role in one story, at the least. With fewer of them there would be little to lose."""


def assert_no_node_died(it: ProxiedNodes) -> None:
    assert [node.site.app.counters.nodes_settled for node in it.nodes] == [0] * len(it.nodes)


@pytest.mark.parametrize("turn", [tuple(When), pytest.param((*When,)[::-1], marks=pytest.mark.long)])
@pytest.mark.parametrize("role", Role)
async def test_a_connection_that_is_lost_at_any_statement_of_a_call_costs_nothing(
    tmp_path: Path, role: Role, turn: tuple[When, ...]
) -> None:
    """Promises 1 to 5: before the server has the statement, or when it is done and the answer is lost, in turn."""
    async with town(tmp_path) as it:
        near, far = await it.add(lease=LEASE), await it.add(lease=LEASE)
        for number in itertools.count(1):
            if role in (Role.NEW, Role.LISTENER):
                near.proxy.cut(*([role] if role is Role.LISTENER else []))  # they are made again in the story
            cut = near.proxy.cut_at(role, number, turn[number % len(turn)])
            await it.tell(near, far)
            near.proxy.forget_cuts()
            await until(near.is_well)
            if not cut.happened.is_set():
                break
        assert number > LEAST[role], "so many statements were lost, each in a story of its own"
        assert_no_node_died(it)


KILL = """
    SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity AS a
    WHERE application_name = $1 AND pid <> pg_backend_pid() AND $2 = CASE
        WHEN query LIKE '%.commit_1(%' THEN 'writer'
        WHEN EXISTS (SELECT 1 FROM pg_locks AS l WHERE l.pid = a.pid AND locktype = 'advisory' AND mode = 'ShareLock')
        THEN 'listener' ELSE 'reader' END
"""


async def test_backends_that_an_operator_ends_again_and_again_are_made_again(
    tmp_path: Path, operator: Operator
) -> None:
    """`pg_terminate_backend`, while one call runs: of the writer, of readers, of the listener, each several times."""
    async with town(tmp_path) as it:
        name = f"perdure-{tmp_path.name}"
        it.url += f"&application_name={name}"
        near, far = await it.add(lease=LEASE), await it.add(lease=LEASE)
        for role in ("writer", "reader", "listener"):
            killed = 0

            async def kill(role: str = role) -> None:
                nonlocal killed
                while killed < 5:
                    killed += await operator.fetchval(KILL, name, role)
                    await asyncio.sleep(0.02)

            killing = asyncio.create_task(kill())
            while not killing.done():
                await it.tell(near, far)
            await killing
            await until(near.is_well)
            await until(far.is_well)
        assert_no_node_died(it)
