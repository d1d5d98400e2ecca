"""A tool that asks by rounds, in the way of 2026-07-28: its question is resolved before it runs."""

from __future__ import annotations

from typing import Annotated

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.resolve import Elicit, Resolve
from pydantic import BaseModel

server = MCPServer("rounds", version="1", log_level="WARNING")


class Order(BaseModel):
    loaf: str


async def which_loaf() -> Elicit[Order]:
    return Elicit("Which loaf?", Order)


@server.tool()
async def order(chosen: Annotated[Order, Resolve(which_loaf)]) -> str:
    return f"a {chosen.loaf} loaf"
