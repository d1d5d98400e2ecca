"""Who started us: the MCP host, told by its pid and by when it started (T2, T7, T11).

A pid alone is used again after a while, and after a restart of the machine at once. With the start time, and on Linux
with the id of the machine's start and the set of pids (containers), no two processes are the same.

Launchers in between are skipped (`launchers` has the rule). Where the way up ends at pid 1, at a process manager or at
something that cannot be read, there is no identity, and resume is off.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass

from perdure.stdio.host.launchers import Kind, kind
from perdure.stdio.host.processes import Processes, Seen, here
from perdure.telemetry.events import log_event

MAX_LAUNCHERS = 16
"""Launchers in a row. `npx` through a Python wheel makes five; a chain of more than this is not understood."""

TRIES = 5
"""How often the way up is looked at again because it changed under our eyes. It can change once for each launcher."""

PAUSE = 0.01
"""Seconds before a process is looked at again that was ending or becoming another program."""


class _Restless(Exception):
    """A process on the way has no command line at this moment, so nobody can tell a launcher from a host."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """One host process; never equal to another one's."""

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
    """The host that started this process (or `pid`); None, and a sentence in the log, if nobody can tell."""
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


def _find_host(processes: Processes, pid: int) -> Seen | None:
    """The way up, seen twice the same: then each was the other's parent all the time in between, and alive.

    A parent that dies while we look leaves its children to another; its pid may be anybody's in the next moment.
    """
    for _ in range(TRIES):
        try:
            first, second = _climb(processes, pid), _climb(processes, pid)
        except _Restless:
            time.sleep(PAUSE)
            continue
        if _same(first, second):
            return first[-1] if first else None
    return None


def _climb(processes: Processes, pid: int) -> list[Seen]:
    """From us to the host; empty if there is no way."""
    way = [seen] if (seen := processes.look(pid)) else []
    while way and len(way) <= MAX_LAUNCHERS + 1:
        parent = processes.look(way[-1].parent) if way[-1].parent > 1 else None
        if parent is None:
            return []
        if not parent.words:
            raise _Restless
        way.append(parent)
        match kind(name=parent.name, words=parent.words):
            case Kind.HOST:
                return way
            case Kind.MANAGER:
                return []
            case Kind.LAUNCHER:
                pass
    return []


def _same(first: list[Seen], second: list[Seen]) -> bool:
    """The same processes; what a process calls itself may change meanwhile."""
    return [(seen.pid, seen.parent, seen.start) for seen in first] == [
        (seen.pid, seen.parent, seen.start) for seen in second
    ]
