"""A gap is a run of events that are gone; this module writes and reads the notification about it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

METHOD = "notifications/perdure/gap"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """Events that the server no longer has."""

    stream: str
    first: int | None
    last: int | None
    reason: str
    tool: str | None = None
    """The tool whose call missed the events; None for the standalone stream."""


def notification(stream: str, first: int, last: int, *, reason: str) -> bytes:
    """The notification about a gap."""
    params = {"stream": stream, "from": first, "to": last, "reason": reason}
    return json.dumps({"jsonrpc": "2.0", "method": METHOD, "params": params}).encode()


def read_gap(params: Mapping[str, Any] | None, *, tool: str | None = None) -> Gap:
    """The gap in a notification's params; values of a wrong type are left out."""
    params = params or {}
    first, last = params.get("from"), params.get("to")
    return Gap(
        stream=str(params.get("stream", "")),
        first=first if isinstance(first, int) else None,
        last=last if isinstance(last, int) else None,
        reason=str(params.get("reason", "")),
        tool=tool,
    )
