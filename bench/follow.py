"""How long an event takes to a reader in the other process, and what idle readers cost: `python -m bench.follow`.

Two server processes share one SQLite file. The tool's clock and the reader's are the same machine's.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from mcp.server.mcpserver import Context, MCPServer
from tests.support.clients.wire_client import Peer, Web
from tests.support.processes.serving import serving

TARGET = "bench.follow:server"
SAMPLES = 200
IDLE_READERS = 1_000
IDLE_SECONDS = 10.0


server = MCPServer("clock", version="1", log_level="WARNING")


@server.tool()
async def tick(n: int, interval: float, ctx: Context) -> str:
    """Report the time, again and again."""
    for number in range(1, n + 1):
        await asyncio.sleep(interval)
        await ctx.report_progress(number, message=repr(time.monotonic()))
    return "done"


async def latency(here: Peer, there: Peer) -> list[float]:
    wire = await here.call("tick", n=SAMPLES, interval=0.02, token=1)
    await wire.message()
    reader = await there.get(wire.last_id)
    took: list[float] = []
    async for message in reader:
        if "method" in message:
            took.append(time.monotonic() - float(message["params"]["message"]))
    return took[5:]


async def idle(webs: list[Web], pids: list[int]) -> list[float]:
    """Percent of a core that each process uses while so many readers wait, each at the other node than its home."""
    for number in range(IDLE_READERS):
        peer = await webs[number % 2].join()
        await peer.through(webs[1 - number % 2]).get()
    processes = [psutil.Process(pid) for pid in pids]
    await asyncio.sleep(3)
    before = [sum(process.cpu_times()[:2]) for process in processes]
    await asyncio.sleep(IDLE_SECONDS)
    return [100 * (sum(p.cpu_times()[:2]) - b) / IDLE_SECONDS for p, b in zip(processes, before, strict=True)]


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        options = ("--store", f"sqlite:{Path(folder) / 'log.db'}", "--keepalive-interval", "10m")
        async with serving(TARGET, *options) as a, serving(TARGET, *options) as b:
            webs = [Web(a.url), Web(b.url)]
            peer = await webs[0].join()
            took = sorted(await latency(peer, peer.through(webs[1])))
            middle, late = statistics.median(took) * 1000, took[int(len(took) * 0.99)] * 1000
            print(f"append to arrival at the other process: median {middle:.1f} ms, p99 {late:.1f} ms", flush=True)
            shares = await idle(webs, [a.pid, b.pid])
            print(f"{IDLE_READERS} idle readers: {', '.join(f'{share:.2f} %' for share in shares)} of a core each")
            for web in webs:
                await web.aclose()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
