"""`perdure.connect` over the tasks of a server of 2026-07-28: the user's code is `await client.call_tool(…)`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import mcp_types as types
import pytest
from mcp.client import advertise
from mcp.client.session import ClientRequestContext
from mcp.shared.exceptions import MCPError
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

import perdure
from perdure._core.envelope import TASKS
from perdure.client.memory import decode
from tests.client.conftest import text
from tests.client.sdk_task_server import SdkTaskServer
from tests.support.clients.modern_requests import MODERN
from tests.support.proxies.cutting_proxy import CuttingProxy, cutting_proxy
from tests.support.servers.in_process import under_uvicorn, until

pytestmark = pytest.mark.anyio

BRIEF = perdure.Patience(max_time=1.0, max_tries=5, first_delay=0.02, max_delay=0.05)
EAGER = perdure.Patience(max_time=60.0, max_tries=1000, first_delay=0.02, max_delay=0.05)


@asynccontextmanager
async def behind_proxy(task_server: SdkTaskServer) -> AsyncIterator[CuttingProxy]:
    async with under_uvicorn(task_server.app, complaint=".*") as port, cutting_proxy(port) as proxy:
        yield proxy


class Person:
    """Answers questions with `answers`, waits at `gate` before, and remembers what it was asked."""

    def __init__(self, **answers: str) -> None:
        self.asked: list[str] = []
        self.gate = asyncio.Event()
        self._answers = answers

    async def __call__(self, context: ClientRequestContext, params: types.ElicitRequestParams) -> types.ElicitResult:
        self.asked.append(params.message)
        await self.gate.wait()
        return types.ElicitResult(action="accept", content={"answer": self._answers[params.message]})


async def test_a_task_is_followed_over_cuts_and_an_outage_to_its_result(tmp_path: Path) -> None:
    """Its handle is on disk before it is waited for, and gone with its result."""
    task_server = SdkTaskServer(tasks=True)
    async with (
        behind_proxy(task_server) as proxy,
        perdure.connect(proxy.url, mode=MODERN, state=tmp_path / "s", patience=EAGER) as client,
    ):
        call = asyncio.create_task(client.call_tool("work", {"gate": "g"}))
        await until(lambda: len(task_server.requests("tasks/get")) > 2)
        [kept] = decode((tmp_path / "s").read_bytes()).durable_calls.values()
        assert (kept.tool, kept.arguments, kept.task) == ("work", {"gate": "g"}, "task-0")
        proxy.refuse()
        proxy.cut()
        seen = proxy.accepted
        await until(lambda: proxy.accepted > seen + 3)
        task_server.gates["g"].set()
        proxy.accept()
        assert text(await call) == "worked at g"
        await until(lambda: decode((tmp_path / "s").read_bytes()).durable_calls == {})
        assert text(await client.call_tool("quick")) == "done"
    assert task_server.runs == ["work", "quick"]
    polls = task_server.ids("tasks/get")
    assert len(set(polls)) == len(polls)


async def test_a_failed_task_is_an_error_and_a_cancelled_one_too() -> None:
    task_server = SdkTaskServer(tasks=True)
    async with behind_proxy(task_server) as proxy, perdure.connect(proxy.url, mode=MODERN) as client:
        with pytest.raises(MCPError, match="it broke") as failed:
            await client.call_tool("fail")
        assert failed.value.code == -32050
        call = asyncio.create_task(client.call_tool("work", {"gate": "g"}))
        await until(lambda: task_server.runs == ["fail", "work"])
        task_server.cancel("task-1")
        with pytest.raises(MCPError, match="The task was cancelled"):
            await call


async def test_a_task_that_the_server_has_forgotten_has_an_unknown_outcome() -> None:
    task_server = SdkTaskServer(tasks=True)
    async with behind_proxy(task_server) as proxy, perdure.connect(proxy.url, mode=MODERN) as client:
        call = asyncio.create_task(client.call_tool("work", {"gate": "g"}))
        await until(lambda: task_server.requests("tasks/get"))
        task_server.cancel("task-0")
        del task_server.jobs["task-0"]
        with pytest.raises(perdure.OutcomeUnknown, check=lambda error: "no such task" in error.reason):
            await call


async def test_questions_of_a_task_reach_the_callback_once_each_and_together() -> None:
    """The second answer does not wait for the first, and no poll asks again."""
    task_server, person = SdkTaskServer(tasks=True), Person(one="1", two="2")
    async with (
        behind_proxy(task_server) as proxy,
        perdure.connect(proxy.url, mode=MODERN, elicitation_callback=person) as client,
    ):
        call = asyncio.create_task(client.call_tool("ask", {"questions": ["one", "two"]}))
        await until(lambda: len(person.asked) == 2)
        seen = len(task_server.requests("tasks/get"))
        await until(lambda: len(task_server.requests("tasks/get")) > seen + 2)
        person.gate.set()
        assert text(await call) == "1 2"
    assert sorted(person.asked) == ["one", "two"]
    assert len(task_server.requests("tasks/update")) == 2


async def test_a_question_that_the_program_cannot_answer_ends_the_call_and_the_task() -> None:
    task_server = SdkTaskServer(tasks=True)

    async def broken(context: ClientRequestContext, params: types.ElicitRequestParams) -> types.ElicitResult:
        raise LookupError("no person here")

    async with (
        behind_proxy(task_server) as proxy,
        perdure.connect(proxy.url, mode=MODERN, elicitation_callback=broken) as client,
    ):
        with pytest.raises(MCPError, match="no person here"):
            await client.call_tool("ask", {"questions": ["one"]})
        await until(lambda: task_server.cancelled == ["ask"])


class Guarded:
    """Refuses polls with 401 while it is `closed`, and counts them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.closed = False
        self.refused = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_poll = (b"mcp-method", b"tasks/get") in scope.get("headers", ())
        if self.closed and is_poll:
            self.refused += 1
            await Response("no", status_code=401)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


async def test_polls_that_are_refused_for_a_while_do_not_end_the_call() -> None:
    """Credentials ran out, say: the task runs on, and is found again within the limits; beyond them it is unknown."""
    task_server = SdkTaskServer(tasks=True)
    guarded = Guarded(task_server.app)
    async with (
        under_uvicorn(guarded, complaint=".*") as port,
        perdure.connect(f"http://127.0.0.1:{port}/mcp", mode=MODERN, patience=BRIEF) as client,
    ):
        call = asyncio.create_task(client.call_tool("work", {"gate": "g"}))
        await until(lambda: task_server.requests("tasks/get"))
        guarded.closed = True
        await until(lambda: guarded.refused == 2)
        guarded.closed = False
        task_server.gates["g"].set()
        assert text(await call) == "worked at g"
        guarded.closed = True
        with pytest.raises(perdure.OutcomeUnknown, check=lambda error: "401" in error.reason):
            await client.call_tool("work", {"gate": "g"})


async def test_an_extension_of_the_users_own_for_tasks_is_left_alone() -> None:
    task_server = SdkTaskServer(tasks=True)
    async with behind_proxy(task_server) as proxy:
        own = advertise(TASKS, {"mine": True})
        async with perdure.connect(proxy.url, mode=MODERN, extensions=[own]) as client:
            await client.list_tools()
    [listed] = task_server.requests("tools/list")
    assert listed["_meta"]["io.modelcontextprotocol/clientCapabilities"]["extensions"][TASKS] == {"mine": True}
