"""Decides when a client reconnects to one stream, and when it gives the stream up.

**What counts as trouble.** An attempt that brings no event stream is a failure; failures in a row are counted, and
timed from the first. A connection that did bring a stream ends the count, also if nothing but a priming event came: a
server may close as often as it likes and let its client poll (SEP-1699), for hours if the call takes hours.

**Delays.** What the server asked for (`retry`) is a lower bound and is always kept (B7). Without it, and after
failures, the delay doubles from `first_delay` up to `max_delay`. Chance spreads the clients that one restart has cut
off: down to half of a delay of our own, up to a tenth above one of the server. A server cannot make us wait for
ever, nor call us back without a pause for ever (`MOST_ASKED`, `FREE_POLLS`).

Callers pass the time as seconds of any clock that never goes back, and chance as a number from 0 up to 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

#: Share of the server's own delay by which chance may lengthen it.
SPREAD = 0.1
#: Seconds that a server may ask for, in `retry` and in `Retry-After`: an hour. More is a mistake of units, or a trap.
MOST_ASKED = 3_600.0
#: Connections in a row without a message after which a `retry` shorter than our own first delay is no longer taken at
#: its word: `retry: 0` and a connection that ends at once would be a loop without a pause.
FREE_POLLS = 10
#: Beyond this doubling any delay is at its maximum; it keeps the numbers small.
MOST_DOUBLINGS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """The limits of the attempts to read one stream."""

    #: Seconds from the first failure in a row until the stream is given up: a deploy takes minutes, not hours.
    max_time: float = 300.0
    #: Failures in a row until then, whatever the time: with the delays below, `max_time` is reached first.
    max_tries: int = 100
    #: Seconds before the first attempt, where the server asked for nothing. Doubles with each failure.
    first_delay: float = 0.5
    #: Seconds that a delay does not exceed, `retry` apart: a server that is back is found within them.
    max_delay: float = 15.0

    def __post_init__(self) -> None:
        if not (self.max_time >= 0 and self.max_tries >= 0 and 0 <= self.first_delay <= self.max_delay):
            raise ValueError(f"limits must not be negative, nor first_delay above max_delay: {self}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """The attempts to read one stream until now."""

    failures: int = 0
    """Attempts in a row that brought no event stream."""
    barren: int = 0
    """Connections in a row that brought no message."""
    since: float | None = None
    """When the first of the failures was."""
    retry: float | None = None
    """Seconds that the server asked for."""
    at_least: float = 0.0
    """Seconds that the server asked for this time only (`Retry-After`)."""

    def opened(self) -> Course:
        return replace(self, failures=0, since=None, at_least=0.0, barren=self.barren + 1)

    def heard(self) -> Course:
        """A message came."""
        return self if not self.barren else replace(self, barren=0)

    def told(self, retry: float) -> Course:
        return replace(self, retry=min(retry, MOST_ASKED))

    def failed(self, now: float, *, at_least: float = 0.0) -> Course:
        since = now if self.since is None else self.since
        asked = min(at_least, MOST_ASKED)
        return replace(self, failures=self.failures + 1, since=since, at_least=asked)


def delay(course: Course, patience: Patience, *, now: float, chance: float) -> float | None:
    """Seconds until the next attempt; None if there shall be none."""
    if course.failures >= max(patience.max_tries, 1):
        return None
    left = None if course.since is None else course.since + patience.max_time - now
    if left is not None and left <= 0:
        return None
    asked = None if course.retry is None else course.retry * (1 + SPREAD * chance)
    if asked is not None and not course.failures:
        wanted = asked if course.barren <= FREE_POLLS else max(asked, patience.first_delay * (0.5 + 0.5 * chance))
    else:
        doublings = min(max(course.failures, course.barren, 1) - 1, MOST_DOUBLINGS)
        own = min(patience.first_delay * float(2**doublings), patience.max_delay) * (0.5 + 0.5 * chance)
        wanted = max(own, asked or 0.0)
    wanted = max(wanted, course.at_least)
    # The last attempt is made when time is up, not after it; but never before the time that the server asked for.
    return wanted if left is None else max(min(wanted, left), course.at_least, course.retry or 0.0)
