"""`perdure serve`, killed by itself at a chosen point: when a named function is entered or left for the n-th time, or
is about to make its n-th call of something written in C, such as SQLite.

Nothing in the product knows of this: the interpreter tells of each call (`sys.setprofile`). Started once, it takes
orders as JSON lines on its standard input and carries out each in a forked child, because importing everything takes
far longer than what is tested. It answers, a line each: `pid N`, and `gone STATUS` when that child is dead.

A point counts from the moment the server is told so (SIGUSR1; the server writes `armed`), or from the start.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NoReturn

from perdure.cli import main as cli

#: Imported before the fork, so that no child has to.
PRELOADED = (
    "tests.support.servers.gate_file_tools",
    "uvloop",
    "httptools",
    "perdure.store.sqlite.store",
    "perdure.store.postgres.store",
    "perdure.http.app",
)

#: What the interpreter calls the edges of a function, and the steps within.
EDGES = {"enter": "call", "leave": "return", "within": "c_call"}


def code_of(module: str, qualname: str) -> CodeType:
    """The code of a function; fails clearly if there is no such function any more."""
    found: Any = importlib.import_module(module)
    for name in qualname.split("."):
        found = getattr(found, name)
    code = getattr(found, "__code__", None)
    assert isinstance(code, CodeType), f"{module}:{qualname} is not a function"
    return code


def watch(module: str, qualname: str, edge: str, nth: int, *, armed: bool) -> None:
    """Kill this process at that edge, the n-th time from when it is armed, in whatever thread."""
    code, event, left = code_of(module, qualname), EDGES[edge], nth
    lock = threading.Lock()

    def arm(*_: object) -> None:
        nonlocal armed
        armed = True
        os.write(1, b"armed\n")

    def seen(frame: FrameType, what: str, _: object) -> None:
        nonlocal left
        if frame.f_code is code and what == event and armed:
            with lock:
                left -= 1
                if left == 0:
                    os.write(1, b"reached\n")
                    os.kill(os.getpid(), signal.SIGKILL)

    signal.signal(signal.SIGUSR1, arm)
    threading.setprofile(seen)
    sys.setprofile(seen)


def serve(order: dict[str, Any]) -> NoReturn:
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for file, standard in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(file, standard)
    if order["point"] is not None:
        watch(**order["point"])
    cli.main(["serve", *order["arguments"]])


def in_child(work: Callable[[dict[str, Any]], object], order: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work(order)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)  # the parent's own exit handlers are not the child's


def main() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    print("ready", flush=True)
    for line in sys.stdin:
        pid = in_child(serve, json.loads(line))
        print(f"pid {pid}", flush=True)
        _, status = os.waitpid(pid, 0)
        print(f"gone {os.waitstatus_to_exitcode(status)}", flush=True)


if __name__ == "__main__":
    main()
