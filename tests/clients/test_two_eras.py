"""Clients whose default is 2026-07-28 meet both eras on one path, and calls that last (H7, P8)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import pytest

from tests.clients.node_clients import HERE, node_client
from tests.clients.python_clients import fastmcp_client, python_client
from tests.clients.stock_client import StockClient
from tests.support.processes.cluster import Cluster, cluster
from tests.support.processes.node_programs import node_modules
from tests.support.processes.serving import BASIC_TOOLS, serving
from tests.support.servers.gate_file_tools import diary, open_gate

pytestmark = pytest.mark.anyio

Connect = Callable[[str], AbstractAsyncContextManager[StockClient]]

CLIENTS: dict[str, Connect] = {
    "python": partial(python_client, mode="auto"),
    "fastmcp": fastmcp_client,
    "typescript": partial(node_client, "ts2.mjs", mode="auto"),
}
"""Each asks `server/discover` first, and declares no tasks."""


@pytest.fixture(params=CLIENTS)
def connect(request: pytest.FixtureRequest) -> Connect:
    node_modules(HERE)
    return CLIENTS[request.param]


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Cluster]:
    """A server with the default eras."""
    async with cluster(tmp_path / "log.db", "--retry", "100ms") as it:
        yield it


async def test_with_both_eras_it_speaks_the_modern_one(connect: Connect) -> None:
    async with serving(BASIC_TOOLS, "--eras", "both", "--store", "memory:") as server, connect(server.url) as client:
        call = await client.call("count", n=12)
        assert await client.answer(call) == "counted to 12"
        assert call.progress == list(range(1, 13))
        assert client.protocol == "2026-07-28"


async def test_by_default_it_is_led_to_a_session_and_its_call_survives_a_cut_and_a_kill_of_the_server(
    connect: Connect, site: Cluster, tmp_path: Path
) -> None:
    """Promises 2 and 3: SIGKILL and a restart in the middle of a call that may run again."""
    gate, log = tmp_path / "gate", tmp_path / "diary"
    async with connect(site.proxy.url) as client:
        assert client.protocol == "2025-11-25"
        calls = []
        for end in ("cut", "kill"):
            call = await client.call("count", n=12, gate=f"{gate}-{end}", pauses=[4], log=str(log))
            await client.saw(call, [1, 2, 3, 4])
            first = site.server.pid
            if end == "cut":
                assert site.proxy.cut(only="POST") == 1
                open_gate(f"{gate}-cut.4")
            else:
                await site.kill()
                open_gate(f"{gate}-kill.4")
                await site.restart()
            assert await client.answer(call) == "counted to 12"
            calls.append(call.progress)
        assert calls == [list(range(1, 13))] * 2
        assert diary(log) == [("-", first), ("-", first), ("-", site.server.pid)]
