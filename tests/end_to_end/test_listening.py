"""Listening over several processes: what changes in one of them reaches the listeners of all.

Real processes on one store, real signals; requests byte by byte, and stock clients.
"""

from __future__ import annotations

import random
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from mcp.client import Client
from mcp.client.subscriptions import ResourceUpdated, SubscriptionLost, ToolsListChanged

from tests.support.clients.listeners import Listener, listening, publish
from tests.support.clients.modern_requests import MODERN
from tests.support.processes.serving import Served, serving
from tests.support.servers.notice_board import SHARED, Board
from tests.support.stores.postgres import store_url

pytestmark = pytest.mark.anyio

BOARD = "tests.support.servers.notice_board:server"
LISTS = ("tools", "prompts", "resources")


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:{tmp_path / 'store.db'}"


@pytest.fixture
def lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Board:
    """The lists that all processes have."""
    monkeypatch.setenv(SHARED, str(tmp_path / "lists"))
    return Board()


@asynccontextmanager
async def nodes(store: str, count: int) -> AsyncIterator[list[Served]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(serving(BOARD, "--store", store)) for _ in range(count)]


async def test_what_changes_in_one_process_reaches_the_listeners_of_all(store: str) -> None:
    items = (*LISTS, "board://a")
    async with nodes(store, 3) as three, AsyncExitStack() as stack:
        ears = [await stack.enter_async_context(listening(served.port, *items)) for served in three]
        for served in three:
            for item in (*items, "board://b"):  # no listener wants b
                await publish(served.port, item)
            for ear in ears:
                await ear.until_told(*items)
                assert set(ear.told) == set(items)
                ear.forget()
        # What a listener names is heard by every process before the listener is acknowledged.
        for n in range(12):
            async with listening(three[n % 3].port, f"board://new/{n}") as ear:
                await publish(three[(n + 1) % 3].port, f"board://new/{n}")
                await ear.until_told(f"board://new/{n}")


async def test_a_client_that_comes_back_reads_everything_again_at_whatever_process(store: str) -> None:
    """It may have missed something; each item is one cue."""
    async with nodes(store, 2) as (a, b), listening(a.port, *LISTS, "board://a", "board://b") as ear:
        await ear.cut()
        for served in (a, b, a):
            await publish(served.port, "board://a", times=5)
        await ear.listen(b.port)
        await ear.until_told(*LISTS, "board://a", "board://b")
        assert sorted(ear.told) == sorted([*LISTS, "board://a", "board://b"])
        ear.forget()
        await publish(a.port, "resources")
        await ear.until_told("resources")
        assert ear.told == ["resources"]


async def test_where_a_process_was_killed_every_listener_is_told_what_may_have_changed(
    store: str, lists: Board
) -> None:
    """It may have published what it had no time to send: listeners of other processes read their resources again, and
    the lists that differ; its own listeners come back."""
    async with (
        nodes(store, 3) as (a, b, c),
        listening(b.port, *LISTS, "board://a") as ear,
        listening(a.port, "board://a") as back,
    ):
        lists.change("prompts")  # and no word of it
        await a.kill()
        assert not await back.read()
        await ear.until_told("prompts", "board://a")
        assert set(ear.told) == {"prompts", "board://a"}
        await back.listen(c.port)
        await back.until_told("board://a")


async def test_no_change_is_missed_through_cuts_and_kills(store: str, lists: Board) -> None:
    """Changes at every process, listeners at every process, connections cut and processes killed at random: behind the
    last time that a listener listens again, it has had a cue for each item since the item last changed."""
    chance = random.Random(20260728)
    items = (*LISTS, "board://a", "board://b", "board://c")
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(serving(BOARD, "--store", store)) for _ in range(3)]
        ears = [Listener(*items) for _ in range(4)]
        for n, ear in enumerate(ears):
            await ear.listen(servers[n % 3].port, address=f"127.0.0.{n + 2}")
            stack.push_async_callback(ear.cut)
        changed: set[str] = set()

        async def back(n: int) -> None:
            await ears[n].listen(chance.choice(servers).port, address=f"127.0.0.{n + 2}")

        for step in range(240):
            item = chance.choice(items)
            changed.add(item)
            for ear in ears:  # what they were told of it before does not count any more
                ear.told = [told for told in ear.told if told != item]
            await publish(chance.choice(servers).port, item)
            if chance.random() < 0.25:
                await back(chance.randrange(len(ears)))
            if step % 80 == 40:  # at once behind a change
                place = chance.randrange(len(servers))
                await servers[place].kill()
                servers[place] = await stack.enter_async_context(serving(BOARD, "--store", store))
        for n, ear in enumerate(ears):
            if n < 2:
                await back(n)
            try:
                await ear.until_told(*changed)
            except AssertionError:  # its server was killed, and this is how it learns
                await back(n)
                await ear.until_told(*changed)


async def test_stock_clients_at_several_workers_hear_each_change(store: str) -> None:
    async with serving(BOARD, "--store", store, "--workers", "2") as served, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(served.url, mode=MODERN)) for _ in range(6)]
        ears = [
            await stack.enter_async_context(
                client.listen(tools_list_changed=True, resource_subscriptions=["board://a"])
            )
            for client in clients
        ]
        processes: set[str] = set()
        while len(processes) < 2:  # at each of them
            async with Client(served.url, mode=MODERN) as client:
                for what, change in (("tools", ToolsListChanged()), ("board://a", ResourceUpdated(uri="board://a"))):
                    result = await client.call_tool("change", {"what": what})
                    processes.add(result.content[0].text)  # type: ignore[union-attr]
                    for ear in ears:
                        while await anext(ear) != change:
                            pass  # what it began with


async def test_a_listener_of_a_process_that_stops_goes_on_at_another(store: str) -> None:
    async with (
        nodes(store, 2) as (a, b),
        Client(b.url, mode=MODERN) as client,
        listening(a.port, "tools", "prompts") as ear,
    ):
        a.send(signal.SIGTERM)
        while await ear.read():
            pass
        assert ear.exchange is not None
        assert ear.exchange.messages[-1]["result"]["resultType"] == "complete"
        assert await a.wait() == 0
        await client.call_tool("change", {"what": "prompts"})
        await ear.listen(b.port)
        await ear.until_told("tools", "prompts")


async def test_a_stock_client_is_told_that_its_subscription_is_lost_and_catches_up(store: str) -> None:
    async with nodes(store, 2) as (a, b):
        lost = False
        try:
            async with Client(a.url, mode=MODERN) as client, client.listen(tools_list_changed=True) as ear:
                await a.kill()
                async for _ in ear:
                    pass
        except* SubscriptionLost:
            lost = True
        assert lost
        async with Client(b.url, mode=MODERN) as client, client.listen(tools_list_changed=True) as ear:
            assert await anext(ear) == ToolsListChanged()


async def test_listeners_of_processes_on_one_postgres_server_hear_all_changes() -> None:
    async with nodes(store_url(), 2) as (a, b), listening(a.port, *LISTS, "board://a") as ear:
        async with listening(b.port, "tools", "board://b") as other:
            for served in (a, b):
                for item in ("tools", "board://a", "board://b"):
                    await publish(served.port, item)
                await ear.until_told("tools", "board://a")
                await other.until_told("tools", "board://b")
                assert "board://b" not in ear.told
                ear.forget()
                other.forget()
        async with listening(b.port, "board://c") as other:
            await a.kill()
            await other.until_told("board://c")
