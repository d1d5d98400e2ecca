"""Hosts that speak 2026-07-28 over the bridge: plain calls that outlive connections, servers, bridges and hosts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
from mcp.server.mcpserver import MCPServer
from mcp.server.transport_security import TransportSecuritySettings
from pydantic import Field

from tests.stdio.served_hosts import serving_host
from tests.stdio.stdio_bridges import Bridge, Host, Message, a_host, text_of
from tests.support.processes.cluster import Cluster, cluster
from tests.support.proxies.cutting_proxy import cutting_proxy
from tests.support.servers.changing_server import new_server
from tests.support.servers.gate_file_tools import diary, open_gate
from tests.support.servers.in_process import serve, under_uvicorn, until

pytestmark = pytest.mark.anyio

MODERN = "2026-07-28"
JOINED = "the host's retry continues a call of an earlier process"


def params(given: Message | None = None, *, token: Any = None, host: str = "host", **capabilities: Any) -> Message:
    """The params of a request with its envelope."""
    envelope = {
        "io.modelcontextprotocol/protocolVersion": MODERN,
        "io.modelcontextprotocol/clientInfo": {"name": host, "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": capabilities,
    }
    return {**(given or {}), "_meta": envelope if token is None else {**envelope, "progressToken": token}}


def begin_call(bridge: Bridge, tool: str, /, *, token: Any = None, host: str = "host", **arguments: Any) -> Any:
    asked = params({"name": tool, "arguments": arguments}, token=token, host=host, elicitation={})
    return bridge.begin("tools/call", asked)


async def saw_progress(bridge: Bridge, token: Any, number: int) -> None:
    await bridge.until(lambda: (token, number) in bridge.progress(), f"progress {number} of {token}")


@dataclass(frozen=True, kw_only=True)
class Office:
    """Servers that can be killed, and a host."""

    servers: Cluster
    host: Host
    folder: Path

    @property
    def gate(self) -> str:
        return str(self.folder / "gate")

    def runs(self, key: str) -> int:
        return len(diary(self.folder / key))


@asynccontextmanager
async def an_office(folder: Path) -> AsyncIterator[Office]:
    async with (
        cluster(folder / "log.db", "--task-after", "200ms") as servers,
        a_host(folder, servers.proxy.url) as host,
    ):
        yield Office(servers=servers, host=host, folder=folder)


async def test_a_plain_call_outlives_the_server(folder: Path) -> None:
    """The host declares no tasks, and sees none; a tool that may not run again has an unknown outcome."""
    async with an_office(folder) as office:
        bridge = await office.host.start()
        found = (await bridge.request("server/discover", params()))["result"]
        assert MODERN in found["supportedVersions"]
        calls = {}
        for tool in ("put", "pay"):
            log = str(folder / tool)
            calls[tool] = begin_call(bridge, tool, token=tool, n=3, gate=office.gate, pauses=[2], log=log)
            await saw_progress(bridge, tool, 2)
        tasks = "SELECT count(*) FROM session WHERE is_task"
        await until(lambda: office.servers.rows(tasks) == [(2,)])
        await office.servers.kill()
        open_gate(f"{office.gate}.2")
        await office.servers.restart()
        done = await bridge.answer(calls["put"])
        assert (text_of(done), done["result"]["resultType"]) == ("counted to 3", "complete")
        assert (await bridge.answer(calls["pay"]))["error"]["code"] == -31001
        assert (office.runs("put"), office.runs("pay")) == (2, 1)
        assert (await bridge.request("tools/list", params()))["result"]["tools"]
        assert await bridge.end() == 0
        assert list(office.host.tokens.glob("call*")) == []


async def test_a_host_under_a_rule_is_answered_early_by_its_own_name(folder: Path) -> None:
    """The key and the tasks of its calls are the bridge's, and do not count. A host without a rule waits."""
    gate, log = str(folder / "gate"), str(folder / "put")
    asked: Message = {"n": 2, "gate": gate, "pauses": [1], "log": log}
    options = ("--task-after", "200ms", "--answer-within", "host=1s")
    async with cluster(folder / "log.db", *options) as servers, a_host(folder, servers.proxy.url) as host:
        bridge = await host.start()
        tools = (await bridge.request("tools/list", params()))["result"]["tools"]
        assert "perdure_wait_for_result" in {tool["name"] for tool in tools}
        patient = begin_call(bridge, "put", host="patient", **asked)
        early = await bridge.answer(begin_call(bridge, "put", **asked))
        assert "still running" in text_of(early)
        await servers.kill()
        open_gate(f"{gate}.1")
        await servers.restart()
        wanted = early["result"]["_meta"]["dev.perdure/call"]["id"]
        found = "still running"
        while "still running" in found:
            found = text_of(await bridge.answer(begin_call(bridge, "perdure_wait_for_result", call=wanted)))
        assert found == text_of(await bridge.answer(patient)) == "counted to 2"
        assert await bridge.end() == 0
        assert list(host.tokens.glob("call*")) == [], "the bridge keeps no key of a call that was answered early"


