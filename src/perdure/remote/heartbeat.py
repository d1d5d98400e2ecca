"""Heartbeat: notices a connection whose other end has vanished without closing it.

TCP says nothing when a laptop changes its network or a firewall forgets a flow: the connection looks silent, and a
call may well be silent for minutes. Only a server that keeps its idle connections alive with comments gives itself
away: where they stop, the server is gone.

**The rule.** The time between two comments in a row, with nothing between them, is the server's beat; the longest that
was heard counts. A stream that has a position and is silent for three beats is resumed. All streams of a client share
what was heard, as one server writes them all. A server that sends no comments is left alone, and so is a stream without
a position: to break it could cost a call its answer. After a cut the beat is learnt again, so that a server which has
changed its ways is cut off once.
"""

from __future__ import annotations

#: Beats that may be missed: one may be late, and one may be lost with a packet that is sent again.
MISSED_BEATS = 3
#: Seconds. Comments that follow each other faster are padding for proxies, not a beat.
LEAST_BEAT = 1.0


class Heartbeat:
    """One server's beat, as far as it was heard."""

    def __init__(self) -> None:
        self._beat: float | None = None

    @property
    def limit(self) -> float | None:
        """Seconds of silence that are too many; None if that is not known."""
        return None if self._beat is None else self._beat * MISSED_BEATS

    def heard(self, seconds: float) -> None:
        """Two comments came, so long one after the other."""
        if seconds >= LEAST_BEAT:
            self._beat = max(seconds, self._beat or 0.0)

    def missed(self) -> None:
        self._beat = None
