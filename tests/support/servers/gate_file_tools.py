"""The tool server of the crash tests: `perdure serve tests.support.servers.gate_file_tools:server`.

Whatever must outlive the process is in files: a *gate* is a path at which a tool waits until it exists, a *diary* is a
file to which each run of a tool adds one line, `<key> <pid>`, in one write. So a test can tell how often a tool ran,
in which process, and can open a gate for a process that does not exist yet.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import anyio
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.resolve import Elicit, Resolve
from mcp.server.mcpserver.tools import Tool
from mcp_types import ToolAnnotations
from pydantic import BaseModel

server = MCPServer("gate_file_tools", version="1", log_level="WARNING")

READ_ONLY = ToolAnnotations(read_only_hint=True)
IDEMPOTENT = ToolAnnotations(read_only_hint=False, idempotent_hint=True)

#: Seconds between two reads of a gate: a file that appears wakes no task.
LOOK = 0.005


def new_server() -> MCPServer:
    """A server of one's own with the tools that count, for several nodes in one process."""
    counting = [Tool.from_function(count, annotations=READ_ONLY), Tool.from_function(count, name="pay")]
    return MCPServer("gate_file_tools", version="1", log_level="WARNING", tools=counting)


class Answer(BaseModel):
    """What `ask` asks the client's user for."""

    answer: str


def open_gate(gate: Path | str) -> None:
    Path(gate).touch()


def diary(path: Path) -> list[tuple[str, int]]:
    """Key and process of each run, in their order."""
    if not path.exists():
        return []
    return [(key, int(pid)) for key, pid in (line.split() for line in path.read_text().splitlines())]


async def pass_gate(gate: str) -> None:
    while gate and not os.path.exists(gate):  # noqa: ASYNC110, ASYNC240
        await anyio.sleep(LOOK)


def note(path: str, key: str) -> None:
    if not path:
        return
    # One write to a file opened so is whole and at the end, whichever other process writes.
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(file, f"{key} {os.getpid()}\n".encode())
    finally:
        os.close(file)


async def count(
    n: int, ctx: Context, gate: str = "", pauses: Sequence[int] = (), interval: float = 0, log: str = "", key: str = "-"
) -> str:
    """Report progress 1 … n, then answer. Wait at `<gate>.<number>` after each number in `pauses`."""
    note(log, key)
    for number in range(n + 1):
        if number:
            await ctx.report_progress(number, n)
            if interval:
                await anyio.sleep(interval)
        if number in pauses:
            await pass_gate(f"{gate}.{number}")
    return f"counted to {n}"


server.tool(annotations=READ_ONLY)(count)
server.tool("put", annotations=IDEMPOTENT)(count)  # changes something, and may do so again
server.tool("pay")(count)  # says nothing of itself: it must never run twice for one request


@server.tool()
async def announce(n: int, ctx: Context, start: int = 1, log: str = "", key: str = "-") -> str:
    """Send n numbered notices that belong to no call: they go to the standalone stream."""
    note(log, key)
    for number in range(start, start + n):
        await ctx.session.send_resource_updated(f"notice://{number}")
    return f"announced {n}"


@server.tool()
async def ask(question: str, ctx: Context, log: str = "", key: str = "-") -> str:
    """Elicit an answer from the client's user."""
    note(log, key)
    result = await ctx.elicit(question, Answer)
    return result.data.answer if result.action == "accept" else result.action


async def _which_answer(key: str) -> Elicit[Answer]:
    return Elicit(f"What about {key}?", Answer)


@server.tool()
async def decide(key: str, chosen: Annotated[Answer, Resolve(_which_answer)]) -> str:
    """Ask by rounds, in the way of 2026-07-28: the question is answered before it runs."""
    return f"{key}: {chosen.answer}"


@server.tool(annotations=READ_ONLY)
async def where(ctx: Context) -> str:
    """The session as the server knows it, and the process that answers: `<session id> <pid>`."""
    assert ctx.headers is not None
    return f"{ctx.headers['mcp-session-id']} {os.getpid()}"


def _resident() -> int:
    with open("/proc/self/statm") as numbers:
        return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@server.tool(annotations=READ_ONLY)
async def census() -> dict[str, int]:
    """What this process holds: tasks, open files, and bytes of memory."""
    gc.collect()
    return {
        "tasks": len(asyncio.all_tasks()),
        "files": len(os.listdir("/proc/self/fd")),
        "memory": _resident(),
    }


async def die(ctx: Context, gate: str, log: str, key: str = "-") -> str:
    """Report progress 1, wait at the gate, kill the process."""
    note(log, key)
    await ctx.report_progress(1)
    await pass_gate(gate)
    os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


server.tool()(die)
server.tool("die_again", annotations=IDEMPOTENT)(die)  # it may be run again
