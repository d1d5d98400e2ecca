"""A tool server whose calls stop at gates, for tests that break things in the middle of a call.

In the test's own process a gate is opened by `open_gate`, which needs no request; from outside by the tool of that
name. Gates open once, so each test uses names of its own.
"""

from __future__ import annotations

import time
from collections import defaultdict

import anyio
from mcp.server.mcpserver import Context, MCPServer
from mcp.shared.message import ServerMessageMetadata
from mcp_types import ListRootsRequest, ListRootsResult

server = MCPServer("gated", version="1", log_level="WARNING")

_gates: defaultdict[str, anyio.Event] = defaultdict(anyio.Event)


def gate(name: str) -> anyio.Event:
    """The gate of that name, in the test's own process."""
    return _gates[name]


def open_gate(name: str) -> None:
    """Let the calls that wait at a gate continue, and all later ones."""
    _gates[name].set()


@server.tool()
async def count(n: int, ctx: Context, gate: str = "", first: int = 0, interval: float = 0) -> str:
    """Report progress 1 … n, then answer. With a gate: wait there after the first `first` reports."""
    for number in range(1, n + 1):
        if gate and number == first + 1:
            await _gates[gate].wait()
        await ctx.report_progress(number, n)
        if interval:
            await anyio.sleep(interval)
    return f"counted to {n}"


@server.tool()
async def announce(n: int, ctx: Context) -> str:
    """Send n numbered notifications that belong to no call: they go to the standalone stream."""
    for number in range(1, n + 1):
        await ctx.session.send_resource_updated(f"notice://{number}")
    return f"announced {n}"


@server.tool()
async def wait(gate: str) -> str:
    """Wait until the gate is open."""
    await _gates[gate].wait()
    return f"went through {gate}"


@server.tool(name="open_gate")
async def open_gate_tool(name: str) -> str:
    """Open a gate from outside."""
    open_gate(name)
    return f"opened {name}"


@server.tool()
async def ask_roots(ctx: Context) -> str:
    """Ask the client something, and wait for its answer."""
    # The session's own method is deprecated and warns; this is the same request.
    result = await ctx.session.send_request(
        ListRootsRequest(), ListRootsResult, metadata=ServerMessageMetadata(related_request_id=ctx.request_id)
    )
    return f"{len(result.roots)} roots"


@server.tool()
async def shout(text: str, times: int, ctx: Context) -> str:
    """Report progress with a long message, again and again."""
    for number in range(1, times + 1):
        await ctx.report_progress(number, times, message=text)
    return f"shouted {times} times"


@server.tool()
async def block(seconds: float, times: int) -> str:
    """Keep the event loop, again and again, as a tool does that computes without a thread."""
    for _ in range(times):
        time.sleep(seconds)  # noqa: ASYNC251
        await anyio.sleep(0.002)
    return "blocked"


@server.tool()
async def babble(size: int) -> str:
    """Answer at length."""
    return "x" * size


@server.tool()
async def stubborn(gate: str) -> str:
    """Wait at a gate, and cannot be cancelled."""
    with anyio.CancelScope(shield=True):
        await _gates[gate].wait()
    return "done at last"
