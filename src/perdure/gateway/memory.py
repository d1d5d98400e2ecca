"""Measures the memory of process trees. Linux only: it reads `/proc`."""

import contextlib
import os
from collections.abc import Collection, Iterator
from typing import NamedTuple

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class _Process(NamedTuple):
    pid: int
    parent: int
    session: int


def memory_of(sessions: Collection[int]) -> dict[int, int]:
    """The bytes that process trees hold for themselves, by the process at the root of each, which leads a session of
    processes. A process counts whose parent has ended, as long as it is in that session, and one that began a session
    of its own, as long as its parents live. Pages that processes share (code, libraries, files) are not counted,
    because each process would count them again."""
    processes = {process.pid: process for process in _processes()}
    found = dict.fromkeys(sessions, 0)
    for process in processes.values():
        root = process
        while root.session not in found and root.parent in processes:
            root = processes[root.parent]
        if root.session in found:
            found[root.session] += _own_memory(process.pid)
    return found


def _processes() -> Iterator[_Process]:
    for name in os.listdir("/proc"):
        if name.isdecimal():
            # It may have ended meanwhile, or belong to another user.
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                # After the command, which may hold anything: state, parent, group, session.
                _, parent, _, session, *_ = file.read().rpartition(b")")[2].split()
                yield _Process(int(name), int(parent), int(session))


def _own_memory(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/statm", "rb") as file:
        _, resident, shared, *_ = map(int, file.read().split())
        return (resident - shared) * _PAGE
    return 0
