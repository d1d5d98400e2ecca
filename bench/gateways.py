"""Gateways as candidates: a bare program over stdio, or the SDK's HTTP server, behind Perdure and behind others."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import psutil
from tests.support.peers.gateways import GATEWAY_PEERS, NotInstalled

from bench import launch
from bench.launch import ROOT, Log, Target, UnavailableError, last_line
from bench.measures import MS, Figures, numbers
from bench.received import BrokenAnswerError, Response
from bench.wire import Client, Wire

STDIO, HTTP, WARM = "gateway-stdio", "gateway-http", "gateway-warm"
SUPERGATEWAY, MCP_PROXY, FASTMCP, FASTMCP_HTTP = "supergateway", "mcp-proxy", "fastmcp-stdio", "fastmcp-http"
OURS = (STDIO, HTTP)
PEERS = {SUPERGATEWAY: "supergateway", MCP_PROXY: "mcp-proxy", FASTMCP: "FastMCP", FASTMCP_HTTP: "FastMCP"}
GATEWAYS = (*OURS, WARM, *PEERS)
BASES = ("sdk", "perdure-sqlite")
"""The upstream alone over HTTP, and a server in Perdure's own process."""
WITHOUT_EVENTS = (MCP_PROXY,)
"""They answer with JSON alone, and drop progress."""

PROGRAM = Path(__file__).with_name("bare_program.py")
START_SECONDS = 60.0
OUTCOME_UNKNOWN = b"-31001"
#: Seconds after which the death of a program does not count as one at its start, which slows the next start down; and
#: for the start of a spare process.
OLD_SECONDS, SPARE_SECONDS = 11.0, 1.0


@dataclass(frozen=True, kw_only=True)
class Gateway(Target):
    """A gateway's processes, without the servers behind it."""

    def private_bytes(self) -> int:
        return sum(int(one.memory_full_info().uss) for one in self._processes())

    def resident_bytes(self) -> int:
        return sum(int(one.memory_info().rss) for one in self._processes())

    def cpu_seconds(self) -> float:
        times = [one.cpu_times() for one in self._processes()]
        return float(sum(one.user + one.system for one in times))

    def _processes(self) -> list[psutil.Process]:
        return [one for one in [self.process, *self.process.children(recursive=True)] if not is_program(one)]


def is_program(process: psutil.Process) -> bool:
    """Whether a process is a server behind a gateway, and not a part of the gateway or a shell that it started."""
    words = process.cmdline()
    return str(PROGRAM) in words[:4]


@contextmanager
def running(kind: str, folder: Path, log: Log, *, cores: str, settings: dict[str, Any]) -> Iterator[Target]:
    """Start a gateway, and the HTTP server behind it if it has one."""
    with ExitStack() as stack:
        upstream = [sys.executable, "-I", "-S", str(PROGRAM)]
        if kind in (HTTP, FASTMCP_HTTP):
            behind = stack.enter_context(launch.running("sdk", folder, log, cores=cores))
            upstream = [f"http://127.0.0.1:{behind.port}{behind.path}"]
        port = free_port()
        errors = folder / f"stderr-{kind}"
        yield stack.enter_context(
            _started(kind, command_of(kind, upstream, port, log, settings), port, log, errors, cores)
        )


def command_of(kind: str, upstream: Sequence[str], port: int, log: Log, settings: dict[str, Any]) -> list[str]:
    if kind in PEERS:
        try:
            return GATEWAY_PEERS[PEERS[kind]].command(upstream, port)
        except NotInstalled as why:
            raise UnavailableError(str(why)) from why
    own = {"max_processes": 1_000, "max_caller_processes": 1_000, "warm": int(kind == WARM)}
    entry: dict[str, Any] = {"url": upstream[0]}
    if len(upstream) > 1:
        entry = {"command": upstream[0], "args": list(upstream[1:]), "perdure": own}
    servers = Path(log.url).with_name(f"servers-{kind}.json")
    servers.write_text(json.dumps({"mcpServers": {"behind": entry}}))
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    store = f"--store=sqlite:{log.url}"
    command = [sys.executable, "-m", "perdure", "serve", f"--servers={servers}", f"--port={port}", store]
    return [*command, "--log-level=error", *options]


