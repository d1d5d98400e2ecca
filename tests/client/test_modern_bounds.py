"""What a server of 2026-07-28 can make the client keep and do, on both sides of each limit (promise 6)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import perdure
from perdure._core.pages import MAX_PAGES
from perdure._core.polling import MAX_ANSWERED, MAX_QUESTIONS
from perdure.client.memory import decode
from perdure.remote.durable_calls import MOST_ROUNDS
from tests.client.conftest import text
from tests.client.sdk_task_server import SdkTaskServer
from tests.client.test_killed_modern import left_behind
from tests.client.test_tasks import EAGER, Person, behind_proxy
from tests.support.clients.modern_requests import MODERN
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio


async def test_so_many_questions_of_a_task_are_put_at_once_and_the_rest_later() -> None:
    questions = [str(number) for number in range(MAX_QUESTIONS + 1)]
    task_server, person = SdkTaskServer(tasks=True), Person(**{question: question for question in questions})
    async with (
        behind_proxy(task_server) as proxy,
        perdure.connect(proxy.url, mode=MODERN, elicitation_callback=person) as client,
    ):
        call = asyncio.create_task(client.call_tool("ask", {"questions": questions}))
        await until(lambda: len(person.asked) == MAX_QUESTIONS)
        polls = len(task_server.requests("tasks/get"))
        await until(lambda: len(task_server.requests("tasks/get")) > polls + 1)
        assert len(person.asked) == MAX_QUESTIONS
        person.gate.set()
        assert text(await call) == " ".join(questions)
    assert sorted(person.asked) == sorted(questions)


async def test_so_many_keys_of_answered_questions_are_remembered(tmp_path: Path) -> None:
    task_server, state, person = SdkTaskServer(tasks=True), tmp_path / "s", Person(one="1", two="2")
    async with behind_proxy(task_server) as proxy:
        async with perdure.connect(proxy.url, mode=MODERN, state=state, elicitation_callback=person) as client:
            call = asyncio.create_task(client.call_tool("survey", {"questions": ["one", "two"]}))
            await until(lambda: task_server.requests("tasks/get"))
        await asyncio.gather(call, return_exceptions=True)
        earlier = [f"earlier {number}" for number in range(MAX_ANSWERED)]
        left_behind(state, task_server.requests("tools/call")[0], task="task-0", answered=earlier)
        person.gate.set()
        async with perdure.connect(proxy.url, state=state, elicitation_callback=person) as client:
            left = client.pending()[0]
            await until(lambda: left.is_answered)
            [kept] = decode(state.read_bytes()).durable_calls.values()
            assert kept.answered == [*earlier[2:], "q0", "q1"]
            assert text(await left) == "1 2"


@pytest.mark.parametrize("rounds", [MOST_ROUNDS, MOST_ROUNDS + 1])
async def test_a_call_of_an_earlier_process_may_ask_in_as_many_rounds_as_any_other(tmp_path: Path, rounds: int) -> None:
    questions = [str(number) for number in range(rounds)]
    task_server, state = SdkTaskServer(keys=True), tmp_path / "s"
    person = Person(**{question: question for question in questions})
    person.gate.set()
    async with behind_proxy(task_server) as proxy:
        async with perdure.connect(proxy.url, mode=MODERN, state=state, elicitation_callback=person) as client:
            await client.call_tool("quick")
        params = {**task_server.requests("tools/call")[0], "name": "survey", "arguments": {"questions": questions}}
        left_behind(state, params)
        async with perdure.connect(proxy.url, state=state, elicitation_callback=person) as client:
            if rounds > MOST_ROUNDS:
                with pytest.raises(perdure.OutcomeUnknown, check=lambda error: "more than 10 rounds" in error.reason):
                    await client.pending()[0]
                assert task_server.cancelled == ["survey"]
            else:
                assert text(await client.pending()[0]) == " ".join(questions)


@pytest.mark.parametrize("pages", [MAX_PAGES, MAX_PAGES + 1])
async def test_so_many_pages_are_read_to_find_out_whether_a_tool_may_run_again(pages: int) -> None:
    task_server = SdkTaskServer()
    task_server.empty_pages = pages - 1
    async with behind_proxy(task_server) as proxy, perdure.connect(proxy.url, mode=MODERN, patience=EAGER) as client:
        call = asyncio.create_task(client.call_tool("safe", {"gate": "g"}))
        await until(lambda: task_server.runs)
        proxy.cut()
        if pages > MAX_PAGES:
            with pytest.raises(perdure.OutcomeUnknown):
                await call
        else:
            await until(lambda: len(task_server.runs) == 2)
            task_server.gates["g"].set()
            assert text(await call) == "worked at g"
