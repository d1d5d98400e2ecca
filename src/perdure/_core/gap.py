"""Events that are gone, as a client hears of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

METHOD = "notifications/perdure/gap"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """What the server says it no longer has."""

    stream: str
    first: int | None
    last: int | None
    reason: str
    tool: str | None = None
    """The tool whose call missed the events; None for the standalone stream."""


def notification(stream: str, first: int, last: int, *, reason: str) -> bytes:
    """The notification that tells of a gap."""
    params = {"stream": stream, "from": first, "to": last, "reason": reason}
    return json.dumps({"jsonrpc": "2.0", "method": METHOD, "params": params}).encode()


def read_gap(params: Mapping[str, Any] | None, *, tool: str | None = None) -> Gap:
    """The gap in a notification's params; what is not as it should be is left out."""
    params = params or {}
    first, last = params.get("from"), params.get("to")
    return Gap(
        stream=str(params.get("stream", "")),
        first=first if isinstance(first, int) else None,
        last=last if isinstance(last, int) else None,
        reason=str(params.get("reason", "")),
        tool=tool,
    )
