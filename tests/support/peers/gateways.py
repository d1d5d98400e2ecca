"""Other gateways that put a server behind HTTP, each installed in an environment of its own: how each is started.

FastMCP's proxy also takes an address as its one word. The other two bring an HTTP server to stdio, not to HTTP.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes.node_programs import node_modules, program
from tests.support.processes.python_environments import programs_of
from tests.support.processes.starting import ROOT

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
    try:
        script = programs_of("mcp-proxy", f"mcp-proxy=={MCP_PROXY}") / "mcp-proxy"
    except RuntimeError as why:
        raise NotInstalled(str(why)) from why
    own = ["--host=127.0.0.1", f"--port={port}", "--pass-environment", "--log-level=ERROR"]
    return [str(script), *own, "--", *upstream]


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


GATEWAY_PEERS: Mapping[str, GatewayPeer] = {
    "mcp-proxy": GatewayPeer(MCP_PROXY, _mcp_proxy),
    "supergateway": GatewayPeer(SUPERGATEWAY, _supergateway),
    "FastMCP": GatewayPeer(FASTMCP, _fastmcp),
}
