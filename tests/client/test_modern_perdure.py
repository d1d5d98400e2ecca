"""`perdure.connect` at 2026-07-28 with Perdure's own servers: outcomes over kills are those without, or unknown."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest
from mcp.client.session import ClientRequestContext
from mcp.shared.exceptions import MCPError
from mcp_types import ElicitRequestParams, ElicitResult, ProgressNotification

import perdure
from perdure._core.envelope import CALLS, KEPT
from perdure.client.memory import decode
from tests.client.client_process import client_process
from tests.client.conftest import Progress, text
from tests.client.test_tasks import EAGER
from tests.support.clients.modern_requests import MODERN
from tests.support.processes.cluster import cluster
from tests.support.processes.serving import serving
from tests.support.proxies.cutting_proxy import cutting_proxy
from tests.support.servers.gate_file_tools import diary, open_gate
from tests.support.servers.in_process import serve, until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio

CHANGING = "tests.support.servers.changing_server:server"
#: Calls are answered by tasks at once, or only by their keys.
TASKS, KEYS = ("--task-after", "0.01", "--task-ttl", "1h"), ("--task-after", "60", "--replay-window", "1h")


async def say_yes(context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:
    return ElicitResult(action="accept", content={"answer": "yes"})


@pytest.mark.parametrize("option", [TASKS, KEYS], ids=["tasks", "keys"])
async def test_the_server_is_killed_and_every_call_has_an_outcome(tmp_path: Path, option: tuple[str, ...]) -> None:
    """A tool that may run twice returns its result, another one is unknown and ran once, and the client continues."""
    log, gate = tmp_path / "diary", tmp_path / "gate"
    about = {"n": 3, "gate": str(gate), "pauses": [2], "log": str(log)}
    async with (
        cluster(tmp_path / "log.db", *option) as site,
        perdure.connect(
            site.proxy.url, mode=MODERN, state=tmp_path / "s", patience=EAGER, elicitation_callback=say_yes
        ) as client,
    ):
        pay = asyncio.create_task(client.call_tool("pay", {**about, "key": "pay"}))
        put = asyncio.create_task(client.call_tool("put", {**about, "key": "put"}))
        await until(lambda: len(diary(log)) == 2)
        if option is TASKS:
            await until(lambda: all(call.task for call in decode((tmp_path / "s").read_bytes()).durable_calls.values()))
        await site.crash()
        open_gate(f"{gate}.2")
        assert text(await put) == "counted to 3"
        with pytest.raises(perdure.OutcomeUnknown) as unknown:
            await pay
        assert unknown.value.arguments == {**about, "key": "pay"}
        assert text(await client.call_tool("ask", {"question": "still there?"})) == "yes"
        assert (client.server_capabilities.extensions or {})[CALLS] == {KEPT: 3_600_000}
        await until(lambda: decode((tmp_path / "s").read_bytes()).durable_calls == {})
    assert sorted(key for key, _ in diary(log)) == ["pay", "put", "put"]


@pytest.mark.parametrize("option", [TASKS, KEYS], ids=["tasks", "keys"])
async def test_the_client_is_killed_and_the_next_one_finds_its_calls_at_any_node(
    tmp_path: Path, option: tuple[str, ...]
) -> None:
    log, gate, state = tmp_path / "diary", tmp_path / "gate", tmp_path / "agent.json"
    pay = {"n": 3, "gate": str(gate), "pauses": [2], "log": str(log)}
    calls = [("pay", pay), ("ask", {"question": "hang on?", "log": str(log), "key": "ask"})]
    async with cluster(tmp_path / "log.db", *option, processes=2) as site:
        async with client_process(site.proxy.url, state, "all", "modern", calls=calls) as first:
            await first.until(asked="hang on?")
            await until(lambda: len(diary(log)) == 2)
            await first.kill()
        open_gate(f"{gate}.2")
        async with client_process(site.proxy.url, state, "-", "answers") as second:
            said = await second.rest()
        assert sorted(tool for tool, _ in said[0]["pending"]) == ["ask", "pay"]
        assert sorted(second.told("result")) == ["at last", "counted to 3"]
    assert len(diary(log)) == 2


async def test_a_listener_hears_of_every_change_over_a_cut_and_the_stop_of_its_node(tmp_path: Path) -> None:
    """Changes are published at the other node, while the listener is away as well."""
    heard: list[str] = []

    async def listen(client: perdure.Client, is_listening: asyncio.Event) -> None:
        async with client.listen(resource_subscriptions=["note://1", "note://2"]) as subscription:
            is_listening.set()
            async for event in subscription:
                heard.append(str(getattr(event, "uri", event)))

    store = ("--store", f"sqlite:{tmp_path / 'log.db'}")
    async with (
        serving(CHANGING, *store) as first,
        serving(CHANGING, *store) as second,
        cutting_proxy(first.port) as proxy,
        perdure.connect(proxy.url, mode=MODERN, patience=EAGER) as client,
        perdure.connect(second.url, mode=MODERN, patience=EAGER) as other,
    ):
        listener = asyncio.create_task(listen(client, is_listening := asyncio.Event()))
        await is_listening.wait()
        await other.call_tool("change", {"what": "note://1"})
        await until(lambda: "note://1" in heard)
        heard.clear()
        proxy.refuse()
        proxy.cut()
        await other.call_tool("change", {"what": "note://2"})
        proxy.accept()
        await until(lambda: "note://2" in heard)
        heard.clear()
        proxy.upstreams = (second.port,)
        await first.stop()
        await other.call_tool("change", {"what": "note://1"})
        await until(lambda: "note://1" in heard)
        assert not listener.done()
        listener.cancel()


async def test_progress_goes_on_after_the_call_has_become_a_task(shop: ToolServer, tmp_path: Path) -> None:
    """Each number once: those before the handle by notifications, those after it in the task's words."""
    count = {"n": 4, "gate": "g", "pauses": [1, 2, 3]}
    progress, again = Progress(), list[float]()
    async with serve(shop.server, task_after=0.01) as site:
        async with perdure.connect(site.url, mode=MODERN, state=tmp_path / "s") as client:
            call = asyncio.create_task(client.call_tool("count", count, progress_callback=progress))
            await until(lambda: any(call.task for call in decode((tmp_path / "s").read_bytes()).durable_calls.values()))
            for number in (1, 2):
                await until(partial(progress.has, number))
                shop.open(f"g/{number}")
            await until(lambda: progress.has(3))
        with pytest.raises(MCPError, match="Connection closed"):
            await call
        async with perdure.connect(site.url, mode=MODERN, state=tmp_path / "s") as client:
            [pending] = client.pending()
            async for note in pending:
                assert isinstance(note, ProgressNotification)
                again.append(note.params.progress)
                shop.open("g/3")
            assert text(await pending) == "counted to 4"
    assert again[0] == 3.0
