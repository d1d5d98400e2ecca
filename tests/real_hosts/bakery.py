"""The server of the host suite: `perdure serve tests.real_hosts.bakery:server`.

Each tool notes its beginning in the `diary` of the folder that it is given, and waits there for the file `gate`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
from mcp.server.mcpserver import Context, MCPServer
from mcp_types import ToolAnnotations
from pydantic import BaseModel

from tests.support.servers.gate_file_tools import note, pass_gate

server = MCPServer("bakery", version="1", log_level="WARNING")

TASKS = "io.modelcontextprotocol/tasks"
IDEMPOTENT = ToolAnnotations(idempotent_hint=True)


class Flour(BaseModel):
    """What `mix` asks the user for."""

    flour: str


def _caller(ctx: Context) -> dict[str, Any]:
    params, capabilities = ctx.session.client_params, ctx.client_capabilities
    return {
        "name": params.client_info.name if params else "",
        "revision": ctx.protocol_version,
        "token": "progress_token" in (ctx.request_context.meta or {}),
        "tasks": TASKS in ((capabilities and capabilities.extensions) or {}),
        "elicitation": bool(capabilities and capabilities.elicitation is not None),
    }


def _begin(tool: str, folder: str, ctx: Context) -> str:
    """Note the beginning and who calls; gives the gate."""
    here = Path(folder)
    (here / "caller").write_text(json.dumps(_caller(ctx)))
    note(str(here / "diary"), tool)
    return str(here / "gate")


@server.tool(annotations=IDEMPOTENT)
async def bake(folder: str, ctx: Context) -> str:
    """May run again, and reports progress."""
    gate = Path(_begin("bake", folder, ctx))
    number = 0
    while not gate.exists():  # noqa: ASYNC240 - a local file
        number += 1
        await ctx.report_progress(number, message=f"loaf {number}")
        await anyio.sleep(0.5)
    return "bake is done"


@server.tool()
async def sell(folder: str, ctx: Context) -> str:
    """Has no hint, and is silent."""
    await pass_gate(_begin("sell", folder, ctx))
    return "sell is done"


@server.tool(annotations=IDEMPOTENT)
async def rest(folder: str, ctx: Context) -> str:
    """May run again, and is silent."""
    await pass_gate(_begin("rest", folder, ctx))
    return "rest is done"


@server.tool()
async def mix(folder: str, ctx: Context) -> str:
    """Asks the user."""
    _begin("mix", folder, ctx)
    answer = await ctx.elicit("Which flour?", Flour)
    return f"mix is done with {answer.data.flour}" if answer.action == "accept" else f"mix was told {answer.action}"
