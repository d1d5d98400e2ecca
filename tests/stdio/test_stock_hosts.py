"""Hosts that know nothing of Perdure drive the bridge unchanged, and launchers stand in between (T11)."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp_types import ElicitRequestParams, ElicitResult

from tests.clients.node_clients import HERE
from tests.stdio.served_hosts import RESUMED
from tests.stdio.stdio_bridges import Bridge
from tests.support.processes.node_programs import node_modules, program
from tests.support.processes.serving import python_path
from tests.support.servers import basic_tools
from tests.support.servers.in_process import Site, serve

pytestmark = pytest.mark.anyio


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with serve(basic_tools.server, retry=0.05) as it:
        yield it


def command(site: Site) -> list[str]:
    return [sys.executable, "-m", "perdure", "stdio", site.url]


def environ(folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(program("node").parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": python_path(), "PERDURE_TOKEN_DIR": str(folder / "tokens")}


async def _answer(context: object, params: ElicitRequestParams) -> ElicitResult:
    return ElicitResult(action="accept", content={"answer": "forty-two"})


async def _note(seen: list[float], progress: float, total: float | None, message: str | None) -> None:
    seen.append(progress)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_the_python_sdk(site: Site, folder: Path, mode: Any) -> None:
    """`auto` asks for 2026-07-28, and has no session then."""
    program, *arguments = command(site)
    parameters = StdioServerParameters(command=program, args=arguments, env=environ(folder))
    for _ in range(2):
        progress: list[float] = []
        on_progress = partial(_note, progress)
        with (folder / "log").open("w") as log:
            pipes = stdio_client(parameters, errlog=log)
            async with Client(pipes, mode=mode, elicitation_callback=_answer) as client:
                result = await client.call_tool("count", {"n": 3}, progress_callback=on_progress)
                asked = await client.call_tool("ask", {"question": "who?"})
        assert (result.content[0].text, progress) == ("counted to 3", [1, 2, 3])  # type: ignore[union-attr]
        assert asked.content[0].text == "forty-two"  # type: ignore[union-attr]
    has_session = mode == "legacy"
    assert (RESUMED in (folder / "log").read_text()) is has_session
    assert len(site.app.session_ids()) == has_session


async def run(*words: str | Path, folder: Path) -> str:
    process = await asyncio.create_subprocess_exec(
        *words,
        env={**environ(folder), "HOME": str(folder)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return output.decode()


@pytest.mark.parametrize(
    "generation", [pytest.param("1", marks=pytest.mark.long), "2", pytest.param("2 auto", marks=pytest.mark.long)]
)
async def test_the_typescript_sdk(site: Site, folder: Path, generation: str) -> None:
    """`auto` asks a bridge that it starts for that alone which revision to speak."""
    script = node_modules(HERE).with_name("stdio_host.mjs")
    said = await run(program("node"), script, generation, *command(site), folder=folder)
    lines = [json.loads(line) for line in said.splitlines()]
    assert [line["text"] for line in lines] == ["counted to 3"] * 2
    assert [line["progress"] for line in lines] == [[1, 2, 3]] * 2
    assert all(line["tools"] > 3 for line in lines)
    assert len(site.app.session_ids()) == (generation != "2 auto")


async def test_the_inspectors_command_line(site: Site, folder: Path) -> None:
    inspector = node_modules(HERE) / ".bin" / "mcp-inspector"
    call = ("--method", "tools/call", "--tool-name", "count", "--tool-arg", "n=3", "--format=json")
    given = [f"-e{name}={environ(folder)[name]}" for name in ("PYTHONPATH", "PERDURE_TOKEN_DIR")]
    said = await run(program("node"), inspector, "--cli", *command(site), *call, *given, folder=folder)
    assert json.loads(said)["result"]["content"] == [{"type": "text", "text": "counted to 3"}]


@asynccontextmanager
async def started(words: Sequence[str], folder: Path) -> AsyncIterator[Bridge]:
    """A bridge that was started by a command; this process is its host."""
    log = folder / "log"
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *words,
            env=environ(folder),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    yield Bridge(process.stdout, process.stdin, log)
    process.stdin.close()
    assert await process.wait() == 0


def npm_package(folder: Path) -> Path:
    """A package that brings `perdure` to people who have npm: its program starts the real one."""
    package = folder / "package"
    package.mkdir()
    about = {"name": "perdure", "version": "1.0.0", "bin": {"perdure": "perdure.cjs"}}
    (package / "package.json").write_text(json.dumps(about))
    start = f"spawn({json.dumps(sys.executable)}, ['-m', 'perdure', ...process.argv.slice(2)], {{ stdio: 'inherit' }})"
    script = f"require('node:child_process').{start}.on('exit', (code) => process.exit(code ?? 1));"
    (package / "perdure.cjs").write_text(f"#!/usr/bin/env node\n{script}\n")
    return package


@pytest.mark.parametrize(
    "launcher",
    [pytest.param("npx", marks=pytest.mark.long), pytest.param("uv run", marks=pytest.mark.long), "sh and env"],
)
async def test_launchers_in_between(site: Site, folder: Path, launcher: str) -> None:
    shell = f"cd / && exec env A=b sh -c {shlex.quote(shlex.join(command(site)))}"
    words = {
        "npx": [str(program("npx")), "--offline", "--yes", str(npm_package(folder)), "stdio", site.url],
        "uv run": [str(program("uv")), "run", "--offline", "--no-project", "--no-config", *command(site)],
        "sh and env": ["sh", "-c", shell],
    }[launcher]
    for _ in range(2):
        async with started(words, folder) as bridge:
            await bridge.handshake()
            assert await bridge.call("count", n=1) == "counted to 1"
    await bridge.logged(RESUMED)
    assert len(site.app.session_ids()) == 1


async def test_a_system_without_our_kind_of_lock_is_bridged_and_not_resumed(site: Site, folder: Path) -> None:
    """T2: as on Windows, which has no `fcntl`."""
    start = (
        "import sys; sys.modules['fcntl'] = None; from perdure.cli.entry import main; sys.argv[0] = 'perdure'; main()"
    )
    async with started([sys.executable, "-c", start, "stdio", site.url], folder) as bridge:
        await bridge.handshake()
        assert await bridge.call("count", n=1) == "counted to 1"
        await bridge.logged("Could not verify parent process start time, session resume disabled for this instance")
    assert not (folder / "tokens").exists()


async def test_it_starts_without_what_it_does_not_need(folder: Path) -> None:
    """Hosts wait for it: no SDK, no web server, no store is imported."""
    parts = "perdure.cli.entry, perdure.cli.stdio, perdure.stdio.program, perdure.stdio.resume_slot"
    listed = f"import sys, {parts}; print(*sys.modules)"
    modules = {name.partition(".")[0] for name in (await run(sys.executable, "-c", listed, folder=folder)).split()}
    assert not modules & {"mcp", "mcp_types", "pydantic", "starlette", "uvicorn", "sqlite3", "fastmcp", "opentelemetry"}
