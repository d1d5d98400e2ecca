"""A server whose tools change its lists and resources, and publish that. For tests of listening."""

from __future__ import annotations

import os
from pathlib import Path

from mcp.server.mcpserver import Context, MCPServer
from mcp_types import Prompt, Resource, Tool

#: Names the file in which several processes keep what has changed; without it each has its own.
SHARED = "CHANGED_ITEMS"


class ChangingServer(MCPServer):
    """A server whose lists have one more item, named by how often the list was changed."""

    def __init__(self) -> None:
        super().__init__("changing", version="1", log_level="WARNING")
        self._own: list[str] = []
        self._shared = os.environ.get(SHARED)

    def change(self, what: str) -> None:
        """Change a list, and publish nothing."""
        if self._shared is None:
            self._own.append(what)
        else:
            with Path(self._shared).open("a") as file:
                file.write(f"{what}\n")

    def _item(self, what: str) -> str:
        changed = self._own
        if self._shared is not None and Path(self._shared).exists():
            changed = Path(self._shared).read_text().splitlines()
        return f"notice-{changed.count(what)}"

    async def list_tools(self) -> list[Tool]:
        return [*await super().list_tools(), Tool(name=self._item("tools"), input_schema={"type": "object"})]

    async def list_prompts(self) -> list[Prompt]:
        return [*await super().list_prompts(), Prompt(name=self._item("prompts"))]

    async def list_resources(self) -> list[Resource]:
        name = self._item("resources")
        return [*await super().list_resources(), Resource(name=name, uri=f"notice://{name}")]


def new_server() -> ChangingServer:
    """A server of its own: what one publishes the others do not hear."""
    server = ChangingServer()

    @server.tool()
    async def change(what: str, ctx: Context, times: int = 1) -> int:
        """Change a list (`tools`, `prompts`, `resources`) or the resource of a URI, and publish it. Returns this
        process."""
        for _ in range(times):
            server.change(what)
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
