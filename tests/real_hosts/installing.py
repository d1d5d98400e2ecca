"""Install a host at its pinned version, in a folder of its own below `build/hosts`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.real_hosts.host import Host
from tests.support.processes.node_programs import program
from tests.support.processes.starting import ROOT

BUILD = ROOT / "build" / "hosts"
#: Some hosts are hundreds of megabytes.
INSTALL_SECONDS = 900


class NotInstalled(Exception):
    """The host cannot be installed here."""


def install(host: Host) -> Path:
    """The folder with the host, installed if it is missing: programs are in its `bin`."""
    package, version = next(iter(host.packages.items()))
    folder = BUILD / f"{package.strip('@').replace('/', '-').partition('[')[0]}-{version}"
    bin_folder = folder / ("node_modules/.bin" if host.registry == "npm" else "venv/bin")
    if not (folder / "ready").exists():
        folder.mkdir(parents=True, exist_ok=True)
        try:
            for command in _commands(host, folder):
                _run(command)
        except (OSError, subprocess.SubprocessError) as why:
            raise NotInstalled(f"{host.name}: {why}") from why
        (folder / "ready").touch()
    return bin_folder


def _commands(host: Host, folder: Path) -> list[list[str]]:
    if host.registry == "npm":
        wanted = [f"{name}@{version}" for name, version in host.packages.items()]
        quiet = ["--no-audit", "--no-fund", "--loglevel=error"]
        return [[str(program("npm")), "install", "--prefix", str(folder), *quiet, *wanted]]
    wanted = [f"{name}=={version}" for name, version in host.packages.items()]
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "venv" / "bin" / "python")]
    return [[sys.executable, "-m", "venv", "--clear", str(folder / "venv")], [*pip, "install", "--quiet", *wanted]]


def _run(command: list[str]) -> None:
    path = os.pathsep.join([str(program("node").parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        command, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=INSTALL_SECONDS
    )
    if done.returncode:
        raise subprocess.SubprocessError(f"{command[0]} failed:\n{done.stderr}")
