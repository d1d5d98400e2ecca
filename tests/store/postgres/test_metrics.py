"""A PostgreSQL store reports its metrics; read from real scrapes."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import asyncpg
import pytest

from perdure._core.ids import NodeId
from perdure._core.retention import Cutoffs
from perdure.errors import StoreUnavailable
from perdure.store.postgres import store as postgres_store
from perdure.store.postgres.address import parse_address
from perdure.store.postgres.store import READERS, PostgresStore
from perdure.store.postgres.sweep import SLOTS
from perdure.store.postgres.wakeups import MANY_NODES
from perdure.store.steps import OpenStream, PutSession
from perdure.telemetry.prometheus import METRICS
from perdure.testing._values import NODE, STREAM, a_session, a_stream, an_append, dead_nodes, some_events
from tests.cluster.conftest import Node, Pair
from tests.support.servers.in_process import Site, serve, until
from tests.support.servers.tool_server import ToolServer
from tests.support.stores.postgres import Server, server_url, store_url
from tests.support.stores.postgres_roles import Operator
from tests.support.stores.shared_store import BUSY_SECONDS
from tests.telemetry.test_metrics import Numbers, numbers, of, scraped

pytestmark = pytest.mark.anyio

OF_STORE = {metric.name for metric in METRICS if metric.help.endswith("(Stores on a server.)")}


async def page_of(site: Site) -> Numbers:
    return numbers((await scraped(site)).text)


def by_node(page: Numbers, name: str, **labels: str) -> dict[str, float]:
    """The samples of a metric by their nodes."""
    wanted = set(labels.items())
    return {
        dict(found)["node"]: value
        for (metric, found), value in page.items()
        if metric == name and wanted <= set(found) and "node" in dict(found)
    }


def figures(store: PostgresStore) -> Mapping[str, float]:
    return store.measures().figures


# --- Facts of nodes ------------------------------------------------------------------------------------------------


async def test_whichever_node_is_scraped_it_shows_how_the_store_fares_for_both() -> None:
    url = store_url()
    shops = ToolServer(), ToolServer()
    async with (
        serve(shops[0].server, store=PostgresStore(url, timeout=BUSY_SECONDS), lease=4.0) as a,
        serve(shops[1].server, store=PostgresStore(url, timeout=BUSY_SECONDS), lease=4.0) as b,
    ):
        pair = Pair(a=Node(site=a, shop=shops[0]), b=Node(site=b, shop=shops[1]))
        await until(lambda: a.app.other_nodes() and b.app.other_nodes())
        at_a, at_b = await pair.join()
        wire = await at_a.call("count", n=4, gate="g", pauses=[2], token=1)
        await wire.messages(2)
        await wire.drop()
        resumed = await at_b.get(wire.last_id)
        shops[0].open("g/2")
        await resumed.rest()
        page: Numbers = {}

        async def is_told() -> bool:
            """What A has sent, and B has heard, is on the page of A."""
            page.clear()
            page.update(await page_of(a))
            sent = by_node(page, "perdure_store_hints_total", direction="sent")
            heard = by_node(page, "perdure_store_hints_total", direction="heard")
            return len(sent) == 2 and sum(sent.values()) > 0 and sum(heard.values()) > 0

        await until(is_told)
        for name in ("commit", "read"):
            counts = by_node(page, f"perdure_store_{name}_seconds_count")
            assert len(counts) == 2
            assert all(count > 0 for count in counts.values())
            [total, *_] = by_node(page, f"perdure_store_{name}_seconds_sum").values()
            assert 0 < total < BUSY_SECONDS
        assert set(by_node(page, "perdure_store_polls").values()) == {0}
        assert all(idle >= 1 for idle in by_node(page, "perdure_store_connections", state="idle").values())
        # A histogram has its samples under longer names. There is no standby, and no slot was begun yet.
        names = {name.removesuffix("_count") for name, _ in page}
        missing = {"replication_lag_bytes", "replication_lag_seconds", "rotated_timestamp_seconds"}
        assert OF_STORE - names == {f"perdure_store_{name}" for name in missing}


async def test_a_store_without_a_server_has_none_of_it() -> None:
    async with serve(ToolServer().server) as site:
        await site.join()
        names = {name.removesuffix("_count") for name, _ in await page_of(site)}
        assert "perdure_append_seconds" in names
        assert not names & OF_STORE


async def test_a_scrape_shows_tables_and_slots() -> None:
    store = PostgresStore(store_url(), timeout=BUSY_SECONDS)
    async with serve(ToolServer().server, store=store) as site:
        await site.join()
        now = store.clock()
        await store.sweep(Cutoffs(events=now - 3_600, answers=now - 7_200))
        page = await page_of(site)
        slots = [f"{part}_{slot}" for part, count in SLOTS.items() for slot in range(count)]
        for table in ("session", "stream", "call", *slots):
            assert (of(page, "perdure_store_bytes", table=table) or 0) > 0
            assert of(page, "perdure_store_rows", table=table) is not None
        for part in SLOTS:
            since = of(page, "perdure_store_rotated_timestamp_seconds", part=part)
            assert since is not None
            assert now <= since <= store.clock()
        assert set(by_node(page, "perdure_store_slots_total").values()) == {0}


async def test_sizes_are_looked_at_once_a_minute_however_often_a_scrape_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with PostgresStore(store_url(), timeout=BUSY_SECONDS) as store:
        fence = await store.join(NODE)
        await store.commit([PutSession(record=a_session()), OpenStream(record=a_stream(fence))])
        before = (await store.survey()).sizes
        await store.commit([an_append(fence, some_events(1, 2_000))])
        assert (await store.survey()).sizes == before
        monkeypatch.setattr(postgres_store, "SURVEY_SECONDS", 0.0)
        assert (await store.survey()).sizes["event_0"] > before["event_0"]


# --- Connections ----------------------------------------------------------------------------------------------------


async def test_work_that_waits_for_a_connection_is_counted(operator: Operator) -> None:
    url = store_url()
    async with PostgresStore(url, timeout=BUSY_SECONDS) as store:
        await store.join(NODE)
        async with operator.transaction():
            await operator.execute(f"LOCK TABLE {parse_address(url).schema}.stream IN ACCESS EXCLUSIVE MODE")
            reads = [asyncio.create_task(store.read(STREAM, after=0, limit=1)) for _ in range(READERS + 3)]
            await until(lambda: figures(store)["waiting"] == 3)
            assert figures(store)["connections_busy"] == READERS
        assert await asyncio.gather(*reads) == [[]] * (READERS + 3)
        now = figures(store)
        assert (now["waiting"], now["connections_busy"], now["connections_idle"]) == (0, 0, READERS + 1)
        assert now["connections_lost"] == 0
        assert (
            sum(store.measures().seconds["read"].counts) == READERS + 3 + 2
        )  # to join: the listener's own word, and the row


async def test_connections_that_are_lost_are_counted(operator: Operator) -> None:
    name = f"lost_{STREAM}_{id(operator)}"
    async with PostgresStore(f"{store_url()}&application_name={name}", timeout=BUSY_SECONDS) as store:
        fence = await store.join(NODE)
        await store.commit([PutSession(record=a_session()), OpenStream(record=a_stream(fence))])
        await store.read(STREAM, after=0, limit=1)
        cut = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = $1"
        count = await operator.fetchval(cut, name)
        assert count == 3  # the writer's, a reader's, the listener's

        async def works() -> bool:
            """The writer and the reader connect when they are needed."""
            try:
                await store.commit([an_append(fence, some_events(1, 1))])
                await store.read(STREAM, after=0, limit=1)
            except StoreUnavailable:
                return False
            return figures(store)["connections_lost"] == float(count)

        await until(works)


async def test_one_of_many_nodes_reports_that_it_polls() -> None:
    async with PostgresStore(store_url(), timeout=BUSY_SECONDS) as store:
        await store.join(NODE)
        mine = store.liveness(NODE, lease=1_000.0, monotonic=lambda: 0.0)
        await dead_nodes(mine)
        assert figures(store)["polls"] == 0
        for number in range(MANY_NODES):
            await store.join(NodeId(f"node-{number}"))
        await dead_nodes(mine)
        assert figures(store)["polls"] == 1


# --- Standbys -------------------------------------------------------------------------------------------------------


@pytest.fixture
async def primary_and_standby(tmp_path: Path) -> AsyncIterator[tuple[Server, Server]]:
    server_url()  # skips where there is no server
    primary, standby = Server(tmp_path / "primary"), Server(tmp_path / "standby")
    for server in (primary, standby):
        server.data.parent.mkdir()
    await asyncio.to_thread(primary.make)
    await asyncio.to_thread(primary.start)
    try:
        backup = ("pg_basebackup", "-D", standby.data, "-d", primary.url, "-R", "-c", "fast", "--no-sync")
        await asyncio.to_thread(standby.run, *backup)
        await asyncio.to_thread(standby.start)
        try:
            yield primary, standby
        finally:
            await asyncio.to_thread(standby.stop)
    finally:
        await asyncio.to_thread(primary.stop)
        shutil.rmtree(tmp_path, ignore_errors=True)


async def test_the_lag_of_a_standby_is_shown_to_a_role_that_may_see_it(
    primary_and_standby: tuple[Server, Server],
) -> None:
    primary, standby = primary_and_standby
    url = primary.url
    operator, at_standby = await asyncpg.connect(primary.url), await asyncpg.connect(standby.url)
    store = PostgresStore(url, timeout=BUSY_SECONDS)
    async with serve(ToolServer().server, store=store) as site:

        async def lags() -> dict[str, float]:
            return {
                name.removeprefix("perdure_store_replication_"): value
                for (name, labels), value in (await page_of(site)).items()
                if name.startswith("perdure_store_replication_") and dict(labels) == {"standby": "walreceiver"}
            }

        await until(lags)
        await at_standby.execute("SELECT pg_wal_replay_pause()")
        await site.join()

        async def is_behind() -> bool:
            found = await lags()
            return found["lag_bytes"] > 0 and found["lag_seconds"] >= 0

        await until(is_behind)
        await at_standby.execute("SELECT pg_wal_replay_resume()")

        async def has_caught_up() -> bool:
            return (await lags())["lag_bytes"] == 0

        await until(has_caught_up)
        await operator.execute("CREATE ROLE plain LOGIN; GRANT ALL ON SCHEMA perdure TO plain")
        await operator.execute("GRANT ALL ON ALL TABLES IN SCHEMA perdure TO plain")
        async with PostgresStore(url.replace("postgres@", "plain@"), timeout=BUSY_SECONDS) as plain:
            survey = await plain.survey()
            assert survey.sizes["session"] > 0
            assert survey.lag_bytes == {}
    await operator.close()
    await at_standby.close()
