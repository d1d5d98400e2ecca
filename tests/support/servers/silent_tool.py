"""A tool that waits without a word to its client."""

from __future__ import annotations

import anyio
from mcp.server.mcpserver import MCPServer

server = MCPServer("silent", version="1", log_level="WARNING")


@server.tool()
async def wait() -> str:
    print("waiting", flush=True)
    await anyio.sleep_forever()
    return "never"
