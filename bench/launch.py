"""The driver's side of a candidate's process: start it, watch it, stop it."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

ROOT = Path(__file__).resolve().parent.parent


class UnavailableError(Exception):
    """This candidate cannot be started here."""


class Log(Protocol):
    """Where a candidate keeps its events."""

    @property
    def url(self) -> str: ...

    def rows(self) -> int:
        """Events that are stored: what was sent must really be there, or the log did not grow."""

    def size(self) -> int:
        """Bytes on the disk."""

    def cpu_seconds(self) -> float:
        """CPU time of a database server, which runs beside the process of the candidate."""


@dataclass(frozen=True)
class SqliteFile:
    """A file beside the candidate's process."""

    path: Path

    @property
    def url(self) -> str:
        return str(self.path)

    def rows(self) -> int:
        with closing(sqlite3.connect(f"file:{self.path}?mode=ro", uri=True)) as db:
            (count,) = db.execute("SELECT count(*) FROM event").fetchone()
        return int(count)

    def size(self) -> int:
        return self.path.stat().st_size

    def cpu_seconds(self) -> float:
        return 0.0


@dataclass(frozen=True, kw_only=True)
class Target:
    """A candidate that runs."""

    kind: str
    port: int
    path: str
    process: psutil.Process
    log: Log
    errors: Path

    def private_bytes(self) -> int:
        """Memory that would be free if the process ended (USS)."""
        return int(self.process.memory_full_info().uss)

    def resident_bytes(self) -> int:
        return int(self.process.memory_info().rss)

    def cpu_seconds(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


@contextmanager
def files() -> Iterator[Path]:
    """A folder for one candidate's files; they go with it."""
    with tempfile.TemporaryDirectory(prefix="perdure-bench-") as folder:
        yield Path(folder)


@contextmanager
def running(
    kind: str, folder: Path, log: Log, *, cores: str, settings: dict[str, Any] | None = None
) -> Iterator[Target]:
    """Start one candidate on a log; what it says on standard error goes to this folder."""
    errors = folder / f"stderr-{len(list(folder.iterdir()))}"
    options = ["--log", log.url, "--cores", cores, "--settings", json.dumps(settings or {})]
    with errors.open("wb") as stderr:
        command = [sys.executable, "-m", "bench.servers", kind, *options]
        child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr)
    try:
        said = _first_line(child, errors)
        process = psutil.Process(child.pid)
        yield Target(kind=kind, port=said["port"], path=said["path"], process=process, log=log, errors=errors)
    finally:
        _stop(child)


def _first_line(child: subprocess.Popen[bytes], errors: Path) -> dict[str, Any]:
    assert child.stdout is not None
    line = child.stdout.readline()
    said: dict[str, Any] = json.loads(line) if line else {"unavailable": f"it ended at once: {last_line(errors)}"}
    if "unavailable" in said:
        raise UnavailableError(said["unavailable"])
    return said


def last_line(file: Path) -> str:
    """The last thing a process said, which for Python names the error."""
    lines = file.read_text(errors="replace").strip().splitlines()
    # Results are kept with the sources, so they name no folder of this machine.
    return lines[-1].replace(str(ROOT), "").replace(str(file.parent), "") if lines else "(it said nothing)"


def _stop(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    child.stdin.close()
    try:
        child.wait(10)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
