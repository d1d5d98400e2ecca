"""What a server does to the store, and the store to a server: lost connections, locks, restarts, full slots."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import asyncpg
import pytest

from perdure._core.ids import Fence, NodeId, SessionId, StreamId
from perdure._core.leases import FREE_SHARE
from perdure._core.states import ClaimState
from perdure.errors import StoreUnavailable
from perdure.store.interface import open_call, reader_of
from perdure.store.postgres.address import parse_address
from perdure.store.postgres.store import PostgresStore
from perdure.store.steps import ChangeSession, OpenStream, PutSession, SendMail
from perdure.testing._values import (
    NODE,
    OTHER,
    SESSION,
    STREAM,
    a_call,
    a_session,
    a_stream,
    an_append,
    dead_nodes,
    numbers,
    some_events,
)
from tests.support.proxies.cutting_proxy import cutting_proxy
from tests.support.servers.in_process import until
from tests.support.stores.postgres import Server, server_url, store_url
from tests.support.stores.postgres_roles import Operator

pytestmark = pytest.mark.anyio

LEASE = 1_000.0
FREE = FREE_SHARE * LEASE


async def opened(store: PostgresStore) -> Fence:
    """Open a session and a stream of `NODE`, which joins; returns its fence."""
    fence = await store.join(NODE)
    refusals = await store.commit([PutSession(record=a_session()), OpenStream(record=a_stream(fence))])
    assert list(refusals) == [None, None]
    return fence


# --- Liveness -------------------------------------------------------------------------------------------------------


async def test_a_process_whose_lock_is_free_is_dead_a_third_of_its_lease_later() -> None:
    """Promise 11: one that cannot be looked up."""
    url, now = store_url(), 0.0
    async with PostgresStore(url, timeout=20.0) as here:
        await here.join(NODE)
        mine = here.liveness(NODE, lease=LEASE, monotonic=lambda: now)
        async with PostgresStore(url, timeout=20.0, process=lambda: None) as there:
            fence = await there.join(OTHER)
            await there.commit([PutSession(record=a_session()), OpenStream(record=a_stream(fence, node=OTHER))])
            now += FREE
            await mine.beat(b"{}")
            assert await dead_nodes(mine) == []
        assert await dead_nodes(mine) == []  # it may only have lost its connection
        now += FREE - 0.01
        assert await dead_nodes(mine) == []
        now += 0.02
        assert await dead_nodes(mine) == [OTHER]
        assert [stream.id for stream in await here.written_by(OTHER)] == [STREAM]


async def test_a_process_that_lives_on_the_same_machine_is_dead_by_its_lease_only() -> None:
    """Promise 11: its lock is free because it has lost its connection."""
    url, now = store_url(), 0.0
    async with PostgresStore(url, timeout=20.0) as here:
        await here.join(NODE)
        mine = here.liveness(NODE, lease=LEASE, monotonic=lambda: now)
        async with PostgresStore(url, timeout=20.0) as there:
            await there.join(OTHER)
        dead = []
        for _ in range(4):
            await mine.beat(b"{}")
            dead.append(await dead_nodes(mine))
            now += FREE
        assert dead == [[], [], [], [OTHER]]


async def test_a_process_that_lost_its_ear_takes_its_lock_again_and_hears_again(
    operator: Operator,
) -> None:
    url, now = store_url(), 0.0
    async with PostgresStore(url, timeout=20.0) as here, PostgresStore(url, timeout=20.0) as there:
        await here.join(NODE)
        await there.join(OTHER)
        told: asyncio.Queue[Sequence[StreamId]] = asyncio.Queue()
        there.subscribe(OTHER, lambda streams: told.put_nowait(streams))
        mine = here.liveness(NODE, lease=LEASE, monotonic=lambda: now)
        schema = parse_address(url).schema
        lock = await operator.fetchval(f"SELECT lock FROM {schema}.node WHERE id = $1", OTHER)
        cut = "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND objid = $1::bigint::oid"
        assert await operator.fetchval(cut, lock & 0xFFFFFFFF)
        assert await told.get() == ()  # it has missed what was said meanwhile
        for _ in range(2):
            now += FREE
            assert await dead_nodes(mine) == []
        here.hint(OTHER, [StreamId("grown")])
        assert await told.get() == ("grown",)


async def test_a_process_that_cannot_have_its_lock_back_beats_by_its_other_connections() -> None:
    """Promise 11: its lock is free for long, and other nodes see that it lives."""
    url, now = store_url(), 0.0
    address = parse_address(url)
    port = address.dsn.partition("@")[2].partition("/")[0].partition(":")[2]
    async with cutting_proxy(int(port)) as way, PostgresStore(url, timeout=20.0) as here:
        direct = address.dsn.replace(f":{port}", f":{way.port}")
        async with PostgresStore(f"{url}&listen={direct}", timeout=1.0) as there:
            await here.join(NODE)
            await there.join(OTHER)
            mine = here.liveness(NODE, lease=LEASE, monotonic=lambda: now)
            way.refuse()
            way.cut()

            async def beat_of_the_other() -> int:
                return {node.id: node.beat for node in await here.nodes()}[OTHER]

            for _ in range(3):
                assert await dead_nodes(mine) == []
                before = await beat_of_the_other()
                await until(partial(has_risen, beat_of_the_other, before))
                now += FREE
                assert await dead_nodes(mine) == []


async def has_risen(number: Callable[[], Awaitable[int]], before: int) -> bool:
    return await number() > before


# --- Nodes that were buried -----------------------------------------------------------------------------------------


MOMENTS = ["commit", "beat", *(pytest.param(at, marks=pytest.mark.long) for at in ("claim", "bury"))]
"""Where a process learns that the store does not know its node."""


@pytest.mark.parametrize("at", MOMENTS)
async def test_a_process_whose_node_was_buried_writes_nothing_more_and_knows_why(at: str) -> None:
    """Promise 11: it lives, and its lease lasts; but no node would settle what it accepts now."""
    url = store_url()
    async with PostgresStore(url, timeout=20.0) as here, PostgresStore(url, timeout=20.0) as there:
        fence = await opened(here)
        mine = here.liveness(NODE, lease=LEASE, monotonic=lambda: 0.0)
        await there.join(OTHER)
        assert await there.bury(NODE, heir=OTHER) == []
        claims = [mine.node_claim.at(0.0)]
        late = [OpenStream(record=a_stream(fence, "late"))]
        attempts: dict[str, Callable[[], Awaitable[object]]] = {
            "commit": lambda: here.commit(late),
            "claim": lambda: here.claim(STREAM, node=NODE, held=fence),
            "bury": lambda: here.bury(OTHER, heir=NODE),
        }
        if at == "beat":
            await mine.beat(b"{}")
        else:
            with pytest.raises(StoreUnavailable, match="have buried this one"):
                await attempts[at]()
        claims.append(mine.node_claim.at(0.0))
        assert claims == [ClaimState.HOLDING, ClaimState.BURIED]
        for attempt in attempts.values():
            with pytest.raises(StoreUnavailable, match="have buried this one"):
                await attempt()
        assert [stream.id for stream in await there.streams(SESSION)] == [STREAM]
        assert list(await there.commit([PutSession(record=a_session("goes on"))])) == [None]


@pytest.mark.parametrize("at", MOMENTS)
async def test_a_process_whose_node_the_server_has_lost_joins_again_and_goes_on(
    operator: Operator, at: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Promise 11: no node has buried it, so none has settled its calls. The server came back without its last moments,
    in which the node had joined."""
    url = store_url()
    schema = parse_address(url).schema
    async with PostgresStore(url, timeout=20.0) as here, PostgresStore(url, timeout=20.0) as there:
        fence = await opened(here)
        mine = here.liveness(NODE, lease=LEASE, monotonic=lambda: 0.0)
        await there.join(OTHER)
        await operator.execute(f"DELETE FROM {schema}.node WHERE id = $1", NODE)
        await operator.execute(f"DELETE FROM {schema}.mailbox WHERE node = $1", NODE)
        attempts: dict[str, Callable[[], Awaitable[object]]] = {
            "commit": lambda: here.commit([OpenStream(record=a_stream(fence, "late"))]),
            "claim": lambda: here.claim(STREAM, node=NODE, held=fence),
            "bury": lambda: here.bury(NodeId("a third one"), heir=NODE),
            "beat": lambda: mine.beat(b"{}"),
        }
        await attempts[at]()
        assert {node.id for node in await there.nodes()} == {NODE, OTHER}
        assert mine.node_claim.at(0.0) is ClaimState.HOLDING
        assert [record.message for record in caplog.records if "joins again" in record.message] != []
        assert list(await there.commit([SendMail(node=NODE, message=b"found")])) == [None]
        theirs = there.liveness(OTHER, lease=LEASE, monotonic=lambda: 0.0)
        assert await dead_nodes(theirs) == [], "its lock is the one that it holds"


