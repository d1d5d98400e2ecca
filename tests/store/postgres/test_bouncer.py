"""The store behind a real PgBouncer: in each of its modes, with few sessions, and when it pauses or dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TypeAlias

import asyncpg
import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from perdure._core.ids import NodeId, StreamId
from perdure.errors import StoreError, StoreUnavailable
from perdure.store.interface import Store
from perdure.store.notes import probe
from perdure.store.postgres.address import parse_address
from perdure.store.postgres.store import PostgresStore
from perdure.store.steps import PutSession, SendMail, Step
from perdure.testing import check_store
from perdure.testing._values import NODE, OTHER, SESSION, a_session, an_append, dead_nodes, numbers, some_events
from tests.store.machine import store_machine
from tests.store.postgres.test_server import opened
from tests.support.proxies.pgbouncer import Bouncer, bouncing
from tests.support.proxies.postgres_proxy import Role, postgres_proxy
from tests.support.servers.in_process import until
from tests.support.stores.postgres import Server, connection, new_schema, server_url, store_url
from tests.support.stores.shared_store import BUSY_SECONDS, ON_POSTGRES

pytestmark = pytest.mark.anyio

Session: TypeAlias = "asyncpg.Connection[asyncpg.Record]"


@pytest.fixture
async def bouncer(tmp_path: Path) -> AsyncIterator[Bouncer]:
    """In transaction mode."""
    async with bouncing(tmp_path) as bouncer:
        yield bouncer


class Stores:
    """Stores by name, each in a schema of its own, behind a bouncer."""

    def __init__(self, bouncer: Bouncer) -> None:
        self._bouncer = bouncer
        self._schemas: dict[str, str] = {}

    def make(self, name: str) -> Store:
        schema = self._schemas.setdefault(name, new_schema())
        return PostgresStore(f"{self._bouncer.url}?schema={schema}", timeout=5.0)

    @contextlib.contextmanager
    def hang(self, name: str) -> Iterator[None]:
        """Another program has locked the tables, and does not come to an end."""
        schema = self._schemas[name]
        with connection(store_url(schema)) as run:
            run("BEGIN")
            run(f"LOCK TABLE {schema}.stream IN ACCESS EXCLUSIVE MODE")
            yield
            run("ROLLBACK")


@pytest.mark.skipif(not ON_POSTGRES, reason="takes a minute: PERDURE_TEST_STORE=postgres runs it")
@pytest.mark.timeout(300)
async def test_the_store_keeps_its_promises_behind_a_pooler(bouncer: Bouncer) -> None:
    """Promises 1 to 23: no session of the server is its own."""
    stores = Stores(bouncer)
    await check_store(stores.make, hang=stores.hang, at_once=4)


def test_histories_behind_a_pooler_show_what_the_model_shows(tmp_path: Path) -> None:
    bouncer = Bouncer(tmp_path, server_url())
    bouncer.start()
    try:
        machine = store_machine(Stores(bouncer).make)
        run_state_machine_as_test(machine, settings=settings(max_examples=5, stateful_step_count=20))
    finally:
        bouncer.stop(signal.SIGKILL)


# --- Notifications --------------------------------------------------------------------------------------------------


def polling_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if getattr(record, "action", "") == "store.no_notifications"]


async def test_a_process_behind_a_pooler_logs_once_that_it_gets_no_notifications_and_polls(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Promise 8. It leaves nothing in a session that the pooler lends to other programs."""
    async with (
        bouncing(tmp_path, default_pool_size="1") as bouncer,
        PostgresStore(url := f"{bouncer.url}?schema={new_schema()}", timeout=BUSY_SECONDS) as here,
        PostgresStore(url, timeout=BUSY_SECONDS) as there,
    ):
        await here.join(NODE)
        [sentence] = polling_warnings(caplog)
        assert "this process polls instead; name a direct connection with ?listen=" in sentence
        await here.join(NodeId("second"))
        await there.join(OTHER)
        assert len(polling_warnings(caplog)) == 2
        told: asyncio.Queue[Sequence[StreamId]] = asyncio.Queue()
        there.subscribe(OTHER, lambda streams: told.put_nowait(streams))
        await here.commit([SendMail(node=OTHER, message=b"look")])
        assert await told.get() == ()
        assert [mail.message for mail in await there.mail(OTHER)] == [b"look"]
        borrower = await asyncpg.connect(bouncer.url, statement_cache_size=0)
        locks = "SELECT 1 FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'"
        assert await borrower.fetch(locks) == []
        assert await borrower.fetch("SELECT pg_listening_channels()") == []
        nodes = await borrower.fetch(f"SELECT lock FROM {parse_address(url).schema}.node")
        assert [node[0] for node in nodes] == [None] * 3
        await borrower.close()


