"""Stock clients that run tools as tasks of 2025-11-25, unchanged, over `kill -9` and restart of the server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import pytest

from tests.clients.node_clients import HERE, node_client, script_client
from tests.clients.stock_client import USER_SAYS, StockClient, named
from tests.support.processes.cluster import Cluster, cluster
from tests.support.processes.node_programs import node_modules
from tests.support.processes.python_environments import programs_of
from tests.support.servers.gate_file_tools import diary, open_gate
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio

OUTCOME_UNKNOWN = -31001
RULES = ("--task", "put=optional", "--task", "pay=optional", "--task", "ask=optional", "--retry", "100ms")

Connect = Callable[[str], AbstractAsyncContextManager[StockClient]]


def python_1(url: str) -> AbstractAsyncContextManager[StockClient]:
    pinned = (HERE.parent / "upstreams" / "sdk-1.txt").read_text().split()
    python = programs_of("sdk-1", "--no-deps", *pinned) / "python"
    return script_client(str(python), str(HERE / "python1_tasks.py"), url)


CLIENTS: dict[str, Connect] = {
    "typescript-1": partial(node_client, "ts1_tasks.mjs"),
    "ext-tasks": partial(node_client, "ext_tasks.mjs"),
    "python-1": python_1,
}


@pytest.fixture(params=named("ext-tasks", in_all=["typescript-1", "python-1"]))
async def client(request: pytest.FixtureRequest, site: Cluster) -> AsyncIterator[StockClient]:
    node_modules(HERE)
    async with CLIENTS[request.param](site.proxy.url) as it:
        await site.proxy.answered("GET")  # the standalone stream is there
        yield it


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path / "log.db", *RULES) as it:
        yield it


async def test_each_of_the_three_clients_gets_its_result_over_a_kill(
    client: StockClient, site: Cluster, tmp_path: Path
) -> None:
    """K6, K8, K12: and a question, wherever its client looks for it; of a tool that may not run twice, its unknown
    outcome."""
    gate, log = tmp_path / "gate", tmp_path / "diary"
    arguments = {"n": 1, "gate": str(gate), "pauses": [1], "log": str(log)}
    put = await client.call("put", key="put", **arguments)
    pay = await client.call("pay", key="pay", **arguments)
    asks = await client.call("ask", question="Why?")
    await until(lambda: len(diary(log)) == 2)
    assert await client.answer(asks) == USER_SAYS
    await site.kill()
    open_gate(f"{gate}.1")
    await site.restart()
    assert await client.answer(put) == "counted to 1"
    assert "error: " in await client.answer(pay)
    assert sorted(key for key, _ in diary(log)) == ["pay", "put", "put"]
    assert len(site.sessions()) == 1
