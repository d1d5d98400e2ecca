"""A desktop host for tests: a process that starts `perdure stdio` as its child, again and again.

It takes orders as JSON lines. What the bridge reads and writes is a socket that the test listens on, so the test plays
the host's part in the conversation, and this process its part in the process tree. Everything is imported once and
each bridge is a forked child: starting Python again takes far longer than what is tested.

A bridge may be made to kill itself at a point: when a function of the product is entered or left for the n-th time. Or
its writer is held: the host has a line, and the thread that wrote it cannot say so before the bridge begins to leave.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import threading
from types import FrameType
from typing import Any, NoReturn

from perdure.stdio import pipes
from tests.stdio.stdio_bridges import PATIENCE
from tests.support.processes.crash_child import EDGES, code_of, die_at

PRELOADED = ("perdure.cli.entry", "perdure.cli.stdio", "perdure.stdio.program", "perdure.stdio.resume_slot")
#: What a bridge imports that serves a program.
SERVING = ("perdure.cli.child_server", "perdure.gateway.host", "perdure.http.app", "perdure.serve.in_process")


def hold_writer(text: str) -> None:
    """Stop the thread that has written this text to the host, until the bridge begins to leave."""
    pipes.SETTLE_SECONDS = PATIENCE  # the machine may be busy
    written, leaving = (code_of("perdure.stdio.pipes", f"Output.{name}") for name in ("_write", "settle"))
    has_begun = threading.Event()

    def seen(frame: FrameType, what: str, _: object) -> None:
        if frame.f_code is leaving:
            has_begun.set()
        elif frame.f_code is written and what == EDGES["leave"] and text.encode() in frame.f_locals["data"]:
            has_begun.wait()

    threading.setprofile(seen)
    sys.setprofile(seen)


def bridge(order: dict[str, Any]) -> NoReturn:
    """Become `perdure stdio`."""
    pipe = socket.socket(socket.AF_UNIX)
    pipe.connect(order["socket"])
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for file, standard in ((pipe.fileno(), 0), (pipe.fileno(), 1), (log, 2)):
        os.dup2(file, standard)
    pipe.close()
    os.environ.update(order["environ"])
    sys.argv = ["perdure", "stdio", *order["arguments"]]
    if order["point"] is not None:
        die_at(**order["point"])
    if order["held"] is not None:
        hold_writer(order["held"])
    from perdure.cli.entry import main

    main()


def in_child(order: dict[str, Any]) -> int:
    """Fork a bridge; returns its pid."""
    for name in SERVING if "--" in order["arguments"] else ():
        importlib.import_module(name)
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        bridge(order)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)  # the host's own exit handlers are not the bridge's


def main() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            _, status = os.waitpid(order["wait"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
        else:
            print(in_child(order), flush=True)


if __name__ == "__main__":
    main()
