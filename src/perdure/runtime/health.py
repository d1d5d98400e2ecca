"""Keeps the state of an upstream, as traffic shows it: the gateway's parts report it, `/healthz/upstreams` reads it.

One object belongs to one upstream in one process, and is used in its event loop alone.
"""

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass

from perdure.telemetry.counters import UpstreamNumbers


class UpstreamState(enum.StrEnum):
    STARTING = "starting"
    """It was not needed yet, or its first handshake runs."""
    UP = "up"
    """The last handshake or request was answered."""
    BACKING_OFF = "backing off"
    """It failed, and is started or asked again at `next_try`."""
    DOWN = "down"
    """It cannot be used."""


@dataclass(frozen=True, kw_only=True)
class UpstreamFailure:
    at: float
    reason: str
    """A sentence, or a part of one, for the operator, without secrets."""


class Health:
    """The state of an upstream, and why and since when it has it. Times are seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time, *, numbers: UpstreamNumbers | None = None) -> None:
        """`numbers`: those of the upstream's processes, if others count them."""
        self._clock = clock
        self.numbers = numbers or UpstreamNumbers()
        self.numbers.upstream_up = 1
        self.last_failure: UpstreamFailure | None = None
        """Of a handshake, or of a process: the upstream may be up again."""
        self.state = UpstreamState.STARTING
        self.since = clock()
        """When this state began."""
        self.reason = ""
        """A sentence for the operator, without secrets; empty while it is up."""
        self.next_try: float | None = None

    def report(self, state: UpstreamState, reason: str = "", *, next_try: float | None = None) -> None:
        """Note what has just been seen. `since` stays while the state does."""
        if state is not self.state:
            self.since = self._clock()
        self.state, self.reason, self.next_try = state, reason, next_try
        self.numbers.upstream_up = int(state in (UpstreamState.STARTING, UpstreamState.UP))
        if reason:
            self.last_failure = UpstreamFailure(at=self.since, reason=reason)

    def note_failure(self, reason: str) -> None:
        self.last_failure = UpstreamFailure(at=self._clock(), reason=reason)