async def test_a_process_notices_by_the_silence_that_it_gets_no_notifications_where_sessions_take_turns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a pooler is not seen to lend one session to two connections, because it lends another one each time."""
    async with bouncing(tmp_path, server_round_robin="1") as bouncer:
        busy = [await asyncpg.connect(bouncer.url, statement_cache_size=0) for _ in range(3)]
        await asyncio.gather(*(one.fetch("SELECT pg_sleep(0.2)") for one in busy))  # now it has three sessions
        async with PostgresStore(f"{bouncer.url}?schema={new_schema()}", timeout=BUSY_SECONDS) as store:
            await store.join(NODE)
            assert len(polling_warnings(caplog)) == 1
            told: asyncio.Queue[Sequence[StreamId]] = asyncio.Queue()
            store.subscribe(NODE, lambda streams: told.put_nowait(streams))
            await store.commit([PutSession(record=a_session())])
            assert await told.get() == ()
        for one in busy:
            await one.close()


async def test_a_look_is_told_of_a_commit_when_it_can_be_seen_and_not_before(tmp_path: Path) -> None:
    """Promise 8: a commit that waits for a standby is in the server's log already, and its readers would find nothing
    yet; a notified event must exist."""
    server = Server(tmp_path)
    await asyncio.to_thread(server.make)
    await asyncio.to_thread(server.start)
    try:
        async with bouncing(tmp_path, server.url) as bouncer, AsyncExitStack() as stack:
            url = f"{bouncer.url}?schema=s"
            here, there = [await stack.enter_async_context(PostgresStore(url, timeout=BUSY_SECONDS)) for _ in range(2)]
            told: asyncio.Queue[Sequence[StreamId]] = asyncio.Queue()
            await there.join(OTHER)
            there.subscribe(OTHER, lambda streams: told.put_nowait(streams))
            operator = await asyncpg.connect(server.url)
            stack.push_async_callback(operator.close)
            await _change(operator, "SET synchronous_standby_names = 'absent'")
            probe = await asyncpg.connect(server.url)
            stack.push_async_callback(probe.close)
            await until(lambda: _commits_wait(operator, probe))
            putting = asyncio.create_task(here.commit([PutSession(record=a_session())]))
            await until(lambda: operator.fetchval("SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"))
            assert await there.session(SESSION) is None
            await _looked_twice(operator)
            while not told.empty():
                told.get_nowait()
            await _change(operator, "RESET synchronous_standby_names")
            assert await told.get() == ()
            assert await there.session(SESSION) is not None
            assert list(await putting) == [None]
    finally:
        await asyncio.to_thread(server.stop)


async def _change(operator: Session, setting: str) -> None:
    await operator.execute(f"ALTER SYSTEM {setting}")
    before = await operator.fetchval("SELECT pg_conf_load_time()")
    await operator.execute("SELECT pg_reload_conf()")
    await until(lambda: operator.fetchval("SELECT pg_conf_load_time() > $1", before))


async def _commits_wait(operator: Session, probe: Session) -> bool:
    """Whether a commit waits for a standby already: the server's checkpointer reads the setting after the others."""
    writing = asyncio.create_task(probe.execute("CREATE TABLE IF NOT EXISTS probe (); DROP TABLE probe"))
    pid = probe.get_server_pid()
    while not writing.done():
        if await operator.fetchval("SELECT 1 FROM pg_stat_activity WHERE pid = $1 AND wait_event = 'SyncRep'", pid):
            await operator.execute("SELECT pg_cancel_backend($1)", pid)
            await writing
            return True
    return False


async def _looked_twice(operator: Session) -> None:
    """Two polls have begun since now, so one has ended."""
    look = "SELECT max(query_start) > $1 FROM pg_stat_activity WHERE query LIKE '%answered < asked%'"
    for _ in range(2):
        since = await operator.fetchval("SELECT clock_timestamp()")
        await until(partial(operator.fetchval, look, since))


