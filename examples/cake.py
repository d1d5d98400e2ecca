"""A bakery whose tool does its work in four steps: after a crash the call goes on in its middle.

perdure serve examples/cake.py:server
"""

import os
import time
from pathlib import Path

from mcp.server.mcpserver import Context, MCPServer

import perdure

server = MCPServer("bakery", version="1")


def do(name: str, diary: str) -> str:
    """Note what is done, by which process, and take a while for it."""
    with Path(diary).open("a") as notes:
        notes.write(f"{name} {os.getpid()}\n")
    time.sleep(0.5)
    return f"{name}: done"


# Outside its steps it does nothing that must not be done twice, so Perdure may go on with it.
@server.tool(meta=perdure.RESUMABLE)
async def cake(diary: str, ctx: Context) -> str:
    """Make a cake, step by step."""
    for number, name in enumerate(("mix", "rise", "bake", "ice"), 1):
        await ctx.report_progress(number, 4, name)
        await perdure.step(name, do, name, diary, again=True)  # a step that was cut short may be done again
    return "a cake"
