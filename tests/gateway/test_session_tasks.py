"""Tasks of 2025-11-25 behind a gateway: its own for tools that a rule names, and those of an upstream that has some."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from perdure import Settings
from perdure.gateway.host import host_upstream
from perdure.gateway.upstream import HttpUpstream, Upstream
from tests.gateway.gateways import gateway
from tests.http.test_session_tasks import RULES, ask, begin, ended, result, until_heard
from tests.support.clients.wire_client import text_of
from tests.support.servers.in_process import serve, until
from tests.support.servers.tool_server import ToolServer
from tests.support.stores.shared_store import SharedStore

pytestmark = pytest.mark.anyio

NAMED = {"tasks": ("plain=optional", "idempotent=optional")}


async def test_a_tool_that_a_rule_names_runs_as_a_task_over_the_death_of_its_process(tmp_path: Path) -> None:
    """K1, K3, K8: its session goes on, and the server does not hear of the task."""
    gate = tmp_path / "gate"
    async with gateway(tmp_path, serving=NAMED) as served:
        peer = await served.join()
        assert peer.welcome["result"]["capabilities"]["tasks"]["requests"] == {"tools": {"call": {}}}
        shown = {tool["name"]: tool.get("execution") for tool in (await ask(peer, "tools/list"))["result"]["tools"]}
        optional = {"taskSupport": "optional"}
        assert shown == {"plain": optional, "idempotent": optional, "read_only": None}
        standalone = await peer.get()
        steps = [{"progress": 1}, {"wait": str(gate)}]
        again, once = [(await begin(peer, tool, do=steps, token=tool))["taskId"] for tool in ("idempotent", "plain")]
        for _ in range(2):
            await until_heard(standalone, "notifications/progress")
        await served.has_run(2)
        await served.kill()
        assert (await result(peer, once))["error"]["code"] == -31001
        gate.touch()
        assert text_of(await result(peer, again)) == "done"
        assert (await ended(peer, once))["status"] == "failed"
        assert sorted(served.runs) == ["idempotent", "idempotent", "plain"]
        later = (await begin(peer, "plain", do=[{"say": "still here"}]))["taskId"]
        assert text_of(await result(peer, later)) == "still here"


async def test_an_upstream_that_declares_tasks_keeps_its_own() -> None:
    """K1: also where a rule of the gateway names its tools; here it is another Perdure."""
    shop = ToolServer()
    async with serve(shop.server, tasks=RULES) as behind:
        upstream = Upstream(name="shop", address=HttpUpstream(url=behind.url), era="session")
        named: dict[str, Any] = {"tasks": ("wait=required",)}
        async with serve(host_upstream(upstream, Settings(**named)), **named) as site:
            peer = await site.join()
            assert peer.welcome["result"]["capabilities"]["tasks"] == {
                "cancel": {},
                "requests": {"tools": {"call": {}}},
            }
            assert "_meta" not in peer.welcome["result"]
            standalone = await peer.get()
            task = (await begin(peer, "wait", gate="g"))["taskId"]
            await until(lambda: shop.seen == ["waiting at g"])
            mine = await behind.join()
            assert (await ask(mine, "tasks/get", taskId=task))["result"]["status"] == "working"
            assert (await ask(peer, "tasks/get", taskId=task))["result"]["taskId"] == task
            shop.open("g")
            told = await until_heard(standalone, "notifications/tasks/status")
            assert (told["params"]["taskId"], told["params"]["status"]) == (task, "completed")
            assert text_of(await result(peer, task)) == "went through g"


async def test_members_in_odd_forms_do_not_keep_a_task_from_its_end(tmp_path: Path) -> None:
    """K14: `_meta` that is no object gives way to the task's own. The answer may be in the same chunk of output."""
    odd: dict[str, Any] = {"_meta": 7, "content": []}
    logged = {"notify": "notifications/message", "params": {"_meta": 7, "level": "info", "data": "odd"}}
    async with gateway(tmp_path, serving=NAMED) as served:
        peer = await served.join()
        standalone = await peer.get()
        task = (await begin(peer, "plain", do=[logged, {"result": odd}]))["taskId"]
        meta = {"io.modelcontextprotocol/related-task": {"taskId": task}}
        assert (await until_heard(standalone, "notifications/message"))["params"]["_meta"] == meta
        assert (await result(peer, task))["result"] == {**odd, "_meta": meta}


async def test_a_task_that_another_node_takes_runs_in_the_one_process_of_its_session(tmp_path: Path) -> None:
    """K6: row and early answer are written where the request comes, and the tool runs at the home."""
    async with AsyncExitStack() as stack:
        here, there = [
            await stack.enter_async_context(
                gateway(tmp_path, serving={**NAMED, "store": SharedStore(tmp_path / "log.db")})
            )
            for _ in range(2)
        ]
        peer = await here.join()
        pid = await peer.result("read_only", do=[{"pid": True}])
        other = peer.through(there.site)
        task = (await begin(other, "plain", do=[{"progress": 1}, {"pid": True}]))["taskId"]
        assert [text_of(await result(each, task)) for each in (other, peer)] == [pid, pid]
        assert (await ended(other, task))["status"] == "completed"
