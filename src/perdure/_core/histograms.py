"""Histograms count how long something took, each time."""

from bisect import bisect_left
from collections.abc import Sequence

BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds in seconds: from a commit into memory to more than a store may take (`store_timeout`)."""


CALL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""The same for calls: from a ping to a tool that works for half an hour."""


class Histogram:
    """Counts how long something took, each time."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = BUCKETS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """For each bound, and for beyond the last."""
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds
