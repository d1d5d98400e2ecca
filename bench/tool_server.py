"""The one tool server that every candidate serves, so that only what stands around it differs."""

from __future__ import annotations

from time import perf_counter, perf_counter_ns

import anyio
from mcp.server.mcpserver import Context, MCPServer


def make() -> MCPServer:
    """A fresh server with the tools `progress`, `echo` and `sleep`."""
    server = MCPServer("bench", log_level="WARNING")

    @server.tool()
    async def progress(n: int, ctx: Context, rate: float = 0.0) -> str:
        """Send n progress events, each with the time of its sending; `rate` (events/s) paces them, 0 does not."""
        start = perf_counter()
        for number in range(1, n + 1):
            if rate and (ahead := start + number / rate - perf_counter()) > 0:
                # uvloop's timers tick in milliseconds, so a high rate comes as small bursts, one per tick.
                await anyio.sleep(ahead)
            # The monotonic clock is the same for all processes of a Linux machine: the client may subtract it.
            await ctx.report_progress(number, n, str(perf_counter_ns()))
        return f"sent {n}"

    @server.tool()
    async def echo(text: str) -> str:
        """Give the text back."""
        return text

    @server.tool()
    async def sleep(seconds: float) -> str:
        """Give the time of its end, on the monotonic clock."""
        await anyio.sleep(seconds)
        return str(perf_counter_ns())

    return server
