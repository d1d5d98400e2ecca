"""Run a program on a terminal of its own (a pty), and play the user who reads and types."""

from __future__ import annotations

import asyncio
import os
import pty
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from tests.support.processes.starting import environment, fork

#: Seconds for the next thing that a program says; it may have to start on a busy machine.
PATIENCE = 60


class PtyProgram:
    """A program, and everything that stands on its terminal."""

    def __init__(self, terminal: int, status: int) -> None:
        self.screen = ""
        self._terminal = terminal
        self._status = status
        self._seen = 0
        self._came = asyncio.Event()
        asyncio.get_running_loop().add_reader(terminal, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._terminal, 65_536)
        except OSError:  # the program has ended
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._terminal)
        self.screen += data.decode(errors="replace")
        self._came.set()

    async def sees(self, text: str) -> None:
        """Wait until this text comes, behind what was waited for before."""
        async with asyncio.timeout(PATIENCE):
            while (place := self.screen.find(text, self._seen)) < 0:
                self._came.clear()
                await self._came.wait()
        self._seen = place + len(text)

    def types(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    async def end(self) -> int:
        """Its status, once it has ended."""
        async with asyncio.timeout(PATIENCE):
            told = await asyncio.to_thread(self._read_status)
        return int(told.split()[1])

    def _read_status(self) -> bytes:
        with os.fdopen(self._status, "rb") as status:
            return status.read()


@asynccontextmanager
async def on_a_pty(module: str, *arguments: str, env: Mapping[str, str] | None = None) -> AsyncIterator[PtyProgram]:
    ours, its = pty.openpty()
    status = fork(module, arguments, (os.dup(its), os.dup(its), its), env=environment(env))
    program = PtyProgram(ours, status)
    try:
        yield program
    finally:
        asyncio.get_running_loop().remove_reader(ours)
        os.close(ours)
        print(program.screen)  # shown by pytest when the test fails
