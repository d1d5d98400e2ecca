"""Limits of one client: how long it waits for what, and how large a message may be."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from perdure._core.reconnect import Course, Patience
from perdure.remote.attempts import Attempts


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """They differ between the clients, and are handed to the engine."""

    patience: Patience
    """For requests, and for what has no answer."""
    listening: Patience
    """For the standalone stream."""
    handshake: Patience
    handshake_seconds: float
    """For one handshake, however lively the server is."""
    message_bytes: int
    """The largest message of the server that is read."""
    counts_from_request: bool
    """Patience runs from the moment when a message was handed over, and a server that asks for more time than it has
    does not get it. Otherwise it runs from the first failure, and a server may ask for any time."""

    def most_asked(self, patience: Patience) -> float:
        """Seconds for which a server that asks for more time is waited for at most."""
        return patience.max_time if self.counts_from_request else math.inf

    def course(self) -> Course:
        """The course of what begins now."""
        return Course(since=time.monotonic() if self.counts_from_request else None)

    def attempts(self, patience: Patience) -> Attempts:
        return Attempts(patience, course=self.course(), most_asked=self.most_asked(patience))
