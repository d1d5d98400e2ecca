"""A small bakery: an ordinary MCP server that does not use Perdure.

perdure serve examples/hello.py:server
"""

import random

import anyio
from mcp.server.mcpserver import Context, MCPServer
from mcp_types import ToolAnnotations

server = MCPServer("bakery", version="1", instructions="Ask for bread; it takes a while.")


@server.tool()
async def greet(name: str) -> str:
    """Say hello."""
    return f"Hello {name}, the oven is warm."


# Baking twice does no harm, so Perdure may run the call again after its process died.
@server.tool(annotations=ToolAnnotations(idempotent_hint=True))
async def bake(loaves: int, ctx: Context, seconds_each: float = 0.4) -> str:
    """Bake loaves one by one and tell about each of them."""
    for loaf in range(1, loaves + 1):
        await anyio.sleep(seconds_each)
        await ctx.report_progress(loaf, loaves, f"loaf {loaf} of {loaves} is out of the oven")
    return f"{loaves} loaves, still warm."


@server.tool()
def fortune() -> str:
    """Break a fortune cookie."""
    return random.choice(
        [
            "What is kept will be read.",
            "A cut is not an end.",
            "You will come back to where you were.",
        ]
    )
