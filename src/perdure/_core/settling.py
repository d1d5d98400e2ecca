"""What becomes of a call whose node died: a table, and a rule for tools."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from perdure._core.sticky import METHODS as STICKY

MOST_ATTEMPTS = 2
"""A request that has ended its process twice is not given a third."""

READS = frozenset(
    {
        "ping",
        "tools/list",
        "resources/list",
        "resources/templates/list",
        "resources/read",
        "prompts/list",
        "prompts/get",
        "completion/complete",
    }
)
"""Requests that the specification makes reads: they may run again."""


class Verdict(enum.Enum):
    RERUN = "rerun"
    """It runs again, into the same stream."""
    UNKNOWN = "unknown"
    """It is answered: interrupted, outcome unknown."""
    ASK = "ask"
    """Whether it may run again is for the server to say: what does it know of this tool?"""
    WAIT = "wait"
    """It may run again, or whether it may is not known, once its principal is back."""


def verdict(method: str, *, attempt: int) -> Verdict:
    """What becomes of a request that was interrupted in this attempt."""
    if attempt >= MOST_ATTEMPTS:
        return Verdict.UNKNOWN
    if method in READS or method in STICKY:
        return Verdict.RERUN
    return Verdict.ASK if method == "tools/call" else Verdict.UNKNOWN


def may_run_again(tool: Mapping[str, Any]) -> bool:
    """Whether a tool, as `tools/list` shows it, says that a second run does no harm."""
    hints = tool.get("annotations")
    if not isinstance(hints, Mapping):
        return False
    return hints.get("readOnlyHint") is True or hints.get("idempotentHint") is True
