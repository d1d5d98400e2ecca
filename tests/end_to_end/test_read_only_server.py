"""A PostgreSQL server that only reads for a while: nodes say `degraded`, lose nothing, and go on by themselves."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.clients.outage_clients import Ledger
from tests.support.processes.postgres_nodes import Busy, PostgresNodes, fleet
from tests.support.servers.in_process import until
from tests.support.stores.postgres_faults import OwnServer, hosts, own_server

pytestmark = [pytest.mark.anyio, pytest.mark.long]


async def set_read_only(server: OwnServer, value: str) -> None:
    await asyncio.to_thread(server.tell, f"ALTER SYSTEM SET default_transaction_read_only = {value}")
    await asyncio.to_thread(server.tell, "SELECT pg_reload_conf()")


async def say(nodes: PostgresNodes, status: str) -> None:
    """Wait until both nodes say so."""
    await until(lambda: nodes.has_health(status))


async def test_a_primary_that_becomes_read_only_and_then_a_standby_is_waited_for(tmp_path: Path) -> None:
    """By default_transaction_read_only, and by a restart as a standby, which is promoted later."""
    with own_server(tmp_path) as server:
        ledger = Ledger(server.url)
        async with fleet(hosts(server)) as nodes:
            busy = await Busy.begin(nodes)
            await set_read_only(server, "on")
            nodes.open("g/5")
            await busy.saw(10, 2)
            await say(nodes, "degraded")
            await set_read_only(server, "off")
            await say(nodes, "ok")
            await asyncio.to_thread(server.stop, "fast")
            (server.data / "standby.signal").touch()
            await asyncio.to_thread(server.start)
            nodes.open("g/10")
            await busy.saw(15, 2)
            await say(nodes, "degraded")
            await asyncio.to_thread(server.promote)
            await say(nodes, "ok")
            assert await busy.client.result("announce", n=1, start=3) == "announced 1"
            await busy.saw(15, 3)
            await busy.finish(nodes)
            assert [len(told.gaps) for told in busy.client.streams] == [0] * 4
            await nodes.judge(ledger, whole=True)
