"""Finds the MCP host that started this bridge: its pid and the time of its start (T2, T7, T11).

A pid alone is used again after a while, and after a restart of the machine at once. With the start time, and on Linux
with the id of the machine's start and the set of pids (containers), no two processes are the same.

Launchers in between are skipped (`launchers` has the rule). Where the chain of parents ends at pid 1, at a process
manager or at something that cannot be read, there is no identity, and resume is off.

On Linux processes are in `/proc`, exactly: the start is a count of clock ticks since the machine started, which no
change of the clock moves, and each start of the machine has an id. macOS is asked through `psutil`; the start is the
time of day in microseconds as it was written down when the process began, so it needs no such id. Elsewhere, on Windows
too, nothing is known, and resume is off.
"""

import importlib
import logging
import os
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perdure.stdio.launchers import ProcessKind, classify
from perdure.telemetry.log_records import log_event

#: Bytes of a command line that are read. A launcher's is short; one that is cut is taken for a host's.
MAX_COMMAND = 65_536
#: Launchers in a row. `npx` through a Python wheel makes five; a chain of more than this is not understood.
MAX_LAUNCHERS = 16
#: How often the chain of parents is read again because it changed meanwhile. It can change once for each launcher.
TRIES = 5
#: Seconds before a process is read again that was ending or becoming another program.
PAUSE = 0.01


@dataclass(frozen=True, kw_only=True)
class ProcessInfo:
    """One process, as it was at one moment."""

    pid: int
    parent: int
    start: int
    name: str
    words: tuple[str, ...]
    """Its command line. Empty while the process ends or becomes another program: its kind is not known then."""

    @property
    def key(self) -> tuple[int, int, int]:
        return self.pid, self.parent, self.start

    @property
    def kind(self) -> ProcessKind:
        return classify(name=self.name, words=self.words)


class Processes(ABC):
    """Looks up the processes of this machine.

    1. `look` returns what is known of a process, or None: there is none, or it cannot be read.
    2. Two processes never have the same pid and start, as long as `boot` and `space` are the same.
    3. `is_gone` is true only if the process with this pid and start does not live any more; never for "cannot tell".
    """

    boot = ""
    """Which start of the machine this is; empty where a start time says it all."""
    space = ""
    """Which of several sets of pids these are: containers have their own, and share the machine's ticks."""

    @abstractmethod
    def look(self, pid: int, /) -> ProcessInfo | None: ...

    def is_gone(self, pid: int, start: int, /) -> bool:
        if (found := self.look(pid)) is not None:
            return found.start != start
        try:
            os.kill(pid, 0)
        except (OSError, OverflowError) as error:
            return isinstance(error, ProcessLookupError)
        return False


class ProcFs(Processes):
    """Linux."""

    def __init__(self, root: str | os.PathLike[str] = "/proc") -> None:
        self._root = Path(root)
        self.boot = (self._root / "sys/kernel/random/boot_id").read_text().strip()
        self.space = os.readlink(self._root / "self/ns/pid")

    def look(self, pid: int, /) -> ProcessInfo | None:
        folder = self._root / str(pid)
        try:
            stat = (folder / "stat").read_text(errors="replace")
            with open(folder / "cmdline", "rb") as file:
                command = file.read(MAX_COMMAND)
            # The name stands in parentheses and may hold some, and spaces.
            begin, _, rest = stat.rpartition(")")
            name, fields = begin.partition(" (")[2], rest.split()
            is_cut = len(command) >= MAX_COMMAND
            said = command.rstrip(b"\0").decode(errors="replace").split("\0") if command else []
            words = (name,) if is_cut else tuple(said)
            # proc(5) counts from 1 and with pid and name: the parent is field 4, the start 22.
            return ProcessInfo(pid=pid, parent=int(fields[1]), start=int(fields[19]), name=name, words=words)
        except (OSError, ValueError, IndexError):
            return None


class Psutil(Processes):
    """macOS. Works elsewhere as well, where start times move with the clock."""

    def __init__(self) -> None:
        self._psutil: Any = importlib.import_module("psutil")  # a dependency on macOS alone

    def look(self, pid: int, /) -> ProcessInfo | None:
        try:
            process = self._psutil.Process(pid)
            with process.oneshot():
                start = round(process.create_time() * 1_000_000)
                parent, name = process.ppid(), process.name()
            try:
                words = tuple(process.cmdline())
            except self._psutil.AccessDenied:
                words = (name,)  # of another user: not a launcher of this bridge
            except self._psutil.ZombieProcess:
                words = ()
        except (self._psutil.Error, OSError, ValueError):
            return None
        return ProcessInfo(pid=pid, parent=parent, start=start, name=name, words=words)


def here(platform: str = sys.platform) -> Processes | None:
    """Return the processes of this machine; None where no way is known to tell them apart for sure."""
    try:
        if platform == "linux":
            return ProcFs()
        return Psutil() if platform == "darwin" else None
    except (OSError, ImportError):
        return None


@dataclass(frozen=True, kw_only=True)
class Identity:
    """One host process. No two processes have the same."""

    pid: int
    start: int  #: Linux: clock ticks from the machine's start. macOS: microseconds since 1970.
    boot: str
    space: str
    name: str = field(default="", compare=False)


def identify(processes: Processes | None = None, *, pid: int | None = None) -> Identity | None:
    """Return the host that started this process (or `pid`); None, and a sentence in the log, if it is not known.

    It is the end of the chain of parents, read twice the same: then each was the other's parent all the time in
    between. A parent that dies meanwhile leaves its children to another; its pid may be any process's in the next
    moment. The name of a process may change meanwhile.
    """
    table = processes or here()
    for _ in range(TRIES if table is not None else 0):
        assert table is not None
        first, second = (parents(table, pid or os.getpid()) for _ in range(2))
        if any(chain and not chain[-1].words for chain in (first, second)):
            time.sleep(PAUSE)
        elif [one.key for one in first] == [one.key for one in second]:
            if len(second) > 1 and (host := second[-1]).kind is ProcessKind.HOST:
                return Identity(pid=host.pid, start=host.start, boot=table.boot, space=table.space, name=host.name)
            break
    sentence = "Could not verify parent process start time, session resume disabled for this instance"
    log_event(logging.WARNING, "token.no_parent", sentence)
    return None


def parents(processes: Processes, pid: int) -> list[ProcessInfo]:
    """Return a process and those above it, to the first that is not a launcher, as far as they can be read."""
    chain: list[ProcessInfo] = []
    found = processes.look(pid)
    while found is not None and len(chain) <= MAX_LAUNCHERS + 1:
        chain.append(found)
        if len(chain) > 1 and found.kind is not ProcessKind.LAUNCHER:
            break
        found = processes.look(found.parent) if found.parent > 1 else None
    return chain
