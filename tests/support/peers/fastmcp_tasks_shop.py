"""The shop's tool with `fastmcp-tasks` on a Redis: `python -m tests.support.peers.fastmcp_tasks_shop`."""

from __future__ import annotations

import asyncio
import os
import socket
from datetime import timedelta

import uvicorn
from fastmcp import FastMCP

from tests.support.peers.shop import STEPS, die_at, effect

#: Seconds after which the task of a dead worker is given to another one. It is 300 by default.
REDELIVERY = 2


async def main() -> None:
    from fastmcp_tasks import TasksExtension  # an import changes FastMCP's clients in its process

    server: FastMCP = FastMCP("shop")

    @server.tool(task=True)
    async def order() -> str:
        values = []
        for name in STEPS:
            values.append(effect(name))
            die_at(f"after {name}")
        return " ".join(values)

    waits = timedelta(seconds=REDELIVERY)
    server.add_extension(TasksExtension(url=os.environ["SHOP_REDIS"], redelivery_timeout=waits))
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(server.http_app(path="/mcp"), log_level="warning")
    print(f"perdure: serving on http://127.0.0.1:{listening.getsockname()[1]}/mcp", flush=True)
    await uvicorn.Server(config).serve(sockets=[listening])


if __name__ == "__main__":
    asyncio.run(main())
