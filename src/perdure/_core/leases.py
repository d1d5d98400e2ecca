"""Decides by leases which nodes are dead, where no operating system can tell.

Each node raises a counter in the store, its *beat*. Two rules follow from it, each on one node's own monotonic clock;
two clocks are never compared (no wall clock).

**Own claim.** It lasts `OWN_SHARE` of a lease from the moment at which the last beat that went through was *sent*. Once
that has passed, the claim is gone for good: a beat that goes through later does not bring it back.

**Another node.** It is dead when its beat, first seen in an answer that came at one moment, is still the same in
an answer that was *asked for* a lease later, while the observer's own beats went through.

Why the second comes after the first: the beat that the observer saw was sent before its answer came, and a later one
had not reached the store when the observer asked again. So when a node may be called dead, its last beat that went
through was sent a whole lease ago, and its own claim ended a quarter of a lease ago.
"""

from collections.abc import Mapping

from perdure._core.ids import NodeId

OWN_SHARE = 0.75
"""Of a lease, for a node's own claim. The rest is the margin: what a node decided just before its claim ended has that
long to reach the store before another node acts, and two clocks may differ in speed by as much (a real pair differs by
less than a thousandth). Fences stop whatever is later still."""

BEATS_IN_LEASE = 5
"""Beats that a node sends in a lease: two may be lost before half a lease is over, three before the claim is."""

_MAX_SILENCE = 0.5
"""Of a lease, between two beats of the observer. A longer silence says that it was paused, or cut off from the store;
other nodes may have been so too, and get a whole lease again to show that they live."""


class Leases:
    """Keeps one node's own claim, and how long each other node has been silent."""

    def __init__(self, node: NodeId, *, lease: float, now: float) -> None:
        """`now` was read before the node's first beat, or its joining, was sent."""
        self._node = node
        self._lease = lease
        self._until = now + OWN_SHARE * lease
        self._beaten = now
        self._seen: dict[NodeId, tuple[int, float]] = {}

    def holds(self, *, now: float) -> bool:
        return now < self._until

    def lapse(self) -> None:
        """The claim is gone: the store does not know this node any more, or it has left."""
        self._until = float("-inf")

    def alone(self, *, now: float) -> None:
        """No other node has joined, so none can have taken this one for dead, however long it was silent."""
        if self._until > float("-inf"):
            self._until = max(self._until, now + OWN_SHARE * self._lease)

    def beaten(self, *, sent: float, now: float) -> None:
        """A beat of this node went through."""
        if not self.holds(now=now):
            return
        if now - self._beaten > _MAX_SILENCE * self._lease:
            self._seen.clear()
        self._beaten = now
        self._until = max(self._until, sent + OWN_SHARE * self._lease)

    def observe(self, beats: Mapping[NodeId, int], *, asked: float, now: float) -> list[NodeId]:
        """Note the beats that the store shows; gives the nodes that are dead."""
        seen = self._seen
        self._seen = {
            node: seen[node] if node in seen and seen[node][0] == beat else (beat, now)
            for node, beat in beats.items()
            if node != self._node
        }
        if not self.holds(now=now) or now - self._beaten > _MAX_SILENCE * self._lease:
            return []
        return [node for node, (_, since) in self._seen.items() if asked - since >= self._lease]

    def ages(self, *, now: float) -> dict[NodeId, float]:
        """Seconds since each node was last known to be alive."""
        return {self._node: now - self._beaten} | {node: now - since for node, (_, since) in self._seen.items()}
