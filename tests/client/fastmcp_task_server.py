"""A FastMCP server with tasks of its own: one tool becomes a task, the other does not.

It is a program (`python -m tests.client.fastmcp_task_server FOLDER`), because importing `fastmcp_tasks`
changes every FastMCP client of a process. A file in the folder opens a gate; the tools
write to `seen` there.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from datetime import timedelta
from pathlib import Path

import fastmcp
import uvicorn
from fastmcp.utilities.tasks import TaskConfig
from fastmcp_tasks import TasksExtension


def note(folder: Path, said: str) -> None:
    with (folder / "seen").open("a") as seen:
        seen.write(f"{said}\n")


def kitchen(folder: Path) -> fastmcp.FastMCP:
    server: fastmcp.FastMCP = fastmcp.FastMCP("kitchen")
    server.add_extension(TasksExtension(url="memory://"))

    async def opened(gate: str) -> None:
        while not (folder / gate).exists():  # noqa: ASYNC110 - what is waited for is made by another process
            await asyncio.sleep(0.01)

    @server.tool(task=TaskConfig(mode="optional", poll_interval=timedelta(milliseconds=50)))
    async def bake(gate: str) -> str:
        note(folder, f"bake {gate}")
        try:
            await opened(gate)
        except asyncio.CancelledError:
            note(folder, f"cancelled {gate}")
            raise
        return f"baked {gate}"

    @server.tool
    async def fry(gate: str) -> str:
        note(folder, f"fry {gate}")
        await opened(gate)
        return f"fried {gate}"

    return server


def main() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    print(f"perdure: serving on http://127.0.0.1:{listening.getsockname()[1]}/mcp", flush=True)
    app = kitchen(Path(sys.argv[1])).http_app(path="/mcp")
    uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)).run([listening])


if __name__ == "__main__":
    main()