@contextmanager
def _started(kind: str, command: list[str], port: int, log: Log, errors: Path, cores: str) -> Iterator[Gateway]:
    allowed = {int(core) for core in cores.split(",")}
    with errors.open("wb") as stderr:
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, allowed),
        )
    process = psutil.Process(child.pid)
    try:
        _wait_for(port, child, errors)
        yield Gateway(kind=kind, port=port, path="/mcp", process=process, log=log, errors=errors)
    finally:
        whole = [process, *process.children(recursive=True)]
        child.send_signal(signal.SIGTERM)
        psutil.wait_procs(whole, timeout=5)
        for one in whole:
            if one.is_running():
                one.kill()
        child.wait()


def _wait_for(port: int, child: subprocess.Popen[bytes], errors: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and child.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise UnavailableError(f"it does not listen: {last_line(errors)}")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


# What is measured of gateways alone


async def call_latency(target: Target, *, times: int) -> Figures:
    """Milliseconds of an `echo` call, one after the other on a kept connection."""
    client = Client(port=target.port, path=target.path)
    session = await client.open_session()
    wire = await client.connect()
    late = sorted([_answered(await wire.ask(_echo(client, session))) for _ in range(times + 20)][20:])
    wire.close()
    return {"p50": late[len(late) // 2], "p99": late[int(len(late) * 0.99)]}


def _echo(client: Client, session: str) -> bytes:
    return client.call(next(numbers), "echo", {"text": "hello"}, session)


def _answered(answer: Response) -> float:
    if answer.status != 200 or b'"hello"' not in answer.body():
        raise BrokenAnswerError(f"echo was answered {answer.status}: {answer.body()[:200]!r}")
    return (answer.ended - answer.asked) / MS


async def deaths(target: Target, *, times: int) -> Figures:
    """Milliseconds from the kill of a program to the -31001 of its call, and from a call just after a kill to its
    answer; and how long the program itself takes to start."""
    client = Client(port=target.port, path=target.path)
    sessions = [await client.open_session() for _ in range(2 * times)]
    await asyncio.sleep(OLD_SECONDS)
    unknown = [await _killed_in_a_call(client, session) for session in sessions[:times]]
    following = []
    for session in sessions[times:]:
        wire = await client.connect()
        pid = await _pid(client, wire, session)
        os.kill(pid, signal.SIGKILL)
        # A call that is written to a pipe whose end was not seen may have run: it is answered -31001.
        while psutil.pid_exists(pid):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        following.append(_answered(await wire.ask(_echo(client, session))))
        wire.close()
        await asyncio.sleep(SPARE_SECONDS)
    start = statistics.median([await asyncio.to_thread(_start_alone) for _ in range(times)])
    following_ms = statistics.median(following)
    return {
        "unknown_ms": statistics.median(unknown),
        "next_ms": following_ms,
        "start_ms": start,
        "beyond_ms": following_ms - start,
    }


async def _killed_in_a_call(client: Client, session: str) -> float:
    wire, hanging = await client.connect(), await client.connect()
    pid = await _pid(client, wire, session)
    asked = asyncio.create_task(hanging.ask(client.call(next(numbers), "hang", {}, session)))
    # The program works in order: it has taken the call when it answers the next one.
    await asyncio.sleep(0)
    await _pid(client, wire, session)
    killed = perf_counter_ns()
    os.kill(pid, signal.SIGKILL)
    answer = await asked
    wire.close()
    hanging.close()
    if OUTCOME_UNKNOWN not in answer.body():
        raise BrokenAnswerError(f"the call was answered {answer.body()[:200]!r}")
    return (answer.ended - killed) / MS


async def _pid(client: Client, wire: Wire, session: str) -> int:
    answer = await wire.ask(client.call(next(numbers), "pid", {}, session))
    [message] = [event.message() for event in answer.events() if event.data][-1:]
    return int(message["result"]["content"][0]["text"])


def _start_alone() -> float:
    """Milliseconds from the start of the program to its answer to `initialize`."""
    began = perf_counter_ns()
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-I", "-S", str(PROGRAM)], stdin=pipe, stdout=pipe) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25"}}\n')
        child.stdin.flush()
        child.stdout.readline()
        return (perf_counter_ns() - began) / MS
