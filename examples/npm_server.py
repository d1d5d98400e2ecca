"""Finds a TypeScript server from npm for the demo, and its process behind a gateway."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from tests.support.processes.node_programs import node_modules, program

NAME = "@modelcontextprotocol/server-everything"
FOLDER = Path(__file__).resolve().parent.parent / "tests" / "upstreams"
SCRIPT = "mcp-server-everything"


class NoNpm(Exception):
    """The server cannot be installed or run here."""


def npm_server() -> list[str]:
    """The command of the server, which is installed if it is missing. Raises `NoNpm`."""
    try:
        return [str(program("node")), str(node_modules(FOLDER) / ".bin" / SCRIPT)]
    except FileNotFoundError as missing:
        raise NoNpm(str(missing)) from missing
    except (RuntimeError, subprocess.TimeoutExpired) as failed:
        raise NoNpm(f"npm cannot install it: {str(failed).strip().splitlines()[-1]}") from failed


def kill_program(gateway: int) -> int:
    """Kill the server's process behind that gateway as a crash does; return its id."""
    processes = [child for child in psutil.Process(gateway).children(recursive=True) if SCRIPT in str(child.cmdline())]
    process = processes[-1]  # node of the wheel is started by a small program, which stays
    process.kill()
    return int(process.pid)
