"""Claude Code without a terminal (`claude -p`), which asks its model by Anthropic's Messages."""

from __future__ import annotations

import json
import shlex

from tests.real_hosts.host import NAME, PROMPT, Host, Place, Start

#: What answers in the user's place where there is no terminal.
ANSWER = {"hookEventName": "Elicitation", "action": "accept", "content": {"flour": "rye"}}


def configure(place: Place) -> None:
    hook = {"type": "command", "command": f"echo {shlex.quote(json.dumps({'hookSpecificOutput': ANSWER}))}"}
    place.write(".claude/settings.json", json.dumps({"hooks": {"Elicitation": [{"hooks": [hook]}]}}))


def options(place: Place) -> list[str]:
    bridge = {"command": place.stdio[0], "args": place.stdio[1:]}
    server = bridge if place.is_stdio else {"type": "http", "url": place.url}
    config = json.dumps({"mcpServers": {NAME: server}})
    return ["--mcp-config", config, "--strict-mcp-config", "--allowedTools", f"mcp__{NAME}"]


def env(place: Place) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": place.model,
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        # Otherwise the model has to search for the tools first.
        "ENABLE_TOOL_SEARCH": "false",
    }


def start(place: Place) -> Start:
    configure(place)
    return Start([str(place.installed / "claude"), "-p", PROMPT, *options(place)], env(place))


def again(place: Place) -> Start:
    return Start([str(place.installed / "claude"), "-p", PROMPT, "--continue", *options(place)], env(place))


PACKAGES = {"@anthropic-ai/claude-code": "2.1.327"}

HOST = Host(
    name="Claude Code, headless",
    registry="npm",
    packages=PACKAGES,
    start=start,
    again=again,
    client="claude-code",
    own_limits={"away": "gives a call up when it has not reached the server for some seconds"},
)
