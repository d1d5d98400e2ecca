"""An old backup of a PostgreSQL server is put back: clients are told what is gone, and never shown other events.

(Promises 2 to 4. A point in time that a WAL archive leads to is such a backup, too.)
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from perdure._core.codes import OUTCOME_UNKNOWN
from tests.support.clients.outage_clients import Ledger
from tests.support.processes.postgres_nodes import Busy, fleet
from tests.support.servers.in_process import until
from tests.support.stores.postgres_faults import OwnServer, hosts, own_server

pytestmark = [pytest.mark.anyio, pytest.mark.long]


async def put_back(server: OwnServer, backup: OwnServer) -> None:
    await asyncio.to_thread(server.stop, "fast")
    await asyncio.to_thread(server.put_back, backup)
    await asyncio.to_thread(server.start)


async def test_clients_that_come_back_to_a_restored_server_are_told_what_is_gone(tmp_path: Path) -> None:
    """All nodes were stopped meanwhile. The calls that ran in the backup ran on, and nothing knows how they ended."""
    with own_server(tmp_path / "own") as server:
        ledger = Ledger(server.url)
        async with fleet(hosts(server)) as nodes:
            busy = await Busy.begin(nodes)
            await busy.stored(ledger.has)
            backup = await asyncio.to_thread(server.copy_to, tmp_path / "backup")
            nodes.open("g/5")
            assert await busy.client.result("announce", n=2, start=3) == "announced 2"
            await busy.saw(10, 4)
            late = await nodes.join(at=1)
            lost = await late.call("count", id=1, at=1, n=20, gate="late", pauses=[5])
            await until(lambda: lost.progress[-1:] == [5])
            for client in (busy.client, late):
                await client.aclose()
        await put_back(server, backup)
        async with fleet(hosts(server)) as nodes:
            for client in (busy.client, late):
                nodes.adopt(client)
            await busy.client.ended()
            await late.ended()
            assert [told.code for told in (*busy.counts, busy.asking)] == [OUTCOME_UNKNOWN] * 3
            assert [told.gaps for told in busy.counts] == [[(6, 10)]] * 2
            assert lost.refused is not None
            assert lost.refused["status"] == 404
            assert await busy.client.result("announce", n=2, start=5) == "announced 2"
            await until(lambda: busy.alone.notices == [1, 2, 3, 4, 5, 6])
            assert busy.alone.gaps[0] == (3, 4)
            await nodes.judge(ledger, whole=False)


async def test_nodes_that_run_while_a_backup_is_put_back_go_on(tmp_path: Path) -> None:
    """One of them joined after the backup was made: it joins again."""
    with own_server(tmp_path / "own") as server:
        ledger = Ledger(server.url)
        async with fleet(hosts(server)) as nodes:
            busy = await Busy.begin(nodes)
            await busy.stored(ledger.has)
            backup = await asyncio.to_thread(server.copy_to, tmp_path / "backup")
            await nodes.start()
            nodes.meet(busy.client)
            third = await busy.client.call("count", id=8, at=2, n=20, gate="g", pauses=[5, 10])
            nodes.open("g/5")
            assert await busy.client.result("announce", n=2, start=3) == "announced 2"
            await busy.saw(10, 4)
            await until(lambda: third.progress[-1:] == [10])
            await put_back(server, backup)
            assert [ledger.has(told) for told in (*busy.counts, busy.alone, third)] == [5, 5, 2, 0]
            await busy.finish(nodes)
            await busy.client.ended()
            assert third.text == "counted to 20"
            assert await busy.client.result("announce", n=1, start=5, at=2) == "announced 1"
            await until(lambda: busy.alone.notices[-1:] == [5])
            await nodes.judge(ledger, whole=False)
            await nodes.is_well()
