"""A tool that says nothing of whether it may run twice, and a process that dies in the middle of it: what the other
library with tasks does on a real Redis, and what Perdure does."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp.shared.inbound import encode_header_value

from tests.support.clients.modern_requests import TASKS, modern
from tests.support.clients.raw_http import Peer
from tests.support.processes.redis_server import a_redis
from tests.support.processes.serving import SERVE, Served, serving
from tests.support.servers.fastmcp_rival import REDELIVERY
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio

RIVAL = (sys.executable, "-m", "tests.support.servers.fastmcp_rival")
WITH_TASKS: dict[str, Any] = {"extensions": {TASKS: {}}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RIVAL_FOLDER", str(tmp_path))
    return tmp_path


def runs(folder: Path) -> int:
    begun = folder / "begun"
    return begun.read_text().count("\n") if begun.exists() else 0


async def ask(served: Served, method: str, params: dict[str, Any]) -> dict[str, Any]:
    body, headers = modern(method, params, capabilities=WITH_TASKS)
    if "taskId" in params:
        headers["mcp-name"] = encode_header_value(params["taskId"])
    answer = await Peer(port=served.port).ask("POST", body, headers=headers)
    result: dict[str, Any] = (answer.messages or [answer.json])[-1]["result"]
    return result


async def killed_while_charging(served: Served, folder: Path) -> str:
    """A task in the middle of which its process is killed; its id."""
    task = await ask(served, "tools/call", {"name": "charge", "arguments": {"card": "mine"}})
    assert task["resultType"] == "task"
    await until(lambda: runs(folder) == 1)
    served.send(signal.SIGKILL)
    return str(task["taskId"])


@pytest.mark.timeout(120)
@pytest.mark.long
async def test_the_rival_runs_it_a_second_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured, so that what our documentation says of it stays true."""
    async with a_redis(folder) as url:
        monkeypatch.setenv("RIVAL_REDIS", url)
        async with serving("rival", argv=RIVAL) as first:
            await killed_while_charging(first, folder)
        async with serving("rival", argv=RIVAL):
            async with asyncio.timeout(REDELIVERY * 30):
                await until(lambda: runs(folder) == 2)


async def test_perdure_runs_it_once_and_says_that_its_outcome_is_unknown(folder: Path) -> None:
    options = ("--store", f"sqlite:{folder / 'store.db'}", "--task-after", "0.1s")
    async with serving("tests.support.servers.fastmcp_rival:server", *options, argv=SERVE) as first:
        task = await killed_while_charging(first, folder)
    async with serving("tests.support.servers.fastmcp_rival:server", *options, argv=SERVE) as second:

        async def has_ended() -> bool:
            found = await ask(second, "tasks/get", {"taskId": task})
            return bool(found["status"] != "working")

        await until(has_ended)
        ended = await ask(second, "tasks/get", {"taskId": task})
        assert (ended["status"], ended["error"]["code"]) == ("failed", -31001)
    assert runs(folder) == 1
