"""What a tool asks its client, in the revision without sessions: seen and answered at any node, once.

Two real processes on one SQLite file. A client that takes tasks finds the questions with `tasks/get`; one that does not
gets them as a round.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients.modern_peer import ALL_ASKS, FORM, TAKES_TASKS, CallPeer, accept, message_of, result_of, said
from tests.support.processes.serving import Served, serving
from tests.support.servers.gate_file_tools import diary
from tests.support.stores.postgres import store_url

pytestmark = pytest.mark.anyio

ASKING_TOOLS = "tests.support.servers.asking_tools:server"
CALLS = 20
"""Calls at once, so that a question is often answered in the moment in which it is shown elsewhere."""


@dataclass(kw_only=True)
class Pair:
    """Two nodes, and a client at each."""

    a: Served
    b: Served
    log: Path

    def at_a(self, *, tasks: bool, asks: Mapping[str, Any] = ALL_ASKS) -> CallPeer:
        return CallPeer(port=self.a.port, capabilities={**asks, **(TAKES_TASKS if tasks else {})})

    def at_b(self, *, tasks: bool, asks: Mapping[str, Any] = ALL_ASKS) -> CallPeer:
        return self.at_a(tasks=tasks, asks=asks).through(self.b.port)

    @property
    def effects(self) -> list[str]:
        return [answer for answer, _ in diary(self.log)]


@asynccontextmanager
async def pair_on(store: str, folder: Path) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        a, b = [await stack.enter_async_context(serving(ASKING_TOOLS, "--store", store)) for _ in range(2)]
        yield Pair(a=a, b=b, log=folder / "log")


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    async with pair_on(f"sqlite:{tmp_path / 'log.db'}", tmp_path) as nodes:
        yield nodes


def messages(asked: Mapping[str, Any]) -> dict[str, str]:
    """The names of questions, by what they ask."""
    return {request["params"]["message"]: name for name, request in asked.items()}


# Tasks


async def test_the_questions_of_a_task_are_answered_at_another_node_in_any_order_and_count_once(pair: Pair) -> None:
    """Partly, then again with an answer that was given already, one to no question, and the rest."""
    a, b = pair.at_a(tasks=True), pair.at_b(tasks=True)
    arguments = {"questions": ["one?", "two?", "three?"], "log": str(pair.log)}
    task = result_of(await a.call("ask_all", arguments))["taskId"]
    asked = await b.until_asked(task, count=3)
    names = messages(asked)
    assert await a.until_asked(task, count=3) == asked
    await b.update(task, {names["two?"]: accept(answer="2")})
    left = await b.until_asked(task, count=2)
    assert messages(left) == {"one?": names["one?"], "three?": names["three?"]}
    again = {names["two?"]: accept(answer="no"), "ask-none-1": accept(answer="no"), "none": accept(answer="no")}
    await a.update(task, again)
    await b.update(task, {**again, names["one?"]: accept(answer="1"), names["three?"]: {"action": "decline"}})
    assert said((await b.until_over(task))["result"]) == "1 2 decline"
    assert sorted(pair.effects) == ["1", "2", "decline"]
    await b.update(task, {names["one?"]: accept(answer="late")})  # acknowledged, as the extension says
    assert said((await a.get(task))["result"]) == "1 2 decline"


async def test_a_task_never_asks_twice_under_one_key_also_when_its_node_dies(pair: Pair) -> None:
    """The node that asked takes its question with it; the run that follows asks under another key."""
    a, b = pair.at_a(tasks=True), pair.at_b(tasks=True)
    task = result_of(await a.call("ask_again", {"question": "Well?", "log": str(pair.log)}))["taskId"]
    before = await b.until_asked(task)
    await pair.a.kill()
    asked = await b.until_asked(task, other_than=before)
    await b.update(task, {name: accept(answer="too late") for name in before})
    assert await b.until_asked(task) == asked
    await b.update(task, {name: accept(answer="now") for name in asked})
    assert said((await b.until_over(task))["result"]) == "now"
    assert pair.effects == ["now"]


async def test_a_task_whose_asking_node_died_and_that_may_not_run_again_has_no_question_left(pair: Pair) -> None:
    a, b = pair.at_a(tasks=True), pair.at_b(tasks=True)
    task = result_of(await a.call("ask", {"question": "Well?", "log": str(pair.log)}))["taskId"]
    asked = await b.until_asked(task)
    await pair.a.kill()
    view = await b.until_over(task)
    assert (view["status"], view["error"]["code"]) == ("failed", -31001)
    assert "inputRequests" not in view
    await b.update(task, {name: accept(answer="late") for name in asked})
    assert await b.get(task) == view
    assert pair.effects == []


async def test_questions_that_follow_each_other_have_keys_of_their_own(pair: Pair) -> None:
    a, b = pair.at_a(tasks=True), pair.at_b(tasks=True)
    task = result_of(await a.call("ask_each", {"questions": ["Well?"] * 3, "log": str(pair.log)}))["taskId"]
    seen: dict[str, Any] = {}
    for number, peer in enumerate((b, a, b)):
        asked = await peer.until_asked(task, other_than=seen)
        seen |= asked
        await peer.update(task, {name: accept(answer=str(number)) for name in asked})
    assert said((await a.until_over(task))["result"]) == "0 1 2"
    assert (len(seen), pair.effects) == (3, ["0", "1", "2"])


# Rounds, and what every client may be asked


@pytest.mark.parametrize("tasks", [True, False])
async def test_models_and_roots_are_asked_for_in_the_same_way(pair: Pair, tasks: bool) -> None:
    a, b = pair.at_a(tasks=tasks), pair.at_b(tasks=tasks)
    model = {"role": "assistant", "model": "none", "content": {"type": "text", "text": "a poem"}}
    folders = {"roots": [{"uri": "file:///home"}]}
    stories = [("sample", {"prompt": "Write!"}, model, "a poem"), ("roots", {}, folders, "file:///home")]
    for tool, arguments, answer, outcome in stories:
        begun = result_of(await a.call(tool, arguments))
        asked = await b.until_asked(begun["taskId"]) if tasks else begun["inputRequests"]
        [(name, request)] = asked.items()
        assert request["method"] == {"sample": "sampling/createMessage", "roots": "roots/list"}[tool]
        if tasks:
            await b.update(begun["taskId"], {name: answer})
            result = (await b.until_over(begun["taskId"]))["result"]
        else:
            result = result_of(await b.round(tool, begun, {name: answer}, arguments=arguments))
        assert said(result) == outcome


async def test_the_rounds_of_a_call_alternate_between_nodes_and_each_counts_once(pair: Pair) -> None:
    """The reply to a round may be lost: the round that is repeated has the same reply, and no second effect."""
    arguments = {"questions": ["one?", "two?"], "log": str(pair.log)}
    a, b = pair.at_a(tasks=False), pair.at_b(tasks=False)
    first = result_of(await a.call("ask_each", arguments))
    assert first["resultType"] == "input_required"
    [name] = first["inputRequests"]
    second = result_of(await b.round("ask_each", first, {name: accept(answer="1")}, arguments=arguments))
    repeated = result_of(await a.round("ask_each", first, {name: accept(answer="1")}, arguments=arguments))
    assert second == repeated
    assert second["requestState"] == first["requestState"]
    [other] = second["inputRequests"]
    assert other != name
    for peer in (a, b):
        done = result_of(await peer.round("ask_each", second, {other: accept(answer="2")}, arguments=arguments))
        assert said(done) == "1 2"
    assert pair.effects == ["1", "2"]


async def test_questions_in_parallel_are_one_round_and_may_be_answered_in_several(pair: Pair) -> None:
    """What was answered at one node is not asked again at the other, however soon the next round comes there."""
    arguments = {"questions": ["one?", "two?"], "log": str(pair.log)}
    a, b = pair.at_a(tasks=False), pair.at_b(tasks=False)

    async def answer_in_rounds() -> None:
        asked = result_of(await a.call("ask_all", arguments))
        while len(asked["inputRequests"]) < 2:  # a round begins with the first question
            asked = result_of(await b.round("ask_all", asked, {}, arguments=arguments))
        names = messages(asked["inputRequests"])
        left = result_of(await b.round("ask_all", asked, {names["one?"]: accept(answer="1")}, arguments=arguments))
        assert messages(left["inputRequests"]) == {"two?": names["two?"]}
        done = result_of(await a.round("ask_all", left, {names["two?"]: accept(answer="2")}, arguments=arguments))
        assert said(done) == "1 2"

    await asyncio.gather(*(answer_in_rounds() for _ in range(CALLS)))
    assert sorted(pair.effects) == ["1"] * CALLS + ["2"] * CALLS


async def test_a_round_whose_reply_was_lost_is_found_again_by_its_key(pair: Pair) -> None:
    """The client repeats what it sent first, at another node, and is asked the same under the same names."""
    arguments = {"question": "Well?", "log": str(pair.log)}
    a, b = pair.at_a(tasks=False), pair.at_b(tasks=False)
    first = result_of(await a.call("ask", arguments, key="order-7"))
    assert result_of(await b.call("ask", arguments, key="order-7")) == first
    params = {"requestState": first["requestState"]}
    params["inputResponses"] = {name: accept(answer="yes") for name in first["inputRequests"]}
    for peer in (b, a):
        assert said(result_of(await peer.call("ask", arguments, key="order-7", params=params))) == "yes"
        assert said(result_of(await peer.call("ask", arguments, key="order-7"))) == "yes"
    assert pair.effects == ["yes"]


async def test_tasks_and_rounds_go_over_two_nodes_on_postgresql_too(tmp_path: Path) -> None:
    async with pair_on(store_url(), tmp_path) as nodes:
        await test_the_questions_of_a_task_are_answered_at_another_node_in_any_order_and_count_once(nodes)
        nodes.log.unlink()
        await test_the_rounds_of_a_call_alternate_between_nodes_and_each_counts_once(nodes)


@pytest.mark.parametrize("tasks", [True, False])
async def test_nothing_is_asked_that_the_client_did_not_declare(pair: Pair, tasks: bool) -> None:
    """The tool hears -32021 with the capability, and the client not a word."""
    others: dict[str, Any] = {"sampling": {}, "roots": {}}
    peer = pair.at_a(tasks=tasks, asks=others)
    answer = result_of(await peer.call("try_to_ask"))
    assert said(answer) == "-32021 {'requiredCapabilities': {'elicitation': {}}}"
    for tool, asks in (("sample", FORM), ("roots", FORM), ("ask", others)):
        arguments = {"sample": {"prompt": "Write!"}, "roots": {}, "ask": {"question": "Well?"}}[tool]
        answer = message_of(await pair.at_a(tasks=tasks, asks=asks).call(tool, arguments))
        assert "inputRequests" not in str(answer), answer
        assert answer["error"]["code"] == -32021 or answer["result"]["isError"], answer
