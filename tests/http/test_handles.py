"""A client that takes tasks gets the answer of its call, or a handle that leads to it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated, Any

import pytest
from anyio import wait_all_tasks_blocked
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.resolve import Elicit, Resolve
from pydantic import BaseModel

from tests.support.clients.modern_requests import TASKS, modern
from tests.support.clients.task_client import OUTCOME_UNKNOWN, Balancer, TaskClient, call_params, response_in, said
from tests.support.clients.wire_client import answer_of, text_of
from tests.support.servers.in_process import Site, serve, until
from tests.support.servers.tool_server import ToolServer
from tests.support.stores.faulty_store import Fault
from tests.support.stores.outages import FAILS, TIMEOUT, Switched

pytestmark = pytest.mark.anyio

TASK_AFTER = 0.02
#: Longer than that, so that both times have passed when the loop looks again.
BUSY = 0.05


async def ask(site: Site, method: str, params: dict[str, Any], able: dict[str, Any] | None = None) -> dict[str, Any]:
    body, headers = modern(method, params, capabilities=able or {"extensions": {TASKS: {}}})
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


class Order(BaseModel):
    loaf: str


handle_is_out = asyncio.Event()


async def which_loaf() -> Elicit[Order]:
    await handle_is_out.wait()
    return Elicit("Which loaf?", Order)


async def test_a_tool_that_asks_by_a_round_behind_its_handle_is_answered_within_the_task() -> None:
    """The round cannot go out any more, because the handle has: it is a question of the task."""
    server = MCPServer("slow")

    @server.tool()
    async def order(chosen: Annotated[Order, Resolve(which_loaf)]) -> str:
        return f"a {chosen.loaf} loaf"

    async with serve(server, task_after=0.0, task_hold=0.0) as site:
        able: dict[str, Any] = {"extensions": {TASKS: {}}, "elicitation": {"form": {}}}
        answer = await ask(site, "tools/call", {"name": "order", "arguments": {}}, able)
        task = {"taskId": answer["result"]["taskId"]}
        handle_is_out.set()

        async def status() -> Any:
            return (await ask(site, "tasks/get", task))["result"]["status"]

        async def asks() -> bool:
            return bool(await status() == "input_required")

        await until(asks)
        [question] = (await ask(site, "tasks/get", task))["result"]["inputRequests"]
        told = {question: {"action": "accept", "content": {"loaf": "dark"}}}
        await ask(site, "tasks/update", {**task, "inputResponses": told})

        async def has_ended() -> bool:
            return bool(await status() == "completed")

        await until(has_ended)
        ended = (await ask(site, "tasks/get", task))["result"]
        assert (text_of(ended), ended["result"]["resultType"]) == ("a dark loaf", "complete")


async def test_a_client_with_neither_handle_nor_key_is_not_sent_elsewhere_when_the_server_stops(tmp_path: Path) -> None:
    """Its tool has run, and nothing would keep it from running again: the outcome is not known."""
    shop, outage = ToolServer(), Switched(tmp_path / "log.db", Fault.RAISES)
    settings: dict[str, Any] = {"task_after": 0.0, "store_timeout": TIMEOUT, "complaint": FAILS}
    async with serve(shop.server, store=outage.store, **settings) as site, outage.begins():
        client = TaskClient(balancer=Balancer(ports=[site.port]))
        async with await client.begin("tools/call", call_params("wait", gate="g")) as exchange:
            await until(lambda: shop.seen)
            await wait_all_tasks_blocked()  # the client waits for the answer
            site.app.begin_stop()
            assert said(response_in(exchange, await exchange.answer())) == OUTCOME_UNKNOWN