@pytest.mark.parametrize("listens_at", ["the server", pytest.param("a pooler in session mode", marks=pytest.mark.long)])
async def test_a_second_address_makes_a_process_hear(
    bouncer: Bouncer, tmp_path: Path, listens_at: str, caplog: pytest.LogCaptureFixture
) -> None:
    schema = new_schema()
    async with AsyncExitStack() as stack:
        direct = server_url().partition("?")[0]
        if listens_at != "the server":
            (tmp_path / "second").mkdir()
            second = await stack.enter_async_context(bouncing(tmp_path / "second", pool_mode="session"))
            direct = second.url
        url = f"{bouncer.url}?schema={schema}&listen={direct}"
        here, there = [await stack.enter_async_context(PostgresStore(url, timeout=BUSY_SECONDS)) for _ in range(2)]
        await here.join(NODE)
        await there.join(OTHER)
        assert polling_warnings(caplog) == []
        told: asyncio.Queue[Sequence[StreamId]] = asyncio.Queue()
        there.subscribe(OTHER, lambda streams: told.put_nowait(streams))
        here.hint(OTHER, [StreamId("grown")])
        assert await told.get() == ("grown",)
        mine = here.liveness(NODE, lease=1_000.0, monotonic=lambda: 0.0)
        assert list(await mine.holders()) == []


async def test_a_second_address_that_leads_nowhere_is_told_at_the_start_and_nothing_is_made() -> None:
    schema, nowhere = new_schema(), "postgresql://postgres:secret@127.0.0.1:1/postgres"
    store = PostgresStore(f"{store_url(schema)}&listen={nowhere}")
    with pytest.raises(StoreUnavailable, match=r"postgres:\*\*\*@127.0.0.1:1/postgres, which `listen` names"):
        await store.open()
    with connection(server_url()) as run:
        assert not run("SELECT 1 FROM pg_namespace WHERE nspname = $1", schema)


async def test_a_pooler_in_session_mode_is_like_the_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with bouncing(tmp_path, pool_mode="session") as bouncer:
        url = f"{bouncer.url}?schema={new_schema()}"
        async with PostgresStore(url, timeout=BUSY_SECONDS) as here, PostgresStore(url, timeout=BUSY_SECONDS) as there:
            await here.join(NODE)
            await there.join(OTHER)
            told: asyncio.Queue[Sequence[StreamId]] = asyncio.Queue()
            there.subscribe(OTHER, lambda streams: told.put_nowait(streams))
            here.hint(OTHER, [StreamId("grown")])
            assert await told.get() == ("grown",)
            assert polling_warnings(caplog) == []


# --- Modes and settings ---------------------------------------------------------------------------------------------


async def test_a_pooler_in_statement_mode_serves_a_schema_that_is_there_and_makes_none(tmp_path: Path) -> None:
    """One commit is one statement. Only what makes the schema is a transaction of several."""
    schema = new_schema()
    async with bouncing(tmp_path, pool_mode="statement") as bouncer:
        behind = f"{bouncer.url}?schema={schema}"
        with pytest.raises(StoreError, match=r"takes no transactions: .* `perdure store init`") as caught:
            await PostgresStore(behind).open()
        assert "\n" not in str(caught.value)
        async with PostgresStore(store_url(schema), timeout=BUSY_SECONDS):
            pass
        async with PostgresStore(behind, timeout=BUSY_SECONDS) as store:
            fence = await opened(store)
            assert list(await store.commit([an_append(fence, some_events(1, 5))])) == [None]
            assert await numbers(store) == [1, 2, 3, 4, 5]
            await probe(store, 10)


async def test_a_setting_that_the_pooler_does_not_take_is_refused_by_name(bouncer: Bouncer) -> None:
    for setting in ("statement_timeout=5000", "synchronous_commit=off"):
        name = setting.partition("=")[0]
        schema = new_schema()
        with pytest.raises(StoreError, match=f"parameter: {name}; the pooler takes no such setting: leave it out"):
            await PostgresStore(f"{bouncer.url}?schema={schema}&{setting}").open()
        with connection(server_url()) as run:
            assert run("SELECT 1 FROM pg_namespace WHERE nspname = $1", schema) == []


async def test_a_setting_that_the_pooler_ignores_is_no_obstacle(tmp_path: Path) -> None:
    async with bouncing(tmp_path, ignore_startup_parameters="synchronous_commit") as bouncer:
        url = f"{bouncer.url}?schema={new_schema()}&synchronous_commit=off"
        async with PostgresStore(url, timeout=BUSY_SECONDS) as store:
            await probe(store, 1)


