"""The host suite's own parts, without a host: the model, the names of outcomes, the results."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from tests.real_hosts.model import WAIT, model
from tests.real_hosts.run import RESULTS, known_hosts, merged
from tests.real_hosts.scenarios import PLAIN, SCENARIOS, outcome

FUNCTION = {"type": "function", "name": "bakery_bake"}
CONVERSATIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Messages": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "Hello"}], "tools": [{"name": "mcp__bakery__bake"}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "hot"}]}
            ]
        },
    ),
    "Responses": (
        "/v1/responses",
        {"input": "Hello", "tools": [{"type": "namespace", "name": "mcp__bakery__", "tools": [FUNCTION]}]},
        {"input": [{"type": "function_call_output", "call_id": "call_1", "output": "hot"}], "tools": [FUNCTION]},
    ),
    "Chat Completions": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hello"}], "tools": [{"function": FUNCTION}]},
        {"messages": [{"role": "tool", "tool_call_id": "call_1", "content": [{"text": "hot"}]}]},
    ),
    "generateContent": (
        "/v1beta/models/gemini-2.5-pro:streamGenerateContent",
        {"contents": [{"parts": [{"text": "Hello"}]}], "tools": [{"functionDeclarations": [FUNCTION]}]},
        {"contents": [{"parts": [{"functionResponse": {"name": "bakery_bake", "response": {"output": "hot"}}}]}]},
    ),
}


@pytest.mark.parametrize("api", CONVERSATIONS)
async def test_the_model_asks_for_its_tool_and_sees_the_result_in_each_api(api: str) -> None:
    path, first, second = CONVERSATIONS[api]
    async with model(["bake"], {"folder": "here"}) as scripted, httpx2.AsyncClient(base_url=scripted.url) as http:
        asked = await http.post(path, json={**first, "stream": True})
        events = [json.loads(line[6:]) for line in asked.text.splitlines() if line.startswith("data: ")]
        ended = await http.post(path, json=second)
    assert first["tools"][0].get("name", "bakery_bake") in json.dumps(events)
    assert "call_1" in json.dumps(events)
    assert "That is all." in ended.text
    assert scripted.shown == {"call_1": "hot"}


async def test_the_model_asks_for_an_early_answer_with_the_id_that_it_was_shown() -> None:
    early = 'call the tool perdure_wait_for_result with {"call": "ZMh5"}'
    tools = [{"function": {"name": name}} for name in ("rest", WAIT)]
    asked = [{"role": "user", "content": "Hello"}]
    answered = [*asked, {"role": "tool", "tool_call_id": "call_1", "content": json.dumps({"text": early})}]
    async with model(["rest", WAIT], {"folder": "here"}) as scripted, httpx2.AsyncClient(base_url=scripted.url) as http:
        answers = [
            await http.post("/v1/chat/completions", json={"messages": messages, "tools": tools})
            for messages in (asked, answered)
        ]
    calls = [answer.json()["choices"][0]["message"]["tool_calls"][0]["function"] for answer in answers]
    assert [call["name"] for call in calls] == ["rest", WAIT]
    assert [json.loads(call["arguments"]) for call in calls] == [{"folder": "here"}, {"call": "ZMh5"}]


async def test_a_call_that_goes_on_in_the_background_has_its_result_once_its_host_tells_of_it() -> None:
    background = {
        "type": "tool_result",
        "tool_use_id": "call_1",
        "content": "It was moved to the background as task k.",
    }
    told = {"type": "text", "text": "<task-notification><result>bake is done</result></task-notification>"}
    messages = [{"role": "user", "content": [background]}]
    async with model([], {}) as scripted, httpx2.AsyncClient(base_url=scripted.url) as http:
        await http.post("/v1/messages", json={"messages": messages})
        assert (scripted.held, scripted.shown) == ({"call_1"}, {})
        await http.post("/v1/messages", json={"messages": [*messages, {"role": "user", "content": [told]}]})
    assert "bake is done" in scripted.shown["call_1"]


ASKS, ASKS_NOBODY = {"elicitation": True}, {"elicitation": False}


@pytest.mark.parametrize(
    ("scenario", "shown", "caller", "name"),
    [
        ("plain", "bake is done", ASKS, "result"),
        ("early", "rest is done", ASKS, "result"),
        ("kill_no_hint", "Interrupted, outcome unknown: the server …", ASKS, "-31001"),
        ("plain", "Transport closed", ASKS, "“…Transport closed”"),
        ("plain", None, ASKS, "the host hangs"),
        ("host_again", "bake is done", ASKS, "result"),
        ("host_again", "aborted", ASKS, "not kept"),
        ("question", "mix is done with rye", ASKS, "result"),
        ("question", "mix was told decline", ASKS, "declined"),
        ("question", "Method not found", ASKS_NOBODY, "declares no elicitation"),
    ],
)
def test_what_was_seen_has_a_name(scenario: str, shown: str | None, caller: dict[str, bool], name: str) -> None:
    assert outcome(SCENARIOS[scenario], shown, caller, has_ended=False) == name


def test_what_another_version_of_a_host_did_is_forgotten() -> None:
    host = known_hosts()["codex"]
    caller = {"name": "codex-mcp-client"}
    cell = {"version": host.version, "date": "2026-11-18", "outcome": "result", "began": 1, "caller": caller}
    earlier = merged(host, {}, {"plain": cell})
    later = merged(host, earlier, {"cut": {**cell, "date": "2026-11-19"}})
    assert {name: seen["date"] for name, seen in later["seen"].items()} == {"plain": "2026-11-18", "cut": "2026-11-19"}
    assert set(merged(host, {**later, "version": "0"}, {"kill": cell})["seen"]) == {"kill"}


@pytest.mark.parametrize("key", known_hosts())
def test_each_host_has_a_result_of_its_pinned_version_or_a_reason_for_every_scenario(key: str) -> None:
    host, result = known_hosts()[key], _result(key)
    assert {seen["version"] for seen in result["seen"].values()} == {result["version"]} == {host.version}
    assert {*result["seen"], *host.left_out} == set(SCENARIOS), f"run `make hosts` again for {key}"
    assert result["left_out"] == dict(host.left_out)


@pytest.mark.parametrize("key", known_hosts())
def test_what_a_model_cannot_go_on_from_is_a_limit_of_its_host(key: str) -> None:
    for name, seen in _result(key)["seen"].items():
        if seen["outcome"] not in PLAIN:
            assert seen["limit"], f"{key}, {name}: {seen['outcome']}"
            assert seen["limit"] == known_hosts()[key].own_limits[name]


@pytest.mark.parametrize("key", known_hosts())
def test_early_answers_are_for_the_name_that_the_host_gives_itself(key: str) -> None:
    assert _result(key)["caller"]["name"] == known_hosts()[key].client


def test_results_are_those_of_hosts_that_exist() -> None:
    assert {file.stem for file in RESULTS.glob("*.json")} == set(known_hosts())


def _result(key: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{key}.json").read_text())
    return result
