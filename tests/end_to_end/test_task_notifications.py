"""Clients that listen to tasks: each notification is what `tasks/get` says, wherever the task runs."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp.shared.inbound import encode_header_value

from tests.support.clients.modern_requests import TASKS, modern
from tests.support.clients.raw_http import Answer, Exchange, Peer
from tests.support.processes.serving import Served, serving
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio

SERVER = "tests.support.servers.waiting_tasks:server"
ABLE: dict[str, Any] = {"extensions": {TASKS: {}}, "elicitation": {}}
UNKNOWN = "A" * 43


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TASK_FOLDER", str(tmp_path))
    return tmp_path


@asynccontextmanager
async def two(folder: Path) -> AsyncIterator[tuple[Served, Served]]:
    options = ("--store", f"sqlite:{folder / 'store.db'}", "--task-after", "0s")
    async with serving(SERVER, *options) as one, serving(SERVER, *options) as other:
        yield one, other


async def ask(served: Served, method: str, params: dict[str, Any], able: dict[str, Any] = ABLE) -> Answer:
    body, headers = modern(method, params, capabilities=able)
    if "taskId" in params:
        headers["mcp-name"] = encode_header_value(params["taskId"])
    return await Peer(port=served.port).ask("POST", body, headers=headers)


async def begun(served: Served, tool: str, **arguments: str) -> str:
    answer = await ask(served, "tools/call", {"name": tool, "arguments": arguments})
    return str(answer.json["result"]["taskId"])


async def listening(served: Served, *tasks: str, **filters: object) -> Exchange:
    wanted = {"notifications": {"taskIds": list(tasks), **filters}}
    body, headers = modern("subscriptions/listen", wanted, id="mine", capabilities=ABLE)
    return await Peer(port=served.port).begin("POST", body, headers=headers)


def plain(task: dict[str, Any]) -> dict[str, Any]:
    """A task without what differs from moment to moment."""
    return {name: value for name, value in task.items() if name not in ("_meta", "resultType", "pollIntervalMs")}


async def test_a_listener_elsewhere_hears_each_state_and_the_end(folder: Path) -> None:
    async with two(folder) as (one, other):
        task = await begun(one, "greet")
        async with await listening(other, task, UNKNOWN) as heard:
            await heard.until_messages(2)
            acknowledged, first = heard.messages
            assert acknowledged["params"]["notifications"] == {"taskIds": [task]}
            assert first["params"]["_meta"]["io.modelcontextprotocol/subscriptionId"] == "mine"
            assert (first["method"], first["params"]["status"]) == ("notifications/tasks", "input_required")
            [question] = first["params"]["inputRequests"]
            told = {"action": "accept", "content": {"name": "Ann"}}
            await ask(one, "tasks/update", {"taskId": task, "inputResponses": {question: told}})
            answer = await heard.answer()
        *_, last, result = answer.messages
        assert last["params"]["status"] == "completed"
        assert result == {
            "jsonrpc": "2.0",
            "id": "mine",
            "result": {
                "resultType": "complete",
                "_meta": {"io.modelcontextprotocol/subscriptionId": "mine"},
            },
        }
        asked = await ask(other, "tasks/get", {"taskId": task})
        assert plain(last["params"]) == plain(asked.json["result"])


async def test_a_listener_hears_how_a_task_ends_whose_process_was_killed(folder: Path) -> None:
    async with two(folder) as (one, other):
        task = await begun(one, "bake", loaf="rye")
        async with await listening(other, task) as heard:
            await heard.until_messages(2)
            await until(lambda: (folder / "begun").read_text() == "rye\n")
            one.send(signal.SIGKILL)
            await until(lambda: (folder / "begun").read_text() == "rye\nrye\n")
            (folder / "rye").touch()
            answer = await heard.answer()
        states = [message["params"]["status"] for message in answer.messages[1:-1]]
        assert states[0] == "working"
        assert states[-1] == "completed"


async def test_a_listener_that_is_cut_at_any_notification_hears_the_rest_when_it_listens_again(folder: Path) -> None:
    """The last that it hears is what `tasks/get` says."""
    async with two(folder) as (one, other):
        for cut in range(1, 4):
            task = await begun(one, "greet")
            async with await listening(other, task) as heard:
                await heard.until_messages(min(cut, 2))
                if cut == 3:
                    await answered(one, task)
                    await heard.until_messages(3)
            if cut < 3:
                await answered(one, task)
            async with await listening(one, task) as again:
                answer = await again.answer()
            *_, last, _ = answer.messages
            asked = await ask(other, "tasks/get", {"taskId": task})
            assert plain(last["params"]) == plain(asked.json["result"])
            assert last["params"]["status"] == "completed"


async def answered(served: Served, task: str) -> None:
    [question] = (await ask(served, "tasks/get", {"taskId": task})).json["result"]["inputRequests"]
    told = {"action": "accept", "content": {"name": "Ann"}}
    await ask(served, "tasks/update", {"taskId": task, "inputResponses": {question: told}})


async def test_a_listener_has_its_end_when_the_server_stops(folder: Path) -> None:
    async with two(folder) as (one, other):
        task = await begun(one, "bake", loaf="rye")
        async with await listening(other, task) as heard:
            await heard.until_messages(2)
            other.send(signal.SIGTERM)
            answer = await heard.answer()
        assert answer.messages[-1]["result"]["resultType"] == "complete"
        assert [message["params"]["status"] for message in answer.messages[1:-1]] == ["working"]


async def test_what_cannot_be_listened_to_is_refused_by_name(folder: Path) -> None:
    options = ("--store", f"sqlite:{folder / 'store.db'}")
    async with serving(SERVER, *options) as served:

        async def refused(tasks: object, able: dict[str, Any] = ABLE) -> tuple[int, int]:
            answer = await ask(served, "subscriptions/listen", {"notifications": {"taskIds": tasks}}, able)
            return answer.status, answer.error["code"]

        assert await refused([UNKNOWN], {}) == (400, -32021)
        assert await refused("all") == (400, -32602)
        assert await refused([1]) == (400, -32602)
        assert await refused([f"task-{number}" for number in range(101)]) == (400, -32602)
        async with await listening(served, *(f"task-{number}" for number in range(100))) as heard:
            answer = await heard.answer()
        assert [message.get("method") for message in answer.messages] == [
            "notifications/subscriptions/acknowledged",
            None,
        ]
        assert answer.messages[0]["params"]["notifications"] == {"taskIds": []}
