"""One tool of three effects on three engines, killed at the same points: how often each effect happened, and what its
caller was told. docs/steps.md says what `SEEN` has; the test fails where an engine does something else.

The tool's `charge` must not happen twice. Perdure alone does not repeat it when it cannot know whether it happened.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.support.clients.task_client import Balancer, TaskClient, said
from tests.support.peers.shop import effects_in
from tests.support.processes.python_environments import programs_of
from tests.support.processes.redis_server import a_redis
from tests.support.processes.serving import SERVE, serving
from tests.support.processes.starting import ROOT

pytestmark = [pytest.mark.anyio, pytest.mark.long, pytest.mark.timeout(300)]

DBOS = "3.3.0"

Outcome = tuple[dict[str, int], str | int]
DONE = "price charge mail"

SEEN: dict[str, dict[str, Outcome]] = {
    "Perdure": {
        "after charge": ({"price": 1, "charge": 1, "mail": 1}, DONE),
        "behind charge": ({"price": 1, "charge": 1}, -31001),
        "behind mail": ({"price": 1, "charge": 1, "mail": 2}, DONE),
    },
    "DBOS": {
        "after charge": ({"price": 1, "charge": 1, "mail": 1}, DONE),
        "behind charge": ({"price": 1, "charge": 2, "mail": 1}, DONE),
        "behind mail": ({"price": 1, "charge": 1, "mail": 2}, DONE),
    },
    "fastmcp-tasks": {
        "after charge": ({"price": 2, "charge": 2, "mail": 1}, DONE),
        "behind charge": ({"price": 2, "charge": 2, "mail": 1}, DONE),
        "behind mail": ({"price": 2, "charge": 2, "mail": 2}, DONE),
    },
}


async def served(folder: Path, name: str, *options: str, argv: tuple[str, ...]) -> str | int:
    """Call the tool of a server that dies in it, and ask the next one what came of it."""
    async with serving(name, *options, argv=argv) as first:
        balancer = Balancer(ports=[first.port])
        client = TaskClient(balancer=balancer)
        task = await client.task("order")
        await first.has_died()
        async with serving(name, *options, argv=argv) as second:
            balancer.ports[:] = [second.port]
            return said(await client.outcome(task))


async def on_perdure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str | int:
    options = ("--store", f"sqlite:{folder / 'log.db'}", "--task-after", "0s")
    return await served(folder, "tests.support.peers.perdure_shop:server", *options, argv=SERVE)


async def on_fastmcp_tasks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str | int:
    async with a_redis(folder) as url:
        monkeypatch.setenv("SHOP_REDIS", url)
        return await served(folder, "shop", argv=(sys.executable, "-m", "tests.support.peers.fastmcp_tasks_shop"))


async def on_dbos(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str | int:
    programs = await asyncio.to_thread(programs_of, "dbos", f"dbos=={DBOS}")
    for _ in range(2):
        process = await asyncio.create_subprocess_exec(
            *(str(programs / "python"), "-m", "tests.support.peers.dbos_shop"), cwd=ROOT, stdout=subprocess.PIPE
        )
        output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode().strip()


ENGINES: dict[str, Callable[[Path, pytest.MonkeyPatch], Awaitable[str | int]]] = {
    "Perdure": on_perdure,
    "DBOS": on_dbos,
    "fastmcp-tasks": on_fastmcp_tasks,
}


@pytest.mark.parametrize("point", ["after charge", "behind charge", "behind mail"])
async def test_the_same_tool_on_three_engines(point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Outcome] = {}
    monkeypatch.setenv("SHOP_POINT", point)
    for name, engine in ENGINES.items():
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.setenv("SHOP_FOLDER", str(folder))
        outcome = await engine(folder, monkeypatch)
        seen[name] = dict(effects_in(folder)), outcome
    assert seen == {name: found[point] for name, found in SEEN.items()}
