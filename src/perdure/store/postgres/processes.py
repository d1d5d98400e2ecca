"""Says how a process is found from another one on the same machine, and whether it is still there.

A name is the machine since it was started, the namespace of process ids (a container has its own), the process id and
the time at which the process began, because ids are used again. Where the system does not tell these, as only Linux
does, a process has no name, and nothing is concluded from it.
"""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")
_ENDED = ("Z", "X")
"""States of a process that has ended, and whose parent has not asked for its exit status."""


def own_name() -> str | None:
    """The name of this process."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = (_PROC / "self/ns/pid").stat().st_ino
        _, began = _state(os.getpid())
    except (OSError, ValueError, IndexError):
        return None
    return f"{boot} {namespace} {os.getpid()} {began}"


def is_there(name: str | None, seen_by: str | None) -> bool | None:
    """Whether the process of a name is there, seen by another process; `None`: it cannot be looked up from there."""
    if name is None or seen_by is None or name.split(" ")[:2] != seen_by.split(" ")[:2]:
        return None
    try:
        _, _, pid, began = name.split(" ")
        os.kill(int(pid), 0)  # nothing is sent; a process of another user is found as well
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    except (ValueError, OverflowError):
        return None
    try:
        state, since = _state(int(pid))
    except (OSError, ValueError, IndexError):
        return True  # its user hides it
    return state not in _ENDED and since == began


def _state(pid: int) -> tuple[str, str]:
    """The state of a process, and when it began, in ticks since the machine was started."""
    # Behind its own name, in which anything may stand.
    fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], fields[19]