@pytest.mark.parametrize("way", ["the bridge is killed", "the host is another process"])
async def test_a_retry_after_a_restart_joins_what_runs(folder: Path, way: str) -> None:
    async with an_office(folder) as office:
        asked: Message = {"n": 3, "gate": office.gate, "pauses": [1], "log": str(folder / "pay")}
        bridge = await office.host.start()
        begin_call(bridge, "pay", token="t", **asked)
        await saw_progress(bridge, "t", 1)
        if way == "the bridge is killed":
            await bridge.kill()
        else:
            await bridge.end()
        async with a_host(folder, office.servers.proxy.url) as other:
            host = other if way == "the host is another process" else office.host
            bridge = await host.start()
            again, beside = begin_call(bridge, "pay", **asked), begin_call(bridge, "pay", host="another", **asked)
            await bridge.logged(JOINED)
            open_gate(f"{office.gate}.1")
            assert text_of(await bridge.answer(again)) == text_of(await bridge.answer(beside)) == "counted to 3"
            assert office.runs("pay") == 2, "one for each host name"
            assert text_of(await bridge.answer(begin_call(bridge, "pay", **asked))) == "counted to 3"
            assert office.runs("pay") == 3, "what was answered is not joined"


async def test_equal_calls_of_bridges_that_live_are_two_calls(folder: Path) -> None:
    async with an_office(folder) as office:
        asked: Message = {"n": 2, "gate": office.gate, "pauses": [1], "log": str(folder / "pay")}
        bridges = [await office.host.start() for _ in range(2)]
        calls = [begin_call(bridge, "pay", token="t", **asked) for bridge in bridges]
        for bridge in bridges:
            await saw_progress(bridge, "t", 1)
        open_gate(f"{office.gate}.1")
        for bridge, call in zip(bridges, calls, strict=True):
            assert text_of(await bridge.answer(call)) == "counted to 2"
        assert office.runs("pay") == 2


async def test_what_a_tool_asks_is_a_round_of_its_call(folder: Path) -> None:
    """A host that was started again before it had answered is asked again, by the same run."""
    async with an_office(folder) as office:
        asked: Message = {"question": "who?", "log": str(folder / "ask")}
        bridge = await office.host.start()
        before = (await bridge.answer(begin_call(bridge, "ask", **asked)))["result"]
        assert before["resultType"] == "input_required"
        await bridge.kill()
        bridge = await office.host.start()
        found = (await bridge.answer(begin_call(bridge, "ask", **asked)))["result"]
        [(key, question)] = found["inputRequests"].items()
        assert (question["method"], question["params"]["message"]) == ("elicitation/create", "who?")
        answers = {key: {"action": "accept", "content": {"answer": "forty-two"}}}
        round_ = {"name": "ask", "arguments": asked, "inputResponses": answers, "requestState": found["requestState"]}
        assert text_of(await bridge.request("tools/call", params(round_, elicitation={}))) == "forty-two"
        assert office.runs("ask") == 1
        assert await bridge.end() == 0
        assert list(office.host.tokens.glob("call*")) == []


async def test_an_answer_to_a_question_of_a_bridge_that_was_killed_reaches_its_tool(folder: Path) -> None:
    """The host brings the state of the earlier bridge, as the specification has it."""
    async with an_office(folder) as office:
        asked: Message = {"question": "who?", "log": str(folder / "ask")}
        bridge = await office.host.start()
        found = (await bridge.answer(begin_call(bridge, "ask", **asked)))["result"]
        answers = {key: {"action": "accept", "content": {"answer": "forty-two"}} for key in found["inputRequests"]}
        await bridge.kill()
        bridge = await office.host.start()
        round_ = {"name": "ask", "arguments": asked, "inputResponses": answers, "requestState": found["requestState"]}
        assert text_of(await bridge.request("tools/call", params(round_, elicitation={}))) == "forty-two"
        assert office.runs("ask") == 1
        assert await bridge.end() == 0
        assert list(office.host.tokens.glob("call*")) == []


