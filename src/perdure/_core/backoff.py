"""Decides when a program that keeps ending soon after its start is started again.

Callers pass the time as seconds of any clock that never goes back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

#: Beyond this doubling any pause is at its longest; it keeps the numbers small.
_MOST_DOUBLINGS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Pauses:
    """The pause after each quick death in a row: the first one, doubled each time, up to the longest."""

    first: float
    longest: float
    free: int = 0
    """Quick deaths in a row that have no pause."""

    def after(self, deaths: int) -> float:
        counted = deaths - self.free
        return 0.0 if counted < 1 else min(self.first * float(2 ** min(counted - 1, _MOST_DOUBLINGS)), self.longest)


@dataclass(frozen=True, kw_only=True, slots=True)
class Backoff:
    """The starts of one program by all its users, as far as they decide about the next one."""

    pauses: Pauses
    quick: float
    """Seconds after a start within which a death counts, and for which a process must serve to end the count."""
    deaths: int = 0
    """Quick deaths in a row."""
    last_death: float = 0.0
    until: float = 0.0
    """When the next start may be."""

    def started(self, now: float) -> Backoff:
        """After a quick death the starts have a pause between them, whatever becomes of each: many users wait."""
        return replace(self, until=now + self.pauses.after(self.deaths)) if self.deaths else self

    def died(self, *, started: float, now: float) -> Backoff:
        """Processes that were started side by side and die together have one cause, and count as one death."""
        if now - started >= self.quick or (self.deaths and started < self.last_death):
            return self
        deaths = self.deaths + 1
        return replace(self, deaths=deaths, last_death=now, until=now + self.pauses.after(deaths))

    def greeted(self) -> Backoff:
        """A process has made its handshake: others may start at once."""
        return replace(self, until=0.0)

    def held(self) -> Backoff:
        """A process has served for `quick` seconds after its handshake."""
        return replace(self, deaths=0, until=0.0)

    def wait(self, now: float) -> float:
        """Seconds until the next start."""
        return max(self.until - now, 0.0)
