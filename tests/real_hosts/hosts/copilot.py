"""GitHub Copilot CLI, which asks its model by OpenAI's Chat Completions."""

from __future__ import annotations

import json

from tests.real_hosts.host import NAME, PROMPT, Host, Place, Start

FREE = ("--allow-all-tools", "--allow-all-paths", "--no-auto-update", "--disable-builtin-mcps")


def configure(place: Place) -> None:
    bridge = {"type": "local", "command": place.stdio[0], "args": place.stdio[1:]}
    server = bridge if place.is_stdio else {"type": "http", "url": place.url}
    place.write(".copilot/mcp-config.json", json.dumps({"mcpServers": {NAME: {**server, "tools": ["*"]}}}))


def _env(place: Place) -> dict[str, str]:
    return {
        "COPILOT_OFFLINE": "true",
        "COPILOT_PROVIDER_TYPE": "openai",
        "COPILOT_PROVIDER_BASE_URL": f"{place.model}/v1",
        "COPILOT_PROVIDER_API_KEY": "none",
        "COPILOT_MODEL": "gpt-5",
    }


def start(place: Place) -> Start:
    configure(place)
    return Start([str(place.installed / "copilot"), *FREE, "-p", PROMPT], _env(place))


def in_a_terminal(place: Place) -> Start:
    configure(place)
    keys = {"Doyoutrustthefiles": "\r", "Whichflour?": "rye\r"}
    argv = [str(place.installed / "copilot"), *FREE, "-i", PROMPT]
    return Start(argv, _env(place), terminal=True, keys=keys, idle="Thatisall.")


def again(place: Place) -> Start:
    return Start([str(place.installed / "copilot"), *FREE, "--continue", "-p", PROMPT], _env(place))


HOST = Host(
    name="Copilot CLI",
    registry="npm",
    packages={"@github/copilot": "1.0.102"},
    client="copilot-cli",
    start=start,
    again=again,
    asks=in_a_terminal,
    own_limits={"away": "gives a call up when it has not reached the server for some seconds"},
)
