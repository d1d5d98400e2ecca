"""A PostgreSQL server that does not answer for a while: to all nodes, or to one that is cut off or stands still.

PERDURE_TEST_OUTAGES=real tells the stories of hangs with the default lease and real outages of up to a minute.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest

from perdure import Settings
from perdure._core.ids import SessionId
from perdure.store.postgres.store import PostgresStore
from tests.support.clients.survey_client import HALF, OUTCOME_UNKNOWN, Client, assert_sound
from tests.support.processes.nodes_behind_proxies import Node, town
from tests.support.processes.serving import serving
from tests.support.proxies.postgres_proxy import Direction
from tests.support.servers.in_process import until
from tests.support.stores.postgres import store_url
from tests.support.stores.shared_store import BUSY_SECONDS

IS_REAL = os.environ.get("PERDURE_TEST_OUTAGES") == "real"

LEASE, TIMEOUT = (Settings().lease, Settings().store_timeout) if IS_REAL else (2.4, 0.4)
"""`lease` and `store_timeout`: the defaults, or the same scaled down."""

SHORT = 2.5 if IS_REAL else 0.9
"""Seconds of an outage that is longer than `store_timeout`, and shorter than a node's own share of its lease."""

LONG = (14.0, 60.0) if IS_REAL else (3.0,)
"""Seconds of outages after which nodes are frozen."""

pytestmark = [pytest.mark.anyio, pytest.mark.long, pytest.mark.timeout(300 if IS_REAL else 120)]


@pytest.mark.parametrize("seconds", [SHORT, *LONG])
async def test_a_server_that_is_silent_for_a_while_loses_nothing(tmp_path: Path, seconds: float) -> None:
    """Promises 3 and 7: nodes say that they are degraded, come back by themselves, and none takes another for dead.
    What one of them sends arrives later, what the other one sends never does."""
    async with town(tmp_path) as it:
        nodes = [await it.add(lease=LEASE, timeout=TIMEOUT) for _ in range(2)]
        clients = [it.client(*nodes), it.client(*reversed(nodes))]
        for client in clients:
            client.has_gate = True
            await client.open()
            await client.ask_for_survey()
        began = time.monotonic()
        nodes[0].proxy.hang()
        nodes[1].proxy.swallow()
        for client in clients:
            client.gate.touch()  # a node that has nothing to write notices it later
        for node in nodes:
            await until(node.is_degraded)
        going_on = [asyncio.create_task(_go_on(client)) for client in clients]
        await asyncio.sleep(began + seconds - time.monotonic())
        assert [await node.health() for node in nodes] == ["degraded"] * 2
        for node in nodes:
            node.proxy.heal()
        await asyncio.gather(*going_on)
        for node in nodes:
            await until(node.is_well)
        await it.judge(*clients)
        assert [node.site.app.counters.nodes_settled for node in nodes] == [0, 0]
        await it.tell(*nodes)


async def _go_on(client: Client) -> None:
    async with client.listening():
        await client.go_on()
    await client.read_again()


async def test_a_slow_network_costs_time_and_nothing_else(tmp_path: Path) -> None:
    async with town(tmp_path) as it:
        nodes = [await it.add() for _ in range(2)]
        for node in nodes:
            node.proxy.delay = 0.02
        client = await it.tell(*nodes)
        assert client.refused == 0
        assert [node.site.app.counters.outages for node in nodes] == [0, 0]


# --- One node of two ------------------------------------------------------------------------------------------------


WAYS = (tuple(Direction), (Direction.UP,), (Direction.DOWN,))
"""Nothing arrives at the server and no answer arrives from it; or only one of both."""


