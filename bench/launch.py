"""The driver's side of a candidate's process: start it, watch it, stop it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent


class NotAvailable(Exception):
    """This candidate cannot be started here."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A candidate that runs."""

    kind: str
    port: int
    path: str
    process: psutil.Process
    db: Path

    def private_bytes(self) -> int:
        """Memory that would be free if the process ended (USS)."""
        return int(self.process.memory_full_info().uss)

    def resident_bytes(self) -> int:
        return int(self.process.memory_info().rss)

    def cpu_seconds(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


@contextmanager
def running(kind: str, *, cores: str, settings: dict[str, Any] | None = None) -> Iterator[Target]:
    """Start one candidate on its own files; they go with it."""
    with tempfile.TemporaryDirectory(prefix="perdure-bench-") as folder:
        db = Path(folder) / "bench.db"
        options = ["--db", str(db), "--cores", cores, "--settings", json.dumps(settings or {})]
        child = subprocess.Popen(
            [sys.executable, "-m", "bench.servers", kind, *options],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if kind.startswith("perdure") else None,
        )
        try:
            said = _first_line(child)
            yield Target(kind=kind, port=said["port"], path=said["path"], process=psutil.Process(child.pid), db=db)
        finally:
            _stop(child)


def _first_line(child: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert child.stdout is not None
    line = child.stdout.readline()
    said: dict[str, Any] = json.loads(line) if line else {"unavailable": "it ended before it listened"}
    if "unavailable" in said:
        raise NotAvailable(said["unavailable"])
    return said


def _stop(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    child.stdin.close()
    try:
        child.wait(10)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
