"""Other gateways that put a server behind HTTP, each installed in an environment of its own: how each is started.

FastMCP's proxy also takes an address as its one word. The other two bring an HTTP server to stdio, not to HTTP.
"""

from __future__ import annotations

import fcntl
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes.node_programs import INSTALL_SECONDS, node_modules, program

ROOT = Path(__file__).resolve().parents[3]
MCP_PROXY, SUPERGATEWAY, FASTMCP = "0.13.0", "4.0.0", "4.1.4"

FASTMCP_PROXY = """
import sys
from fastmcp.server import create_proxy
port, *target = sys.argv[1:]
if len(target) > 1:
    target = {"mcpServers": {"behind": {"command": target[0], "args": target[1:]}}}
else:
    [target] = target
create_proxy(target).run("http", host="127.0.0.1", port=int(port), show_banner=False, log_level="ERROR")
"""


class NotInstalled(Exception):
    """The gateway cannot be installed here."""


@dataclass(frozen=True)
class GatewayPeer:
    """One gateway."""

    version: str
    command: Callable[[Sequence[str], int], list[str]]
    """How it serves a program, given as its words, on a port of this machine at `/mcp`. Raises `NotInstalled`."""


def _mcp_proxy(upstream: Sequence[str], port: int) -> list[str]:
    own = [str(_environment("mcp-proxy", MCP_PROXY) / "bin" / "mcp-proxy"), "--host=127.0.0.1", f"--port={port}"]
    return [*own, "--pass-environment", "--log-level=ERROR", "--", *upstream]


def _supergateway(upstream: Sequence[str], port: int) -> list[str]:
    try:
        script = node_modules(Path(__file__).parent) / ".bin" / "supergateway"
    except (FileNotFoundError, RuntimeError) as why:
        raise NotInstalled(str(why)) from why
    own = ["--outputTransport=streamableHttp", "--stateful", f"--port={port}", "--logLevel=none"]
    return [str(program("node")), str(script), "--stdio", shlex.join(upstream), *own]


def _fastmcp(upstream: Sequence[str], port: int) -> list[str]:
    python = ROOT / ".venv" / "bin" / "python"
    if not python.exists():
        raise NotInstalled("make setup installs FastMCP")
    return [str(python), "-c", FASTMCP_PROXY, str(port), *upstream]


def _environment(name: str, version: str) -> Path:
    """An environment with one package of PyPI, made if it is missing."""
    folder = ROOT / "build" / "peers" / f"{name}-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            for command in (["-m", "venv", "--clear", str(folder / "venv")], _pip(folder, f"{name}=={version}")):
                done = subprocess.run(
                    [sys.executable, *command], capture_output=True, text=True, timeout=INSTALL_SECONDS
                )
                if done.returncode:
                    raise NotInstalled(f"{name}: {done.stderr}")
            (folder / "ready").touch()
    return folder / "venv"


def _pip(folder: Path, package: str) -> list[str]:
    return ["-m", "pip", "--python", str(folder / "venv" / "bin" / "python"), "install", "--quiet", package]


GATEWAY_PEERS: Mapping[str, GatewayPeer] = {
    "mcp-proxy": GatewayPeer(MCP_PROXY, _mcp_proxy),
    "supergateway": GatewayPeer(SUPERGATEWAY, _supergateway),
    "FastMCP": GatewayPeer(FASTMCP, _fastmcp),
}
