"""opencode, which asks its model by OpenAI's Chat Completions."""

from __future__ import annotations

import json

from tests.real_hosts.host import NAME, PROMPT, Host, Place, Start

#: It looks for its newest version and its list of models on the internet otherwise.
ALONE = {
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
}


def configure(place: Place) -> None:
    bridge = {"type": "local", "command": place.stdio}
    server = bridge if place.is_stdio else {"type": "remote", "url": place.url, "oauth": False}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "here",
        "options": {"baseURL": f"{place.model}/v1", "apiKey": "none"},
        "models": {"gpt-5": {"name": "gpt-5", "tool_call": True}},
    }
    config = {
        "model": "here/gpt-5",
        "small_model": "here/gpt-5",
        "provider": {"here": provider},
        "mcp": {NAME: {**server, "enabled": True}},
        "permission": "allow",
        "share": "disabled",
    }
    place.write(".config/opencode/opencode.json", json.dumps(config))


def start(place: Place) -> Start:
    configure(place)
    return Start([str(place.installed / "opencode"), "run", PROMPT], ALONE)


def again(place: Place) -> Start:
    return Start([str(place.installed / "opencode"), "run", "--continue", PROMPT], ALONE)


HOST = Host(
    name="opencode",
    registry="npm",
    packages={"opencode-ai": "1.18.33"},
    client="opencode",
    start=start,
    again=again,
    own_limits={"away": "has given its stream up by then, and its limit of 60 s ends the call"},
)
