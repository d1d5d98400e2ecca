"""Environments of Python with other packages than the tests' own, made when one is first needed."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

from tests.support.processes.node_programs import INSTALL_SECONDS
from tests.support.processes.starting import ROOT


def programs_of(name: str, *wanted: str) -> Path:
    """The folder of the programs of an environment with what `pip install` is told to bring. Raises `RuntimeError`."""
    folder = ROOT / "build" / "environments" / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "installed").open("a+") as installed:  # written last, so an install that was cut short is made again
        # Parallel test workers come here at once: the first one installs, the others wait and find it done.
        fcntl.flock(installed, fcntl.LOCK_EX)
        installed.seek(0)
        if installed.read() != "\n".join(wanted):
            installed.truncate(0)
            _run("-m", "venv", "--without-pip", "--clear", str(folder / "venv"))
            _run("-m", "pip", "--python", str(folder / "venv"), "install", "--quiet", *wanted)
            installed.write("\n".join(wanted))
    return folder / "venv" / "bin"


def _run(*command: str) -> None:
    done = subprocess.run(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=INSTALL_SECONDS
    )
    if done.returncode:
        raise RuntimeError(f"python {' '.join(command)} failed:\n{done.stdout}")
