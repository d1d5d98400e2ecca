"""What happened, for people and machines: log records with a stable `action`, and counters.

Counters are plain numbers in one object; whoever exports them reads the object.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass

_logger = logging.getLogger("perdure")


def note(level: int, action: str, sentence: str, /, **facts: object) -> None:
    """Log a sentence for people, with `action` and the facts as attributes for machines."""
    if _logger.isEnabledFor(level):
        _logger.log(level, sentence, extra={"action": action, **facts})


@dataclass(slots=True)
class Counters:
    """How often things happened since the start of this process (P9)."""

    sessions_opened: int = 0
    sessions_loaded: int = 0
    """Sessions of before, or of other processes, that were loaded from their records."""
    sessions_ended: int = 0
    sessions_not_found: int = 0
    call_streams: int = 0
    """Streams opened by POST."""
    standalone_readers: int = 0
    """GETs attached to a standalone stream."""
    resumes: int = 0
    """GETs that named a position."""
    events_appended: int = 0
    events_replayed: int = 0
    """Events that a resumed reader got from further back than the moment it attached."""
    gaps: int = 0
    positions_lost: int = 0
    take_overs: int = 0
    slow_readers_ended: int = 0
    calls_accepted: int = 0
    calls_answered: int = 0
    calls_cancelled: int = 0
    calls_settled: int = 0
    """Calls that were answered: interrupted, outcome unknown."""
    calls_rerun: int = 0
    """Calls of a node that died which were run again here."""
    nodes_settled: int = 0
    """Dead nodes that this one has buried."""
    reattaches: int = 0
    recoveries_tried: int = 0
    recoveries_succeeded: int = 0
    requests_refused: int = 0
    """Answers of 400 and above that the endpoint gave."""
    outages: int = 0
    events_held: int = 0
    """Events that went on live from memory while the store failed."""

    def snapshot(self) -> dict[str, int]:
        return dataclasses.asdict(self)
