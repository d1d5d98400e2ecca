"""Starts Python programs in a twentieth of a second: `python -m tests.support.processes.fork_server FD`.

Importing the SDK takes a second of processor time, far longer than most of what tests do with a server of their own.
So it is done once here, and each program is a fork that continues as `python -m MODULE ARGUMENTS` would, from an
empty module `__main__` to the interpreter's own end. FD is a socket on which orders arrive, each with four files: the
program's three standard ones, and one that gets `PID` at the start and the exit status at the end, a line each.

This process has one thread, opens nothing and serves nothing. When the socket is closed, it ends, and so do the
programs that are left.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
from typing import Any

from tests.support.processes.preloaded_servers import PreloadedServers

#: Imported before the fork, so that no program has to.
PRELOADED = (
    "perdure.cli.tool_calls",
    "perdure.cli.console",
    "perdure.cli.dev",
    "perdure.cli.entry",
    "perdure.cli.sessions",
    "perdure.cli.store",
    "perdure.console.app",
    "perdure.http.app",
    "perdure.runtime.sdk",
    "perdure.serve.uvicorn_server",
    "perdure.store.sqlite.store",
    "perdure.store.postgres.store",
    "anyio._backends._asyncio",
    "encodings.idna",
    "rich.console",
    "rich.logging",
    "tomllib",
    "uvloop",
    "httptools",
    "uvicorn.lifespan.on",
    "uvicorn.loops.uvloop",
    "mcp.server.mcpserver",
)
#: An order holds the environment.
LONGEST_ORDER = 1 << 20


Order = tuple[dict[str, Any], list[int]]


def main(orders: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    for name in PRELOADED:
        importlib.import_module(name)
    preloaded = PreloadedServers()
    sys.meta_path.insert(0, preloaded)
    running: dict[int, tuple[int, int]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(orders, selectors.EVENT_READ)
        order = _carry_out(orders, selector, running, preloaded)
    if order is None:
        for pid, _ in running.values():
            os.kill(pid, signal.SIGKILL)
        return
    for file in (orders.detach(), *running, *(status for _, status in running.values())):
        os.close(file)
    _become(*order)


def _carry_out(
    orders: socket.socket,
    selector: selectors.BaseSelector,
    running: dict[int, tuple[int, int]],
    preloaded: PreloadedServers,
) -> Order | None:
    """Fork for each order until there are no more. In the fork: returns the order that it is for."""
    while True:
        for key, _ in selector.select():
            if key.fd in running:
                selector.unregister(key.fd)
                _tell_end(key.fd, *running.pop(key.fd))
                continue
            if (order := _take(orders)) is None:
                return None
            preloaded.keep(order[0]["arguments"])
            gc.collect()
            gc.freeze()  # no program collects objects that it did not make, nor copies their pages for that
            if (pid := os.fork()) == 0:
                return order
            ending = os.pidfd_open(pid)
            selector.register(ending, selectors.EVENT_READ)
            running[ending] = (pid, _tell_start(pid, order[1]))


def _take(orders: socket.socket) -> Order | None:
    data, files, _, _ = socket.recv_fds(orders, LONGEST_ORDER, 4)
    return (json.loads(data), files) if data else None


def _tell_start(pid: int, files: list[int]) -> int:
    """Leave the files to the program; returns the one to which its end is written."""
    *standard, status = files
    for file in standard:
        os.close(file)
    os.write(status, b"%d\n" % pid)
    return status


def _tell_end(ending: int, pid: int, status: int) -> None:
    _, how = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):  # the test that started it is over
        os.write(status, b"%d\n" % os.waitstatus_to_exitcode(how))
    os.close(status)
    os.close(ending)


def _become(order: dict[str, Any], files: list[int]) -> None:
    """Go on as a program that was just started."""
    *standard, status = files
    os.close(status)
    for place, file in enumerate(standard):
        os.dup2(file, place)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    _open_standard_files(at_once=bool(os.environ.get("PYTHONUNBUFFERED")))
    command = [sys.executable, "-m", order["module"], *order["arguments"]]
    sys.argv, sys.orig_argv = command[2:], command
    sys.path[0] = order["folder"]
    how: object = 0
    try:
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        how = end.code or 0
    _end(how)


def _end(status: object) -> None:
    """End as the interpreter does, and leave out what takes it most of the time: freeing what was imported for all."""
    if isinstance(status, int) and threading.active_count() == 1:
        with contextlib.suppress(OSError, ValueError):  # the interpreter has words for output that cannot be written
            sys.stdout.flush()
            os._exit(status & 0xFF)
    sys.exit(status)  # type: ignore[arg-type]


def _open_standard_files(*, at_once: bool) -> None:
    """As the interpreter does at its start: output to no terminal is kept back until it is flushed."""
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
    output = io.FileIO(1, "w", closefd=False)
    sys.stdout = io.TextIOWrapper(output if at_once else io.BufferedWriter(output), "utf-8", write_through=at_once)
    errors = io.FileIO(2, "w", closefd=False)
    sys.stderr = io.TextIOWrapper(errors, "utf-8", "backslashreplace", line_buffering=True, write_through=True)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