async def test_a_call_that_the_host_cancels_before_it_leaves(folder: Path) -> None:
    async with an_office(folder) as office:
        bridge = await office.host.start()
        call = begin_call(bridge, "pay", token="t", n=3, gate=office.gate, pauses=[1])
        await saw_progress(bridge, "t", 1)
        await until(lambda: office.servers.rows("SELECT count(*) FROM session WHERE is_task") == [(1,)])
        await until(lambda: '"task": ""' not in _ledger(office.host))
        bridge.notify("notifications/cancelled", **params({"requestId": call}))
        assert await bridge.end() == 0
        await until(lambda: office.servers.rows("SELECT state FROM call") == [("cancelled",)])
        assert not bridge.has_answer(call)


def _ledger(host: Host) -> str:
    return "".join(path.read_text() for path in host.tokens.glob("calls-*[0-9a-f]"))


@pytest.mark.parametrize("kind", ["Perdure's", "the SDK's own"])
async def test_listening_comes_back(folder: Path, kind: str) -> None:
    """The host does not know what it missed: it gets one cue for each thing that it listens to."""
    async with AsyncExitStack() as stack:
        if kind == "Perdure's":
            port = (await stack.enter_async_context(serve(new_server()))).port
        else:
            anybody = TransportSecuritySettings(enable_dns_rebinding_protection=False)
            app = new_server().streamable_http_app(transport_security=anybody)
            port = await stack.enter_async_context(under_uvicorn(app))
        proxy = await stack.enter_async_context(cutting_proxy(port))
        host = await stack.enter_async_context(a_host(folder, proxy.url))
        bridge, other = await host.start(), await host.start(url=f"http://127.0.0.1:{port}/mcp")
        wanted = {"notifications": {"toolsListChanged": True, "promptsListChanged": True}}
        bridge.begin("subscriptions/listen", params(wanted), id="l-1")
        acknowledged = "notifications/subscriptions/acknowledged"
        await bridge.until(lambda: bridge.order[:1] == [acknowledged], "the acknowledgement")
        proxy.refuse()
        assert proxy.cut() >= 1
        await other.answer(begin_call(other, "change", what="prompts"))
        proxy.accept()
        tools, prompts = "notifications/tools/list_changed", "notifications/prompts/list_changed"
        back = [acknowledged, tools, prompts]
        await bridge.until(lambda: back in [bridge.order[n : n + 3] for n in range(1, len(bridge.order))], "cues")
        named = {message["params"]["_meta"]["io.modelcontextprotocol/subscriptionId"] for message in bridge.heard}
        assert named == {"l-1"}
        for each in (bridge, other):  # the SDK's own server waits for the streams that are open
            await each.end()


async def test_a_server_with_sessions_alone_has_the_host_fall_back(folder: Path) -> None:
    async with serving_host(folder, eras="session") as hosted:
        bridge = await hosted.host.start()
        refused = (await bridge.request("server/discover", params()))["error"]
        assert (refused["code"], refused["data"]["supported"][0]) == (-32022, "2025-11-25")
        await bridge.handshake()
        assert len(hosted.sessions) == 1


async def test_requests_that_cannot_be_taken(folder: Path) -> None:
    """A host's own task and key are its own; an id that is in use is refused."""
    async with serving_host(folder, task_after=0.1) as hosted:
        bridge = await hosted.host.start()
        declared: dict[str, Any] = {"extensions": {"io.modelcontextprotocol/tasks": {}}}
        asked = params({"name": "wait", "arguments": {"gate": "g"}}, **declared)
        asked["_meta"]["dev.perdure/key"] = "mine"
        handle = (await bridge.answer(bridge.begin("tools/call", asked)))["result"]
        assert handle["resultType"] == "task"
        bridge.begin("tools/call", params({"name": "wait", "arguments": {"gate": "h"}}), id="twice")
        await until(lambda: _ledger(hosted.host))
        refused = await bridge.answer(bridge.begin("tools/list", params(), id="twice"))
        assert refused["error"]["code"] == -32600
        hosted.tool_server.open("g")
        seen = params({"taskId": handle["taskId"]}, **declared)

        async def is_over() -> bool:
            return bool((await bridge.request("tasks/get", seen))["result"]["status"] == "completed")

        await until(is_over)


async def test_a_tool_that_wants_an_argument_in_a_header(folder: Path) -> None:
    """A pipe has no headers: the bridge makes them."""
    server = MCPServer("weather", version="1")

    @server.tool()
    def forecast(city: Annotated[str, Field(json_schema_extra={"x-mcp-header": "City"})]) -> str:
        return f"rain in {city}"

    async with serve(server) as site, a_host(folder, site.url) as host:
        bridge = await host.start()
        assert text_of(await bridge.answer(begin_call(bridge, "forecast", city="Köln"))) == "rain in Köln"
