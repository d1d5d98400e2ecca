"""Losses and the notifications about them: a gap is a run of lost events, an orphan is a call whose client returned
without its position."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perdure._core.ids import Position

GAP = "notifications/perdure/gap"
ORPHAN = "notifications/perdure/orphan"

MAX_NAME = 200
"""Characters of a name that are sent: enough for a tool's name; a resource's URI may be as long as a request."""

MAX_TAKEN = 3
"""Times that a request may take the id of an orphan that still runs: a page that is loaded again so often while its
calls run. Each is searched when a client cancels by id."""

_TAKEN = 1_000_000
"""More incarnations than a session can have."""

_CALL = re.compile(r"([0-9]{1,9}):(.*)", re.DOTALL)
"""Nine digits: more incarnations than a session can have, and a number that every store can compare."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """Events that the server no longer has."""

    stream: str
    first: int | None
    last: int | None
    reason: str
    tool: str | None = None
    """The tool whose call missed the events; None for the standalone stream."""


def gap_notification(stream: str, first: int, last: int, *, reason: str) -> bytes:
    params = {"stream": stream, "from": first, "to": last, "reason": reason}
    return json.dumps({"jsonrpc": "2.0", "method": GAP, "params": params}).encode()


def read_gap(params: Mapping[str, Any] | None, *, tool: str | None) -> Gap:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Orphan:
    """The server's report about a call whose client came back without its position."""

    incarnation: int
    request_id: int | str
    method: str
    name: str | None
    """The tool, the prompt or the resource, if the server still has the request."""
    ended: bool
    position: Position
    """The events that no reader was sent follow it and, if the call has ended, the answer."""
    last: int
    """The last event on the call's own stream."""

    @property
    def call(self) -> str:
        """The call's name in any incarnation; `notifications/cancelled` takes it as `requestId`."""
        return f"{self.incarnation}:{self.request_id}"

    @property
    def params(self) -> dict[str, object]:
        params: dict[str, object] = {"call": self.call, "requestId": self.request_id, "method": self.method}
        if self.name is not None:
            params["name"] = self.name[:MAX_NAME]
        params |= {"state": "ended" if self.ended else "running", "position": str(self.position)}
        if self.position.seq < self.last:
            params |= {"from": self.position.seq + 1, "to": self.last}
        return params

    @property
    def sentence(self) -> str:
        """The same as a sentence for people, in a log message."""
        what = self.method if self.name is None else f"{self.method} {self.name[:MAX_NAME]}"
        state = "has ended" if self.ended else f"still runs (cancel it as {self.call!r})"
        if self.position.seq >= self.last:
            return f"call {self.call} ({what}) {state}"
        missed = f"events {self.position.seq + 1} to {self.last}{', its answer among them,' if self.ended else ''}"
        return f"call {self.call} ({what}) {state}; {missed} can be read with Last-Event-ID {self.position}"


@dataclass(slots=True)
class Visits:
    """When a client came to its session, in arrival numbers of the hub; 0 is never."""

    attached: int = 0
    """Calls whose reader was lost before this are orphans."""
    began: int = 0
    """It last connected without a position: it has forgotten earlier events."""
    due: int = 0
    """It has had the time to resume calls whose reader was lost before this."""

    def come_without_positions(self, now: int) -> None:
        """The client connects without the positions of its calls."""
        self.attached = self.began = now

    def pass_time(self, since: int) -> None:
        """The client came at that moment, and has had the time to resume its calls."""
        self.attached, self.due = max(self.attached, since), max(self.due, since)

    def is_orphan(self, lost_at: int) -> bool:
        """Whether a call is one, whose reader was lost at that moment."""
        return 0 < lost_at < self.attached

    def is_due(self, lost_at: int) -> bool:
        """Whether the client may hear of such a call: it could have resumed it, and has not."""
        return 0 < lost_at < self.due

    def remembers(self, told_at: int) -> bool:
        """Whether it still knows the events of that moment."""
        return told_at > self.began


def numbers_of(incarnation: int) -> list[int]:
    """The numbers under which the calls of an incarnation with one id may be entered: the first is the incarnation, and
    each further one is for a request that took the id of the previous, which is an orphan."""
    return [incarnation + times * _TAKEN for times in range(MAX_TAKEN + 1)]


def incarnation_of(number: int) -> int:
    """The incarnation in which a call with such a number came."""
    return number % _TAKEN


def read_call(request_id: int | str) -> tuple[int, str] | None:
    """The incarnation and the request id in a call's name; `None` if it is not such a name."""
    match = _CALL.fullmatch(request_id) if isinstance(request_id, str) else None
    return None if match is None else (int(match[1]), match[2])
