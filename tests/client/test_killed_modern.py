"""The client's own process is killed while calls of 2026-07-28 run, and started again with the same state."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from mcp.shared.exceptions import MCPError

import perdure
from perdure._core.envelope import KEY
from perdure.client import transport
from perdure.client.memory import decode
from tests.client.client_process import client_process
from tests.client.conftest import text
from tests.client.sdk_task_server import SdkTaskServer
from tests.client.test_durable_calls import keys_of
from tests.client.test_elsewhere import ModernOnly
from tests.client.test_tasks import EAGER, Person
from tests.support.clients.modern_requests import MODERN
from tests.support.proxies.cutting_proxy import cutting_proxy
from tests.support.servers.in_process import under_uvicorn, until

pytestmark = pytest.mark.anyio


async def test_the_next_process_finds_calls_by_handle_and_by_key_and_asks_open_questions_again(tmp_path: Path) -> None:
    task_server, state = SdkTaskServer(tasks=True, keys=True), tmp_path / "agent.json"
    calls = [("work", {"gate": "g"}), ("safe", {"gate": "g"}), ("ask", {"questions": ["hang on?"]})]
    async with under_uvicorn(ModernOnly(task_server.app), complaint=".*") as port:
        url = f"http://127.0.0.1:{port}/mcp"
        async with client_process(url, state, "all", calls=calls) as first:
            await first.until(asked="hang on?")
            await until(lambda: sorted(task_server.runs) == ["ask", "safe", "work"])
            await until(lambda: sum(c.task is not None for c in decode(state.read_bytes()).durable_calls.values()) == 2)
            await first.kill()
        task_server.gates["g"].set()
        async with client_process(url, state, "-", "answers") as second:
            said = await second.rest()
        assert sorted(said[0]["pending"]) == sorted([tool, arguments] for tool, arguments in calls)
        assert second.told("asked") == ["hang on?"]
        assert sorted(second.told("result")) == ["at last", "worked at g", "worked at g"]
    assert sorted(task_server.runs) == ["ask", "safe", "work"]
    assert decode(state.read_bytes()).durable_calls == {}


@pytest.mark.parametrize("kind", ["task", "key"])
async def test_a_call_given_up_is_cancelled_by_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The server was away when the program gave the call up, and until the process ended."""
    monkeypatch.setattr(transport, "LEAVING_SECONDS", 0.1)
    task_server, state = SdkTaskServer(tasks=kind == "task", keys=kind == "key"), tmp_path / "s"
    async with under_uvicorn(task_server.app, complaint=".*") as port, cutting_proxy(port) as proxy:
        async with perdure.connect(proxy.url, mode=MODERN, state=state, patience=EAGER) as client:
            call = asyncio.create_task(client.call_tool("work", {"gate": "g"}))
            await until(lambda: task_server.requests("tasks/get") if kind == "task" else task_server.runs)
            proxy.refuse()
            proxy.cut()
            call.cancel()
            await until(lambda: all(c.is_given_up for c in decode(state.read_bytes()).durable_calls.values()))
        assert (len(decode(state.read_bytes()).durable_calls), task_server.cancelled) == (1, [])
        proxy.accept()
        async with perdure.connect(proxy.url, mode=MODERN, state=state) as client:
            assert client.pending() == []
            await until(lambda: task_server.cancelled == ["work"])
            await until(lambda: decode(state.read_bytes()).durable_calls == {})


async def test_without_keys_and_tasks_a_safe_tool_runs_again_and_another_one_is_unknown(tmp_path: Path) -> None:
    task_server, state = SdkTaskServer(), tmp_path / "agent.json"
    async with under_uvicorn(ModernOnly(task_server.app), complaint=".*") as port:
        url = f"http://127.0.0.1:{port}/mcp"
        async with client_process(url, state, "all", calls=[("work", {"gate": "g"}), ("safe", {"gate": "g"})]) as first:
            await until(lambda: sorted(task_server.runs) == ["safe", "work"])
            await first.kill()
        task_server.gates["g"].set()
        async with client_process(url, state) as second:
            await second.rest()
        assert second.told("unknown") == ["work"]
        assert second.told("result") == ["worked at g"]
    assert sorted(task_server.runs) == ["safe", "safe", "work"]


