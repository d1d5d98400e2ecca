"""Qwen Code, which asks its model by OpenAI's Chat Completions."""

from __future__ import annotations

import json

from tests.real_hosts.host import NAME, PROMPT, Host, Place, Start


def configure(place: Place) -> None:
    bridge = {"command": place.stdio[0], "args": place.stdio[1:]}
    server = bridge if place.is_stdio else {"httpUrl": place.url}
    settings = {
        "general": {"enableAutoUpdate": False, "disableAutoUpdate": True},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "security": {"auth": {"selectedType": "openai"}},
        # Otherwise the model has to search for the tools first.
        "tools": {"toolSearch": {"enabled": False}},
        "memory": {"enableManagedAutoMemory": False},
        "mcpServers": {NAME: {**server, "trust": True}},
    }
    place.write(".qwen/settings.json", json.dumps(settings))


def start(place: Place) -> Start:
    configure(place)
    return _qwen(place)


def again(place: Place) -> Start:
    return _qwen(place, "--continue")


def _qwen(place: Place, *more: str) -> Start:
    env = {"OPENAI_BASE_URL": f"{place.model}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "gpt-5"}
    return Start([str(place.installed / "qwen"), *more, "--yolo", "--prompt", PROMPT], env)


_OWN_WORDS = "says in words of its own that the call may have run, and must not be repeated unchecked"

HOST = Host(
    name="Qwen Code",
    registry="npm",
    packages={"@qwen-code/qwen-code": "0.24.4"},
    client="qwen-cli-mcp-client-bakery",
    start=start,
    again=again,
    own_limits={"kill_no_hint": _OWN_WORDS, "kill_late_no_hint": _OWN_WORDS},
)
