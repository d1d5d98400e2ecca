"""Finds the MCP host that started this bridge: its pid and the time of its start (T2, T7, T11).

A pid alone is used again after a while, and after a restart of the machine at once. With the start time, and on Linux
with the id of the machine's start and the set of pids (containers), no two processes are the same.

Launchers in between are skipped (`launchers` has the rule). Where the chain of parents ends at pid 1, at a process
manager or at something that cannot be read, there is no identity, and resume is off.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass

from perdure.stdio.host.launchers import ProcessKind, classify
from perdure.stdio.host.processes import Processes, ProcessInfo, here
from perdure.telemetry.events import log_event

MAX_LAUNCHERS = 16
"""Launchers in a row. `npx` through a Python wheel makes five; a chain of more than this is not understood."""

TRIES = 5
"""How often the chain of parents is read again because it changed meanwhile. It can change once for each launcher."""

PAUSE = 0.01
"""Seconds before a process is looked at again that was ending or becoming another program."""


class _Changing(Exception):
    """A parent has no command line at this moment, so a launcher cannot be told from a host."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """One host process. No two processes have the same."""

    pid: int
    start: int
    """Linux: clock ticks from the machine's start. macOS: microseconds since 1970."""
    boot: str
    space: str

    @property
    def name(self) -> str:
        """As it stands in the names of files (T1)."""
        return f"{self.pid}-{self.start}"


def identify(processes: Processes | None = None, *, pid: int | None = None) -> Identity | None:
    """The host that started this process (or `pid`); None, and a sentence in the log, if it is not known."""
    table = processes or here()
    host = None if table is None else _find_host(table, pid or os.getpid())
    if table is None or host is None:
        log_event(
            logging.WARNING,
            "token.no_parent",
            "Could not verify parent process start time, session resume disabled for this instance",
        )
        return None
    return Identity(pid=host.pid, start=host.start, boot=table.boot, space=table.space)


def _find_host(processes: Processes, pid: int) -> ProcessInfo | None:
    """The end of the chain of parents, read twice the same: then each was the other's parent all the time in between.

    A parent that dies while we look leaves its children to another; its pid may be any process's in the next moment.
    What a process calls itself may change meanwhile.
    """
    for _ in range(TRIES):
        try:
            first, second = _parents(processes, pid), _parents(processes, pid)
        except _Changing:
            time.sleep(PAUSE)
            continue
        first_ids, second_ids = ([(one.pid, one.parent, one.start) for one in chain] for chain in (first, second))
        if first_ids == second_ids:
            return first[-1] if first else None
    return None


def _parents(processes: Processes, pid: int) -> list[ProcessInfo]:
    """From this process to the host; empty if there is no host."""
    chain = [found] if (found := processes.look(pid)) else []
    while chain and len(chain) <= MAX_LAUNCHERS + 1:
        parent = processes.look(chain[-1].parent) if chain[-1].parent > 1 else None
        if parent is None:
            return []
        if not parent.words:
            raise _Changing
        chain.append(parent)
        match classify(name=parent.name, words=parent.words):
            case ProcessKind.HOST:
                return chain
            case ProcessKind.MANAGER:
                return []
            case ProcessKind.LAUNCHER:
                pass
    return []
