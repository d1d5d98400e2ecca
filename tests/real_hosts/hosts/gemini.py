"""Gemini CLI, which asks its model by Gemini's `generateContent`."""

from __future__ import annotations

import json

from tests.real_hosts.host import NAME, PROMPT, Host, Place, Start

ARGUMENTS = ("--skip-trust", "--model", "gemini-2.5-pro", "--prompt", PROMPT)


def configure(place: Place) -> None:
    bridge = {"command": place.stdio[0], "args": place.stdio[1:]}
    server = bridge if place.is_stdio else {"httpUrl": place.url}
    settings = {
        "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
        "privacy": {"usageStatisticsEnabled": False},
        "security": {"auth": {"selectedType": "gemini-api-key"}},
        "mcpServers": {NAME: {**server, "trust": True}},
    }
    place.write(".gemini/settings.json", json.dumps(settings))


def start(place: Place) -> Start:
    configure(place)
    return _gemini(place)


def again(place: Place) -> Start:
    return _gemini(place, "--resume", "latest")


def _gemini(place: Place, *more: str) -> Start:
    env = {"GOOGLE_GEMINI_BASE_URL": place.model, "GEMINI_API_KEY": "none"}
    return Start([str(place.installed / "gemini"), *more, *ARGUMENTS], env)


_TWICE = "tries twice to resume a call, 5 s (`retry`) apart, and then waits for its own limit of 10 minutes"

HOST = Host(
    name="Gemini CLI",
    registry="npm",
    packages={"@google/gemini-cli": "0.61.0"},
    client="gemini-cli-mcp-client",
    start=start,
    again=again,
    own_limits={"away": _TWICE},
)
