"""What becomes of a call whose node died: a table, and a rule for tools."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Collection, Mapping
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


def progress_in(payload: bytes, tokens: Collection[int | str]) -> float | None:
    """The progress that a message reports under one of the tokens; `None` if it reports none that can be compared."""
    if b"notifications/progress" not in payload:
        return None
    try:
        params = json.loads(payload).get("params")
    except ValueError:  # a number with more digits than Python reads
        return None
    if not isinstance(params, dict) or params.get("progressToken") not in tokens:
        return None
    return as_progress(params.get("progress"))


def as_progress(sent: object) -> float | None:
    """Progress as the ledger keeps it: the smallest float that is not below it. What is not above that was sent."""
    if isinstance(sent, bool) or not isinstance(sent, int | float) or sent != sent:
        return None
    try:
        progress = float(sent)
    except OverflowError:
        return math.inf if sent > 0 else None
    return progress if progress >= sent else math.nextafter(progress, math.inf)


def may_run_again(tool: Mapping[str, Any]) -> bool:
    """Whether a tool, as `tools/list` shows it, says that a second run does no harm."""
    hints = tool.get("annotations")
    if not isinstance(hints, Mapping):
        return False
    return hints.get("readOnlyHint") is True or hints.get("idempotentHint") is True