async def test_the_last_thousand_burials_are_remembered(operator: Operator) -> None:
    url = store_url()
    schema = parse_address(url).schema
    async with PostgresStore(url, timeout=20.0) as store:
        await store.join(OTHER)
        await store.bury(OTHER, heir=NODE)
        for first, last, is_known in ((1, 999, True), (1_000, 1_000, False)):
            burials = f"SELECT {schema}.note_buried_1('node ' || n) FROM generate_series({first}, {last}) AS n"
            await operator.execute(burials)
            rows = await operator.fetch(f"SELECT node FROM {schema}.buried WHERE node = $1", OTHER)
            assert bool(rows) is is_known
            assert await operator.fetchval(f"SELECT count(*) FROM {schema}.buried") == 1_000


async def test_a_burial_waits_for_the_commit_that_is_on_its_way(operator: Operator) -> None:
    """So a call that it accepts exists when the burying node reads again, or is refused."""
    url = store_url()
    schema = parse_address(url).schema
    waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%' || $1 || '.' || $2"
    async with PostgresStore(url, timeout=20.0) as here, PostgresStore(url, timeout=20.0) as there:
        fence = await opened(here)
        await there.join(OTHER)
        looker = await asyncpg.connect(server_url().partition("?")[0])
        async with operator.transaction():
            await operator.execute(f"LOCK TABLE {schema}.stream IN EXCLUSIVE MODE")
            accepting = asyncio.create_task(here.commit([OpenStream(record=a_stream(fence, "late"))]))
            await until(lambda: looker.fetchval(waits, schema, "commit_1%"))
            burying = asyncio.create_task(there.bury(NODE, heir=OTHER))
            await until(lambda: looker.fetchval(waits, schema, "bury_1%"))
            assert not burying.done()
        assert list(await accepting) == [None]
        assert await burying == []
        assert [stream.id for stream in await there.written_by(NODE)] == [STREAM, "late"]
        await looker.close()


