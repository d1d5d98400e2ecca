"""Where it was measured, and how much others disturbed it."""

from __future__ import annotations

import os
import platform
import resource
import sqlite3
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import monotonic
from typing import Any

import psutil


class Bystanders:
    """How much of the machine others use while the benchmark runs: what is busy, less ours and our servers'."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = monotonic(), _busy_seconds(), _own_seconds()

    def share(self, *, less: float = 0.0) -> float:
        """`less`: CPU seconds of a server that we started and that is not a child of this process."""
        others = _busy_seconds() - self._busy - (_own_seconds() - self._own) - less
        return max(0.0, others / (monotonic() - self._began) / (os.cpu_count() or 1))


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def _own_seconds() -> float:
    """Ours and those of servers that have ended."""
    uses = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses)


def describe() -> dict[str, Any]:
    """Where it was measured; the load tells how much to believe."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "temporary_files": _filesystem(tempfile.gettempdir()),
        "packages": {
            name: _version(name)
            for name in ("perdure", "mcp", "mcp-persist", "uvicorn", "uvloop", "httptools", "asyncpg")
        },
    }


def _cpu() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0].partition(":")[2].strip() if names else platform.machine()


def _filesystem(path: str) -> str:
    mounts = [part for part in psutil.disk_partitions(all=True) if Path(path).is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else "unknown"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"
