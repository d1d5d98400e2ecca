"""Published servers as upstreams, each with a call that it answers, and their processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from mcp_types import CallToolResult, TextContent

from tests.support.processes.node_programs import node_modules, program
from tests.support.processes.python_environments import programs_of
from tests.support.processes.serving import serving
from tests.support.processes.starting import ROOT, python_path
from tests.support.servers.in_process import until

PACKAGES = ROOT / "tests" / "upstreams"


@dataclass(frozen=True, kw_only=True)
class RealServer:
    """A server that others publish, and a call of it."""

    argv: Callable[[Path], Sequence[str]]
    """Its command, in a folder of the test."""
    tool: str
    arguments: Callable[[Path], dict[str, Any]]
    says: str
    """Part of the answer."""
    prepare: Callable[[Path], object] = lambda _: None
    env: Callable[[Path], dict[str, str]] = lambda _: {}
    era: str = "auto"


def _npm(name: str, *words: str) -> tuple[str, ...]:
    return str(program("node")), str(node_modules(PACKAGES) / ".bin" / f"mcp-server-{name}"), *words


def _pip(requirements: str, name: str, *words: str) -> tuple[str, ...]:
    pinned = (PACKAGES / f"{requirements}.txt").read_text().split()
    return str(programs_of(requirements, "--no-deps", *pinned) / f"mcp-server-{name}"), *words


def _repository(folder: Path) -> None:
    subprocess.run(["git", "init", "--quiet", "--initial-branch", "rye", folder], check=True)


REAL_SERVERS = {
    "everything": RealServer(
        argv=lambda folder: _npm("everything", "stdio"),
        tool="echo",
        arguments=lambda folder: {"message": "rye"},
        says="Echo: rye",
    ),
    "filesystem": RealServer(
        argv=lambda folder: _npm("filesystem", str(folder)),
        prepare=lambda folder: (folder / "note").write_text("rye"),
        tool="read_text_file",
        arguments=lambda folder: {"path": str(folder / "note")},
        says="rye",
    ),
    "memory": RealServer(
        argv=lambda folder: _npm("memory"),
        env=lambda folder: {"MEMORY_FILE_PATH": str(folder / "graph")},
        tool="read_graph",
        arguments=lambda folder: {},
        says="entities",
    ),
    "time": RealServer(
        argv=lambda folder: _pip("sdk-2", "time"),
        tool="convert_time",
        arguments=lambda folder: {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"},
        says="T21:00",
    ),
    "git": RealServer(
        argv=lambda folder: _pip("sdk-2", "git", "--repository", str(folder)),
        prepare=_repository,
        tool="git_status",
        arguments=lambda folder: {"repo_path": str(folder)},
        says="On branch rye",
    ),
    "fetch": RealServer(
        argv=lambda folder: _pip("sdk-2", "fetch", "--allow-private-ips", "--ignore-robots-txt"),
        tool="fetch",
        arguments=lambda folder: {"url": "http://127.0.0.1:9/"},  # where nothing listens
        says="Failed to fetch",
    ),
    "sqlite": RealServer(
        argv=lambda folder: _pip("sdk-1", "sqlite", "--db-path", str(folder / "shop.db")),
        tool="read_query",
        arguments=lambda folder: {"query": "SELECT 6 * 7 AS loaves"},
        says="42",
    ),
    "fastmcp": RealServer(
        argv=lambda folder: (
            sys.executable,
            "-c",
            "from tests.support.servers.fastmcp_asking_tools import server; server.run('stdio', show_banner=False)",
        ),
        env=lambda folder: {"PYTHONPATH": python_path()},
        tool="ask_each",
        arguments=lambda folder: {"questions": ["which loaf?"]},
        says="rye",
        era="session",  # at 2026-07-28 FastMCP lets no tool ask in the middle of a call
    ),
}


@dataclass(frozen=True, kw_only=True)
class RealGateway:
    """`perdure serve -- COMMAND` in a process of its own."""

    url: str
    pid: int
    command: Sequence[str]

    @property
    def children(self) -> list[int]:
        """The processes of the upstream that live."""
        found = []
        for child in psutil.Process(self.pid).children():
            try:
                if child.status() != psutil.STATUS_ZOMBIE and child.cmdline()[-len(self.command) :] == list(
                    self.command
                ):
                    found.append(child.pid)
            except psutil.NoSuchProcess:
                pass
        return found

    async def kill_children(self) -> None:
        """Kill all processes of the upstream, and wait until they are gone."""
        killed = self.children
        assert killed
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: not {pid for pid in killed if psutil.pid_exists(pid)})


@asynccontextmanager
async def gateway_to(server: RealServer, folder: Path, *options: str) -> AsyncIterator[RealGateway]:
    """The server behind a gateway, with `folder` for what it reads."""
    server.prepare(folder)
    command = tuple(server.argv(folder))
    env = [word for name, value in server.env(folder).items() for word in ("--env", f"{name}={value}")]
    async with serving(f"--era={server.era}", *options, *env, "--", *command) as served:
        yield RealGateway(url=served.url, pid=served.pid, command=command)


@asynccontextmanager
async def everything_over_http(port: int) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """server-everything at `/mcp`, once it listens; what kills it, which happens at the end at the latest."""
    process = await asyncio.create_subprocess_exec(
        *_npm("everything", "streamableHttp"),
        env={**os.environ, "PORT": str(port)},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stderr is not None

    async def kill() -> None:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)  # node of the wheel is started by a small program
            await process.communicate()

    try:
        while b"listening" not in (line := await process.stderr.readline()):
            assert line, "server-everything ended before it listened"
        yield kill
    finally:
        await kill()


def text_of(result: CallToolResult) -> str:
    return "\n".join(content.text for content in result.content if isinstance(content, TextContent))
