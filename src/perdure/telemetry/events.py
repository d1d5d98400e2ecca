"""What happened, for people and machines: log records with a stable `action`, counters and latencies.

They are plain numbers in one object; `metrics` exports them, and so may anybody else.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from bisect import bisect_left
from dataclasses import dataclass, field

from perdure._core.printable import printable

_logger = logging.getLogger("perdure")


MAX_SENTENCE = 2_000
"""Characters of a sentence or of a fact: room for any of ours and the reason in it, which a peer may have written."""


def log_event(level: int, action: str, sentence: str, /, **facts: object) -> None:
    """Log a sentence for people, with `action` and the facts as attributes for machines.

    A sentence may name what a peer wrote (a method, a reason), so both are made harmless here, whoever writes the log.
    """
    if _logger.isEnabledFor(level):
        safe = {name: printable(fact, MAX_SENTENCE) if isinstance(fact, str) else fact for name, fact in facts.items()}
        _logger.log(level, printable(sentence, MAX_SENTENCE), extra={"action": action, **safe})


PEER_RECORDS = 5
PEER_SECONDS = 60.0
"""Records of one action that peers can cause in so much time. The first few say what is wrong and where;
thousands would fill the disk and hide everything else. The counters count them all."""


class PeerLog:
    """Logs what peers cause: of each action a few records in a minute, and then one that says how many there were more.

    It belongs to one process's event loop, whose timer writes that last one.
    """

    def __init__(self) -> None:
        self._written: dict[str, int] = {}

    def log_event(self, level: int, action: str, sentence: str, /, **facts: object) -> None:
        """As `log_event` does, unless there were too many of that action lately."""
        if action not in self._written:
            asyncio.get_running_loop().call_later(PEER_SECONDS, self._sum_up, level, action)
        count = self._written[action] = self._written.get(action, 0) + 1
        if count <= PEER_RECORDS:
            log_event(level, action, sentence, **facts)

    def _sum_up(self, level: int, action: str) -> None:
        more = self._written.pop(action) - PEER_RECORDS
        if more > 0:
            sentence = f"{more} more records of {action} within {PEER_SECONDS:g} s were not written"
            log_event(level, action, sentence, suppressed=more)


BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds in seconds: from a commit into memory to more than a store may take (`store_timeout`)."""


class Histogram:
    """How long something took, each time."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        """For each bound, and for beyond the last."""
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds


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
    orphans_told: int = 0
    """Calls of which a client was told that had lost their positions: that they run, or that they have ended."""
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
    settles_cancelled: int = 0
    """Calls of a node that died which their client cancelled while they waited to be settled."""
    nodes_settled: int = 0
    """Dead nodes that this one has buried."""
    reattaches: int = 0
    recoveries_tried: int = 0
    """New sessions begun in place of lost ones (`recover="reissue"`)."""
    recoveries_succeeded: int = 0
    recoveries_failed: int = 0
    recoveries_refused: int = 0
    """Callers that had lost too many sessions to be given another one."""
    resume_chains_opened: int = 0
    resume_tokens_accepted: int = 0
    resume_tokens_rejected: int = 0
    resume_chains_revoked: int = 0
    """Chains revoked because a token was used that had been voided or retired: a security event."""
    requests_refused: int = 0
    """Answers of 400 and above that the endpoint gave."""
    outages: int = 0
    events_held: int = 0
    """Events that went on live from memory while the store failed."""

    append_seconds: Histogram = field(default_factory=Histogram)
    """From the first thing put into a group until the group is written."""
    replay_seconds: Histogram = field(default_factory=Histogram)
    """From the coming of a reader until it has caught up with what was there."""

    def snapshot(self) -> dict[str, int]:
        """The counters; the latencies are read one by one."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, int)}
