"""Serve a target in a process of its own, the way a user does: `perdure serve TARGET --port 0`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import sys
from asyncio.subprocess import STDOUT
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.processes.crash_points import Point
from tests.support.processes.starting import ROOT, Program, can_fork, python_path, start, start_other

__all__ = ["ROOT", "SERVE", "START_SECONDS", "Line", "Served", "die_at", "log_lines", "python_path", "serving"]

BASIC_TOOLS = "tests.support.servers.basic_tools:server"

CRASHING = "tests.support.processes.crash_child"
PERDURE = (sys.executable, "-m", "perdure", "serve")
#: How to start a server. The variable lets the same tests run against another one that prints the same ready line.
SERVE = tuple(shlex.split(os.environ["PERDURE_TEST_SERVE"])) if "PERDURE_TEST_SERVE" in os.environ else PERDURE

#: A line of the log: time, level, action, and the sentence with the ids after it.
LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ([A-Z]+) +(\S+) +(.*?)(?:  ((?:\w+=\S+ ?)+))?")
READY = re.compile(r"perdure: serving on (http://127\.0\.0\.1:(\d+)/\S*)")
#: A process that only imports and binds; generous because several start at once on a small machine.
START_SECONDS = 60
#: Longer than any drain time the tests set, also on a busy machine.
STOP_SECONDS = 60


@dataclass(frozen=True)
class Line:
    """A line of a server's log."""

    level: str
    action: str
    sentence: str
    ids: str = field(default="", compare=False)
    """Such as `session=LpAKL48j node=Y7Ive-ON`."""


def log_lines(output: Iterable[str]) -> list[Line]:
    """The lines of a log in its text form; tracebacks and what else was printed are left out."""
    return [Line(*(part or "" for part in found.groups())) for line in output if (found := LINE.fullmatch(line))]


@dataclass(kw_only=True)
class Served:
    """A server process that answers."""

    process: Program
    url: str
    port: int
    #: Every line it has printed so far, both outputs together.
    output: list[str] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.process.pid

    async def stop(self) -> int:
        """Ask it to stop (SIGTERM), insist if it does not (SIGKILL); returns its exit status."""
        return await self._end(signal.SIGTERM)

    async def end(self) -> int:
        """Stop it at once, whatever it does: a second signal does not wait for its calls."""
        self.send(signal.SIGTERM)
        self.send(signal.SIGINT)  # another one, because two of a kind may arrive as one
        return await self.wait()

    async def kill(self) -> int:
        """Kill it as a crash would (SIGKILL)."""
        return await self._end(signal.SIGKILL)

    async def _end(self, how: signal.Signals) -> int:
        self.send(how)
        return await self.wait()

    def send(self, how: signal.Signals) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(how)

    async def wait(self) -> int:
        """Its exit status, once it has ended by itself; it is killed if it takes too long."""
        try:
            return await asyncio.wait_for(self.process.wait(), STOP_SECONDS)
        except TimeoutError:
            self.process.kill()
            return await self.process.wait()

    async def arm(self) -> None:
        """Let its point count from now on."""
        self.send(signal.SIGUSR1)
        async with asyncio.timeout(START_SECONDS):
            while "armed" not in self.output:  # noqa: ASYNC110 - another task reads the lines
                await asyncio.sleep(0.002)

    async def has_died(self) -> bool:
        """Wait until it has ended by itself; whether it was killed, as at its point."""
        async with asyncio.timeout(START_SECONDS):
            return await self.process.wait() == -signal.SIGKILL


async def die_at(point: Point, target: str, *options: str) -> bool:
    """Start a server that may die before it is ready, and wait for its end; whether it was killed, as at its point."""
    arguments = (json.dumps(asdict(point)), "serve", target, "--port", "0", *options)
    process = await start(CRASHING, *arguments, errors=STDOUT)
    async with asyncio.timeout(START_SECONDS):
        print((await process.communicate())[0].decode())
    return process.returncode == -signal.SIGKILL


@asynccontextmanager
async def serving(
    target: str = BASIC_TOOLS,
    *options: str,
    argv: Sequence[str] = SERVE,
    port: int = 0,
    cwd: Path | None = None,
    forks: bool = True,
    command: str = "serve",
    point: Point | None = None,
) -> AsyncIterator[Served]:
    """A running server. It stops when the block ends; a test may stop or kill it before. `forks=False` starts its
    workers as the product does, each in an interpreter of its own, which takes more than a second. A server that is
    given neither a store nor a folder has a store of its own. It kills itself at the `point`."""
    arguments = (target, "--port", str(port), *options)
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    own = TemporaryDirectory(prefix="p-")
    if cwd is None:
        env.setdefault("PERDURE_STORE", f"sqlite:{own.name}/perdure.db")
    has_workers = "--workers" in options or command == "dev"
    process: Program
    if point is not None:
        process = await start(CRASHING, json.dumps(asdict(point)), command, *arguments, env=env, errors=STDOUT)
    elif argv == PERDURE:
        pool = has_workers and forks and can_fork()
        module = "tests.support.processes.forked_workers" if pool else "perdure"
        process = await start(module, command, *arguments, cwd=cwd, env=env, errors=STDOUT)
    else:
        process = await start_other(*argv, *arguments, cwd=cwd, env=env, errors=STDOUT)
    assert process.stdout is not None
    served = Served(process=process, url="", port=0)
    drain: asyncio.Task[None] | None = None
    try:
        async with asyncio.timeout(START_SECONDS):
            served.url, served.port = await _ready(process.stdout, served.output)
        drain = asyncio.create_task(_drain(process.stdout, served.output))
        yield served
    finally:
        # Workers would outlive their parent, a store in the current directory would keep the traces of the death, and
        # coverage is written at the end.
        gently = has_workers or "--store" not in options or "COVERAGE_PROCESS_START" in os.environ
        await (served.end() if gently else served.kill())
        if drain is not None:
            await drain
        own.cleanup()
        print(*served.output, sep="\n")  # shown by pytest when the test fails


async def _ready(stdout: asyncio.StreamReader, output: list[str]) -> tuple[str, int]:
    while line := await stdout.readline():
        output.append(line.decode().rstrip())
        if found := READY.search(output[-1]):
            return found[1], int(found[2])
    raise RuntimeError("the server ended before it was ready:\n" + "\n".join(output))


async def _drain(stdout: asyncio.StreamReader, output: list[str]) -> None:
    """Keep reading, or the process would block on a full pipe."""
    while line := await stdout.readline():
        output.append(line.decode().rstrip())
