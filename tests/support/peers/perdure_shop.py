"""The shop's tool with Perdure: `perdure serve tests.support.peers.perdure_shop:server`."""

from __future__ import annotations

from mcp.server.mcpserver import MCPServer

import perdure
from tests.support.peers.shop import STEPS, die_at, effect

server = MCPServer("shop", version="1", log_level="WARNING")


@server.tool(meta=perdure.RESUMABLE)
async def order() -> str:
    values = []
    for name in STEPS:
        values.append(await perdure.step(name, effect, name, again=name != "charge"))
        die_at(f"after {name}")
    return " ".join(values)
