"""Claude Code in a terminal, with a server that gives it a task at once."""

from __future__ import annotations

from dataclasses import replace

from tests.real_hosts.hosts import claude_code_interactive

OPTIONS = ("--task-after", "0s")

HOST = replace(
    claude_code_interactive.HOST,
    name=f"Claude Code, interactive, `{' '.join(OPTIONS)}`",
    options=OPTIONS,
    own_limits={"away": "disconnects from a server that it cannot reach, until its user connects again with `/mcp`"},
)
