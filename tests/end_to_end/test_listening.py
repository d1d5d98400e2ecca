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
from tests.support.servers.changing_server import SHARED, ChangingServer
from tests.support.stores.postgres import store_url

pytestmark = pytest.mark.anyio

CHANGING = "tests.support.servers.changing_server:server"
LISTS = ("tools", "prompts", "resources")


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:{tmp_path / 'store.db'}"


@pytest.fixture
def lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ChangingServer:
    """The lists that all processes have."""
    monkeypatch.setenv(SHARED, str(tmp_path / "lists"))
    return ChangingServer()


@asynccontextmanager
async def nodes(store: str, count: int) -> AsyncIterator[list[Served]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(serving(CHANGING, "--store", store)) for _ in range(count)]


async def test_what_changes_in_one_process_reaches_the_listeners_of_all(store: str) -> None:
    items = (*LISTS, "note://a")
    async with nodes(store, 3) as three, AsyncExitStack() as stack:
        listeners = [await stack.enter_async_context(listening(served.port, *items)) for served in three]
        for served in three:
            for item in (*items, "note://b"):  # no listener wants b
                await publish(served.port, item)
            for listener in listeners:
                await listener.until_told(*items)
                assert set(listener.told) == set(items)
                listener.forget()
        # What a listener names is heard by every process before the listener is acknowledged.
        for n in range(12):
            async with listening(three[n % 3].port, f"note://new/{n}") as listener:
                await publish(three[(n + 1) % 3].port, f"note://new/{n}")
                await listener.until_told(f"note://new/{n}")


async def test_a_client_that_comes_back_reads_everything_again_at_whatever_process(store: str) -> None:
    """It may have missed something; each item is one cue."""
    async with nodes(store, 2) as (a, b), listening(a.port, *LISTS, "note://a", "note://b") as listener:
        await listener.cut()
        for served in (a, b, a):
            await publish(served.port, "note://a", times=5)
        await listener.listen(b.port)
        await listener.until_told(*LISTS, "note://a", "note://b")
        assert sorted(listener.told) == sorted([*LISTS, "note://a", "note://b"])
        listener.forget()
        await publish(a.port, "resources")
        await listener.until_told("resources")
        assert listener.told == ["resources"]


async def test_where_a_process_was_killed_every_listener_is_told_what_may_have_changed(
    store: str, lists: ChangingServer
) -> None:
    """It may have published what it had no time to send: listeners of other processes read their resources again, and
    the lists that differ; its own listeners come back."""
    async with (
        nodes(store, 3) as (a, b, c),
        listening(b.port, *LISTS, "note://a") as listener,
        listening(a.port, "note://a") as back,
    ):
        lists.change("prompts")  # and no word of it
        await a.kill()
        assert not await back.read()
        await listener.until_told("prompts", "note://a")
        assert set(listener.told) == {"prompts", "note://a"}
        await back.listen(c.port)
        await back.until_told("note://a")


async def test_no_change_is_missed_through_cuts_and_kills(store: str, lists: ChangingServer) -> None:
    """Changes at every process, listeners at every process, connections cut and processes killed at random: behind the
    last time that a listener listens again, it has had a cue for each item since the item last changed."""
    chance = random.Random(20260728)
    items = (*LISTS, "note://a", "note://b", "note://c")
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(serving(CHANGING, "--store", store)) for _ in range(3)]
        listeners = [Listener(*items) for _ in range(4)]
        for n, listener in enumerate(listeners):
            await listener.listen(servers[n % 3].port, address=f"127.0.0.{n + 2}")
            stack.push_async_callback(listener.cut)
        changed: set[str] = set()

        async def back(n: int) -> None:
            await listeners[n].listen(chance.choice(servers).port, address=f"127.0.0.{n + 2}")

        for step in range(240):
            item = chance.choice(items)
            changed.add(item)
            for listener in listeners:  # what they were told of it before does not count any more
                listener.told = [told for told in listener.told if told != item]
            await publish(chance.choice(servers).port, item)
            if chance.random() < 0.25:
                await back(chance.randrange(len(listeners)))
            if step % 80 == 40:  # at once behind a change
                place = chance.randrange(len(servers))
                await servers[place].kill()
                servers[place] = await stack.enter_async_context(serving(CHANGING, "--store", store))
        for n, listener in enumerate(listeners):
            if n < 2:
                await back(n)
            try:
                await listener.until_told(*changed)
            except AssertionError:  # its server was killed, and this is how it learns
                await back(n)
                await listener.until_told(*changed)


async def test_stock_clients_at_several_workers_hear_each_change(store: str) -> None:
    async with serving(CHANGING, "--store", store, "--workers", "2") as served, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(served.url, mode=MODERN)) for _ in range(6)]
        listeners = [
            await stack.enter_async_context(client.listen(tools_list_changed=True, resource_subscriptions=["note://a"]))
            for client in clients
        ]
        processes: set[str] = set()
        while len(processes) < 2:  # at each of them
            async with Client(served.url, mode=MODERN) as client:
                for what, change in (("tools", ToolsListChanged()), ("note://a", ResourceUpdated(uri="note://a"))):
                    result = await client.call_tool("change", {"what": what})
                    processes.add(result.content[0].text)  # type: ignore[union-attr]
                    for listener in listeners:
                        while await anext(listener) != change:
                            pass  # what it began with


async def test_a_listener_of_a_process_that_stops_goes_on_at_another(store: str) -> None:
    async with (
        nodes(store, 2) as (a, b),
        Client(b.url, mode=MODERN) as client,
        listening(a.port, "tools", "prompts") as listener,
    ):
        a.send(signal.SIGTERM)
        while await listener.read():
            pass
        assert listener.exchange is not None
        assert listener.exchange.messages[-1]["result"]["resultType"] == "complete"
        assert await a.wait() == 0
        await client.call_tool("change", {"what": "prompts"})
        await listener.listen(b.port)
        await listener.until_told("tools", "prompts")


async def test_a_stock_client_is_told_that_its_subscription_is_lost_and_catches_up(store: str) -> None:
    async with nodes(store, 2) as (a, b):
        lost = False
        try:
            async with Client(a.url, mode=MODERN) as client, client.listen(tools_list_changed=True) as listener:
                await a.kill()
                async for _ in listener:
                    pass
        except* SubscriptionLost:
            lost = True
        assert lost
        async with Client(b.url, mode=MODERN) as client, client.listen(tools_list_changed=True) as listener:
            assert await anext(listener) == ToolsListChanged()


async def test_listeners_of_processes_on_one_postgres_server_hear_all_changes() -> None:
    async with nodes(store_url(), 2) as (a, b), listening(a.port, *LISTS, "note://a") as listener:
        async with listening(b.port, "tools", "note://b") as other:
            for served in (a, b):
                for item in ("tools", "note://a", "note://b"):
                    await publish(served.port, item)
                await listener.until_told("tools", "note://a")
                await other.until_told("tools", "note://b")
                assert "note://b" not in listener.told
                listener.forget()
                other.forget()
        async with listening(b.port, "note://c") as other:
            await a.kill()
            await other.until_told("note://c")
