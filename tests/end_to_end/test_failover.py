"""A PostgreSQL primary dies, and its standby is promoted, while nodes run calls on it (promises 1 to 4)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from perdure._core.codes import OUTCOME_UNKNOWN
from tests.support.clients.outage_clients import Ledger
from tests.support.processes.postgres_nodes import Busy, fleet
from tests.support.proxies.cutting_proxy import CuttingProxy, cutting_proxy
from tests.support.servers.in_process import until
from tests.support.stores.postgres_faults import OwnServer, hosts, own_server

WAITS_FOR_NO_STANDBY = {"synchronous_standby_names": ""}

pytestmark = [pytest.mark.anyio, pytest.mark.long]


@dataclass(frozen=True, kw_only=True)
class Replicated:
    """A primary, its standby, and the way by which the standby gets what the primary writes."""

    primary: OwnServer
    standby: OwnServer
    link: CuttingProxy

    @property
    def url(self) -> str:
        return hosts(self.primary, self.standby)

    async def caught_up(self) -> None:
        """Wait until the standby has replayed what the primary has written."""
        [(end,)] = await asyncio.to_thread(self.primary.tell, "SELECT pg_current_wal_insert_lsn()::text")
        reached = f"SELECT pg_last_wal_replay_lsn() >= '{end}'"
        await until(lambda: asyncio.to_thread(lambda: self.standby.tell(reached) == [(True,)]))

    async def fail_over(self) -> None:
        await asyncio.to_thread(self.primary.kill)
        await asyncio.to_thread(self.standby.promote)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnServer]:
    """An empty server that the servers of the stories are copies of: that is faster than to make each."""
    with own_server(tmp_path_factory.mktemp("template")) as server:
        yield server


@asynccontextmanager
async def replicated(
    template: OwnServer, folder: Path, settings: Mapping[str, str] | None = None
) -> AsyncIterator[Replicated]:
    primary = await asyncio.to_thread(lambda: template.copy_to(folder / "primary", settings=settings))
    standby: OwnServer | None = None
    try:
        await asyncio.to_thread(primary.start)
        async with cutting_proxy(primary.port) as link:
            standby = await asyncio.to_thread(
                lambda: primary.copy_to(folder / "standby", port=link.port, standby=True, settings=WAITS_FOR_NO_STANDBY)
            )
            await asyncio.to_thread(standby.start)
            yield Replicated(primary=primary, standby=standby, link=link)
    finally:
        for server in (primary, standby):
            if server is not None:
                await asyncio.to_thread(server.end)


async def test_a_standby_that_lagged_is_promoted_and_what_it_lacks_is_told(template: OwnServer, tmp_path: Path) -> None:
    """Calls go on at their nodes and are answered once; a question that was lost is asked again; a session that only
    the lost end knew is gone."""
    async with replicated(template, tmp_path) as servers, fleet(servers.url) as nodes:
        busy = await Busy.begin(nodes)
        short = await busy.client.call("count", id=5, at=0, n=6, gate="short", pauses=[3])
        await until(lambda: short.progress[-1:] == [3])
        early = short.position
        await busy.stored(Ledger(servers.primary.url).has)
        await servers.caught_up()
        servers.link.hold()
        nodes.open("g/5")
        nodes.open("short/3")
        await until(lambda: short.is_over)
        assert await busy.client.result("announce", n=2, start=3, at=1) == "announced 2"
        asked_late = await busy.client.call("ask", id=4, at=0, question="When?")
        await busy.saw(10, 4)
        late = await nodes.join(at=1)
        counting = await late.call("count", id=1, at=1, n=20, gate="late", pauses=[5])
        await until(lambda: counting.progress[-1:] == [5])
        await busy.stored(Ledger(servers.primary.url).has)
        await servers.fail_over()
        ledger = Ledger(servers.standby.url)
        assert [ledger.has(told) for told in (*busy.counts, busy.alone, asked_late, counting)] == [5, 5, 2, 0, 0]
        nodes.open("g/10")
        await busy.saw(15, 4)
        await until(lambda: len(asked_late.asks) > 1)
        await busy.client.answer_all(**{"When?": "Now"})
        await busy.finish(nodes)
        nodes.open("late/5")
        await late.ended()
        unknown = (await (await busy.client.peers[1].get(early)).rest())[-1]
        assert (unknown["id"], unknown["error"]["code"]) == (5, OUTCOME_UNKNOWN), "nothing knows the lost answer"
        assert short.text == "counted to 6"
        assert (await late.insist(late.peers[0].tool("count", n=1))).status_code == 404
        assert (await nodes.join(at=1)).session != late.session
        await nodes.judge(ledger, whole=False)
        await nodes.is_well()


async def test_a_node_that_the_promoted_server_does_not_know_joins_again_and_its_calls_go_on(
    template: OwnServer, tmp_path: Path
) -> None:
    """It joined after the lag began, so the promoted server has nothing of it, and nothing of it is taken over."""
    async with replicated(template, tmp_path) as servers, fleet(servers.url) as nodes:
        old = await nodes.join(at=0)
        await servers.caught_up()
        servers.link.hold()
        await nodes.start()
        client = await nodes.join(at=2)
        new = await client.call("count", id=1, at=2, n=20, gate="g", pauses=[5])
        nodes.meet(old)
        known = await old.call("count", id=2, at=2, n=20, gate="g", pauses=[5])
        await until(lambda: new.progress[-1:] == known.progress[-1:] == [5])
        await servers.fail_over()
        nodes.open("g/5")
        await client.ended()
        await old.ended()
        assert new.text == known.text == "counted to 20"
        assert nodes.nodes[2].shop.seen == ["counted 20"] * 2
        assert (await client.insist(client.peers[2].tool("count", n=1))).status_code == 404, "its session was lost"
        for at in (0, 2):
            assert await old.result("count", n=1, at=at) == "counted to 1"
        await until(lambda: all(len(node.site.app.other_nodes()) == 2 for node in nodes.nodes))
        await nodes.judge(Ledger(servers.standby.url), whole=False)
        await nodes.is_well()


async def test_a_standby_that_commits_wait_for_has_everything(template: OwnServer, tmp_path: Path) -> None:
    """With synchronous replication nothing is shown that a promoted standby does not have."""
    settings = {"synchronous_standby_names": "standby"}
    async with replicated(template, tmp_path, settings) as servers, fleet(servers.url) as nodes:
        busy = await Busy.begin(nodes)
        nodes.open("g/5")
        await busy.saw(10, 2)
        await servers.fail_over()
        nodes.open("g/10")
        assert await busy.client.result("announce", n=1, start=3) == "announced 1"
        await busy.saw(15, 3)
        await busy.finish(nodes)
        assert [len(told.gaps) for told in busy.client.streams] == [0] * 4
        assert len(busy.asking.asks) == 1
        await nodes.judge(Ledger(servers.standby.url), whole=True)


async def test_claims_and_mail_that_were_lost_hold_nothing_up_and_no_fence_comes_twice(
    template: OwnServer, tmp_path: Path
) -> None:
    """The home of a session moved after the lag began, and an answer was on its way between two nodes."""
    fences = "SELECT fence FROM perdure.stream WHERE generation > 1"
    async with replicated(template, tmp_path) as servers, fleet(servers.url) as nodes:
        client = await nodes.join()
        alone = await client.listen(at=1)
        assert await client.result("announce", n=2) == "announced 2"
        await until(lambda: alone.notices == [1, 2])
        asking = await client.call("ask", id=3, at=0, question="Why?")
        await until(lambda: asking.asks)
        await servers.caught_up()
        before = {row[0] for row in Ledger(servers.primary.url).rows(fences)}
        servers.link.hold()
        subscribed = client.peers[1].request("resources/subscribe", {"uri": "a://1"})
        assert (await client.insist(subscribed, at=1)).status_code == 200
        assert await client.result("announce", n=2, start=3, at=1) == "announced 2"
        await until(lambda: alone.notices[-2:] == [3, 4])
        assert alone.events[-1][0].generation > 1, "the home has moved"
        lost = {row[0] for row in Ledger(servers.primary.url).rows(fences)} - before
        await servers.fail_over()
        await client.answer_all(**{"Why?": "Because"})
        await client.ended()
        assert asking.text == "Because"
        assert await client.result("announce", n=2, start=5, at=1) == "announced 2"
        assert await client.result("announce", n=1, start=7, at=0) == "announced 1"
        await until(lambda: {5, 6, 7} <= {*alone.notices})
        ledger = Ledger(servers.standby.url)
        await until(lambda: asyncio.to_thread(lambda: ledger.open_calls() == 0))
        after = {row[0] for row in ledger.rows(fences)}
        assert lost
        assert not lost & after
        await nodes.judge(ledger, whole=False)