async def test_nodes_that_are_cut_off_beyond_their_lease_show_nothing_more_and_end(tmp_path: Path) -> None:
    """Promises 3 and 11: another node settles their calls. What they say afterwards is neither shown nor written."""
    async with town(tmp_path) as it:
        *cut, other = [await it.add(lease=2.0, timeout=TIMEOUT) for _ in (*WAYS, None)]
        clients = [it.client(node, other) for node in cut]
        async with AsyncExitStack() as stack:
            for client in clients:
                client.has_gate = True
                await client.open()
                await stack.enter_async_context(client.listening())
                await client.ask_for_survey()
                await until(lambda client=client: client.standalone.notices)  # type: ignore[misc]
            readers = [await client.at(client.near).resume(client.call.position) for client in clients]
            for reader in readers:
                await stack.enter_async_context(reader)
                assert await reader.head() == 200
            for node, directions in zip(cut, WAYS, strict=True):
                node.proxy.swallow(*directions)
            for node in cut:
                await until(partial(_is_frozen, node))
            for client in clients:
                client.gate.touch()  # its tool goes on, and is not heard
                await client.go_on()
            await until(lambda: other.site.app.counters.nodes_settled == len(cut))
            assert [await _is_frozen(node) for node in cut] == [True] * len(cut), "they cannot know yet"
            assert [reader.messages for reader in readers] == [[]] * len(cut)
            for node, reader in zip(cut, readers, strict=True):
                node.proxy.heal()
                await until(partial(_is_stopping, node))
                assert (await reader.answer()).messages == [], "its readers are sent away, to the other node"
        for client in clients:
            assert [answer["error"]["code"] for answer in client.call.answers] == [OUTCOME_UNKNOWN]
        await it.judge(*clients, is_known=False)
        await it.tell(other)


async def test_what_a_node_showed_between_the_cut_and_the_end_of_its_claim_is_told_as_a_gap(tmp_path: Path) -> None:
    """Promise 4: it went on from memory, as it may. Its client has seen what the log does not have, and is told so by
    the node that settles the call."""
    async with town(tmp_path) as it:
        cut, other = [await it.add(lease=2.0, timeout=TIMEOUT) for _ in range(2)]
        client = it.client(cut, other)
        client.has_gate = True
        await client.open()
        await client.ask_for_survey()
        async with await client.at(client.near).resume(client.call.position) as reader:
            assert await reader.head() == 200
            cut.proxy.swallow()
            client.gate.touch()
            while not client.asked:
                assert await client.call.read(reader)
        shown = len(client.call.events)
        await client.read(client.far, client.call, lambda: bool(client.call.answers))
        [gap, answer] = client.call.messages[shown:]
        assert (gap["method"], answer["error"]["code"]) == ("notifications/perdure/gap", OUTCOME_UNKNOWN)
        [call] = [call for call in await it.look.calls(SessionId(client.session.id)) if call.request_id == 1]
        assert [event.final for event in await it.look.read(call.stream, after=0, limit=99)] == [False] * HALF + [True]
        await until(lambda: other.site.app.counters.nodes_settled == 1)
        cut.proxy.heal()
        await until(lambda: _is_stopping(cut))


async def _is_frozen(node: Node) -> bool:
    """It takes no new work."""
    response = await node.site.http.get(f"http://127.0.0.1:{node.site.port}/healthz")
    return (response.status_code, response.json()["status"]) == (503, "degraded")


async def _is_stopping(node: Node) -> bool:
    return await node.health() == "stopping"


async def test_a_process_that_stands_still_beyond_its_lease_says_nothing_more_of_its_calls(tmp_path: Path) -> None:
    """Promises 3 and 11: all its connections stand, and its lock is held; its lease tells."""
    url = store_url()
    options = ("--store", url, "--lease", "2s")
    async with (
        serving("tests.support.clients.survey_client:server", *options) as paused,
        serving("tests.support.clients.survey_client:server", *options) as other,
        PostgresStore(url, timeout=BUSY_SECONDS) as store,
    ):

        async def is_buried() -> bool:
            return len(await store.nodes()) == 1

        client = Client(near=paused.port, far=other.port, key="survey", folder=tmp_path, has_gate=True)
        await client.open()
        async with client.listening():
            await client.ask_for_survey()
            await until(lambda: client.standalone.notices)
            reader = await client.at(client.near).resume(client.call.position)
            assert await reader.head() == 200
            os.kill(paused.pid, signal.SIGSTOP)
            try:
                client.gate.touch()
                await client.go_on()
                await until(is_buried)
            finally:
                os.kill(paused.pid, signal.SIGCONT)
            assert (await reader.answer()).messages == []
            await reader.aclose()
        await until(lambda: any("took this process for dead" in line for line in paused.output))
        assert len(client.call.progress) == HALF
        assert [answer["error"]["code"] for answer in client.call.answers] == [OUTCOME_UNKNOWN]
        await assert_sound(store, client, is_known=False)
        later = Client(near=other.port, far=other.port, key="later", folder=tmp_path)
        await later.tell()
        await assert_sound(store, later)
