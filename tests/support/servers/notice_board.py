"""A notice board: tools that say that lists and resources have changed. For tests of listening."""

from __future__ import annotations

import os

from mcp.server.mcpserver import Context, MCPServer


def new_server() -> MCPServer:
    """A board of its own: what one of them publishes the others do not hear."""
    server = MCPServer("board", version="1", log_level="WARNING")

    @server.tool()
    async def change(what: str, ctx: Context, times: int = 1) -> int:
        """Say that a list (`tools`, `prompts`, `resources`) or the resource of a URI has changed. Gives this
        process."""
        for _ in range(times):
            match what:
                case "tools":
                    await ctx.notify_tools_changed()
                case "prompts":
                    await ctx.notify_prompts_changed()
                case "resources":
                    await ctx.notify_resources_changed()
                case uri:
                    await ctx.notify_resource_updated(uri)
        return os.getpid()

    return server


server = new_server()
