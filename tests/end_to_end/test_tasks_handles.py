"""Handles of tasks: one that was lost on the way is found again by its key, and one that was given is known at once.

Two processes on one store; each request goes to the other one.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.support.clients.task_client import CAN_BE_ASKED, Balancer, TaskClient, call_params, said
from tests.support.processes.cluster import Cluster, cluster
from tests.support.servers.gate_file_tools import diary
from tests.support.stores.postgres import store_url
from tests.support.stores.shared_store import shared_address

pytestmark = pytest.mark.anyio

#: Tasks that are made and looked for; a number of thousands takes minutes.
MADE = int(os.environ.get("PERDURE_TEST_TASKS_MADE", "150"))
AT_ONCE = 10
"""Requests under way together."""
EVERY = int(os.environ.get("PERDURE_TEST_TASKS_CUT_EVERY", "7"))
"""The response is cut at every so manieth byte; at each one if this is 1."""


def client_of(nodes: Cluster) -> TaskClient:
    balancer = Balancer(ports=[served.port for served in nodes.servers])
    return TaskClient(balancer=balancer, capabilities=CAN_BE_ASKED)


async def test_a_handle_that_is_cut_at_any_byte_is_found_again_by_its_key(tmp_path: Path) -> None:
    """Each cut has a call and a key of its own; the calls wait for their client, so they stay tasks."""
    log = tmp_path / "diary"
    async with cluster(shared_address(tmp_path / "log.db"), "--task-after", "0s", processes=2) as nodes:
        client, turns = client_of(nodes), asyncio.Semaphore(AT_ONCE)

        async def response_of(name: str, most: int | None) -> bytes:
            """As many bytes of the response to the first request with this key, before the connection is cut."""
            params = call_params("ask", name, question="Why?", log=str(log), key=name)
            exchange = await client.begin("tools/call", params)
            got = b""
            while most is None or len(got) < most:
                async with asyncio.timeout(60):
                    piece = await exchange.bytes(65_536 if most is None else most - len(got))
                got += piece
                if not piece or (most is None and got.endswith(b"}}}")):
                    break
            exchange.cut()
            await exchange.aclose()
            return got

        async def cut_at(byte: int) -> None:
            async with turns:
                name = f"cut-{byte}"
                assert len(await response_of(name, byte)) == byte
                found = {await client.task("ask", under=name, question="Why?", log=str(log), key=name) for _ in "ab"}
                assert len(found) == 1, name
                assert (await client.get(found.pop()))["status"] == "input_required"

        whole = await response_of("whole", None)
        assert whole.startswith(b"HTTP/1.1 200")
        cuts = sorted({*range(0, len(whole), EVERY), len(whole) - 1})
        async with asyncio.TaskGroup() as group:
            for byte in cuts:
                group.create_task(cut_at(byte))
        assert sorted(name for name, _ in diary(log)) == sorted(["whole", *(f"cut-{byte}" for byte in cuts)])


@pytest.mark.parametrize("store", ["shared", pytest.param("postgres", marks=pytest.mark.long)])
async def test_a_task_is_known_at_another_node_the_moment_its_handle_is_out(tmp_path: Path, store: str) -> None:
    """Also where a caller has as many as it may: those that ended first go, whatever node makes room for another."""
    address = shared_address(tmp_path / "log.db") if store == "shared" else store_url()
    made = MADE if store == "shared" else MADE // 3
    options = ("--task-after", "0s", "--task-hold", "0s", "--max-principal-tasks", str(MADE // 3))
    async with cluster(address, *options, processes=2) as nodes:

        async def make(count: int) -> None:
            client = client_of(nodes)
            for _ in range(count):
                task = await client.task("count", n=2, interval=0.002)
                response = await client.ask("tasks/get", {"taskId": task})
                assert "result" in response, response
                assert response["result"]["status"] in ("working", "completed")
                assert said(await client.outcome(task)) == "counted to 2"

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(make(made // AT_ONCE))
