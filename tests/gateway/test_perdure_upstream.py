"""A session in front of Perdure at 2026-07-28, whose calls outlive its own process and the gateway's."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from mcp_types import TextContent

import perdure
from tests.gateway.modern_lanes import EAGER, http_lane, text
from tests.support.processes.cluster import cluster
from tests.support.processes.serving import serving
from tests.support.proxies.cutting_proxy import cutting_proxy
from tests.support.servers.gate_file_tools import diary, open_gate
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio

#: Calls become tasks at once, or are known by their keys only.
TASKS, KEYS = ("--task-after", "0.01"), ("--task-after", "60")


@pytest.mark.parametrize("option", [TASKS, KEYS], ids=["tasks", "keys"])
async def test_the_upstream_is_killed_and_settles_its_calls_itself(tmp_path: Path, option: tuple[str, ...]) -> None:
    log, gate = tmp_path / "diary", tmp_path / "gate"
    about = {"n": 3, "gate": str(gate), "pauses": [2], "log": str(log)}
    async with cluster(tmp_path / "log.db", *option) as site, http_lane(site.proxy.url) as front:
        heard = front.heard
        pay, put = front.call("pay", key="pay", **about), front.call("put", "tok", key="put", **about)
        await until(lambda: len(diary(log)) == 2)
        if option is TASKS:
            await until(lambda: all("task" in heard.positions[key][-1] for key in (pay, put)))
        await site.crash()
        open_gate(f"{gate}.2")
        assert text(await heard.answer(put)) == "counted to 3"
        assert (await heard.answer(pay))["code"] == -31001
        reported = [params["progress"] for params in heard.of("notifications/progress") if params is not None]
        assert reported == sorted(set(reported))
        assert heard.closed == []
    assert sorted(key for key, _ in diary(log)) == ["pay", "put", "put"]


@pytest.mark.parametrize("option", [TASKS, KEYS], ids=["tasks", "keys"])
async def test_a_later_lane_follows_a_call_that_runs_once(tmp_path: Path, option: tuple[str, ...]) -> None:
    log, gate = tmp_path / "diary", tmp_path / "gate"
    params = {"name": "pay", "arguments": {"n": 3, "gate": str(gate), "pauses": [2], "log": str(log), "key": "pay"}}
    async with cluster(tmp_path / "log.db", *option) as site:
        async with http_lane(site.proxy.url) as front:
            key = front.start("tools/call", **params)
            await until(lambda: diary(log))
            if option is TASKS:
                await until(lambda: "task" in front.heard.positions[key][-1])
            state = front.heard.positions[key][-1]
        async with http_lane(site.proxy.url) as later:
            later.lane.follow("k", "tools/call", params, state)
            open_gate(f"{gate}.2")
            assert text(await later.heard.answer("k")) == "counted to 3"
    assert [key for key, _ in diary(log)] == ["pay"]


@pytest.mark.parametrize("option", [TASKS, KEYS], ids=["tasks", "keys"])
async def test_a_tools_question_is_an_ask(tmp_path: Path, option: tuple[str, ...]) -> None:
    async with cluster(tmp_path / "log.db", *option) as site, http_lane(site.proxy.url) as front:
        key = front.call("ask", question="well?")
        await until(lambda: front.heard.asks)
        [(ask, (method, params, of))] = front.heard.asks.items()
        assert (method, of, (params or {})["message"]) == ("elicitation/create", key, "well?")
        front.lane.reply(ask, {"result": {"action": "accept", "content": {"answer": "yes"}}})
        assert text(await front.heard.answer(key)) == "yes"
        assert len(front.heard.asks) == 1


@pytest.mark.parametrize("option", [TASKS, KEYS], ids=["tasks", "keys"])
async def test_the_gateway_is_killed_and_the_next_one_follows_the_call(tmp_path: Path, option: tuple[str, ...]) -> None:
    """Its tool may not run twice; the client resumes its session at the next gateway, and waits for one call. G8."""
    log, gate = tmp_path / "diary", tmp_path / "gate"
    about = {"n": 3, "gate": str(gate), "pauses": [2], "log": str(log), "key": "pay"}
    options = ("--store", f"sqlite:{tmp_path / 'gateway.db'}", "--era", "2026-07-28", "--retry", "0.05")
    async with cluster(tmp_path / "log.db", *option) as upstream, AsyncExitStack() as stack:
        first = await stack.enter_async_context(serving(upstream.proxy.url, *options))
        proxy = await stack.enter_async_context(cutting_proxy(first.port))
        client = await stack.enter_async_context(perdure.connect(proxy.url, mode="legacy", patience=EAGER))
        pay = asyncio.create_task(client.call_tool("pay", about))
        await until(lambda: diary(log))
        proxy.hold()
        await first.kill()
        second = await stack.enter_async_context(serving(upstream.proxy.url, *options))
        proxy.upstreams = (second.port,)
        proxy.cut()
        proxy.release()
        open_gate(f"{gate}.2")
        result = await pay
        assert [content.text for content in result.content if isinstance(content, TextContent)] == ["counted to 3"]
    assert [key for key, _ in diary(log)] == ["pay"]
