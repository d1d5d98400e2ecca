"""Kills its own process at a chosen point of the product: a named function is entered or left for the n-th time, or is
about to make its n-th call of something written in C, such as SQLite.

    python -m tests.support.processes.crash_child POINT ARGUMENTS

runs `perdure ARGUMENTS` so. Nothing in the product knows of this: the interpreter reports each call (`sys.setprofile`).
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
from types import CodeType, FrameType
from typing import Any

#: What the interpreter calls the edges of a function, and the steps within.
EDGES = {"enter": "call", "leave": "return", "within": "c_call"}


def code_of(module: str, qualname: str) -> CodeType:
    """The code of a function; fails clearly if no such function exists any more."""
    found: Any = importlib.import_module(module)
    for name in qualname.split("."):
        found = getattr(found, name)
    code = getattr(found, "__code__", None)
    assert isinstance(code, CodeType), f"{module}:{qualname} is not a function"
    return code


def die_at(module: str, qualname: str, edge: str, nth: int, *, armed: bool = True) -> None:
    """Kill this process at that edge, the n-th time, in whatever thread.

    Without `armed` counting begins at SIGUSR1, and the process writes `armed` then.
    """
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
                    os.kill(os.getpid(), signal.SIGKILL)

    if not armed:
        signal.signal(signal.SIGUSR1, arm)
    threading.setprofile(seen)
    sys.setprofile(seen)


if __name__ == "__main__":
    from perdure.cli.entry import main

    die_at(**json.loads(sys.argv[1]))
    del sys.argv[1]
    main(sys.argv[1:])
