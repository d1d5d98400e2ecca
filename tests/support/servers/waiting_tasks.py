"""Tools that run as tasks, and wait for files: a test decides when they continue."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from mcp.server.mcpserver import Context, MCPServer
from mcp_types import ToolAnnotations
from pydantic import BaseModel

server = MCPServer("tasks", version="1", log_level="WARNING")


def folder() -> Path:
    return Path(os.environ["TASK_FOLDER"])


class Name(BaseModel):
    name: str


async def there(name: str) -> None:
    """Wait until a test has made a file."""
    while not (folder() / name).exists():  # noqa: ASYNC110 - another process makes it
        await asyncio.sleep(0.01)


@server.tool(annotations=ToolAnnotations(idempotent_hint=True))
async def bake(loaf: str, ctx: Context) -> str:
    """Note that it began, and wait for the file that is called like the loaf."""
    with (folder() / "begun").open("a") as begun:
        begun.write(f"{loaf}\n")
    await ctx.report_progress(1, 2, "in the oven")
    await there(loaf)
    return f"{loaf} is baked"


@server.tool()
async def greet(ctx: Context) -> str:
    """Ask who is there."""
    answer = await ctx.elicit("Who is there?", Name)
    return f"Hello {answer.data.name}" if answer.action == "accept" else "Nobody"
