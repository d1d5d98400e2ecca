"""`perdure ARGUMENTS` with workers that start at once: `python -m tests.support.processes.forked_workers ARGUMENTS`.

A worker is a new interpreter, and importing the SDK takes it more than a second of processor time. Here it is a fork of
a process that has everything imported (the template), and continues as the new interpreter would: with the sockets, the
environment, a process group of its own, and nothing of the parent's state. It is the parent's child in every respect:
the process between the template and the worker ends at once, and the parent adopts the worker.

The template is a child of the parent as well, with a name of its own (`is_template`). It ends when the parent does.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import runpy
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from perdure.serve import worker_pool
from perdure.serve.worker_pool import VARIABLE, Worker
from tests.support.processes.starting import LONGEST_ORDER

TEMPLATE = "template"
_NAME = Path("/proc/self/comm")
_PR_SET_CHILD_SUBREAPER = 36


def is_template(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == TEMPLATE
    except OSError:  # it has ended, or the system has no such files, and then no template
        return False


class ForkedWorker:
    """What `Worker` needs of `asyncio.subprocess.Process`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    async def wait(self) -> int:
        over = asyncio.Event()
        loop, file = asyncio.get_running_loop(), os.pidfd_open(self.pid)
        loop.add_reader(file, over.set)
        await over.wait()
        loop.remove_reader(file)
        os.close(file)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])  # noqa: ASYNC222 - it has ended
        return self.returncode

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, how: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, how)


def main() -> None:
    orders, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        orders.close()
        order = _template(its)
        if order is not None:
            _become(*order)
        return
    its.close()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    async def start(command: Sequence[str], environment: Mapping[str, str], shared: Sequence[socket.socket]) -> Worker:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            order = {"command": command, "environment": dict(environment)}
            files = [one.fileno() for one in (theirs, *shared)]
            socket.send_fds(orders, [json.dumps(order).encode()], files)
            pid = int(orders.recv(64))
        return Worker(cast(asyncio.subprocess.Process, ForkedWorker(pid)), ours)

    worker_pool.Worker.start = start  # type: ignore[method-assign]
    _run("perdure", sys.argv[1:])


def _template(orders: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork for each order until the parent is gone. In the fork: returns the order that it is for."""
    name = _NAME.read_text()
    _NAME.write_text(TEMPLATE)
    for sig in (signal.SIGINT, signal.SIGHUP):  # for the parent
        signal.signal(sig, signal.SIG_IGN)
    while True:
        data, files, _, _ = socket.recv_fds(orders, LONGEST_ORDER, 4)
        if not data:
            return None
        told, telling = os.pipe()
        between = os.fork()
        if between == 0:
            if pid := os.fork():
                os.write(telling, b"%d" % pid)
                os._exit(0)
            orders.close()
            os.close(told)
            os.close(telling)
            _NAME.write_text(name)
            return json.loads(data), files
        os.waitpid(between, 0)  # from now on the worker is the parent's child
        orders.send(os.read(told, 64))
        for file in (*files, told, telling):
            os.close(file)


def _become(order: dict[str, Any], files: list[int]) -> None:
    """Go on as a worker that was just started."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.environ[VARIABLE] = ",".join(map(str, files))
    _, dash, module, *arguments = order["command"]
    assert dash == "-m"
    _run(module, arguments)


def _run(module: str, arguments: Sequence[str]) -> None:
    command = [sys.executable, "-m", module, *arguments]
    sys.argv, sys.orig_argv = command[2:], command
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
