"""The host suite's own parts, without a host: the model, the names of outcomes, the results."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from tests.real_hosts.model import model
from tests.real_hosts.run import RESULTS, known_hosts
from tests.real_hosts.scenarios import SCENARIOS, outcome

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


@pytest.mark.parametrize(
    ("shown", "name"),
    [
        ("bake is done", "result"),
        ("Interrupted, outcome unknown: the server …", "-31001"),
        ("Transport closed", "“…Transport closed”"),
        (None, "the host hangs"),
    ],
)
def test_what_a_host_shows_has_a_name(shown: str | None, name: str) -> None:
    assert outcome("bake", shown, has_ended=False) == name


def test_results_are_those_of_the_pinned_versions_and_of_scenarios_that_exist() -> None:
    hosts = known_hosts()
    for file in RESULTS.glob("*.json"):
        result = json.loads(file.read_text())
        assert result["version"] == hosts[file.stem].version, f"run `make hosts` again for {file.stem}"
        assert set(result["seen"]) <= set(SCENARIOS)
