"""Decides what progress a client is shown while its tool says nothing.

Hosts end a call that is silent for too long, and progress resets their clocks. A beat is no event: it is not in the
log, and nothing is kept of it. Its value follows from the tool's last progress and from the age of the call, so it
rises over resumes and at every node, and stays within a millionth of the tool's own.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from perdure._core.jsonrpc import JsonObject
from perdure._core.settling import as_progress

PROGRESS = "notifications/progress"

SHARE = 1e-6
"""The part of its value, or of 1, by which a beat may exceed the tool's own: no host shows so small a part."""

HALF = 3_600.0
"""Seconds after which half of that is used: a call of days has room left, and a beat of 1 s still moves a float."""


FIRST = 0
"""The progress that is in the log before the tool runs, where the revision has no other event with an id by then."""

RECENT = 16
"""Events at the end of a stream in which the last progress is searched: what follows it are questions, which are few,
or log messages."""

BEHIND_FIRST = 1e-9
"""Stands for a tool's own 0 after `FIRST`: progress has to rise."""


def is_first(params: JsonObject) -> bool:
    """Whether progress may be the one before the tool runs, and not the tool's own: it says nothing."""
    return params.get("progress") == FIRST and not (params.get("message") or params.get("total"))


def beat_value(said: float, seconds: float) -> float:
    """The progress of a call of this age whose tool has said `said`; 0 if it has said nothing."""
    return said + _room(said) * seconds / (seconds + HALF)


def beat(token: int | str, said: JsonObject | None, seconds: float) -> bytes | None:
    """The progress notification for a silent call. `said`: the params of the last progress of its tool. `None` if a
    float cannot hold a value above that."""
    last = 0.0 if said is None else as_progress(said.get("progress"))
    value = math.inf if last is None else beat_value(last, max(0.0, seconds))
    if last is None or not last < value < math.inf:
        return None
    said = said or {}
    message = said.get("message") or f"Still running ({seconds:.0f} s)"
    return encode_progress({"progressToken": token, **_within(said, value), "message": message})


def raised(params: JsonObject, said: float, seconds: float) -> bytes | None:
    """The progress that a tool reports after a silence in which beats may have been sent, where its value is not above
    all of them: with a value that is, and the tool's own text. `None` where it goes out as it is."""
    reported = as_progress(params.get("progress"))
    if reported is None or reported > said + _room(said):
        return None
    value = beat_value(max(said, reported), max(0.0, seconds))
    return encode_progress({**params, **_within(params, value)}) if value < math.inf else None


def rising(before: JsonObject | None, said: JsonObject | None) -> JsonObject | None:
    """The last progress of a tool, with the highest value of this and of the previous one."""
    if before is None or said is None:
        return said or before
    values = as_progress(before.get("progress")), as_progress(said.get("progress"))
    return {**said, "progress": max([value for value in values if value is not None], default=None)}


@dataclass(kw_only=True)
class Hearing:
    """The progress of one call, as far as its client has heard of it, event by event."""

    opened: float
    silence: float
    """Seconds without an event after which it may have been sent a beat."""
    time: float
    """Of the last event."""
    said: JsonObject | None = None
    """The tool's last words, with its highest progress."""
    is_beaten: bool = False
    """There may have been beats that are above all that the tool has said."""

    def hear(self, events: Iterable[tuple[float, bytes]]) -> bytes:
        """Take the next events, by their times. Returns the last one as the client is shown it: a value that is not
        above earlier beats is replaced by one that is."""
        shown = b""
        for time, payload in events:
            shown = payload
            self.is_beaten = self.is_beaten or time - self.time >= self.silence
            self.time = time
            if (params := progress_params(payload)) is None:
                continue
            if self.is_beaten:
                self.said = self.said or {"progress": FIRST}
                above = raised(params, as_progress(self.said["progress"]) or 0.0, time - self.opened)
                shown, self.is_beaten = above or payload, above is not None
            self.said = rising(self.said, params)
        return shown


def progress_params(payload: bytes) -> JsonObject | None:
    """The params of a message, if it reports progress that can be compared."""
    if PROGRESS.encode() not in payload:
        return None
    try:
        message = json.loads(payload)
    except ValueError:  # a number with more digits than Python reads
        return None
    params = message.get("params") if message.get("method") == PROGRESS else None
    return params if isinstance(params, dict) and as_progress(params.get("progress")) is not None else None


def last_progress(payloads: Sequence[bytes]) -> JsonObject | None:
    """The params of the last message that reports progress, of those of a stream in their order."""
    return next(filter(None, map(progress_params, reversed(payloads))), None)


def encode_progress(params: JsonObject) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "method": PROGRESS, "params": params}, separators=(",", ":")).encode()


def _within(params: JsonObject, value: float) -> dict[str, Any]:
    """A value, and the total that the tool named, but not below the value."""
    total = as_progress(params.get("total"))
    return {"progress": value} if total is None else {"progress": value, "total": max(total, value)}


def _room(said: float) -> float:
    return SHARE * max(1.0, abs(said))
