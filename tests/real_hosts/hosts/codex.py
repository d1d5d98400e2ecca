"""Codex CLI, which asks its model by OpenAI's Responses."""

from __future__ import annotations

import json

from tests.real_hosts.host import NAME, PROMPT, Host, Place, Start

FREE = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")


def configure(place: Place) -> None:
    if place.is_stdio:
        server = f"command = {json.dumps(place.stdio[0])}\nargs = {json.dumps(place.stdio[1:])}"
    else:
        server = f"url = {json.dumps(place.url)}"
    place.write(
        ".codex/config.toml",
        f"""\
model = "gpt-5"
model_provider = "here"
[model_providers.here]
name = "here"
base_url = "{place.model}/v1"
wire_api = "responses"
[mcp_servers.{NAME}]
{server}
required = true
startup_timeout_sec = 60
""",
    )


def start(place: Place) -> Start:
    configure(place)
    return Start([str(place.installed / "codex"), "exec", *FREE, PROMPT])


def again(place: Place) -> Start:
    return Start([str(place.installed / "codex"), "exec", "resume", "--last", *FREE, PROMPT])


HOST = Host(
    name="Codex CLI",
    registry="npm",
    packages={"@openai/codex": "0.169.0"},
    client="codex-mcp-client",
    start=start,
    again=again,
    own_limits={
        "question": "declares elicitation, and declines by itself; in a terminal it cancels a question for a text"
    },
)
