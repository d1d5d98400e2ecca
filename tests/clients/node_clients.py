"""The official TypeScript clients: scripts that take calls as JSON lines on stdin and print what they see the same way.

They end when the input ends.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from tests.clients.stock_client import Call, StockClient
from tests.support.processes.node_programs import program

HERE = Path(__file__).parent


class NodeClient(StockClient):
    """A script of this folder under node."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        super().__init__()
        self._process = process
        self._calls: list[Call] = []
        self.ended = False

    async def knows(self, call: Call, positions: int) -> None:
        """A reset throws away what fetch has received and nobody has read yet, so wait for the client's own word."""
        await self.until(lambda: len(call.tokens) >= positions)

    async def call(self, tool: str, /, **arguments: Any) -> Call:
        assert self._process.stdin is not None
        call = Call()
        self._calls.append(call)
        self._process.stdin.write(json.dumps({"tool": tool, "arguments": arguments}).encode() + b"\n")
        await self._process.stdin.drain()
        return call

    async def listen(self) -> None:
        """Take in what the script prints until it ends."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            self._saw(**json.loads(line))
            self.changed()
        self.ended = True
        self.changed()

    def _saw(
        self,
        *,
        ready: str | None = None,
        call: int | None = None,
        progress: int | None = None,
        token: str | None = None,
        answer: str | None = None,
        code: int | None = None,
        data: Any = None,
        notice: str | None = None,
        asked: str | None = None,
        error: str | None = None,
    ) -> None:
        if ready is not None:
            self.protocol = ready
        if notice is not None:
            self.notices.append(notice)
        if asked is not None:
            self.asked.append(asked)
        if error is not None:
            self.errors.append(error)
        if call is not None and progress is not None:
            self._calls[call].progress.append(progress)
        if call is not None and token is not None:
            self._calls[call].tokens.append(token)
        if call is not None and answer is not None:
            self._calls[call].answer, self._calls[call].code, self._calls[call].data = answer, code, data


def node_client(script: str, url: str, *, mode: str = "legacy") -> AbstractAsyncContextManager[StockClient]:
    """`mode`: how version 2 negotiates the revision, `legacy`, `auto` or the one that it is pinned to."""
    return script_client(str(program("node")), str(HERE / script), url, mode)


@asynccontextmanager
async def script_client(*command: str) -> AsyncIterator[StockClient]:
    """A client in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    client = NodeClient(process)
    async with AsyncExitStack() as stack:
        listening = await stack.enter_async_context(asyncio.TaskGroup())
        listening.create_task(client.listen())
        stack.push_async_callback(_end, process)
        await client.until(lambda: bool(client.protocol) or client.ended)
        assert client.protocol, f"{command[1]} ended before it was connected: {client.errors}"
        yield client


async def _end(process: asyncio.subprocess.Process) -> None:
    """End of input is the script's sign to close; one that does not is killed, so that no story leaves a process."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), 5)
    except TimeoutError:
        process.kill()
        await process.wait()
