"""Start and kill clients in processes of their own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.processes.starting import Program, start

PATIENCE = 60


class ClientProcess:
    """What `client_child` says, line by line."""

    def __init__(self, process: Program) -> None:
        self.process = process
        self.said: list[dict[str, Any]] = []

    async def line(self) -> dict[str, Any] | None:
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            line = await self.process.stdout.readline()
        if not line:
            return None
        self.said.append(json.loads(line))
        return self.said[-1]

    async def until(self, **facts: object) -> None:
        """Read until it says this."""
        while (line := await self.line()) is not None:
            if line == facts:
                return
        raise AssertionError(f"it ended without {facts}: {self.said}")

    async def rest(self) -> list[dict[str, Any]]:
        while await self.line() is not None:
            pass
        assert await self.process.wait() == 0
        return self.said

    def told(self, what: str) -> list[Any]:
        return [line[what] for line in self.said if what in line]

    async def kill(self) -> None:
        self.process.kill()
        await self.process.communicate()


@asynccontextmanager
async def client_process(
    url: str, state: Path, tool: str = "-", *more: str, **arguments: object
) -> AsyncIterator[ClientProcess]:
    process = await start(
        *("tests.client.client_child", url, str(state), tool, json.dumps(arguments), *more), errors=None
    )
    try:
        yield ClientProcess(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
