"""Histograms count how long something took, each time."""

from bisect import bisect_left

BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds in seconds: from a commit into memory to more than a store may take (`store_timeout`)."""


class Histogram:
    """Counts how long something took, each time."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        """For each bound, and for beyond the last."""
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds
