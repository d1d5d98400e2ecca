"""Start Python programs, each in a process of its own: as a fork of one that has everything imported (`fork_server`).

Where that cannot be (no Linux), or where it would hide something (a measurement of coverage begins with the
interpreter), a new interpreter is started, which takes a second longer.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).parents[3]

#: Bytes of a line that a test reads.
LONGEST_LINE = 1 << 24
#: Bytes of an order, which holds the environment.
LONGEST_ORDER = 1 << 20


class Program(Protocol):
    """What tests need of `asyncio.subprocess.Process`."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    @property
    def stdout(self) -> asyncio.StreamReader | None: ...
    def send_signal(self, signal: int) -> None: ...
    def kill(self) -> None: ...
    async def wait(self) -> int: ...
    async def communicate(self) -> tuple[bytes, bytes]: ...


async def start(
    module: str,
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    errors: int | None = PIPE,
) -> Program:
    """`python -m MODULE ARGUMENTS`. Its output is read, and its errors: apart, with the output (STDOUT), or not at all
    (None: they are this process's)."""
    if not can_fork():
        return await start_other(sys.executable, "-m", module, *arguments, cwd=cwd, env=env, errors=errors)
    output, output_end = os.pipe()
    said, said_end = os.pipe() if errors == PIPE else (None, os.dup(2 if errors is None else output_end))
    nothing = os.open(os.devnull, os.O_RDONLY)
    status = fork(module, arguments, (nothing, output_end, said_end), cwd=cwd, env=env)
    told = await _reader(status)
    pid = int(await told.readline())
    return _Forked(pid, await _reader(output), None if said is None else await _reader(said), told)


async def start_other(
    *command: str, cwd: Path | None = None, env: Mapping[str, str] | None = None, errors: int | None = PIPE
) -> asyncio.subprocess.Process:
    """Any command, in the same way."""
    return await asyncio.create_subprocess_exec(
        *command, cwd=cwd, env=environment(env), stdin=DEVNULL, stdout=PIPE, stderr=errors, limit=LONGEST_LINE
    )


@asynccontextmanager
async def stand_ins(folder: Path) -> AsyncIterator[Sequence[str]]:
    """What another program may run in place of `python -m`, so that its programs are forks as well (`stand_in`)."""
    if not can_fork():
        yield sys.executable, "-m"
        return
    loop = asyncio.get_running_loop()
    place = str(folder / "orders")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(place)
        listener.listen()
        listener.setblocking(False)

        async def take_orders() -> None:
            while True:
                connection, _ = await loop.sock_accept(listener)
                with connection:
                    connection.setblocking(True)  # the order follows at once
                    data, files, _, _ = socket.recv_fds(connection, LONGEST_ORDER, 3)
                    order = json.loads(data)
                    status = fork(
                        order["module"], order["arguments"], files, cwd=Path(order["folder"]), env=order["environment"]
                    )
                    socket.send_fds(connection, [b"s"], [status])
                    os.close(status)

        taking = asyncio.create_task(take_orders())
        try:
            yield sys.executable, "-I", "-S", str(ROOT / "tests" / "support" / "processes" / "stand_in.py"), place
        finally:
            taking.cancel()
            await asyncio.wait([taking])


def environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    return {**(os.environ if env is None else env), "PYTHONPATH": python_path()}


def python_path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def can_fork() -> bool:
    return hasattr(os, "pidfd_open") and "COVERAGE_PROCESS_START" not in os.environ


def fork(
    module: str,
    arguments: Sequence[str],
    files: Sequence[int],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> int:
    """Start a program with its three standard files; returns the file for its pid and its end."""
    status, status_end = os.pipe()
    folder = str(cwd or Path.cwd())
    order = {"module": module, "arguments": arguments, "folder": folder, "environment": environment(env)}
    try:
        socket.send_fds(_fork_server()[0], [json.dumps(order).encode()], [*files, status_end])
    finally:
        for file in (*files, status_end):
            os.close(file)
    return status


@cache
def _fork_server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Return the fork server of this process, which ends with it, and the socket on which it takes orders."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.processes.fork_server", str(its.fileno())],
            cwd=ROOT,
            env=environment(),
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
        )
    atexit.register(_end, ours, process)
    return ours, process


def _end(orders: socket.socket, fork_server: subprocess.Popen[bytes]) -> None:
    orders.close()
    fork_server.wait()


class _Forked:
    """A child of the fork server."""

    def __init__(
        self,
        pid: int,
        stdout: asyncio.StreamReader,
        stderr: asyncio.StreamReader | None,
        status: asyncio.StreamReader,
    ) -> None:
        self.pid = pid
        self.stdout = stdout
        self.stderr = stderr
        self.returncode: int | None = None
        self._end = asyncio.create_task(self._read_end(status))

    async def _read_end(self, status: asyncio.StreamReader) -> int:
        self.returncode = int(await status.read())
        return self.returncode

    async def wait(self) -> int:
        return await asyncio.shield(self._end)

    async def communicate(self) -> tuple[bytes, bytes]:
        said, errors = await asyncio.gather(self.stdout.read(), self.stderr.read() if self.stderr else _nothing())
        await self.wait()
        return said, errors

    def send_signal(self, signal: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


async def _nothing() -> bytes:
    return b""


async def _reader(file: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=LONGEST_LINE)
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(file, "rb", 0))
    return reader
