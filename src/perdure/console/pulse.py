"""Tells how much happens: counts, rates and latencies of all nodes, once a second.

Nodes write what they have counted with their beats, every three seconds at the most. What came with a beat is spread
over the time until the next one, so that counts rise evenly; they are late by one beat. A node that is killed takes
along what it has counted since its last beat.
"""

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from perdure._core.ids import NodeId
from perdure._core.jsonrpc import JsonObject
from perdure.console.node_watch import NodeWatch, Seen
from perdure.console.session_index import SessionIndex
from perdure.telemetry.counters import BUCKETS, CALL_BUCKETS

TICK = 1.0
"""Seconds between two ticks."""

SHORTEST, LONGEST = 1.0, 3.0
"""Seconds over which a beat's counts are spread: nodes beat every three seconds, or more often with a short lease."""

WINDOW = 60.0
"""Seconds of which latencies are told: enough events that the slowest hundredth means something."""

COUNTED: Mapping[str, Sequence[str]] = {
    "events": ("events_appended",),
    "calls_begun": ("calls_accepted",),
    "calls_ended": ("calls_answered", "calls_cancelled", "calls_settled"),
}
"""What a tick counts, and the counters of a node that make it up."""

TIMED = {"call": CALL_BUCKETS, "append": BUCKETS}
"""The latency that is told: of calls, where nodes tell it; else of writing to the store."""


@dataclass(slots=True)
class Spread:
    """A count that moves evenly to where it is known to be."""

    begin: float
    goal: float
    since: float
    until: float

    def at(self, now: float) -> float:
        if now >= self.until:
            return self.goal
        return self.begin + (self.goal - self.begin) * max(0.0, now - self.since) / (self.until - self.since)

    def move(self, goal: float, *, now: float) -> None:
        """Go on to a new goal, as fast as the last one took to be known."""
        took = min(LONGEST, max(SHORTEST, now - self.since))
        self.begin, self.goal, self.since, self.until = self.at(now), goal, now, now + took


@dataclass(slots=True)
class NodeCounts:
    """What one node has counted since the console looks."""

    base: Mapping[str, float]
    spreads: dict[str, Spread]
    beat: int
    seconds: dict[str, Sequence[int]] = field(default_factory=dict)


class Meter:
    """Adds up what nodes have told. Pure: the time is an argument."""

    def __init__(self) -> None:
        self._nodes: dict[NodeId, NodeCounts] = {}
        self._gone = dict.fromkeys(COUNTED, 0.0)
        self._seconds: deque[tuple[float, str, Sequence[int]]] = deque()
        """What each beat has added to a histogram."""
        self._began = False

    def see(self, nodes: Sequence[Seen], *, now: float) -> None:
        for seen in nodes:
            self._see_one(seen, now=now)
        for node in self._nodes.keys() - {seen.record.id for seen in nodes}:
            counts = self._nodes[node]
            if all(spread.until <= now for spread in counts.spreads.values()):
                del self._nodes[node]
                for name, spread in counts.spreads.items():
                    self._gone[name] += spread.goal - counts.base[name]
        self._began = True
        while self._seconds and self._seconds[0][0] < now - WINDOW:
            self._seconds.popleft()

    def _see_one(self, seen: Seen, *, now: float) -> None:
        found = {name: float(sum(_count(seen, part) for part in parts)) for name, parts in COUNTED.items()}
        counts = self._nodes.get(seen.record.id)
        if counts is None:
            # What a node had counted before the console looked is not counted; a node that came later has begun at 0.
            base = dict.fromkeys(COUNTED, 0.0) if self._began else found
            spreads = {name: Spread(base[name], base[name], now, now) for name in COUNTED}
            counts = self._nodes[seen.record.id] = NodeCounts(base, spreads, seen.record.beat)
            if not self._began:
                counts.seconds = dict(_histograms(seen))
        for name, spread in counts.spreads.items():
            if found[name] > spread.goal:
                spread.move(found[name], now=now)
        for name, after in _histograms(seen).items():
            before = counts.seconds.get(name, (0,) * len(after))
            if any(added := [max(0, b - a) for a, b in zip(before, after, strict=True)]):
                self._seconds.append((now, name, added))
            counts.seconds[name] = after

    def totals(self, *, now: float) -> dict[str, int]:
        """The counts since the console looks."""
        return {
            name: int(self._gone[name] + sum(c.spreads[name].at(now) - c.base[name] for c in self._nodes.values()))
            for name in COUNTED
        }

    def latency(self) -> JsonObject | None:
        """The median and the slowest hundredth, in seconds; `None` if nothing was timed lately."""
        for name, bounds in TIMED.items():
            beats = [added for _, of, added in self._seconds if of == name]
            counts = [sum(column) for column in zip(*beats, strict=True)]
            if any(counts):
                return {"of": name, "p50": quantile(counts, bounds, 0.5), "p99": quantile(counts, bounds, 0.99)}
        return None


def quantile(counts: Sequence[int], bounds: Sequence[float], share: float) -> float:
    """The time within which a share of what a histogram counts was done, as far as its bounds tell."""
    wanted = math.ceil(share * sum(counts))
    within = list(itertools.accumulate(counts))
    place = next(place for place, count in enumerate(within) if count >= wanted)
    if place == len(bounds):
        return bounds[-1]
    low = bounds[place - 1] if place else 0.0
    before = within[place - 1] if place else 0
    return low + (bounds[place] - low) * (wanted - before) / counts[place]


def _count(seen: Seen, name: str) -> int:
    """Another release may tell anything."""
    counters = seen.numbers.counters
    value = counters.get(name, 0) if isinstance(counters, dict) else 0
    return value if isinstance(value, int) else 0


def _histograms(seen: Seen) -> dict[str, Sequence[int]]:
    found: dict[str, Sequence[int]] = {}
    seconds = seen.numbers.seconds
    for name, bounds in TIMED.items() if isinstance(seconds, dict) else ():
        counts = seconds.get(name, ((), 0.0))[0]
        if len(counts) == len(bounds) + 1 and all(isinstance(count, int) for count in counts):
            found[name] = counts
    return found


class Pulse:
    """Makes the ticks, one for all that look at the same time."""

    def __init__(
        self,
        index: SessionIndex,
        nodes: NodeWatch,
        is_degraded: Callable[[], Awaitable[bool | None]],
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index = index
        self._nodes = nodes
        self._is_degraded = is_degraded
        self._clock = clock
        self._monotonic = monotonic
        self._meter = Meter()
        self._turn = asyncio.Lock()
        self._last: JsonObject = {}
        self._due = -math.inf

    async def tick(self) -> JsonObject:
        """The tick of this second."""
        async with self._turn:
            if self._monotonic() >= self._due:
                self._last = await self._tick()
                self._due = self._monotonic() + TICK / 2
            return self._last

    async def version(self) -> object:
        """Another value when a list should be read again."""
        nodes = await self._nodes.nodes()
        return self._index.version, frozenset((seen.record.id, seen.alive) for seen in nodes)

    async def _tick(self) -> JsonObject:
        nodes, snapshot = await self._nodes.nodes(), await self._index.snapshot()
        now = self._monotonic()
        self._meter.see(nodes, now=now)
        counts = snapshot.counts
        return {
            "what": "tick",
            "time": self._clock(),
            **self._meter.totals(now=now),
            "running": counts["running"],
            "sessions": counts["sessions"],
            "tasks": counts["tasks"],
            "nodes": sum(seen.alive for seen in nodes),
            "degraded": await self._is_degraded(),
            "latency": self._meter.latency(),
        }
