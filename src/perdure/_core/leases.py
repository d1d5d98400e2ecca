"""Decides by leases, and by locks where a store has them, which nodes are dead.

Each node raises a counter in the store, its *beat*. Three rules follow from it, each on one node's own monotonic clock;
two clocks are never compared (no wall clock).

**Own claim.** It lasts `OWN_SHARE` of a lease from the moment at which the last beat that went through was *sent*.
After that it is FROZEN until another beat goes through, or BURIED when a beat finds that the store does not know the
node any more (`_core.states.CLAIM`).

**Another node, by its lease.** It is dead when its beat, first seen in an answer that came at one moment, is still the
same in an answer that was *asked for* a lease later, while the observer's own beats went through.

**Another node, by its lock.** A store may give each node a lock that is freed when its process dies. The node is dead
when its lock, first seen free in an answer that came at one moment, is still free in an answer that was asked for
`FREE_SHARE` of a lease later, with the same beat in both, while the observer's own lock was held. A lock says nothing
of a node that stands still or is cut off: its lease does.

**Another node, by its process.** An observer on the same machine may look up the process. If that has ended, its node
is dead at once. If it runs, its lock is free because it has lost its connection: only its lease decides.

Why the second comes after the first: the beat that the observer saw was sent before its answer came, and a later one
had not reached the store when the observer asked again. So when a node is called dead, the last beat that the observer
can have seen was sent a whole lease ago, and the claim that it renewed ended a quarter of a lease ago. A node may come
back all the same between answer and burial. A burial names the beat that was seen, and does not happen if there
is a later one; so no node is buried that holds its claim. What was claimed of it until then, fences have taken away.

A lock may be lost by a process that lives, as when its connection breaks. It beats at once then and until it has its
lock back, which the third rule sees. If no beat gets through either for a third of a lease, it may be buried while its
lease still lasts: a store with such locks commits nothing for a node that it does not know.
"""

import math
from collections.abc import Container, Mapping
from typing import NamedTuple

from perdure._core.ids import NodeId
from perdure._core.states import CLAIM, ClaimState, ClaimStep, advance

OWN_SHARE = 0.75
"""Of a lease, for a node's own claim. The rest is the margin: what a node decided just before its claim ended has that
long to reach the store before another node acts, and two clocks may differ in speed by as much (a real pair differs by
less than a thousandth). Fences stop whatever is later still."""

BEATS_IN_LEASE = 5
"""Beats that a node sends in a lease: two may be lost before half a lease is over, three before the claim is."""

FREE_SHARE = 1 / 3
"""Of a lease: a lock that is free for so long is a dead process's. A process whose connections broke, and whose new
ones are refused (a firewall is reloaded, a role is at its limit), has that long to come back. A crash on another
machine is found so much later, which is still much sooner than by the lease."""

FREE_SECONDS = 1.8
"""At the least, for short leases: a process that lost its lock beats by its other connections, and at least three times
in that time."""

_MAX_SILENCE = 0.5
"""Of a lease, between two beats of the observer. A longer silence says that it was paused, or cut off from the store;
other nodes may have been so too, and get a whole lease again to show that they live."""


class _Observation(NamedTuple):
    """A node's beat, since when it has been so, and since when its lock has been free with it."""

    beat: int
    since: float
    free_since: float | None


class Claim:
    """A node's own claim on its streams. The node's `Liveness` moves it; the journal compares `until` with the
    monotonic clock before each commit and each event, so a process that stood still cannot act on an old answer."""

    __slots__ = ("_state", "until")

    def __init__(self, until: float = math.inf) -> None:
        self.until = until
        """The claim holds before this moment of the monotonic clock; never, once it is buried."""
        self._state = ClaimState.HOLDING

    def at(self, now: float) -> ClaimState:
        if now >= self.until:
            self._state = advance(CLAIM, self._state, ClaimStep.LAPSE)
        return self._state

    def renew(self, until: float, *, now: float) -> None:
        if self._state is not ClaimState.BURIED:
            self.until = max(self.until, until)
            if now < self.until:  # a late answer proves nothing about now
                self._state = advance(CLAIM, self._state, ClaimStep.RENEW)

    def bury(self) -> None:
        """The store does not know the node any more: it was buried, or it has left."""
        self._state = advance(CLAIM, self._state, ClaimStep.BURY)
        self.until = -math.inf


class Leases:
    """Keeps one node's own claim, and how long each other node has been silent."""

    def __init__(self, node: NodeId, *, lease: float, now: float) -> None:
        """`now` was read before the node's first beat, or its joining, was sent."""
        self._node = node
        self._lease = lease
        self._free_seconds = min(lease, max(FREE_SECONDS, FREE_SHARE * lease))
        self.claim = Claim(now + OWN_SHARE * lease)
        self._beaten = now
        self._seen: dict[NodeId, _Observation] = {}

    def alone(self, *, now: float) -> None:
        """No other node has joined, so none can have taken this one for dead, however long it was silent."""
        self.claim.renew(math.inf, now=now)

    def joined(self, *, now: float) -> None:
        """Another node has joined: a claim that could not lapse before can now."""
        if self.claim.until == math.inf:
            self.claim.until = now + OWN_SHARE * self._lease

    def beaten(self, *, sent: float, now: float) -> None:
        """A beat went through: the store knew this node when it came there."""
        if now - self._beaten > _MAX_SILENCE * self._lease:
            self._seen.clear()
        self._beaten = now
        self.claim.renew(sent + OWN_SHARE * self._lease, now=now)

    def observe(
        self,
        beats: Mapping[NodeId, int],
        *,
        asked: float,
        now: float,
        free: Container[NodeId] = (),
        ended: Container[NodeId] = (),
    ) -> list[NodeId]:
        """Note the beats that the store shows, and the nodes whose lock is `free` in the same answer; returns the
        dead nodes. `ended`: nodes whose process has ended, as this machine knows."""
        own_lock_held = self._node not in free
        seen, self._seen = self._seen, {}
        for node, beat in beats.items():
            if node != self._node:
                last = seen.get(node)
                if last is None or last.beat != beat:
                    last = _Observation(beat, now, None)
                is_free = own_lock_held and node in free
                free_since = (now if last.free_since is None else last.free_since) if is_free else None
                self._seen[node] = last._replace(free_since=free_since)
        if self.claim.at(now) is not ClaimState.HOLDING or now - self._beaten > _MAX_SILENCE * self._lease:
            return []
        return [
            node
            for node, (_, since, free_since) in self._seen.items()
            if node in ended
            or asked - since >= self._lease
            or (free_since is not None and asked - free_since >= self._free_seconds)
        ]

    def due(self, *, now: float) -> float | None:
        """Seconds until the first of the locks that are free now will have been so for long enough; `None` if none
        is."""
        free = [seen.free_since for seen in self._seen.values() if seen.free_since is not None]
        return max(0.0, min(free) + self._free_seconds - now) if free else None

    def ages(self, *, now: float) -> dict[NodeId, float]:
        """Seconds since each node was last known to be alive."""
        return {self._node: now - self._beaten} | {node: now - seen.since for node, seen in self._seen.items()}
