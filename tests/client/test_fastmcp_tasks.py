"""FastMCP's tasks (`fastmcp-tasks`), which are not Perdure's: its calls are followed, cancelled and found again."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from mcp.shared.exceptions import MCPError

import perdure
from perdure.client.memory import decode
from tests.client.conftest import text
from tests.client.test_tasks import EAGER
from tests.support.cutting_proxy import CuttingProxy, cutting_proxy
from tests.support.modern import MODERN
from tests.support.site import under_uvicorn, until

fastmcp = pytest.importorskip("fastmcp")
fastmcp_tasks = pytest.importorskip("fastmcp_tasks")

pytestmark = pytest.mark.anyio


class Kitchen:
    """A FastMCP server with one tool that becomes a task and one that does not."""

    def __init__(self) -> None:
        self.gates: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.seen: list[str] = []
        self.server = fastmcp.FastMCP("kitchen")
        self.server.add_extension(fastmcp_tasks.TasksExtension(url="memory://"))
        config = fastmcp.utilities.tasks.TaskConfig(mode="optional", poll_interval=timedelta(milliseconds=50))
        self.server.tool(self.bake, task=config)
        self.server.tool(self.fry)

    async def bake(self, gate: str) -> str:
        self.seen.append(f"bake {gate}")
        try:
            await self.gates[gate].wait()
        except asyncio.CancelledError:
            self.seen.append(f"cancelled {gate}")
            raise
        return f"baked {gate}"

    async def fry(self, gate: str) -> str:
        self.seen.append(f"fry {gate}")
        await self.gates[gate].wait()
        return f"fried {gate}"


@asynccontextmanager
async def open_kitchen(kitchen: Kitchen) -> AsyncIterator[CuttingProxy]:
    async with (
        under_uvicorn(kitchen.server.http_app(path="/mcp"), complaint=".*") as port,
        cutting_proxy(port) as proxy,
    ):
        yield proxy


async def test_its_tasks_outlive_cuts_and_the_client_and_what_is_no_task_is_unknown(tmp_path: Path) -> None:
    kitchen, state = Kitchen(), tmp_path / "s"
    async with open_kitchen(kitchen) as proxy:
        async with perdure.connect(proxy.url, mode=MODERN, state=state, patience=EAGER) as client:
            calls = [asyncio.create_task(client.call_tool("bake", {"gate": gate})) for gate in ("rye", "oat", "rolls")]
            await until(lambda: len(kitchen.seen) == 3)
            await until(lambda: sum(c.task is not None for c in decode(state.read_bytes()).single_calls.values()) == 3)
            fry = asyncio.create_task(client.call_tool("fry", {"gate": "eggs"}))
            await until(lambda: "fry eggs" in kitchen.seen)
            proxy.cut()
            with pytest.raises(perdure.OutcomeUnknown):
                await fry
            kitchen.gates["rye"].set()
            assert text(await calls[0]) == "baked rye"
            calls[1].cancel()
            await until(lambda: "cancelled oat" in kitchen.seen)
        with pytest.raises(MCPError):
            await calls[2]  # the client has left, the task has not
        async with perdure.connect(proxy.url, state=state, patience=EAGER) as client:
            [left] = client.pending()
            kitchen.gates["rolls"].set()
            assert text(await left) == "baked rolls"
    assert sorted(kitchen.seen) == ["bake oat", "bake rolls", "bake rye", "cancelled oat", "fry eggs"]
