"""Start Python programs, each in a process of its own: as a fork of one that has everything imported (`forge`).

Where that cannot be (no Linux), or where it would hide something (a measurement of coverage begins with the
interpreter), a new interpreter is started, which takes a second longer.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).parents[2]


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


async def start(module: str, *arguments: str, cwd: Path | None = None, errors: int | None = None) -> Program:
    """`python -m MODULE ARGUMENTS`. Its output is read from `stdout`; so are its errors with `errors=STDOUT`."""
    if not hasattr(os, "pidfd_open") or "COVERAGE_PROCESS_START" in os.environ:
        return await start_other(sys.executable, "-m", module, *arguments, cwd=cwd, errors=errors)
    folder = str(cwd or Path.cwd())
    order = {"module": module, "arguments": arguments, "folder": folder, "environment": environment()}
    return await _fork(order, errors=errors)


async def start_other(*command: str, cwd: Path | None = None, errors: int | None = None) -> Program:
    """Any command, in the same way."""
    return await asyncio.create_subprocess_exec(
        *command, cwd=cwd, env=environment(), stdin=DEVNULL, stdout=PIPE, stderr=errors
    )


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1"}


def python_path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


class _Forked:
    """A child of the forge."""

    def __init__(self, pid: int, stdout: asyncio.StreamReader, status: asyncio.StreamReader) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._end = asyncio.create_task(self._read_end(status))

    async def _read_end(self, status: asyncio.StreamReader) -> int:
        self.returncode = int(await status.read())
        return self.returncode

    async def wait(self) -> int:
        return await asyncio.shield(self._end)

    def send_signal(self, signal: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


async def _fork(order: Mapping[str, object], *, errors: int | None) -> _Forked:
    output, output_end = os.pipe()
    status, status_end = os.pipe()
    nothing = os.open(os.devnull, os.O_RDWR)
    errors_end = {None: 2, STDOUT: output_end, DEVNULL: nothing}[errors]
    try:
        files = [nothing, output_end, errors_end, status_end]
        socket.send_fds(_forge()[0], [json.dumps(order).encode()], files)
    finally:
        for file in (output_end, status_end, nothing):
            os.close(file)
    told = await _reader(status)
    return _Forked(int(await told.readline()), await _reader(output), told)


async def _reader(file: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(file, "rb", 0))
    return reader


@cache
def _forge() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """The forge of this process, which ends with it, and the socket on which it takes orders."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forge", str(its.fileno())],
            cwd=ROOT,
            env=environment(),
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
        )
    return ours, process