async def test_a_call_that_asks_by_rounds_is_found_by_its_key_and_asks_again(tmp_path: Path) -> None:
    """It was killed between two rounds, while no request was on its way."""
    task_server, state = SdkTaskServer(keys=True), tmp_path / "agent.json"
    async with under_uvicorn(ModernOnly(task_server.app), complaint=".*") as port:
        url = f"http://127.0.0.1:{port}/mcp"
        async with client_process(url, state, "ask", questions=["hang one", "hang two"]) as first:
            while len(first.told("asked")) < 2:
                await first.line()
            await first.kill()
        assert len(keys_of(task_server)) == 1
        async with client_process(url, state, "-", "answers") as second:
            await second.rest()
        assert second.told("result") == ["at last at last"]
    assert task_server.runs == ["ask"]
    assert set(keys_of(task_server)) == {keys_of(task_server)[0]}


async def test_an_answer_that_was_given_is_not_asked_for_again(tmp_path: Path) -> None:
    """The process ended between the person's answer and the server's word that it has it."""
    task_server, state, person = SdkTaskServer(tasks=True), tmp_path / "agent.json", Person(one="1")
    person.gate.set()
    async with under_uvicorn(ModernOnly(task_server.app), complaint=".*") as port:
        url = f"http://127.0.0.1:{port}/mcp"
        async with client_process(url, state, "ask", questions=["hang one"]) as first:
            await first.until(asked="hang one")
            await first.kill()
        kept = json.loads(state.read_bytes())
        [call] = kept["durable_calls"].values()
        call["answers"] = {"q0": {"action": "accept", "content": {"answer": "from then"}}}
        state.write_text(json.dumps(kept))
        async with perdure.connect(url, state=state, elicitation_callback=person, patience=EAGER) as client:
            [pending] = client.pending()
            assert text(await pending) == "from then"
    assert person.asked == []


async def test_a_server_that_is_away_when_the_program_starts_again_is_waited_for(tmp_path: Path) -> None:
    task_server, state = SdkTaskServer(tasks=True), tmp_path / "agent.json"
    async with under_uvicorn(task_server.app, complaint=".*") as port, AsyncExitStack() as gate:
        proxy = await gate.enter_async_context(cutting_proxy(port))
        async with perdure.connect(proxy.url, mode=MODERN, state=state) as client:
            call = asyncio.create_task(client.call_tool("work", {"gate": "g"}))
            await until(lambda: task_server.requests("tasks/get"))
        with pytest.raises(MCPError, match="Connection closed"):
            await call
        await gate.aclose()  # no socket listens at the address
        async with perdure.connect(proxy.url, state=state, patience=EAGER) as client:
            assert client.protocol_version == MODERN
            [left] = client.pending()
            task_server.gates["g"].set()
            proxy.accept()
            async with await asyncio.start_server(proxy.serve, "127.0.0.1", proxy.port):
                assert text(await left) == "worked at g"
        await proxy.aclose()
    assert task_server.runs == ["work"]


async def test_a_key_that_the_server_may_have_forgotten_is_not_sent_again(tmp_path: Path) -> None:
    """It would run a second time. The server says how long it keeps keys."""
    task_server, state = SdkTaskServer(keys=True), tmp_path / "agent.json"
    task_server.kept = {"keptMs": 60_000}
    async with under_uvicorn(task_server.app, complaint=".*") as port:
        url = f"http://127.0.0.1:{port}/mcp"
        async with perdure.connect(url, mode=MODERN, state=state) as client:
            await client.call_tool("quick")
        left_behind(state, task_server.requests("tools/call")[0], seconds=70)
        async with perdure.connect(url, state=state) as client:
            with pytest.raises(perdure.OutcomeUnknown, check=lambda error: "forgotten its key" in error.reason):
                await client.pending()[0]
        assert task_server.runs == ["quick"]
        left_behind(state, task_server.requests("tools/call")[0], seconds=50)
        async with perdure.connect(url, state=state) as client:
            assert text(await client.pending()[0]) == "done"
    assert task_server.runs == ["quick"] * 2


def left_behind(state: Path, params: dict[str, Any], *, seconds: float = 0, **more: Any) -> None:
    """Make the state of a process that sent a call so long ago, and was killed."""
    kept, key = json.loads(state.read_bytes()), f"{params} {seconds} s ago"
    headers = {"mcp-protocol-version": MODERN, "mcp-method": "tools/call", "mcp-name": params["name"]}
    params = {**params, "_meta": {**params["_meta"], KEY: key}}
    call = {"id": key, "key": key, "params": params, "headers": headers, "began": time.time() - seconds, **more}
    kept["durable_calls"] = {key: call}
    state.write_text(json.dumps(kept))
