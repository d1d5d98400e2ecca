"""Many nodes on one server: beyond `MANY_NODES` each node polls, and hints stop."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

import asyncpg
import pytest

from perdure._core.ids import NodeId, StreamId
from perdure.store.postgres import wakeups
from perdure.store.postgres.address import parse_address
from perdure.store.postgres.listen_connection import channel_of
from perdure.store.postgres.store import PostgresStore
from perdure.store.postgres.wakeups import APART, MANY_NODES, POLL
from perdure.store.steps import PutSession
from perdure.testing._values import OTHER, a_session, dead_nodes
from tests.support.servers.in_process import until
from tests.support.stores.postgres import server_url, store_url
from tests.support.stores.shared_store import BUSY_SECONDS

pytestmark = pytest.mark.anyio

LEASE = 1_000.0
PROCESSES = 3


def a_name(number: int) -> NodeId:
    return NodeId(f"node-{number}")


class ManyNodes:
    """Nodes in a few stores, each a process to the server; and a connection that counts the hints to one node."""

    def __init__(self, url: str, stores: Sequence[PostgresStore], listener: asyncpg.Connection[asyncpg.Record]) -> None:
        self.stores = stores
        self._listener = listener
        self._channel = channel_of(parse_address(url).schema, OTHER)
        self.said: list[str] = []
        self.told: list[Sequence[StreamId]] = []

    async def open(self, count: int) -> None:
        for number in range(count - 1):
            await self.stores[number % (PROCESSES - 1)].join(a_name(number))
        await self.stores[-1].join(OTHER)
        self.stores[-1].subscribe(OTHER, lambda streams: self.told.append(streams))
        await self._listener.add_listener(self._channel, lambda *heard: self.said.append(str(heard[-1])))

    async def look(self) -> None:
        """Every process counts the nodes, as it does twice a second."""
        for number, store in enumerate(self.stores):
            node = OTHER if store is self.stores[-1] else a_name(number)
            assert await dead_nodes(store.liveness(node, lease=LEASE, monotonic=lambda: 0.0)) == []

    async def is_told(self) -> bool:
        """Whether a hint is said to the node."""
        self.said.clear()
        self.stores[0].hint(OTHER, [StreamId("grown")])
        await asyncio.sleep(2 * APART)  # by then it is on its way
        await self.look()  # on the same connections, after it
        while "over" not in self.said:
            await self._listener.execute("SELECT pg_notify($1, 'over')", self._channel)
            await asyncio.sleep(0.01)
        return "h grown" in self.said

    async def learns(self) -> None:
        """Wait until the node has learned of a commit of which it is sent no hint."""
        self.told.clear()
        await self.stores[0].commit([PutSession(record=a_session(secrets.token_hex(4)))])
        await until(lambda: () in self.told)

    async def looks_no_more(self) -> bool:
        self.told.clear()
        await self.stores[0].commit([PutSession(record=a_session(secrets.token_hex(4)))])
        await asyncio.sleep(4 * POLL)
        return () not in self.told


@contextlib.asynccontextmanager
async def gathered(count: int) -> AsyncIterator[ManyNodes]:
    url = store_url()
    async with AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(PostgresStore(url, timeout=BUSY_SECONDS)) for _ in range(PROCESSES)]
        listener = await asyncpg.connect(server_url().partition("?")[0])
        stack.push_async_callback(listener.close)
        nodes = ManyNodes(url, stores, listener)
        await nodes.open(count)
        await nodes.look()
        yield nodes


MORE = NodeId("one more")


async def test_nodes_look_for_themselves_while_there_are_many_and_listen_again_when_some_have_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Promise 8, on both sides of the limit. A word that is said to one node wakes all that listen."""
    monkeypatch.setattr(wakeups, "LINGER", 0.0)
    async with gathered(MANY_NODES) as nodes:
        assert await nodes.is_told()
        assert await nodes.looks_no_more()
        await nodes.stores[0].join(MORE)
        await nodes.look()
        for _ in range(3):
            assert not await nodes.is_told()
            await nodes.learns()
        await nodes.stores[0].leave(MORE)
        await nodes.look()
        assert await nodes.is_told()
        await until(nodes.looks_no_more)


async def test_nodes_do_both_for_a_while_because_others_notice_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise 8: no wake-up is lost between a node that notifies no more and a node that does not poll yet."""
    monkeypatch.setattr(wakeups, "LINGER", 600.0)
    async with gathered(MANY_NODES) as nodes:
        await nodes.stores[0].join(MORE)
        await nodes.look()
        assert await nodes.is_told()
        await nodes.learns()
        await nodes.stores[0].leave(MORE)
        await nodes.look()
        assert await nodes.is_told()
        await nodes.learns()


async def test_a_word_that_this_release_does_not_know_changes_nothing() -> None:
    """A newer release may say more, and any program may use a channel."""
    url = store_url()
    channel = channel_of(parse_address(url).schema, OTHER)
    async with PostgresStore(url, timeout=BUSY_SECONDS) as store, PostgresStore(url, timeout=BUSY_SECONDS) as there:
        await store.join(OTHER)
        await there.join(a_name(1))
        told: asyncio.Queue[Sequence[StreamId]] = asyncio.Queue()
        store.subscribe(OTHER, lambda streams: told.put_nowait(streams))
        stranger = await asyncpg.connect(server_url().partition("?")[0])
        for number, word in enumerate(("", "over", "!", "! 1", "? 1", "x 1 2 3", "! 1 no one holds", "? 9999 ")):
            await stranger.execute("SELECT pg_notify($1, $2)", channel, word)
            there.hint(OTHER, [StreamId(f"grown-{number}")])
            while await told.get() != (f"grown-{number}",):
                pass
        await stranger.close()
        assert list(await there.liveness(a_name(1), lease=LEASE, monotonic=lambda: 0.0).holders()) == []
