"""Servers that start in a twentieth of a second, one after the other, and may die at a chosen point (`crash_child`)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.support.processes.serving import READY, ROOT, python_path
from tests.support.servers.in_process import until

#: A kill that does not come is a point that was not reached.
PATIENCE = 60


@dataclass(frozen=True, kw_only=True)
class Point:
    """Where a process kills itself; see `crash_child`."""

    module: str
    qualname: str
    edge: str
    nth: int = 1
    armed: bool = False
    """From the start. Otherwise it counts from `CrashingServer.arm` on."""


class CrashingServer:
    """A server process."""

    def __init__(self, crashing_servers: asyncio.subprocess.Process, output: Path, pid: int) -> None:
        self.pid = pid
        self.port = 0
        self._nursery = crashing_servers
        self._output = output
        self._gone: asyncio.Task[int] | None = None

    def said(self) -> str:
        return self._output.read_text() if self._output.exists() else ""

    async def ready(self) -> None:
        """Wait until it serves, or is dead."""
        async with asyncio.timeout(PATIENCE):
            await until(lambda: READY.search(self.said()) or self.dead)
        if found := READY.search(self.said()):
            self.port = int(found[2])

    async def arm(self) -> None:
        os.kill(self.pid, signal.SIGUSR1)
        async with asyncio.timeout(PATIENCE):
            await until(lambda: "armed\n" in self.said())

    @property
    def dead(self) -> bool:
        return self._ending.done()

    @property
    def _ending(self) -> asyncio.Task[int]:
        if self._gone is None:
            self._gone = asyncio.create_task(self._wait())
        return self._gone

    async def _wait(self) -> int:
        assert self._nursery.stdout is not None
        word, status = (await self._nursery.stdout.readline()).split()
        assert word == b"gone"
        return int(status)

    async def gone(self) -> int:
        """Wait until it is dead; its exit status, negative for a signal."""
        async with asyncio.timeout(PATIENCE):
            return await asyncio.shield(self._ending)

    async def kill(self) -> None:
        if not self.dead:
            os.kill(self.pid, signal.SIGKILL)
        await self.gone()

    async def stop(self) -> int:
        if not self.dead:
            os.kill(self.pid, signal.SIGTERM)
        return await self.gone()


class CrashingServers:
    """Starts one server at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._count = 0
        self._last: CrashingServer | None = None

    async def start(self, target: str, *options: str, folder: Path, point: Point | None = None) -> CrashingServer:
        assert self._last is None or self._last.dead, "one at a time"
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._count += 1
        output = folder / f"server-{self._process.pid}-{self._count}.txt"
        order = {
            "arguments": [target, "--port", "0", *options],
            "point": None if point is None else asdict(point),
            "output": str(output),
        }
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        word, pid = (await self._process.stdout.readline()).split()
        assert word == b"pid"
        self._last = CrashingServer(self._process, output, int(pid))
        await self._last.ready()
        return self._last

    async def clear(self) -> None:
        """Kill what still runs, so that the next test can start its own."""
        if self._last is not None:
            await self._last.kill()
            print(self._last.said())  # shown by pytest when the test fails


@asynccontextmanager
async def crashing_servers() -> AsyncIterator[CrashingServers]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.support.processes.crash_child",
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    it = CrashingServers(process)
    try:
        yield it
    finally:
        await it.clear()
        process.stdin.close()
        await process.wait()
