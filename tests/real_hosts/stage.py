"""A scenario's stage: the bakery behind a proxy, the model, and one host in an empty home."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import pty
import re
import signal
import termios
from asyncio.subprocess import DEVNULL, STDOUT
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from tests.real_hosts.host import PROMPT, Host, Place, Start
from tests.real_hosts.model import Model, model
from tests.support.processes.node_programs import program
from tests.support.processes.serving import Served, serving
from tests.support.proxies.cutting_proxy import CuttingProxy, cutting_proxy
from tests.support.servers.gate_file_tools import diary, open_gate

BAKERY = "tests.real_hosts.bakery:server"
#: The size of a terminal.
ROWS, COLUMNS = 40, 120
#: What moves the cursor and colours the text.
CONTROL = re.compile(r"\x1b\[[0-9;?<>=]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|\x1b.")
#: Seconds between two strokes.
STROKE = 0.3


class Stage:
    """What a scenario does things to."""

    def __init__(
        self, folder: Path, host: Host, place: Place, proxy: CuttingProxy, scripted: Model, options: Sequence[str]
    ) -> None:
        self.folder = folder
        self.host = host
        self.place = place
        self.proxy = proxy
        self.model = scripted
        self._options = options
        self._process: asyncio.subprocess.Process | None = None
        self._terminal: asyncio.Task[None] | None = None
        self._servers = AsyncExitStack()
        self._served: Served | None = None

    async def serve(self) -> None:
        """Start the bakery, or start it again, on the same store."""
        options = ["--store", f"sqlite:{self.folder}/perdure.db", *self._options]
        self._served = await self._servers.enter_async_context(serving(BAKERY, *options))
        self.proxy.upstreams = (self._served.port,)

    async def kill(self) -> None:
        assert self._served is not None
        await self._served.kill()

    def runs(self) -> int:
        """How often tools have begun."""
        return len(diary(self.folder / "diary"))

    async def began(self, times: int = 1) -> None:
        while self.runs() < times:  # noqa: ASYNC110 - another process writes the diary
            await asyncio.sleep(0.1)

    def open_gate(self) -> None:
        open_gate(self.folder / "gate")

    def caller(self) -> dict[str, object]:
        """What the tool was told of its caller; empty if none began."""
        file = self.folder / "caller"
        return json.loads(file.read_text()) if file.exists() else {}

    async def start_host(self, *, asks: bool = False) -> None:
        start = self.host.asks if asks else None
        await self._start((start or self.host.start)(self.place))

    async def start_host_again(self) -> None:
        await self._start((self.host.again or self.host.start)(self.place))

    async def host_ended(self) -> None:
        """Wait until the host has ended by itself."""
        while True:
            process = self._process
            if process is None:  # the scenario has ended it, and will start it again
                await asyncio.sleep(0.1)
                continue
            await process.wait()
            if process is self._process:
                return

    async def end_host(self) -> None:
        """Kill the host, with all that it started."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if self._terminal is not None:
            await self._terminal
            self._terminal = None

    async def close(self) -> None:
        await self.end_host()
        await self._servers.aclose()

    async def _start(self, start: Start) -> None:
        path = os.pathsep.join([str(program("node").parent), os.environ.get("PATH", os.defpath)])
        home = str(self.place.home)
        # Nothing of this user's own settings reaches the host.
        env = {"HOME": home, "PATH": path, "LANG": "C.UTF-8", "TERM": "xterm-256color", **start.env}
        with (self.folder / "host.log").open("ab") as log:
            if not start.terminal:
                self._process = await asyncio.create_subprocess_exec(
                    *start.argv, cwd=home, env=env, stdin=DEVNULL, stdout=log, stderr=STDOUT, start_new_session=True
                )
                return
        ours, its = pty.openpty()
        termios.tcsetwinsize(its, (ROWS, COLUMNS))
        try:
            self._process = await asyncio.create_subprocess_exec(
                *start.argv, cwd=home, env=env, stdin=its, stdout=its, stderr=its, start_new_session=True
            )
        finally:
            os.close(its)
        self._terminal = asyncio.create_task(self._type(ours, start))

    async def _type(self, terminal: int, start: Start) -> None:
        """Write down what the terminal shows, and type what the host waits for."""
        waiting = dict(start.keys)
        screen = ""
        with (self.folder / "host.log").open("ab") as log, os.fdopen(terminal, "r+b", buffering=0) as file:
            while data := await asyncio.to_thread(_read, file):
                log.write(data)
                screen += "".join(CONTROL.sub("", data.decode(errors="replace")).split())
                for text in [text for text in waiting if text in screen]:
                    await _strokes(file, waiting.pop(text))
                if start.idle and start.idle in screen and not self.model.asked:
                    screen = ""
                    await _strokes(file, f"{PROMPT}\r")


async def _strokes(file: io.FileIO, keys: str) -> None:
    """Type as a person does: what comes in one piece is taken for a paste, Enter included."""
    for stroke in re.split("(\r)", keys):
        await asyncio.sleep(STROKE)
        file.write(stroke.encode())


def _read(file: io.FileIO) -> bytes:
    try:
        return file.read(65536) or b""
    except OSError:  # the host has ended
        return b""


@asynccontextmanager
async def stage(
    folder: Path, installed: Path, host: Host, tools: list[str], *, is_stdio: bool, options: Sequence[str]
) -> AsyncIterator[Stage]:
    """All is up but the host."""
    home = folder / "home"
    home.mkdir()
    async with model(tools, {"folder": str(folder)}) as scripted, cutting_proxy(0) as proxy:
        place = Place(installed, home, scripted.url, proxy.url, is_stdio)
        here = Stage(folder, host, place, proxy, scripted, options)
        try:
            await here.serve()
            yield here
        finally:
            await here.close()
