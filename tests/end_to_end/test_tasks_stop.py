"""A process stops while calls of 2026-07-28 run: each client gets its answer or its handle, and goes on elsewhere.

Real processes on one store, stopped with SIGTERM.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients.raw_http import Exchange, Peer
from tests.support.clients.task_client import (
    OUTCOME_UNKNOWN,
    STOPPING,
    Balancer,
    Message,
    TaskClient,
    call_params,
    response_in,
    said,
)
from tests.support.processes.cluster import Cluster, cluster
from tests.support.servers.gate_file_tools import diary, open_gate
from tests.support.servers.in_process import until
from tests.support.stores.shared_store import shared_address

pytestmark = pytest.mark.anyio

WAITS = ("--task-after", "60s")
"""No handle goes out but at a stop."""


@asynccontextmanager
async def two_nodes(tmp_path: Path, *options: str) -> AsyncIterator[Cluster]:
    async with cluster(shared_address(tmp_path / "log.db"), *options, processes=2) as nodes:
        yield nodes


def client_of(*ports: int, **capabilities: Any) -> TaskClient:
    balancer = Balancer(ports=[*ports])
    return TaskClient(balancer=balancer, capabilities=capabilities) if capabilities else TaskClient(balancer=balancer)


async def running(client: TaskClient, story: Message, tool: str, *, under: str | None = None) -> Exchange:
    """A call whose tool has begun, and waits at its gate."""
    exchange = await client.begin("tools/call", call_params(tool, under, key=tool, **story))
    await until(lambda: tool in {name for name, _ in diary(Path(story["log"]))})
    return exchange


async def answered(exchange: Exchange) -> Message:
    async with exchange:
        return response_in(exchange, await exchange.answer())


async def test_a_client_that_takes_tasks_gets_its_handle_when_the_process_stops(tmp_path: Path) -> None:
    """A tool that may run again does so elsewhere; the outcome of any other one is not known."""
    story: dict[str, Any] = {"n": 4, "gate": str(tmp_path / "gate"), "pauses": [2], "log": str(tmp_path / "diary")}
    async with two_nodes(tmp_path, *WAITS, "--drain-timeout", "0s") as nodes:
        first, second = nodes.servers
        here = client_of(first.port)
        calls = {tool: await running(here, story, tool) for tool in ("count", "pay")}
        first.send(signal.SIGTERM)
        handles = {tool: await answered(exchange) for tool, exchange in calls.items()}
        assert {handle["result"]["resultType"] for handle in handles.values()} == {"task"}
        assert await first.wait() == 0
        open_gate(f"{story['gate']}.2")
        client = client_of(first.port, second.port)
        assert said(await client.resolved(handles["count"])) == "counted to 4"
        assert said(await client.resolved(handles["pay"])) == OUTCOME_UNKNOWN
        assert sorted(name for name, _ in diary(tmp_path / "diary")) == ["count", "count", "pay"]


async def test_calls_of_clients_that_take_no_tasks_are_answered_when_the_process_stops(tmp_path: Path) -> None:
    """One with a key is asked for again elsewhere; any other one has an outcome that is not known."""
    story: dict[str, Any] = {"n": 4, "gate": str(tmp_path / "gate"), "pauses": [2], "log": str(tmp_path / "diary")}
    async with two_nodes(tmp_path, "--drain-timeout", "0s") as nodes:
        first, second = nodes.servers
        here = client_of(first.port, sampling={})  # it can be asked something, so its calls are in the log
        keyed = await running(here, story, "count", under="mine")
        paid = await running(here, story, "pay", under="other")
        bare = await running(here, story, "put")
        first.send(signal.SIGTERM)
        stopped = await answered(keyed)
        assert (stopped["status"], said(stopped)) == (503, STOPPING)
        assert (said(await answered(paid)), said(await answered(bare))) == (OUTCOME_UNKNOWN, OUTCOME_UNKNOWN)
        assert await first.wait() == 0
        open_gate(f"{story['gate']}.2")
        client = client_of(first.port, second.port, sampling={})
        again = {"count": "mine", "pay": "other"}
        told = {tool: said(await client.call(tool, under=key, key=tool, **story)) for tool, key in again.items()}
        assert told == {"count": "counted to 4", "pay": OUTCOME_UNKNOWN}
        assert sorted(name for name, _ in diary(tmp_path / "diary")) == ["count", "count", "pay", "put"]


async def test_tasks_have_a_time_of_their_own_to_finish_in(tmp_path: Path) -> None:
    """Beyond that of other calls. Their clients may ask for them here as well, and are not kept waiting."""
    story: dict[str, Any] = {"n": 4, "gate": str(tmp_path / "gate"), "pauses": [2], "log": str(tmp_path / "diary")}
    options = ("--task-after", "0s", "--task-hold", "60s", "--drain-timeout", "0s", "--task-drain", "60s")
    async with two_nodes(tmp_path, *options) as nodes:
        first, second = nodes.servers
        here = client_of(first.port)
        handle = await answered(await running(here, story, "pay"))
        task = {"taskId": handle["result"]["taskId"]}
        polling = asyncio.create_task(here.ask("tasks/get", task))
        session = await Peer(port=first.port).session()
        async with (
            await running(client_of(first.port, sampling={}), story, "put") as bare,
            await session.begin_call("pay", key="session", **story) as call,
        ):
            await call.until_messages(1)
            first.send(signal.SIGTERM)
            assert (await polling)["result"]["status"] == "working"
            assert said(await answered(bare)) == OUTCOME_UNKNOWN
            assert (await call.answer()).messages[-1]["error"]["code"] == OUTCOME_UNKNOWN
        assert (await here.ask("tasks/get", task))["result"]["status"] == "working"
        refused = await here.call("pay", key="refused", **story)
        assert (refused["status"], said(refused)) == (503, STOPPING)
        assert first.process.returncode is None
        open_gate(f"{story['gate']}.2")
        assert said(await client_of(second.port).resolved(handle)) == "counted to 4"
        assert await first.wait() == 0
        assert sorted(name for name, _ in diary(tmp_path / "diary")) == ["pay", "put", "session"]
