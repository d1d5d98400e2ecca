"""FastMCP's tasks (`fastmcp-tasks`), which are not Perdure's: its calls are followed, cancelled and found again."""

from __future__ import annotations

import asyncio
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from mcp.shared.exceptions import MCPError

import perdure
from perdure.client.memory import decode
from tests.client.conftest import text
from tests.client.test_tasks import EAGER
from tests.support.clients.modern_requests import MODERN
from tests.support.processes.serving import serving
from tests.support.proxies.cutting_proxy import cutting_proxy
from tests.support.servers.in_process import until

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(find_spec("fastmcp_tasks") is None, reason="fastmcp-tasks is not installed"),
]

KITCHEN = (sys.executable, "-m", "tests.client.fastmcp_task_server")


async def test_its_tasks_outlive_cuts_and_the_client_and_what_is_no_task_is_unknown(tmp_path: Path) -> None:
    state, notes = tmp_path / "s", tmp_path / "seen"

    def seen() -> list[str]:
        return notes.read_text().splitlines() if notes.exists() else []

    async with serving(str(tmp_path), argv=KITCHEN) as served, cutting_proxy(served.port) as proxy:
        async with perdure.connect(proxy.url, mode=MODERN, state=state, patience=EAGER) as client:
            calls = [asyncio.create_task(client.call_tool("bake", {"gate": gate})) for gate in ("rye", "oat", "rolls")]
            await until(lambda: len(seen()) == 3)
            await until(lambda: sum(c.task is not None for c in decode(state.read_bytes()).durable_calls.values()) == 3)
            fry = asyncio.create_task(client.call_tool("fry", {"gate": "eggs"}))
            await until(lambda: "fry eggs" in seen())
            proxy.cut()
            with pytest.raises(perdure.OutcomeUnknown):
                await fry
            (tmp_path / "rye").touch()
            assert text(await calls[0]) == "baked rye"
            calls[1].cancel()
            await until(lambda: "cancelled oat" in seen())
        with pytest.raises(MCPError):
            await calls[2]  # the client has left, the task has not
        async with perdure.connect(proxy.url, state=state, patience=EAGER) as client:
            [left] = client.pending()
            (tmp_path / "rolls").touch()
            assert text(await left) == "baked rolls"
    assert sorted(seen()) == ["bake oat", "bake rolls", "bake rye", "cancelled oat", "fry eggs"]
