"""A client that takes tasks gets the answer of its call, or a handle that leads to it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from mcp.server.mcpserver import MCPServer

from tests.support.modern import TASKS, modern
from tests.support.site import Site, serve
from tests.support.wire import answer_of, text_of

pytestmark = pytest.mark.anyio

TASK_AFTER = 0.02
#: Longer than that, so that both times have passed when the loop looks again.
BUSY = 0.05


async def ask(site: Site, method: str, params: dict[str, Any]) -> dict[str, Any]:
    body, headers = modern(method, params, capabilities={"extensions": {TASKS: {}}})
    accepts = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
    return answer_of(await site.request("POST", headers=[*accepts.items(), *headers.items()], body=body))


async def test_a_call_that_ends_in_the_moment_of_its_handle_is_not_lost() -> None:
    """A busy loop comes late to the end of a tool's wait, and to the time of the handle right behind it: both happen in
    one turn. On a machine so slow that the handle is first, the handle leads to the answer."""
    server = MCPServer("busy")

    @server.tool()
    async def work() -> str:
        asyncio.get_running_loop().call_soon(time.sleep, BUSY)
        await asyncio.sleep(TASK_AFTER / 20)
        return "done"

    async with serve(server, task_after=TASK_AFTER) as site:
        answer = await ask(site, "tools/call", {"name": "work", "arguments": {}})
        if "taskId" in answer["result"]:
            answer = await ask(site, "tasks/get", {"taskId": answer["result"]["taskId"]})
            answer = answer["result"]
        assert text_of(answer) == "done"
