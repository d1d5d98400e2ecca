"""Tools that are slow, or do not stop at all, and a route that names the process. For tests of ending processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import anyio
from mcp.server.mcpserver import Context, MCPServer
from mcp_types import ToolAnnotations
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

server = MCPServer("stubborn", version="1", log_level="WARNING")


def folder() -> Path:
    """The folder in which a test acts on processes that it did not start itself."""
    return Path(os.environ.get("STUBBORN_FOLDER", "."))


class Answer(BaseModel):
    """What `ask` asks for."""

    answer: str


@server.tool()
async def until_there(name: str, ctx: Context) -> str:
    """Wait until a file exists; reports progress when the wait has begun."""
    await ctx.report_progress(0)
    while not (folder() / name).exists():  # noqa: ASYNC110 - what is waited for is made by another process
        await anyio.sleep(0.01)
    return f"{name} is there"


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
async def look_for(name: str, ctx: Context) -> str:
    """Wait as `until_there` does; may run again elsewhere."""
    return await until_there(name, ctx)


@server.tool()
async def ask(ctx: Context) -> str:
    """Wait for the answer of the client's user."""
    result = await ctx.elicit("Well?", Answer)
    return result.data.answer if result.action == "accept" else result.action


@server.tool()
async def block(ctx: Context) -> str:
    """Block the event loop."""
    await ctx.report_progress(0)
    time.sleep(3600)  # noqa: ASYNC251
    return "never"


@server.tool()
async def thread(ctx: Context) -> str:
    """Hold a thread that cannot be stopped."""
    await ctx.report_progress(0)
    await anyio.to_thread.run_sync(time.sleep, 3600)
    return "never"


@server.tool()
async def die() -> str:
    """Kill the process."""
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


@server.custom_route("/pid", methods=["GET"])  # type: ignore[untyped-decorator]
async def pid(_: Request) -> Response:
    return PlainTextResponse(str(os.getpid()))


@server.custom_route("/environment", methods=["GET"])  # type: ignore[untyped-decorator]
async def environment(_: Request) -> Response:
    return PlainTextResponse("\n".join(os.environ))
