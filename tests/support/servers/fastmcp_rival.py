"""One FastMCP server, served in two ways: with Perdure, or by itself with the tasks extension of its own on a Redis.

`python -m tests.support.servers.fastmcp_rival` serves it the second way, and prints the line of `perdure serve`.
"""

from __future__ import annotations

import asyncio
import os
import socket
from datetime import timedelta
from pathlib import Path

import uvicorn
from fastmcp import FastMCP

#: Seconds after which the rival gives the task of a dead worker to another one. It is 300 by default; what it does then
#: is the same.
REDELIVERY = 2


def notebook() -> Path:
    return Path(os.environ["RIVAL_FOLDER"])


def make(*, as_task: bool) -> FastMCP:
    """A tool that says nothing of whether it may run twice."""
    server: FastMCP = FastMCP("rival")

    @server.tool(task=as_task)
    async def charge(card: str) -> str:
        """Note that it began, and never end."""
        with (notebook() / "begun").open("a") as begun:
            begun.write(f"{card}\n")
        await asyncio.Event().wait()  # its process is killed meanwhile
        return f"{card} was charged"

    return server


if "RIVAL_REDIS" not in os.environ:
    server = make(as_task=False)


async def main() -> None:
    from fastmcp_tasks import TasksExtension

    rival = make(as_task=True)
    waits = timedelta(seconds=REDELIVERY)
    rival.add_extension(TasksExtension(url=os.environ["RIVAL_REDIS"], redelivery_timeout=waits))
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(rival.http_app(path="/mcp"), log_level="warning")
    print(f"perdure: serving on http://127.0.0.1:{listening.getsockname()[1]}/mcp", flush=True)
    await uvicorn.Server(config).serve(sockets=[listening])


if __name__ == "__main__":
    asyncio.run(main())