# --- Where nothing is heard -----------------------------------------------------------------------------------------


@asynccontextmanager
async def without_notifications(url: str) -> AsyncIterator[str]:
    """A way to the server on which no notification arrives, as through a pooler in transaction mode."""
    address = parse_address(url)
    host, _, port = address.dsn.partition("@")[2].partition("/")[0].partition(":")

    async def back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readexactly(5)
                rest = await reader.readexactly(int.from_bytes(head[1:], "big") - 4)
                if head[:1] != b"A":
                    writer.write(head + rest)
        writer.close()

    async def forth(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(host, int(port))
        answering = asyncio.create_task(back(server_reader, writer))
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                server_writer.write(data)
        server_writer.close()
        await answering

    async with await asyncio.start_server(forth, "127.0.0.1", 0) as proxy:
        way = proxy.sockets[0].getsockname()[1]
        user = address.dsn.partition("://")[2].partition("@")[0]
        yield f"postgresql://{user}@127.0.0.1:{way}/postgres?sslmode=disable&schema={address.schema}"


async def test_a_process_that_hears_nothing_says_so_once_and_polls(caplog: pytest.LogCaptureFixture) -> None:
    """Promises 8 and 15, by looking instead of listening."""
    url = store_url()
    async with (
        without_notifications(url) as way,
        PostgresStore(url, timeout=20.0) as here,
        PostgresStore(way, timeout=20.0) as there,
    ):
        await here.join(NODE)
        await there.join(OTHER)
        assert [record.message for record in caplog.records if "polls instead" in record.message] != []
        told: asyncio.Queue[Sequence[StreamId]] = asyncio.Queue()
        there.subscribe(OTHER, lambda streams: told.put_nowait(streams))
        await here.commit([SendMail(node=OTHER, message=b"look")])
        assert await told.get() == ()
        assert [mail.message for mail in await there.mail(OTHER)] == [b"look"]
        mine, theirs = (
            store.liveness(node, lease=LEASE, monotonic=lambda: 0.0) for store, node in ((here, NODE), (there, OTHER))
        )
        assert [list(await view.holders()) for view in (mine, theirs)] == [[], []]
        theirs.hold(True)
        assert list(await mine.holders()) == [OTHER]
        theirs.hold(False)
        mine.hold(True)
        assert list(await theirs.holders()) == [NODE]
        mine.hold(False)
        assert [list(await view.holders()) for view in (mine, theirs)] == [[], []]


async def test_a_direct_address_for_listening_hears_past_what_is_between() -> None:
    url = store_url()
    async with without_notifications(url) as way:
        direct = url.partition("?")[0]
        async with PostgresStore(f"{way}&listen={direct}", timeout=20.0) as there:
            await there.join(OTHER)
            told: asyncio.Queue[Sequence[StreamId]] = asyncio.Queue()
            there.subscribe(OTHER, lambda streams: told.put_nowait(streams))
            async with PostgresStore(url, timeout=20.0) as here:
                here.hint(OTHER, [StreamId("grown")])
                assert await told.get() == ("grown",)


# --- Commits --------------------------------------------------------------------------------------------------------


async def test_a_commit_that_is_in_a_deadlock_is_tried_again(operator: Operator) -> None:
    url = store_url()
    schema = parse_address(url).schema
    touch = f"UPDATE {schema}.session SET active = 1 WHERE id = $1"
    async with PostgresStore(url, timeout=20.0) as store:
        await store.commit([PutSession(record=a_session(name)) for name in ("a", "b")])
        rival = operator.transaction()
        await rival.start()
        await operator.execute("SET LOCAL deadlock_timeout = '60s'")  # the store's commit is to be undone
        await operator.execute(touch, "b")
        steps = [ChangeSession(session=SessionId(name), active=9.0) for name in ("a", "b")]
        commit = asyncio.create_task(store.commit(steps))
        waits = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%' || $1 || '.commit%'"
        async with contextlib.AsyncExitStack() as stack:
            looker = await asyncpg.connect(server_url().partition("?")[0])
            stack.push_async_callback(looker.close)
            await until(lambda: looker.fetchval(waits, schema))
        await operator.execute(touch, "a")
        await rival.commit()
        assert list(await commit) == [None, None]
        assert [session.active for session in await store.newest(limit=9)] == [9.0, 9.0]


async def test_what_was_given_up_does_not_happen_behind_what_came_later(
    operator: Operator,
) -> None:
    """A commit that did not answer in time is over on the server before the next one of its process begins."""
    url = store_url()
    schema = parse_address(url).schema
    async with PostgresStore(url, timeout=0.5) as store:
        store_fence = await store.join(NODE)
        steps = [PutSession(record=a_session()), OpenStream(record=a_stream(store_fence))]
        assert list(await store.commit(steps)) == [None, None]
        async with operator.transaction():
            await operator.execute(f"LOCK TABLE {schema}.session IN EXCLUSIVE MODE")
            with pytest.raises(StoreUnavailable):
                await store.commit([ChangeSession(session=SESSION, version="given up")])

        async def later() -> bool:
            with contextlib.suppress(StoreUnavailable):
                return list(await store.commit([ChangeSession(session=SESSION, version="later")])) == [None]
            return False

        await until(later)
        busy = "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE '%' || $1 || '.commit%'"
        assert await operator.fetchval(busy, schema) == 0
        record = await store.session(SESSION)
        assert record is not None
        assert record.version == "later"


# --- The server's own life ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [pytest.param("fast", marks=pytest.mark.long), "immediate"])
async def test_a_server_that_restarts_has_everything_and_is_found_again(tmp_path: Path, mode: str) -> None:
    """Promise 3: `immediate` is the state that a crash leaves."""
    server = Server(tmp_path)
    await asyncio.to_thread(server.make)
    await asyncio.to_thread(server.start)
    try:
        async with PostgresStore(f"{server.url}?schema=s", timeout=5.0) as store:
            fence = await opened(store)
            await store.commit([an_append(fence, some_events(1, 5))])
            await asyncio.to_thread(server.stop, mode)
            with pytest.raises(StoreUnavailable):
                await store.commit([an_append(fence, some_events(6, 6))])
            with pytest.raises(StoreUnavailable):
                await store.session(SESSION)
            await asyncio.to_thread(server.start)
            mine = store.liveness(NODE, lease=LEASE, monotonic=lambda: 0.0)

            async def beats() -> bool:
                with contextlib.suppress(StoreUnavailable):
                    await mine.beat(b"{}")
                    return True
                return False

            await until(beats)
            await store.commit([an_append(fence, some_events(6, 7))])
            assert await numbers(store) == [1, 2, 3, 4, 5, 6, 7]
    finally:
        await asyncio.to_thread(server.stop)


# --- Values -----------------------------------------------------------------------------------------------------------


async def test_ids_and_names_of_any_length_and_content_are_kept() -> None:
    """What a peer sends is compared and indexed, however long it is."""
    url = store_url()
    async with PostgresStore(url, timeout=20.0) as store:
        fence = await store.join(NODE)
        owner = "o\0" + "ж" * 5_000
        await store.commit([PutSession(record=a_session(owner=owner))])
        ids = ["x" * 10_000, "x" * 9_999 + "y", "\ud800" * 500]
        calls = tuple(a_call(id_) for id_ in ids)
        assert list(await store.commit([OpenStream(record=a_stream(fence), calls=calls)])) == [None]
        again = OpenStream(record=a_stream(fence, "other"), calls=(a_call(ids[0], stream="other"),))
        [refusal] = await store.commit([again])
        assert type(refusal).__name__ == "IdTaken"
        found = await open_call(store, SESSION, incarnation=1, request_id=ids[1])
        assert found is not None
        assert found.request_id == ids[1]
        assert await store.session(SessionId("no\0thing")) is None
        assert await reader_of(store, StreamId("\0")) is None
        assert [session.owner for session in await store.newest(limit=9)] == [owner]
        assert NodeId("") not in {node.id for node in await store.nodes()}
