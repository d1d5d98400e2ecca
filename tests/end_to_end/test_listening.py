"""Listening over several processes: what changes in one of them reaches the listeners of all.

Real processes on one store, real signals; requests byte by byte, and stock clients.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from mcp.client import Client
from mcp.client.subscriptions import ResourceUpdated, SubscriptionLost, ToolsListChanged

from tests.support.clients.listeners import POSITION, Listener, listening, publish
from tests.support.clients.modern_requests import MODERN
from tests.support.processes.serving import Served, serving
from tests.support.stores.postgres import store_url

pytestmark = pytest.mark.anyio

BOARD = "tests.support.servers.notice_board:server"
LISTS = ("tools", "prompts", "resources")


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:{tmp_path / 'store.db'}"


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


async def test_a_listener_that_brings_its_position_hears_what_changed_since_once_for_each_item(store: str) -> None:
    async with nodes(store, 2) as (a, b), listening(a.port, *LISTS, "board://a", "board://b") as ear:
        await publish(b.port, "prompts")
        await ear.until_told("prompts")
        await ear.cut()
        await publish(a.port, "tools")
        for served in (a, b, a):
            await publish(served.port, "board://a", times=5)
        ear.forget()
        acknowledged = await ear.listen(b.port)
        assert acknowledged["params"]["_meta"][POSITION].keys() == {"time", "nodes"}
        await ear.until_told("tools", "board://a")
        await publish(a.port, "resources")
        await ear.until_told("resources")
        assert sorted(set(ear.told)) == sorted({"tools", "board://a", "resources"} | young_resources(ear))
        assert ear.told.count("tools") == ear.told.count("board://a") == 1


def young_resources(ear: Listener) -> set[str]:
    """A resource that was not heard of for long when the position was given counts as changed."""
    return {item for item in ear.told if item == "board://b"}


async def test_a_client_without_a_position_hears_what_changed_while_it_was_away(store: str) -> None:
    """Its connection broke, and it listens again at another process. A caller from elsewhere has missed nothing."""
    async with nodes(store, 2) as (a, b):
        ear = Listener("tools", "prompts", keeps_position=False)
        await ear.listen(a.port)
        await ear.cut()
        await publish(b.port, "tools")
        await ear.listen(b.port)
        await ear.until_told("tools")
        async with listening(b.port, "tools", "prompts", address="127.0.0.2") as stranger:
            await publish(a.port, "prompts")
            await stranger.until_told("prompts")
            assert stranger.told == ["prompts"]
        await ear.cut()


async def test_where_a_process_was_killed_every_listener_is_told_that_anything_may_have_changed(store: str) -> None:
    """It may have published what it had no time to write: a listener at another process, one that comes back with its
    position, and one that has none."""
    async with nodes(store, 3) as (a, b, c), listening(b.port, "tools", "board://a") as ear:
        async with listening(a.port, "tools", "board://a") as back:
            await publish(c.port, "board://a")
            await back.until_told("board://a")
            await ear.until_told("board://a")
            back.forget()
            ear.forget()
            await a.kill()
            assert not await back.read()
            await ear.until_told("tools", "board://a")
            await back.listen(c.port)
            await back.until_told("tools", "board://a")
        async with listening(c.port, "tools") as new:
            await new.until_told("tools")


async def test_no_change_is_missed_through_cuts_and_kills(store: str) -> None:
    """Changes at every process, listeners at every process, connections cut and processes killed at random: behind the
    last time that a listener listens again, it has had a cue for each item since the item last changed."""
    chance = random.Random(20260728)
    items = (*LISTS, "board://a", "board://b", "board://c")
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(serving(BOARD, "--store", store)) for _ in range(3)]
        ears = [Listener(*items, keeps_position=n % 2 == 0) for n in range(4)]
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
                        assert await anext(ear) == change


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
        await ear.until_told("prompts")
        assert ear.told == ["prompts"]  # it left in good order: nothing else may have changed


async def test_a_stock_client_is_told_that_its_subscription_is_lost_and_catches_up(store: str) -> None:
    async with nodes(store, 2) as (a, b):
        lost = False
        try:
            async with Client(a.url, mode=MODERN) as client, client.listen(tools_list_changed=True) as ear:
                await a.kill()
                await anext(ear)
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
        await ear.cut()
        await asyncio.gather(*(publish(served.port, "prompts", times=3) for served in (a, b)))
        await ear.listen(b.port)
        await ear.until_told("prompts")
        assert ear.told.count("prompts") == 1
