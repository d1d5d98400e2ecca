"""Claude Code in a terminal, where it takes tasks and asks its user."""

from __future__ import annotations

import json

from tests.real_hosts.host import PROMPT, Host, Place, Start
from tests.real_hosts.hosts.claude_code import PACKAGES, env, options

#: What its user types into the form of a question, and to accept it.
KEYS = {"Typesomething": "rye\r\r"}


def configure(place: Place) -> None:
    """No theme to choose, no key to approve, no folder to trust."""
    known = {
        "hasCompletedOnboarding": True,
        "theme": "dark",
        "customApiKeyResponses": {"approved": ["none"], "rejected": []},
        "projects": {str(place.home): {"hasTrustDialogAccepted": True}},
    }
    place.write(".claude.json", json.dumps(known))


def _claude(place: Place, *more: str) -> Start:
    argv = [str(place.installed / "claude"), *more, PROMPT, *options(place)]
    return Start(argv, env(place), terminal=True, keys=KEYS, idle="Thatisall.")


def start(place: Place) -> Start:
    configure(place)
    return _claude(place)


def again(place: Place) -> Start:
    return _claude(place, "--continue")


_TAKES_TASKS = "takes tasks, so it is never answered early"
_NO_TASK_YET = "speaks 2026-07-28, where a call ends with its connection until it is a task, by default after 10 s"

HOST = Host(
    name="Claude Code, interactive",
    registry="npm",
    packages=PACKAGES,
    start=start,
    again=again,
    client="claude-code",
    own_limits=dict.fromkeys(("cut", "cut_silent", "kill", "kill_no_hint", "away"), _NO_TASK_YET),
    left_out=dict.fromkeys(("early", "host_again_early", "stdio_early", "stdio_host_again_early"), _TAKES_TASKS),
)
