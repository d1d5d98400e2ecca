"""Nodes behind a real PgBouncer in transaction mode: some stories of other files, a kill, a pooler that restarts."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urljoin

import pytest

from perdure.store.postgres.store import PostgresStore
from tests.cluster.conftest import Start
from tests.cluster.test_order import test_a_home_that_moves_while_tools_speak_changes_nothing_in_their_order
from tests.cluster.test_two_nodes import (
    test_a_call_is_resumed_live_through_the_other_node,
    test_an_answer_to_an_ask_reaches_the_call_that_waits_elsewhere,
)
from tests.support.clients.wire_client import Web, progress_of
from tests.support.processes.serving import BASIC_TOOLS, serving
from tests.support.proxies.pgbouncer import Bouncer, bouncing
from tests.support.servers.in_process import serve, until
from tests.support.servers.tool_server import ToolServer
from tests.support.stores.outages import FAILS
from tests.support.stores.postgres import new_schema
from tests.support.stores.shared_store import BUSY_SECONDS

__all__ = [
    "test_a_call_is_resumed_live_through_the_other_node",
    "test_a_home_that_moves_while_tools_speak_changes_nothing_in_their_order",
    "test_an_answer_to_an_ask_reaches_the_call_that_waits_elsewhere",
]

pytestmark = pytest.mark.anyio


@pytest.fixture
async def bouncer(tmp_path: Path) -> AsyncIterator[Bouncer]:
    async with bouncing(tmp_path) as bouncer:
        yield bouncer


@pytest.fixture
async def start(bouncer: Bouncer, tmp_path: Path) -> AsyncIterator[Start]:
    url = f"{bouncer.url}?schema={new_schema()}"
    async with AsyncExitStack() as stack:
        yield Start(stack, tmp_path, lambda _: PostgresStore(url, timeout=BUSY_SECONDS))


async def test_the_calls_of_a_killed_process_are_settled_by_its_lease(bouncer: Bouncer) -> None:
    """Promise 3: behind a pooler there is no lock that the server frees."""
    options = ("--store", f"{bouncer.url}?schema={new_schema()}", "--lease", "2s")
    async with serving(BASIC_TOOLS, *options) as doomed, serving(BASIC_TOOLS, *options) as living:
        first, second = Web(doomed.url), Web(living.url)
        peer = await first.join()
        wire = await peer.call("count", n=3, gate="g", pauses=[2], id=7, token=1)
        assert progress_of(await wire.messages(2)) == [1, 2]
        there = peer.through(second)
        reader = await there.get(wire.last_id)
        await doomed.kill()
        assert await there.result("open_gate", name="g/2") == "opened g/2"
        rest = await reader.rest()  # the tool only reads, so it runs again: what was sent is not sent again
        assert progress_of(rest[:-1]) == [3]
        assert (rest[-1]["id"], rest[-1]["result"]["content"][0]["text"]) == (7, "counted to 3")
        await first.aclose()
        await second.aclose()


async def test_calls_go_on_when_the_pooler_is_killed_and_started_again(bouncer: Bouncer) -> None:
    """Promises 1 and 2: what is said meanwhile is held, and arrives once and in order."""
    shop = ToolServer()
    store = PostgresStore(f"{bouncer.url}?schema={new_schema()}", timeout=1.0)
    async with serve(shop.server, store=store, store_timeout=1.0, complaint=FAILS) as site:
        peer = await site.join()
        wire = await peer.call("count", n=6, gate="g", pauses=[2, 4], id=7, token=1)
        assert progress_of(await wire.messages(2)) == [1, 2]
        await asyncio.to_thread(bouncer.stop, signal.SIGKILL)
        shop.open("g/2")

        async def is_well() -> bool:
            return (await site.http.get(urljoin(site.url, "/healthz"))).text == '{"status": "ok"}'

        async def is_ill() -> bool:
            return not await is_well()

        await until(is_ill)
        await asyncio.to_thread(bouncer.start)
        await until(is_well)
        shop.open("g/4")
        rest = await wire.rest()
        assert progress_of(rest[:-1]) == [3, 4, 5, 6]
        assert rest[-1]["id"] == 7