# --- Few sessions, and none -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["1", pytest.param("2", marks=pytest.mark.long)])
async def test_many_nodes_wait_their_turn_for_the_few_sessions_of_a_pool(tmp_path: Path, size: str) -> None:
    """Work that waits in the pooler is late, not lost; and no node holds a session while it needs another one."""
    async with bouncing(tmp_path, default_pool_size=size) as bouncer, AsyncExitStack() as stack:
        url = f"{bouncer.url}?schema={new_schema()}"
        nodes = [NodeId(f"node-{number}") for number in range(5)]
        stores = [await stack.enter_async_context(PostgresStore(url, timeout=BUSY_SECONDS)) for _ in nodes]
        for store, node in zip(stores, nodes, strict=True):
            await store.join(node)

        async def work(store: Store, node: NodeId) -> None:
            mine = store.liveness(node, lease=1_000.0, monotonic=lambda: 0.0)
            for number in range(5):
                puts = [PutSession(record=a_session(f"{node} {number}"))]
                mails = [SendMail(node=other, message=node.encode()) for other in nodes]
                assert list(await store.commit([*puts, *mails])) == [None] * 6
                await mine.beat(b"{}")
                assert await dead_nodes(mine) == []

        await asyncio.gather(*map(work, stores, nodes))
        assert len(await stores[0].newest(limit=99)) == 25
        for store, node in zip(stores, nodes, strict=True):
            assert len(await store.mail(node)) == 25


async def _is_written(store: Store, steps: Sequence[Step]) -> bool:
    """Commits as the journal does, which tries again after a failure."""
    with contextlib.suppress(StoreUnavailable):
        return list(await store.commit(steps)) == [None] * len(steps)
    return False


@contextlib.asynccontextmanager
async def _restarted(bouncer: Bouncer) -> AsyncIterator[None]:
    await asyncio.to_thread(bouncer.stop, signal.SIGKILL)
    yield
    await asyncio.to_thread(bouncer.start)


@contextlib.asynccontextmanager
async def _paused(bouncer: Bouncer) -> AsyncIterator[None]:
    await bouncer.command("PAUSE")
    yield
    await bouncer.command("RESUME")


@contextlib.asynccontextmanager
async def _killed(bouncer: Bouncer) -> AsyncIterator[None]:
    await bouncer.command("KILL postgres")
    yield
    await bouncer.command("RESUME postgres")


@pytest.mark.parametrize(
    "away", [*(pytest.param(away, marks=pytest.mark.long) for away in (_restarted, _paused)), _killed]
)
async def test_a_pooler_that_was_away_is_found_again(
    bouncer: Bouncer, away: Callable[[Bouncer], contextlib.AbstractAsyncContextManager[None]]
) -> None:
    """Promises 3, 5 and 9: what fails meanwhile has a name, and repeating it is safe."""
    async with PostgresStore(f"{bouncer.url}?schema={new_schema()}", timeout=0.5) as store:
        fence = await opened(store)
        await store.commit([an_append(fence, some_events(1, 3))])
        again = [an_append(fence, some_events(4, 6))]
        async with away(bouncer):
            with pytest.raises(StoreUnavailable):
                await store.commit(again)
            with pytest.raises(StoreUnavailable):
                await store.newest(limit=1)
        await until(lambda: _is_written(store, again))
        assert await numbers(store) == [1, 2, 3, 4, 5, 6]


async def test_a_pooler_whose_login_failed_refuses_for_a_while_and_is_found_again(tmp_path: Path) -> None:
    """Promises 3, 5 and 9. RECONNECT cuts off a login that is under way, too, which counts as failed."""
    async with (
        postgres_proxy(server_url()) as proxy,
        bouncing(tmp_path, proxy.url(server_url())) as bouncer,
        PostgresStore(f"{bouncer.url}?schema={new_schema()}", timeout=0.5) as store,
    ):
        fence = await opened(store)
        proxy.hang(Role.NEW)
        before = set(proxy.links())
        await bouncer.command("RECONNECT")
        await until(lambda: set(proxy.links()) - before)  # the store polls whether anything was written
        await bouncer.command("RECONNECT")
        with pytest.raises(StoreUnavailable, match="server_login_retry"):
            await store.commit([an_append(fence, some_events(1, 1))])
        proxy.heal()
        await until(lambda: _is_written(store, [an_append(fence, some_events(1, 2))]))
        assert await numbers(store) == [1, 2]


async def test_sessions_that_the_pooler_makes_again_change_nothing(
    bouncer: Bouncer, caplog: pytest.LogCaptureFixture
) -> None:
    """RECONNECT closes each session of the server once its transaction has ended. A commit fails if a login for another
    connection of the store was under way, and nothing is logged."""
    caplog.set_level(logging.WARNING)
    async with PostgresStore(f"{bouncer.url}?schema={new_schema()}", timeout=BUSY_SECONDS) as store:
        fence = await opened(store)
        for number in range(1, 11):
            await bouncer.command("RECONNECT")
            await until(partial(_is_written, store, [an_append(fence, some_events(number, number))]))
        assert await numbers(store) == list(range(1, 11))
        assert len(polling_warnings(caplog)) == len(caplog.records) == 1
