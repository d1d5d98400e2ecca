"""A PostgreSQL server restarts, or is killed, while two nodes run calls on it (promises 1 to 4)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clients.outage_clients import Ledger
from tests.support.processes.postgres_nodes import Busy, fleet
from tests.support.servers.in_process import until
from tests.support.stores.postgres_faults import FROM_THE_DISK, WRITES_LATE, OwnServer, hosts, own_server

pytestmark = [pytest.mark.anyio, pytest.mark.long]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnServer]:
    with own_server(tmp_path_factory.mktemp("server"), FROM_THE_DISK) as server:
        yield server


@pytest.mark.parametrize("how", ["restart", "crash"])
async def test_a_server_that_comes_back_has_everything_that_was_shown(server: OwnServer, how: str) -> None:
    """With synchronous_commit=on: what clients see was written before. Nothing is asked again, and no gap is told."""
    schema = f"back_{how}"
    ledger = Ledger(server.url, schema)
    async with fleet(hosts(server, schema=schema)) as nodes:
        busy = await Busy.begin(nodes)
        nodes.open("g/5")
        comes_back = asyncio.create_task(asyncio.to_thread(getattr(server, how)))
        await busy.saw(10, 2)  # live traffic goes on
        nodes.open("g/10")
        assert await busy.client.result("announce", n=1, start=3) == "announced 1"
        await busy.saw(15, 3)
        await comes_back
        await busy.finish(nodes)
        assert [len(told.gaps) for told in busy.client.streams] == [0] * 4
        assert len(busy.asking.asks) == 1
        assert [node.shop.seen.count("counted 20") for node in nodes.nodes] == [1, 1]
        await nodes.judge(ledger, whole=True)
        await nodes.is_well()


async def test_a_server_that_answers_before_it_writes_loses_the_end_and_that_is_told(tmp_path: Path) -> None:
    """With synchronous_commit=off: gaps are told, the question is asked again, and each call is answered once."""
    with own_server(tmp_path, FROM_THE_DISK | WRITES_LATE) as server:
        ledger = Ledger(server.url)
        async with fleet(hosts(server)) as nodes:
            busy = await Busy.begin(nodes)
            await busy.stored(ledger.has)
            await asyncio.to_thread(server.stop_writing)
            nodes.open("g/5")
            assert await busy.client.result("announce", n=2, start=3) == "announced 2"
            later = await busy.client.call("ask", id=4, at=0, question="When?")
            await until(lambda: later.asks)
            await busy.saw(10, 4)
            await busy.stored(ledger.has)
            await asyncio.to_thread(server.crash)
            lost = [told for told in (*busy.counts, busy.alone, later) if ledger.has(told) < told.events[-1][0].seq]
            assert lost == [*busy.counts, busy.alone, later]
            nodes.open("g/10")
            await busy.saw(15, 4)
            await until(lambda: len(later.asks) > 1)
            await busy.client.answer_all(**{"When?": "Now"})
            await busy.finish(nodes)
            await nodes.judge(ledger, whole=False)
            assert (later.text, len(later.asks), len(busy.asking.asks)) == ("Now", 2, 1)
            await nodes.is_well()
